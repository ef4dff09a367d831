"""The ledger: the events of a run, in files beside its checkpoints.

    ledger/000001-20261121T101500.123-3f2a9c-0000.jsonl     events of one driver in order, one JSON object per line

Object stores cannot append, so each driver writes its own files: it rewrites the last one while that is short, then
starts the next. A driver that is killed loses the seconds since its last write. A live driver loses nothing while
storage is unavailable.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint import manifest, naming
from raytf.checkpoint.naming import stamp
from raytf.errors import DamagedFileError, StorageError
from raytf.runs import run_log
from raytf.storage import strict_json, untrusted_json
from raytf.storage.storage import Storage

FOLDER = "ledger"
#: The suffix of the files with events.
SUFFIX = ".jsonl"
#: The file with the newest heartbeat of the newest driver, which is replaced repeatedly.
LIVE = "live.json"
#: Maximum number of events in a file; the last file is written again at each flush, so it must be short.
FILE_EVENTS = 500
#: Maximum number of events that wait for storage; beyond it, the oldest are dropped.
MOST_WAITING = 100_000
#: Limits for readers: bytes of a line, lines of a file, and bytes of all files. Writers stay far below them.
_LINE_BYTES, _FILE_LINES, _ALL_BYTES = 4 << 20, 20 * FILE_EVENTS, 1 << 30
Event = dict[str, Any]
_COUNT, _SECONDS = untrusted_json.optional(untrusted_json.whole), untrusted_json.optional(untrusted_json.finite)
_WORDS = untrusted_json.optional(untrusted_json.text)
#: The known fields of an event; others are only shown.
_EVENT = untrusted_json.record(
    {"time": untrusted_json.when, "kind": untrusted_json.text},
    {
        **dict.fromkeys(
            ("step", "of_step", "from_step", "total", "workers", "world_size", "from", "to", "lost"), _COUNT
        ),
        **dict.fromkeys(("checkpoint", "snapshot", "snapshot_bytes", "possible", "wanted"), _COUNT),
        **dict.fromkeys(
            ("stall", "trace", "silent", "seconds", "deadline_seconds", "samples_per_second", "samples_per_step"),
            _SECONDS,
        ),
        **dict.fromkeys(("state", "outcome", "phase", "tier", "cause", "text", "machine"), _WORDS),
        **dict.fromkeys(("settings", "versions"), untrusted_json.values(untrusted_json.text)),
        "ratio": untrusted_json.optional(untrusted_json.number),
        "phases": untrusted_json.values(untrusted_json.finite),
    },
)
_WITH_ATTEMPTS = (run_log.STEPS, run_log.ATTEMPTS, manifest.FOLDER)


@dataclass(frozen=True)
class EventClock:
    """The clock for a driver's events, valid in all processes of its machine. It never goes back, even if the machine's
    clock is set while a run trains.

    Attributes:
        began: the boot time in seconds since the epoch, as known when this clock was created.
    """

    began: float

    @classmethod
    def of_now(cls) -> EventClock:
        """Return a clock that agrees with the machine's clock now."""
        return cls(time.time() - time.clock_gettime(time.CLOCK_BOOTTIME))

    def __call__(self) -> float:
        """Return the current time in seconds since the epoch."""
        return self.began + time.clock_gettime(time.CLOCK_BOOTTIME)


#: The term at the beginning of a name.
_DRIVER = re.compile(r"(\d{6})-", re.ASCII)


def name_of(term: int) -> str:
    """Return a name for the driver with this term; see `latest_term`."""
    return f"{term:06d}-{stamp()}"


def driver_of(file: str) -> int:
    """Return the term in the name of a ledger file, or 0 if it has none."""
    match = _DRIVER.match(file)
    return 0 if match is None else int(match[1])


class Ledger:
    """Writes the events of one driver.

    Args:
        name: the unique name of this driver, from `name_of`; names sort by the order of drivers.
        most_waiting: maximum number of events that wait for storage; beyond it, the oldest are lost.
    """

    def __init__(self, run: Storage, name: str, most_waiting: int = MOST_WAITING):
        self._run, self._most, self.name = run, most_waiting, name
        self._lock, self._writing = threading.Lock(), threading.Lock()
        #: Events of the current file and later files.
        self._events: deque[Event] = deque()
        self._file = 0
        #: Number of events of the current file that are written, of all events added, and of those that are on storage.
        self._written, self._added, self._seen = 0, 0, 0

    def add(self, events: Iterable[Event]) -> None:
        """Add events in order. Each has at least `time`, in seconds since the epoch, and `kind`."""
        with self._lock:
            for event in events:
                self._events.append(event)
                self._added += 1
            while len(self._events) - self._written > self._most:
                # Drop the oldest waiting rows, because written rows belong to a file that is written again.
                del self._events[self._written]

    def sign(self, event: Event) -> None:
        """Replace the heartbeat, which readers use as the last event until a newer event is in the ledger. Errors of
        storage are ignored, because the next heartbeat replaces this one."""
        row = strict_json.dumps({**event, "driver": self.name}, default=str)
        with contextlib.suppress(StorageError):
            self._run.put(f"{FOLDER}/{LIVE}", row.encode())

    def flush(self) -> bool:
        """Write all added events to storage. Return False if storage refuses; the next flush tries again."""
        with self._writing:
            while True:
                with self._lock:
                    if self._seen == self._added:
                        return True
                    part, seen = list(itertools.islice(self._events, FILE_EVENTS)), self._added
                    self._written = len(part)  # they no longer count as waiting
                text = "".join(strict_json.dumps(event, default=str) + "\n" for event in part)
                try:
                    self._run.put(f"{FOLDER}/{self.name}-{self._file:04d}{SUFFIX}", text.encode())
                except StorageError:
                    return False
                if len(part) < FILE_EVENTS:
                    self._seen = seen
                    continue
                with self._lock:
                    for _ in part:
                        self._events.popleft()
                    self._written, self._file = 0, self._file + 1
                    if not self._events:
                        self._seen = self._added


def read(run: Storage, before: str | None = None) -> list[Event]:
    """Return all undamaged events of a run, in the order of its drivers.

    Args:
        before: the name of a driver, to return only events of earlier drivers.
    """
    return read_with_problems(run, before)[0]


def read_with_problems(run: Storage, before: str | None = None) -> tuple[list[Event], list[str]]:
    """Return the events as `read` does, and a line with the file and the reason for each damage."""
    names = run.list(FOLDER)
    files = [name for name in names if name.endswith(SUFFIX) and (before is None or name < before)]
    events: list[Event] = []
    problems: list[str] = []
    for file_events, wrong in _read_files(run, files):
        events += file_events
        problems += wrong
    return events + (_sign_of_life(run, names, events) if before is None else []), problems


def newest(run: Storage, names: Iterable[str], is_enough: Callable[[Sequence[Event]], bool]) -> list[Event]:
    """Return the last undamaged events of a run, in order, from as many files as needed.

    Args:
        names: the names of the files in the run's ledger folder.
        is_enough: returns whether the events suffice, so that no earlier file is read.
    """
    names = sorted(names)
    events: list[Event] = []
    for file_events, _ in _read_files(run, [name for name in reversed(names) if name.endswith(SUFFIX)]):
        events = file_events + events
        if is_enough(events):
            break
    return events + _sign_of_life(run, names, events)


def _sign_of_life(run: Storage, names: Sequence[str], events: Sequence[Event]) -> list[Event]:
    """Return the newest driver's heartbeat, if it is newer than the last event."""
    if LIVE not in names or not events or events[-1].get("state") == "ended":
        return []
    newest = max(name for name in names if name.endswith(SUFFIX)).rpartition("-")[0]
    with contextlib.suppress(StorageError, DamagedFileError):
        sign = sign_of(run.get_or_none(f"{FOLDER}/{LIVE}", untrusted_json.SMALL) or b"")
        if sign is not None and sign.pop("driver", None) == newest and sign["time"] > events[-1]["time"]:
            return [sign]
    return []


def sign_of(data: bytes) -> Event | None:
    """Parse a heartbeat, which names its driver; return None if the bytes are not a heartbeat."""
    events, _ = _events(data)
    return events[0] if events else None


def _read_files(run: Storage, names: Iterable[str]) -> Iterator[tuple[list[Event], list[str]]]:
    """Yield the events and the problems of each file. A file beyond the limit on all bytes counts as damaged."""
    size = 0
    for name in names:
        where = f"{FOLDER}/{name}"
        try:
            data = run.get(where, min(untrusted_json.LARGE, _ALL_BYTES - size))
        except DamagedFileError as error:
            yield [], [f"{where}: {error.reason}"]
            continue
        size += len(data)
        events, wrong = _events(data)
        yield events, [f"{where}: {wrong}"] if wrong else []


def _events(data: bytes) -> tuple[list[Event], str]:
    """Return the events in a file's bytes, and the first problem in them. A last line that is cut off is no problem."""
    events: list[Event] = []
    wrong, is_last = "", not data.endswith(b"\n")
    lines = data.split(b"\n", _FILE_LINES)
    for number, line in enumerate(lines, 1):
        if number > _FILE_LINES:
            return events, wrong or f"it has more than {_FILE_LINES:,} lines"
        if not line:
            continue
        try:
            if len(line) > _LINE_BYTES:
                raise ValueError(f"it has {len(line):,} bytes")
            event = untrusted_json.decode(line)
            problem = _EVENT(event)
            if problem:
                raise ValueError(problem)
            if b"\\ud" in line.lower():  # surrogates, which pages and metrics cannot encode
                event = json.loads(json.dumps(event, ensure_ascii=False).encode(errors="replace"))
            events.append({**event, "time": float(event["time"])})
        except ValueError as error:
            if not (is_last and number == len(lines)):
                wrong = wrong or f"line {number:,}: {error}"
    return events, wrong


# -- terms -------------------------------------------------------------------------------------------------------------
#
# A term orders the writes of drivers and their workers, because the clocks of two machines differ and any clock may be
# set back. A driver's term is higher than that of its predecessor's lease and of all names in the run's folder. Late
# writes of a predecessor that was suspended or cut off therefore never count as newer.


def latest_term(run: Storage) -> int:
    """Return the highest term in the names of a run's files, or 0 if there is none.

    Raises:
        StorageError: the storage refuses.
    """
    terms = [naming.term_of(name) for folder in _WITH_ATTEMPTS for name in run.list(folder)]
    drivers = [driver_of(name) for name in run.list(FOLDER)]
    return max([*terms, *drivers], default=0)
