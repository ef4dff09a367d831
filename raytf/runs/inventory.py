"""Which runs lie in a storage, and how far each is. Only reads, also beside live runs.

A run is a folder with a lease, a result, checkpoints or attempts in it. Everything comes from one list of the storage
and, for each run, its lease, its result and its newest manifests. A run with a damaged file hides no other one.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint import manifest, naming
from raytf.checkpoint.document import CheckpointDocument
from raytf.config.objective import MetricObjective
from raytf.errors import CheckpointError, ConfigError, DamagedFileError, RunMismatchError, StorageError
from raytf.runs import ledger, run_log
from raytf.runs.lease import LEASE_FILE, RENEW_SECONDS, Lease, parse, process_start
from raytf.storage.listing import StoredFile
from raytf.storage.local_names import is_plain
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import SMALL, attempt

#: An owner on another machine lives when it renews its lease within so long.
WATCH_SECONDS = 2 * RENEW_SECONDS
_READERS = 8
#: Checkpoints of a run that are looked at, at least: the newest ones, as many as most runs keep.
_LOOKS = 3


class RunState(enum.Enum):
    """What has become of a run so far."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"  # its owner left: it was interrupted, or ended with an error that it has shown
    FAILED = "failed"  # its owner died without a word, or no longer reaches the storage
    DAMAGED = "damaged"  # nobody trains it, and a file of it cannot be read


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
        problems: what is wrong with its files, a line each; `raytf verify` reads all of them.
    """

    name: str
    state: RunState
    step: int | None
    checkpoints: int
    metric: str | None
    best: float | None
    epoch: int | None
    last: float | None
    bytes: int
    modified: float
    problems: tuple[str, ...] = ()


def state_of(lives: bool | None, result: dict[str, Any] | None, step: int | None, is_damaged: bool = False) -> RunState:
    """What a run does.

    Args:
        lives: whether the lease's owner does; None where there is no lease.
        result: of the run.
        step: of the newest checkpoint.
        is_damaged: whether a file of it is.
    """
    if lives:
        return RunState.RUNNING
    if is_damaged:
        return RunState.DAMAGED
    # A result with fewer steps than a checkpoint is of a run that went on since.
    if result is not None and (step is None or result["steps"] >= step):
        return RunState.FINISHED
    return RunState.STOPPED if lives is None else RunState.FAILED


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
    folders: dict[str, list[StoredFile]] = {}
    unread: list[str] = []
    for file in storage.files(skipped=unread):
        name, _, inner = file.name.partition("/")
        # A name that no URI can hold is none of a run: --run takes none such.
        if inner and is_plain(name) and (storage.is_local or not set("?#@%") & set(name)):
            folders.setdefault(name, []).append(StoredFile(inner, file.bytes, file.modified))
    names = [name for name in sorted(folders) if any(_is_of_a_run(file.name) for file in folders[name])]
    problems = {name: _places(folders[name], name, unread) for name in names}
    leases = [n for n in names if any(_is_in(f.name, LEASE_FILE) for f in folders[n])]
    lives = _living(storage, leases, problems, say, sleep)
    with ThreadPoolExecutor(_READERS) as pool:
        return list(pool.map(lambda n: _read(storage.child(n), n, folders[n], lives.get(n), problems[n]), names))


def main_goal(history: list[dict[str, Any]]) -> MetricObjective | None:
    """What to judge a run by: a metric whose name tells which values are good; of the validation where there is one,
    and rather not the loss.

    Args:
        history: logs of epochs.
    """
    goals = []
    for name in dict.fromkeys(name for entry in history for name, value in entry.items() if isinstance(value, float)):
        with contextlib.suppress(ConfigError):  # seconds or a learning rate, say
            goals.append(MetricObjective.of(name))
    ranked = sorted(goals, key=lambda g: (not g.metric.startswith("val_"), g.metric.endswith("loss")))
    return ranked[0] if ranked else None


def _is_of_a_run(name: str) -> bool:
    return any(_is_in(name, part) for part in (LEASE_FILE, run_log.RESULT, run_log.ATTEMPTS, manifest.FOLDER))


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _places(files: list[StoredFile], name: str, unread: list[str]) -> list[str]:
    """What lies where something else is expected, and folders of a run that cannot be read."""
    there = {file.name for file in files}
    folders = (run_log.ATTEMPTS, manifest.FOLDER, run_log.STEPS, ledger.FOLDER)
    wrong = [f"{folder}: there is a file where a folder is expected" for folder in folders if folder in there]
    mine = [folder.partition("/")[2] for folder in unread if _is_in(folder, name)]
    return wrong + [f"{folder or 'its folder'}: access is denied" for folder in mine]


def _read(run: Storage, name: str, files: list[StoredFile], lives: bool | None, problems: list[str]) -> Run:
    mark = f"/{manifest.FILE}"
    complete = [f.name.removesuffix(mark).removeprefix(f"{manifest.FOLDER}/") for f in files if f.name.endswith(mark)]
    complete = naming.restore_order([n for n in complete if "/" not in n and naming.split_name(n)[0] >= 0])
    result, damaged = attempt(lambda: run_log.read_result(run))
    problems += [] if damaged is None else [f"{run_log.RESULT}: {damaged.reason}"]
    newest, document = _newest(run, files, complete, problems)
    history: list[dict[str, Any]] = [] if result is None else result.get("history", [])
    if newest is not None and (result is None or newest > result["steps"]):
        history = document.history or history
    goal = main_goal(history)
    values = [] if goal is None else [(int(e.get("epoch", i)), goal.value(e)) for i, e in enumerate(history)]
    best: tuple[int | None, float | None] = (None, None)
    for epoch, value in values:
        if goal is not None and goal.is_better(value, best[1]):
            best = (epoch, value)
    steps = [s for s in (newest, None if result is None else result["steps"]) if s is not None]
    return Run(
        name=name,
        state=state_of(lives, result, newest, bool(problems)),
        step=max(steps, default=None),
        checkpoints=len(complete),
        metric=None if goal is None else goal.metric,
        best=best[1],
        epoch=best[0],
        last=values[-1][1] if values else None,
        bytes=sum(file.bytes for file in files),
        modified=max(file.modified for file in files),
        problems=tuple(problems),
    )


def _newest(
    run: Storage, files: list[StoredFile], complete: list[str], problems: list[str]
) -> tuple[int | None, CheckpointDocument]:
    """Step and document of the newest checkpoint that is whole by the sizes of its files; of older ones, too, what is
    wrong is added to the problems."""
    found: tuple[int | None, CheckpointDocument] = (None, CheckpointDocument())
    for i, name in enumerate(complete):
        if i >= _LOOKS and found[0] is not None:
            break
        folder = f"{manifest.FOLDER}/{name}"
        sizes = {f.name.removeprefix(f"{folder}/"): f.bytes for f in files if f.name.startswith(f"{folder}/")}
        try:
            body = manifest.read(run, name)
            wrong = manifest.size_problems(body["shares"], sizes)
            if wrong:
                raise CheckpointError(wrong[0])
        except RunMismatchError as error:
            problems.append(f"{folder}: {str(error).removeprefix(f'checkpoint {name} ')}".rstrip("."))
        except CheckpointError as error:
            if run.exists(f"{folder}/{manifest.FILE}"):  # else retention was faster
                problems.append(f"{folder}: {str(error).removeprefix(f'checkpoint {name}: ')}".rstrip("."))
        except StorageError as error:
            if error.kind not in ("missing", "denied"):
                raise
            problems += [f"{folder}: access is denied"] if error.kind == "denied" else []
        else:
            found = found if found[0] is not None else (body["step"], CheckpointDocument.parse(body["document"]))
    return found


def _living(
    storage: Storage,
    names: list[str],
    problems: dict[str, list[str]],
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> dict[str, bool]:
    """Whether the owners of leases live: by their processes on this machine, by renewals on others."""
    boot = Lease(storage).owner["boot"]
    lives: dict[str, bool] = {}
    watched: dict[str, bytes | None] = {}
    for name in names:
        try:
            text = storage.get_or_none(f"{name}/{LEASE_FILE}", SMALL)
            holder = {} if text is None else parse(text, LEASE_FILE)
        except DamagedFileError as error:
            problems[name].append(f"{LEASE_FILE}: {error.reason}")
            continue
        if holder.get("boot") == boot:
            lives[name] = process_start(holder.get("pid", 0)) == holder.get("started")
        elif text is not None:
            watched[name] = text
    if watched:
        runs = f"{len(watched)} run{'s' if len(watched) > 1 else ''}"
        say(f"watching for {WATCH_SECONDS:.0f} s whether the owners of {runs} on other machines live")
        sleep(WATCH_SECONDS)
    for name, text in watched.items():
        now, _ = attempt(lambda name=name: storage.get_or_none(f"{name}/{LEASE_FILE}", SMALL))  # type: ignore[misc]
        if now is not None:
            lives[name] = now != text
    return lives
