"""Lists the runs of a storage with their progress. It only reads, and is safe beside live runs.

A run is a folder with a lease, a result, checkpoints, attempts or a ledger; the runs of a program are in a folder with
its name. The facts come from one listing of the storage and, for each run, from its lease, its result, its newest
manifests and the end of its ledger. A run with a damaged file does not hide other runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from raytf._process import process_start
from raytf.checkpoint import manifest, naming
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.config.objective import flat
from raytf.errors import CheckpointError, DamagedFileError, RunMismatchError, StorageError
from raytf.runs import ledger, run_folder, run_log, run_state
from raytf.runs.lease import LEASE_FILE, Lease
from raytf.runs.lease_decisions import RENEW_SECONDS, parse
from raytf.runs.ledger import Event
from raytf.runs.run_state import Run, RunState
from raytf.storage import untrusted_json
from raytf.storage.local_files import StoredFile, is_plain
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import SMALL, attempt

#: An owner on another machine counts as alive if it renews its lease within these seconds.
WATCH_SECONDS = 2 * RENEW_SECONDS
_READERS = 8
#: Minimum number of a run's newest checkpoints to inspect; most runs keep as many.
_LOOKS = 3
#: The file that marks the folder of a search, and the file that is written when the best trial is known.
_SEARCH, _BEST = f"{run_folder.SEARCH}/{run_folder.SEARCH_IDENTITY}", f"{run_folder.BEST_TRIAL}/parameters.json"
_FOUND = untrusted_json.record(
    {"metric": untrusted_json.text, "value": untrusted_json.optional(untrusted_json.number)}, {}
)


@dataclass(frozen=True)
class ListedRun:
    """A run, with the storage's listing of it before it was read.

    Attributes:
        files: the files in its folder.
        problems: the problems of its folders, one line each.
    """

    files: tuple[StoredFile, ...]
    problems: tuple[str, ...]
    run: Run


#: A run's result or None, and the error if it cannot be read.
ReadResult = tuple[dict[str, Any] | None, DamagedFileError | None]


def survey(
    storage: Storage,
    say: Callable[[str], None] = lambda message: None,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Run]:
    """Return all runs of a storage, by name.

    Args:
        say: called with a message before leases are watched for some seconds.

    Raises:
        StorageError: the storage refuses.
    """
    return [listed.run for listed in survey_again(storage, {}, say, sleep).values()]


def survey_again(
    storage: Storage,
    known: Mapping[str, ListedRun],
    say: Callable[[str], None] = lambda message: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, ListedRun]:
    """Return all runs by name, as `survey` does. Reuse a known run if it has no lease and its files are unchanged."""
    folders: dict[str, list[StoredFile]] = {}
    unread: list[str] = []
    for file in storage.files(skipped=unread):
        name, _, inner = file.name.partition("/")
        # --run refuses names that cannot be part of a URI, so such a folder is not a run.
        if inner and is_plain(name) and (storage.is_local or not set("?#@%") & set(name)):
            folders.setdefault(name, []).append(StoredFile(inner, file.bytes, file.modified))
    files_by_run = {path: files for name in sorted(folders) for path, files in runs_in(name, folders[name])}
    problems = {path: _places(files, path, unread) for path, files in files_by_run.items()}
    leases = {path: _lease_of(files) for path, files in files_by_run.items()}
    lives = _living(storage, {p: f"{p}/{lease}" for p, lease in leases.items() if lease}, problems, say, sleep)

    def read(path: str) -> ListedRun:
        files, wrong, before = tuple(files_by_run[path]), tuple(problems[path]), known.get(path)
        if before is not None and not leases[path] and (before.files, before.problems) == (files, wrong):
            return before
        of_kind = _read_search if _is_search(files_by_run[path]) else _read
        run = of_kind(storage.child(path), path, files_by_run[path], lives.get(path), problems[path])
        return ListedRun(files, wrong, run)

    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(files_by_run, pool.map(read, files_by_run), strict=True))


def read_run(run: Storage, events: Sequence[Event], lives: bool, result: ReadResult) -> Run:
    """Return one run whose ledger, owner and result the caller has already read.

    Args:
        lives: whether a live process owns the run.
        result: the run's result, and the error if it cannot be read.
    """
    unread: list[str] = []
    files = list(run.files(skipped=unread))
    name = run.locate("").rstrip("/").rpartition("/")[2]
    owner = lives if lives or _lease_of(files) else None
    return _read(run, name, files, owner, _places(files, "", unread), events, result)


def runs_in(name: str, files: list[StoredFile]) -> Iterator[tuple[str, list[StoredFile]]]:
    """Yield the run or the search in a folder of a storage, or each run of a program there, with its files.

    Args:
        name: the name of the folder, with which the names of the runs begin.
        files: all files in the folder.
    """
    if _is_search(files) or any(_is_of_a_run(file.name) for file in files):
        yield name, files
        return
    inner: dict[str, list[StoredFile]] = {}
    for file in files:
        own, _, rest = file.name.partition("/")
        if rest:
            inner.setdefault(own, []).append(StoredFile(rest, file.bytes, file.modified))
    for own in sorted(inner):
        if any(_is_of_a_run(file.name) for file in inner[own]):
            yield f"{name}/{own}", inner[own]


def _is_search(files: list[StoredFile]) -> bool:
    return any(file.name == _SEARCH for file in files)


def _lease_of(files: list[StoredFile]) -> str | None:
    wanted = f"{run_folder.SEARCH}/{LEASE_FILE}" if _is_search(files) else LEASE_FILE
    return wanted if any(_is_in(file.name, wanted) for file in files) else None


def _is_of_a_run(name: str) -> bool:
    # A run that ended before its first step has only a ledger.
    known = (LEASE_FILE, run_log.RESULT, run_log.ATTEMPTS, manifest.FOLDER)
    return any(_is_in(name, part) for part in known) or (_is_in(name, ledger.FOLDER) and name.endswith(ledger.SUFFIX))


def _is_in(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")


def _places(files: Sequence[StoredFile], name: str, unread: list[str]) -> list[str]:
    """Return a line for each file where a folder is expected, and for each folder of a run that cannot be read."""
    there = {file.name for file in files}
    folders = (run_log.ATTEMPTS, manifest.FOLDER, run_log.STEPS, ledger.FOLDER)
    wrong = [f"{folder}: there is a file where a folder is expected" for folder in folders if folder in there]
    mine = [folder.removeprefix(name).strip("/") for folder in unread if not name or _is_in(folder, name)]
    return wrong + [f"{folder or 'its folder'}: access is denied" for folder in mine]


def _read(
    run: Storage,
    name: str,
    files: Sequence[StoredFile],
    lives: bool | None,
    problems: list[str],
    events: Sequence[Event] | None = None,
    read_result: ReadResult | None = None,
) -> Run:
    mark = f"/{manifest.FILE}"
    complete = [f.name.removesuffix(mark).removeprefix(f"{manifest.FOLDER}/") for f in files if f.name.endswith(mark)]
    complete = naming.restore_order([n for n in complete if "/" not in n and naming.split_name(n)[0] >= 0])
    result, damaged = read_result or attempt(lambda: run_log.read_result(run))
    problems += [] if damaged is None else [f"{run_log.RESULT}: {damaged.reason}"]
    newest, document = _newest(run, files, complete, problems)
    history: list[dict[str, Any]] = [] if result is None else result.get("history", [])
    if newest is not None and (result is None or newest > result["steps"]):
        history = document.history or history
    history = [flat(epoch) for epoch in history]
    if events is None:
        inside = f"{ledger.FOLDER}/"
        names = [f.name.removeprefix(inside) for f in files if f.name.startswith(inside)]
        events = ledger.newest(run, names, run_state.has_enough)
    return replace(
        run_state.of(events, result, lives, newest, history, bool(problems)),
        name=name,
        checkpoints=len(complete),
        bytes=sum(file.bytes for file in files),
        modified=max((file.modified for file in files), default=0.0),
        problems=tuple(problems),
        settings=_settings(result, document),
        saves=tuple(sorted({naming.split_name(name)[0] for name in complete})),
    )


def _settings(result: dict[str, Any] | None, document: CheckpointDocument) -> dict[str, str]:
    identity = document.identity or (result or {}).get("identity")
    return {str(name): str(value) for name, value in identity.items()} if isinstance(identity, dict) else {}


def _read_search(
    search: Storage, name: str, files: Sequence[StoredFile], lives: bool | None, problems: list[str]
) -> Run:
    best, damaged = attempt(lambda: untrusted_json.read(search, _BEST, _FOUND, untrusted_json.LARGE))
    problems += [] if damaged is None else [f"{_BEST}: {damaged.reason}"]
    if lives is None:
        state = RunState.DAMAGED if problems else RunState.STOPPED if best is None else RunState.FINISHED
    else:
        state = RunState.RUNNING if lives else RunState.KILLED
    return Run(
        name=name,
        state=state,
        checkpoints=sum(file.name.endswith(f"/{manifest.FILE}") for file in files),
        metric=None if best is None else best["metric"],
        best=None if best is None else best["value"],
        bytes=sum(file.bytes for file in files),
        modified=max(file.modified for file in files),
        problems=tuple(problems),
        trials=len({file.name.partition("/")[0] for file in files if file.name.startswith(run_folder.TRIAL)}),
    )


def _newest(
    run: Storage, files: Sequence[StoredFile], complete: list[str], problems: list[str]
) -> tuple[int | None, CheckpointDocument]:
    """Return the step and the document of the newest checkpoint whose files have the right sizes. Add the defects of
    the inspected checkpoints to the problems."""
    newest: tuple[int | None, CheckpointDocument] = (None, CheckpointDocument())
    for i, name in enumerate(complete):
        if i >= _LOOKS and newest[0] is not None:
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
            if run.exists(f"{folder}/{manifest.FILE}"):  # otherwise it was deleted by retention
                problems.append(f"{folder}: {str(error).removeprefix(f'checkpoint {name}: ')}".rstrip("."))
        except StorageError as error:
            if error.kind not in ("missing", "denied"):
                raise
            problems += [f"{folder}: access is denied"] if error.kind == "denied" else []
        else:
            newest = newest if newest[0] is not None else (body["step"], CheckpointDocument.parse(body["document"]))
    return newest


def _living(
    storage: Storage,
    leases: Mapping[str, str],
    problems: dict[str, list[str]],
    say: Callable[[str], None],
    sleep: Callable[[float], None],
) -> dict[str, bool]:
    """Return whether the owner of each run's lease is alive, by its process on this machine, otherwise by renewals."""
    boot = Lease(storage).owner["boot"]
    lives: dict[str, bool] = {}
    watched: dict[str, bytes | None] = {}
    for name, lease in leases.items():
        try:
            text = storage.get_or_none(lease, SMALL)
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
        say(f"watching for {WATCH_SECONDS:.0f} s whether the owners of {runs} on other machines are alive")
        sleep(WATCH_SECONDS)
    for name, text in watched.items():
        now, _ = attempt(lambda name=name: storage.get_or_none(leases[name], SMALL))  # type: ignore[misc]
        if now is not None:
            lives[name] = now != text
    return lives
