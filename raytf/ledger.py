"""The ledger: what happened in a run and when, and from that alone where every second of it went.

    ledger/20261121T101500.123-3f2a9c-0000.jsonl     events of one driver, a JSON object a line, in order

Object stores cannot append, so each driver writes files of its own: the last one again and again while it is short,
then the next. Events carry the clock of the driver's node alone. A driver that is killed loses the seconds since its
last write, and storage that is away loses nothing as long as the driver lives.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raytf import reading
from raytf.errors import DamagedFileError, StorageError
from raytf.runlog import new_attempt
from raytf.storage import Storage

FOLDER = "ledger"
#: Events of a file; the last file is written again at each flush, so it stays short.
FILE_EVENTS = 500
#: Events that wait for storage at most; the oldest go first.
MOST_WAITING = 100_000
#: A line, the lines of a file and the bytes of all files that are read at the most: what writes them stays far below.
_LINE_BYTES, _FILE_LINES, _ALL_BYTES = 4 << 20, 20 * FILE_EVENTS, 1 << 30

Event = dict[str, Any]

_COUNT, _SECONDS = reading.optional(reading.whole), reading.optional(reading.finite)
_WORDS = reading.optional(reading.text)
#: What is known of an event's fields; others are only shown.
_EVENT = reading.record(
    {"time": reading.when, "kind": reading.text},
    {
        **dict.fromkeys(("step", "of_step", "from_step", "total", "workers", "world_size", "from", "to"), _COUNT),
        **dict.fromkeys(("checkpoint", "snapshot", "snapshot_bytes", "possible", "wanted"), _COUNT),
        **dict.fromkeys(("stall", "silent", "seconds", "deadline_seconds", "samples_per_second"), _SECONDS),
        **dict.fromkeys(("state", "outcome", "phase", "tier", "cause", "text"), _WORDS),
        "ratio": reading.optional(reading.number),
        "phases": reading.values(reading.finite),
    },
)


class Ledger:
    """Writes the events of one driver.

    Args:
        run: the run's folder.
        name: of this driver, unlike that of any other; names sort by the order of drivers. By default made from the
            number of those before and the time.
        most_waiting: events that wait for storage at most; of more, the oldest are lost.

    Raises:
        StorageError: storage refuses to say which drivers there were.
    """

    def __init__(self, run: Storage, name: str | None = None, most_waiting: int = MOST_WAITING):
        self._run, self._most = run, most_waiting
        # Clocks of machines differ, so time alone would not order their drivers.
        drivers = {file.rpartition("-")[0] for file in run.list(FOLDER)} if name is None else ()
        self.name = name or f"{len(drivers):06d}-{new_attempt()}"
        self._lock, self._writing = threading.Lock(), threading.Lock()
        #: Of the present file and later ones.
        self._events: deque[Event] = deque()
        self._file = 0
        #: Events of the present file that are on storage, and a number that changes with every event.
        self._written, self._added, self._seen = 0, 0, 0

    def add(self, events: Iterable[Event]) -> None:
        """Note events, in order; each has at least `time`, in seconds of the epoch, and `kind`."""
        with self._lock:
            for event in events:
                self._events.append(event)
                self._added += 1
            while len(self._events) - self._written > self._most:
                # Of what waits, the oldest: what is written belongs to a file that is written again.
                del self._events[self._written]

    def flush(self) -> bool:
        """Have all that was added on storage. False where storage refuses; it is tried again with the next flush."""
        with self._writing:
            while True:
                with self._lock:
                    if self._seen == self._added:
                        return True
                    part, seen = list(itertools.islice(self._events, FILE_EVENTS)), self._added
                    self._written = len(part)  # from now on they are not among those that wait
                text = "".join(json.dumps(event, default=str) + "\n" for event in part)
                try:
                    self._run.put(f"{FOLDER}/{self.name}-{self._file:04d}.jsonl", text.encode())
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
    """All events of a run, in the order of its drivers; what is damaged is left out.

    Args:
        before: a driver's name; only what earlier ones wrote.
    """
    return look(run, before)[0]


def look(run: Storage, before: str | None = None) -> tuple[list[Event], list[str]]:
    """As `read`, and what is damaged: a line each, with file and reason."""
    events: list[Event] = []
    problems: list[str] = []
    size = 0
    for name in run.list(FOLDER):
        if not name.endswith(".jsonl") or (before is not None and name >= before):
            continue
        where = f"{FOLDER}/{name}"
        try:
            data = run.get(where, min(reading.LARGE, _ALL_BYTES - size))
        except DamagedFileError as error:
            problems.append(f"{where}: {error.reason}")
            continue
        size += len(data)
        found, wrong = _events(data)
        events += found
        problems += [f"{where}: {wrong}"] if wrong else []
    return events, problems


def _events(data: bytes) -> tuple[list[Event], str]:
    """Events of a file; and what is wrong with it, but for a last line that is cut off."""
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
            event = reading.decode(line)
            problem = _EVENT(event)
            if problem:
                raise ValueError(problem)
            if b"\\ud" in line.lower():  # halves of characters, which no page and no metric takes
                event = json.loads(json.dumps(event, ensure_ascii=False).encode(errors="replace"))
            events.append({**event, "time": float(event["time"])})
        except ValueError as error:
            if not (is_last and number == len(lines)):
                wrong = wrong or f"line {number:,}: {error}"
    return events, wrong


#: Where time goes, in the order in which people want to see it.
CATEGORIES = {
    "training": "new steps",
    "redone": "steps done once more after a failure",
    "checkpoint": "training stood still to save or copy the state",
    "validation": "validation",
    "startup": "from the start of a driver to its first step",
    "restart": "from a failure to the next step",
    "resize": "planned changes of the number of workers",
    "waiting": "for nodes",
    "hang": "a worker made no progress",
    "finish": "test and export",
    "down": "no driver ran",
}


@dataclass(frozen=True)
class Span:
    """A part of the run's time that belongs to one category.

    Attributes:
        begin, end: seconds of the epoch.
        category: a key of CATEGORIES.
        workers: world size, 0 where no group trains.
        first_step, last_step: global steps at its ends.
    """

    begin: float
    end: float
    category: str
    workers: int
    first_step: int
    last_step: int

    @property
    def seconds(self) -> float:
        return self.end - self.begin


_PHASES = {"training": "training", "validating": "validation", "resizing": "resize"}
_FINISHING = ("testing", "exporting", "saving")


class Timeline:
    """Goes through events in order and cuts the time between them."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._now: float | None = None
        self._state = "startup"
        #: What a start of a group is for, until it trains.
        self._cause = "startup"
        self._workers = self._step = self._highest = 0
        self._stall = 0.0
        self._has_ended = False
        #: What the clock of the present driver is behind that of the ones before.
        self._behind = 0.0

    def add(self, event: Event) -> None:
        kind = event["kind"]
        starts = kind == "driver" and event.get("state") == "started"
        if starts and self._now is not None:
            self._behind = max(0.0, self._now - event["time"])
        time = event["time"] + self._behind
        time = time if self._now is None else max(self._now, time)
        if self._now is None or (starts and self._has_ended):
            self._now = time
        elif starts:
            self._cut(time, "down", self._step)
        else:
            self._book(event, time)
        self._change(event, kind)

    def take(self) -> list[Span]:
        """The spans since the last call."""
        taken, self.spans = self.spans, []
        return taken

    def _book(self, event: Event, time: float) -> None:
        assert self._now is not None
        step = int(event.get("step") or self._step)
        if self._state != "training":
            self._cut(time, self._state, self._step)
            return
        # A fault is noticed some time after the last sign of life.
        silent = min(float(event.get("silent") or 0.0), time - self._now) if event["kind"] in ("fault", "hang") else 0.0
        step = max(step, self._step)
        length = time - silent - self._now
        stall = min(max(float(event.get("stall") or self._stall) - self._stall, 0.0), length)
        self._stall = max(self._stall, float(event.get("stall") or 0.0))
        again = min(step, self._highest) - self._step
        share = again / (step - self._step) if again > 0 else 0.0
        begin, middle = self._now + stall, self._step + max(0, again)
        self._cut(begin, "checkpoint", self._step)
        self._cut(begin + (length - stall) * share, "redone", middle)
        self._cut(time - silent, "training", step)
        self._cut(time, "hang" if event.get("cause") == "hang" or event["kind"] == "hang" else "restart", step)
        self._highest = max(self._highest, step)

    def _cut(self, end: float, category: str, step: int) -> None:
        assert self._now is not None
        if end > self._now:
            workers = self._workers if category in ("training", "redone", "checkpoint", "validation", "finish") else 0
            self.spans.append(Span(self._now, end, category, workers, self._step, step))
            self._now = end
        self._step = step

    def _change(self, event: Event, kind: str) -> None:
        if kind == "driver":
            self._has_ended = event.get("state") == "ended" and event.get("outcome") == "finished"
            self._state = self._cause = "startup" if event.get("state") == "started" else "down"
        elif kind == "fault":
            self._state = self._cause = "restart"
        elif kind == "hang":
            self._state = self._cause = "hang"
        elif kind == "waiting":
            self._state = "waiting"
        elif kind == "group":
            self._stall = 0.0
            if self._state in ("training", "resize"):
                self._cause = "resize"
            self._state = self._cause
        elif kind == "phase":
            phase = event.get("phase", "")
            if phase in _FINISHING:
                self._state = "finish"
            elif phase in _PHASES:
                self._state = _PHASES[phase]
                self._cause = "resize" if phase == "resizing" else self._cause
            if self._state in ("training", "validation", "resize"):
                # A group that restored an earlier step begins there.
                self._step = int(event.get("step") or 0) if phase == "training" else self._step
            self._workers = int(event.get("workers") or self._workers)


def timeline(events: Sequence[Event]) -> list[Span]:
    """Cut a run's time into spans; they touch, but where a run that had finished was later given more steps."""
    line = Timeline()
    for event in events:
        line.add(event)
    return line.spans


def account(spans: Iterable[Span]) -> dict[str, float]:
    """Seconds of each category, in the order of CATEGORIES, without those that have none."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for span in spans:
        seconds[span.category] += span.seconds
    return {category: value for category, value in seconds.items() if value}


def goodput(seconds: dict[str, float]) -> float:
    """Share of the run's time that went into new steps; 0 where there was no time."""
    total = sum(seconds.values())
    return seconds.get("training", 0.0) / total if total else 0.0
