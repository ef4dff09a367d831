"""Which runs lie in a storage, and how far each is. Only reads, also beside live runs.

A run is a folder with a lease, a result, checkpoints or attempts in it. Everything comes from one list of the storage
and, for each run, its lease, its result and its newest manifest.
"""

from __future__ import annotations

import contextlib
import enum
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raytf import runlog
from raytf.checkpoint import manifest, policy
from raytf.errors import CheckpointError, ConfigError, RunMismatchError, StorageError
from raytf.goal import Goal
from raytf.lease import LEASE_FILE, RENEW_SECONDS, Lease, process_start
from raytf.names import is_plain
from raytf.storage import File, Storage

#: An owner on another machine lives when it renews its lease within so long.
WATCH_SECONDS = 2 * RENEW_SECONDS
_READERS = 8


class State(enum.Enum):
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # its owner left: it was interrupted, or ended with an error that it has shown
    FAILED = "failed"  # its owner died without a word, or no longer reaches the storage


@dataclass(frozen=True)
class Run:
    """A run in a storage.

    Attributes:
        name: its folder.
        step: of the newest checkpoint, or of the result; None where there is neither.
        checkpoints: folders with a manifest.
        metric, best, epoch, last: the best value of a metric so far, the epoch that had it (from 0), and the value of
            the last epoch; None where no epoch has ended.
        bytes: of all its files.
        modified: seconds of the epoch when a file of it last changed, by the storage's clock.
    """

    name: str
    state: State
    step: int | None
    checkpoints: int
    metric: str | None
    best: float | None
    epoch: int | None
    last: float | None
    bytes: int
    modified: float


def state_of(lives: bool | None, result: dict[str, Any] | None, step: int | None) -> State:
    """What a run does.

    Args:
        lives: whether the lease's owner does; None where there is no lease.
        result: of the run.
        step: of the newest checkpoint.
    """
    if lives:
        return State.RUNNING
    # A result with fewer steps than a checkpoint is of a run that went on since.
    if result is not None and (step is None or result["steps"] >= step):
        return State.FINISHED
    return State.STOPPED if lives is None else State.FAILED


def survey(
    storage: Storage,
    say: Callable[[str], None] = lambda message: None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Run]:
    """All runs of a storage, by name.

    Args:
        say: told when leases have to be watched for a while.
        sleep: injected by tests.

    Raises:
        StorageError: storage refuses.
    """
    folders: dict[str, list[File]] = {}
    for file in storage.files():
        name, _, inner = file.name.partition("/")
        # A name that no URI can hold is none of a run: --run takes none such.
        if inner and is_plain(name) and (storage.is_local or not set("?#@%") & set(name)):
            folders.setdefault(name, []).append(File(inner, file.bytes, file.modified))
    names = [name for name in sorted(folders) if any(_is_of_a_run(file.name) for file in folders[name])]
    lives = _living(storage, [n for n in names if any(f.name == LEASE_FILE for f in folders[n])], say, sleep)
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda n: _read(storage.child(n), n, folders[n], lives.get(n)), names))


def main_goal(history: list[dict[str, Any]]) -> Goal | None:
    """What to judge a run by: a metric whose name tells which values are good; of the validation where there is one,
    and rather not the loss.

    Args:
        history: logs of epochs.
    """
    goals = []
    for name in dict.fromkeys(name for entry in history for name, value in entry.items() if isinstance(value, float)):
        with contextlib.suppress(ConfigError):  # seconds or a learning rate, say
            goals.append(Goal.of(name))
    ranked = sorted(goals, key=lambda g: (not g.metric.startswith("val_"), g.metric.endswith("loss")))
    return ranked[0] if ranked else None


def _is_of_a_run(name: str) -> bool:
    return name in (LEASE_FILE, runlog.RESULT) or name.startswith((f"{runlog.ATTEMPTS}/", f"{manifest.FOLDER}/"))


def _read(run: Storage, name: str, files: list[File], lives: bool | None) -> Run:
    mark = f"/{manifest.FILE}"
    complete = [f.name.removesuffix(mark).removeprefix(f"{manifest.FOLDER}/") for f in files if f.name.endswith(mark)]
    complete = policy.restore_order([n for n in complete if policy.split_name(n)[0] >= 0])
    newest = policy.split_name(complete[0])[0] if complete else None
    result = _as_result(runlog.read_result(run))
    history: list[dict[str, Any]] = [] if result is None else result["history"]
    if newest is not None and (result is None or newest > result["steps"]):
        history = _history(run, complete) or history
    goal = main_goal(history)
    values = [] if goal is None else [(e.get("epoch", i), goal.value(e)) for i, e in enumerate(history)]
    best: tuple[int | None, float | None] = (None, None)
    for epoch, value in values:
        if goal is not None and goal.is_better(value, best[1]):
            best = (epoch, value)
    steps = [s for s in (newest, None if result is None else result["steps"]) if s is not None]
    return Run(
        name=name,
        state=state_of(lives, result, newest),
        step=max(steps, default=None),
        checkpoints=len(complete),
        metric=None if goal is None else goal.metric,
        best=best[1],
        epoch=best[0],
        last=values[-1][1] if values else None,
        bytes=sum(file.bytes for file in files),
        modified=max(file.modified for file in files),
    )


def _as_result(document: Any) -> dict[str, Any] | None:
    """A result as far as it is read here; None for what is none, as a file that was cut off and is JSON by chance."""
    if not isinstance(document, dict) or not isinstance(document.get("steps"), int):
        return None
    history = document.get("history")
    entries = [e for e in history if isinstance(e, dict)] if isinstance(history, list) else []
    return {"steps": document["steps"], "history": entries}


def _history(run: Storage, complete: list[str]) -> list[dict[str, Any]]:
    """The epochs that the newest checkpoint whose manifest can be read has seen."""
    for name in complete:
        try:
            history = manifest.read(run, name)["document"].get("history", [])
        except (CheckpointError, RunMismatchError):
            continue
        except StorageError as error:
            if error.kind != "missing":
                raise
            continue  # retention was faster
        return [entry for entry in history if isinstance(entry, dict)]
    return []


def _living(
    storage: Storage, names: list[str], say: Callable[[str], None], sleep: Callable[[float], None]
) -> dict[str, bool]:
    """Whether the owners of leases live: by their processes on this machine, by renewals on others."""
    boot = Lease(storage).owner["boot"]
    lives: dict[str, bool] = {}
    watched: dict[str, bytes | None] = {}
    for name in names:
        text = storage.get_or_none(f"{name}/{LEASE_FILE}")
        holder = _holder(text)
        if holder.get("boot") == boot:
            lives[name] = process_start(holder.get("pid", 0)) == holder.get("started")
        elif text is not None:
            watched[name] = text
    if watched:
        runs = f"{len(watched)} run{'s' if len(watched) > 1 else ''}"
        say(f"watching for {WATCH_SECONDS:.0f} s whether the owners of {runs} on other machines live")
        sleep(WATCH_SECONDS)
    for name, text in watched.items():
        now = storage.get_or_none(f"{name}/{LEASE_FILE}")
        if now is not None:
            lives[name] = now != text
    return lives


def _holder(text: bytes | None) -> dict[str, Any]:
    try:
        holder = json.loads(text) if text else {}
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}
