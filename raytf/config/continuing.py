"""Says how to continue a run after its process has ended: by the same command, unless that started a new run."""

from __future__ import annotations

import shlex

_SAME = "the same command"
#: What is typed to continue each new run that this process has started, and in place of what.
_replacements: list[tuple[str, str]] = []


def replace_new(new: str, name: str) -> None:
    """Note that this process has started a new run.

    Args:
        new: what was typed for it: `--new`, or `new=True` in a program.
        name: what names the run in its place, such as `--run mnist-2`.
    """
    _replacements.append((new, name))


def next_command() -> str:
    """Return the command that continues the run of this process, as the subject of a sentence."""
    return f"{_SAME}{change()}"


def change() -> str:
    """Return what to change in the command or cell that started a new run, between commas; empty for no new run."""
    if not _replacements:
        return ""
    new, name = _replacements[-1]
    return f", with {name} in place of {new},"


def from_last_checkpoint() -> str:
    """Return how to continue the run of this process, as a sentence without a capital letter and a period."""
    return f"{next_command()} goes on from the last checkpoint"


def next_submission(command: str) -> str:
    """Return the command that continues the run of a submitted job, as the subject of a sentence.

    Args:
        command: of the job, for a shell.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return f"{_SAME}, with --run and the name that the job printed in place of --new," if "--new" in words else _SAME
