"""Steps of a run, computed again by the run's own program in another folder, which is compared afterwards."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys

import numpy as np

from raytf.checkpoint import durable, manifest, naming
from raytf.config.terminal_text import say, visible
from raytf.driver import replaying
from raytf.errors import CheckpointError, ConfigError, RaytfError, StorageError
from raytf.runs import run_log, start_command
from raytf.storage.storage import Storage

#: What callbacks keep, which they go on with.
_OF_CALLBACKS = "files"
#: What of a checkpoint's tensors is computed; what else there is belongs to callbacks.
_COMPUTED = ("model/", "optimizer/", "reduction/")


def words_of(run: Storage, program: str, usage: str) -> list[str]:
    """Return the words of the command that trains a run, which the reader of the run passes.

    Args:
        run: its folder. The command that it records is shown and never run.
        program: the command, as one text for a shell.
        usage: the reader's own command up to `--`.

    Raises:
        ConfigError: there is no command, or it cannot be read.
    """
    if not program:
        raise ConfigError(_no_program(run, usage))
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise ConfigError(f"the command {visible(program)} cannot be read: {error}.") from None
    return [sys.executable, *words[1:]] if words[:1] in (["python"], ["python3"]) else words


def _no_program(run: Storage, usage: str) -> str:
    try:
        command = start_command.read(run)
    except (RaytfError, StorageError):
        command = None
    recorded = "The run's folder does not record which command started it."
    if command is not None and command.words:
        recorded = (
            f"The run's folder records this command, started in {visible(command.folder)}; check it before you pass "
            f"it: {start_command.text(command)}"
        )
    return (
        "computing steps again runs the program that trained the run, and what a run's folder records is never run. "
        f"Pass the command after `--`: {usage} -- python train.py. {recorded}"
    )


def seed_before(run: Storage, folder: str, step: int) -> int:
    """Let the run that computes again begin with the newest whole checkpoint before a step.

    Args:
        run: folder of the run.
        folder: in which steps are computed again.

    Returns:
        The checkpoint's step, 0 where there is none: then it begins anew.
    """
    for name in manifest.list_complete(run):
        if naming.split_name(name)[0] < step and seed(run, folder, name):
            return naming.split_name(name)[0]
    return 0


def seed(run: Storage, folder: str, name: str) -> bool:
    """Let the run that computes again begin with a checkpoint; False where that is damaged, or deleted meanwhile."""
    again = Storage(folder).child(replaying.RUN)
    place = f"{manifest.FOLDER}/{name}"
    try:
        manifest.read(run, name)
        os.makedirs(os.path.join(again.root, place))
        run.get_tree(place, os.path.join(again.root, place))
    except (RaytfError, StorageError):
        again.delete(place)
        return False
    if run.list(_OF_CALLBACKS):
        run.get_tree(_OF_CALLBACKS, os.path.join(again.root, _OF_CALLBACKS))
    return True


def compute(words: list[str], plan: replaying.ReplayPlan) -> Storage:
    """Run the program; returns the folder of the run that computed again.

    Raises:
        ConfigError: it did not come to the call that trains the run.
    """
    say(f"running {shlex.join(['python' if word == sys.executable else word for word in words])}")
    # On this machine, where the folders are: not on a cluster that this shell has chosen.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(words, env={**environment, **plan.told()}, check=False)
    except OSError as error:
        raise ConfigError(f"{visible(words[0])} cannot be run: {error.strerror or error}.") from None
    again = Storage(plan.folder).child(replaying.RUN)
    if not again.exists(run_log.RESULT):
        raise ConfigError(
            f"the program has not computed the steps (exit code {done.returncode}): {visible(shlex.join(words))}. What "
            "it has printed says why; if nothing does, it has not called fit for this run."
        )
    return again


def not_computed(run: Storage, again: Storage, step: int, name: str | None = None) -> str:
    """What a checkpoint has that is not what the steps before it have computed.

    Args:
        run, again: folders of the run, and of the one that has computed up to a step again.
        name: the checkpoint's; by default any of that step.

    Returns:
        One line for people; empty where all is equal, and where the run keeps no checkpoint of the step.
    """
    name = name or _at(run, step)
    if name is None:
        return ""
    ended = _at(again, step)
    if ended is None:
        return f"the program has not come to step {step}"
    try:
        ours, theirs = (durable.load(*each).tensors for each in ((again, ended), (run, name)))
    except (CheckpointError, StorageError) as error:
        return f"checkpoint {name} cannot be compared: {error}"
    names = sorted(key for key in ours.keys() | theirs.keys() if key.startswith(_COMPUTED))
    wrong = [key for key in names if not _are_equal(ours.get(key), theirs.get(key))]
    return f"checkpoint {name} is not what its steps compute: {', '.join(wrong[:5])}" if wrong else ""


def _at(run: Storage, step: int) -> str | None:
    return next((name for name in manifest.list_complete(run) if naming.split_name(name)[0] == step), None)


def _are_equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return False
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
