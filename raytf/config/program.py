"""The program that trains: the default name of its runs, its file, and the command that continues a run."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

#: Names of runs if the program has no name, such as `python -c`, and if the file of the notebook is unknown.
NO_NAME, NOTEBOOK = "run", "notebook"
_NOTEBOOK_SUFFIX = ".ipynb"
#: Folders of installed modules, such as pytest, whose names do not describe the run.
_INSTALLED = {"site-packages", "dist-packages"}
_SAME = "the same command"
#: For each new run of this process: the text that was typed, and the text that replaces it to continue the run.
_replacements: list[tuple[str, str]] = []
#: Ray copies each version of a job's working directory below a folder of this name.
_COPIED = "runtime_resources"


@dataclass(frozen=True)
class Program:
    """The default name of a program's runs, and the path of its file with links resolved. The path is empty if there is
    no file, or only a temporary copy."""

    name: str
    path: str = ""


def of_file(path: str) -> Program:
    """Return the program in a file."""
    return Program(name_of(path), lasting(os.path.realpath(path)))


def of_process(in_notebook: bool) -> Program:
    """Return the program that this process runs."""
    main = sys.modules["__main__"]
    files = [sys.argv[0], getattr(main, "__file__", None) or ""]
    if in_notebook:  # set by VS Code, and by Jupyter
        files = [getattr(main, "__vsc_ipynb_file__", ""), os.environ.get("JPY_SESSION_NAME", "")]
    return choose(files, in_notebook)


def choose(files: list[str], in_notebook: bool) -> Program:
    """Return the program of a process, from the candidates for its file."""
    if in_notebook:
        path = next((file for file in files if _NOTEBOOK_SUFFIX in file), "")
        # VS Code appends an ID to the name.
        name = name_of(path.rpartition(_NOTEBOOK_SUFFIX)[0]) if path else NOTEBOOK
        return Program(name, lasting(os.path.realpath(path)) if os.path.isabs(path) else "")
    path = next((file for file in files if os.path.exists(file)), "")
    return of_file(path) if path else Program(NO_NAME)


def name_of(path: str) -> str:
    """Return the default name of the runs of a file."""
    file = Path(path)
    if _INSTALLED & set(file.parts):
        return NO_NAME
    stem = file.parent.name if file.name == "__main__.py" else file.name.removesuffix(file.suffix)
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).lstrip(".") or NO_NAME


def lasting(path: str) -> str:
    """Return a program's path, or an empty text if the path may differ at the next start of the same program."""
    return "" if {_COPIED, *_INSTALLED} & set(Path(path).parts) or not os.path.exists(path) else path


# -- continuing --------------------------------------------------------------------------------------------------------
#
# The same command continues a run, unless it started a new run.


def replace_new(new: str, name: str) -> None:
    """Record that `new`, as typed, started a run, and that `name`, such as `--run mnist-2`, continues it."""
    _replacements.append((new, name))


def next_command() -> str:
    """Return the command that continues the run of this process, as the subject of a sentence."""
    return f"{_SAME}{change()}"


def change() -> str:
    """Return the change, between commas, to the command or cell that started a new run; empty without a new run."""
    if not _replacements:
        return ""
    new, name = _replacements[-1]
    return f", with {name} in place of {new},"


def from_last_checkpoint() -> str:
    """Return how to continue the run of this process, as a sentence without capital letter and period."""
    return f"{next_command()} continues from the last checkpoint"


def next_submission(command: str) -> str:
    """Return the command that continues the run of a submitted job, as the subject of a sentence."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return f"{_SAME}, with --run and the name that the job printed in place of --new," if "--new" in words else _SAME
