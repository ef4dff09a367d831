"""A run's history for people: its state, its events in words and its restarts, from the ledger and other files."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raytf.errors import ConfigError, StorageError
from raytf.runs import inventory, ledger, run_log, run_state, start_command, timeline
from raytf.runs.events import HELD, describe
from raytf.runs.lease import LEASE_FILE, is_held
from raytf.runs.ledger import Event
from raytf.runs.run_state import Run
from raytf.runs.timeline import Span
from raytf.storage.storage import Storage
from raytf.storage.untrusted_json import attempt

#: Kind of an event -> its sort; an event of any other kind is a note.
_CLASSES = {
    "fault": "fault",
    "hang": "fault",
    "save_failed": "fault",
    "notice": "notice",
    "straggler": "notice",
    "exclude": "notice",
    "waiting": "notice",
    "resize": "resize",
    "attempt": "start",
    "save": "save",
    "driver": "driver",
}
_FOLDERS = (run_log.ATTEMPTS, run_log.STEPS, "checkpoints")
#: Kinds of events that `History.happenings` omits: heartbeats, and changes that other events report better.
_QUIET = ("progress", "phase", "group")
#: Cause of a restart in which the workers kept their state, and no fault or resize came before.
_JOINED = "workers join"


@dataclass(frozen=True)
class HistoryEvent:
    """An event of a run, in words.

    Attributes:
        time: Unix time in seconds.
        kind: the event's kind in the ledger.
        sort: fault, notice, resize, start, save, driver or note.
        step: the global step of the run at that time, or None.
        text: a description in one line.
    """

    time: float
    kind: str
    sort: str
    step: int | None
    text: str


@dataclass(frozen=True)
class RestartRecord:
    """A start of a group of workers that finished its first step, including the run's first start.

    Attributes:
        time: when the first step ended, as Unix time in seconds.
        cause: the reason for the start, in words.
        is_first: whether it is the run's first start.
        tier: the source of its state: new, memory, durable or held.
        from_step: the global step at which it started.
        redone: number of repeated steps, as far as the driver knew.
        phases: seconds of each phase of the start, in order.
    """

    time: float
    cause: str
    is_first: bool
    workers: int
    tier: str
    from_step: int
    redone: int
    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class History(Run):
    """A run with all facts from its ledger. An unknown step is 0.

    Attributes:
        place: the run's folder, for people.
        seconds: category of time -> seconds.
        events: the ledger's events, in order.
        samples_per_second: the rate over the time in which steps were made; None if unknown.
        command: the words of the command that last started the run.
        changed: flag -> value, of the settings that were not at their defaults at the last start.
        made_with: the versions by name, and the machine, of the last start.
    """

    place: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    happenings: list[HistoryEvent] = field(default_factory=list)
    restarts: list[RestartRecord] = field(default_factory=list)
    samples_per_second: float | None = None
    command: Sequence[str] = ()
    changed: Mapping[str, str] = field(default_factory=dict)
    made_with: Mapping[str, str] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        return timeline.goodput(self.seconds)

    @property
    def wall_clock(self) -> float:
        """The seconds from the first to the last event, without the time between the end of a finished run and the
        start of a driver that continues it. It is computed from the events alone, because the booked time is compared
        with it. If a driver's clock is behind its predecessor's, the time between the two drivers is unknown and
        left out."""
        if not self.events:
            return 0.0
        gaps = (
            after["time"] - before["time"]
            for before, after in itertools.pairwise(self.events)
            if after.get("state") == "started"
            and (before.get("outcome") == "finished" or after["time"] < before["time"])
        )
        return self.events[-1]["time"] - self.events[0]["time"] - sum(gaps)

    @property
    def begin(self) -> float:
        return self.events[0]["time"] if self.events else 0.0

    @property
    def redone(self) -> int:
        """The number of repeated steps."""
        return sum(restart.redone for restart in self.restarts)


def load(uri: str, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep) -> History:
    """Read a run's history. If its driver is on another machine, this takes some seconds; see `lease.is_held`.

    Raises:
        ConfigError: there is no run.
        StorageError: the storage cannot be read.
    """
    run = Storage(uri)
    contents, damaged = attempt(lambda: ledger.read_with_problems(run))
    events, problems = contents or ([], [])
    result, broken = attempt(lambda: run_log.read_result(run))
    problems += [f"{error.file}: {error.reason}" for error in (damaged, broken) if error is not None]
    if not events and result is None and not problems and not _is_run(run):
        raise ConfigError(_no_run(run))
    is_over = bool(events) and events[-1]["kind"] == "driver" and events[-1].get("state") == "ended"
    is_alive, lost = (False, None) if is_over else attempt(lambda: is_held(run, clock, sleep))
    problems += [] if lost is None else [f"{lost.file}: {lost.reason}"]
    listed = inventory.read_run(run, events, bool(is_alive), (result, broken))
    problems += [problem for problem in listed.problems if problem not in problems]
    command, _ = attempt(lambda: start_command.read(run))
    return replace(
        _of(replace(listed, problems=tuple(problems)), run.locate(""), events, result),
        command=() if command is None else command.words,
    )


def load_with_steps(uri: str) -> tuple[History, dict[str, np.ndarray] | None]:
    """Read a run as `load` does, and its steps as `raytf.read_steps` does. If the steps cannot be read, return None
    instead of them, and add the reason to the run's problems."""
    run = load(uri)
    try:
        return run, run_log.read_steps(uri)
    except StorageError as error:
        return replace(run, problems=(*run.problems, str(error))), None


def with_sign(run: History, sign: Event) -> History:
    """Return the history updated with a heartbeat of its driver, without reading storage. If the heartbeat is not newer
    than the last event, or the run has ended, return the same history."""
    if not run.events or run.events[-1].get("state") == "ended" or sign["time"] <= run.events[-1]["time"]:
        return run
    events = [*run.events, sign]
    now = run_state.of(events, None, True, None, run.epochs)
    state = {name: getattr(now, name) for name in ("state", "why", "total", "metrics")}
    return replace(run, **state, step=now.step or 0, **_facts(events, None))


def build(place: str, events: Sequence[Event], result: dict[str, Any] | None, is_alive: bool) -> History:
    """Return the history of a run from only its events and its result.

    Args:
        is_alive: whether a process owns the run.
    """
    return _of(run_state.of(events, result, is_alive or None), place, events, result)


def _of(run: Run, place: str, events: Sequence[Event], result: dict[str, Any] | None) -> History:
    known = {**vars(run), "name": _name(place), "step": run.step or 0}
    return History(**known, place=place, **_facts(events, result))


def _facts(events: Sequence[Event], result: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a `History` that depend only on events and result."""
    spans = timeline.timeline(events)
    machine = _last(events, "machine").get("machine", "").partition(", TensorFlow")[0]
    return {
        "seconds": timeline.account(spans),
        "spans": spans,
        "events": list(events),
        "happenings": list(_happenings(events)),
        "restarts": _restarts(events),
        "samples_per_second": _rate(spans, events, result),
        "changed": _last(events, "versions").get("settings", {}),
        "made_with": {**_last(events, "versions").get("versions", {}), **({"machine": machine} if machine else {})},
    }


def _last(events: Sequence[Event], field: str) -> Event:
    return next((event for event in reversed(events) if event.get(field)), {})


def _name(place: str) -> str:
    """Return a run's name; for run N of a program, it is PROGRAM/N."""
    parts = place.rstrip("/").split("/")
    return "/".join(parts[-2:] if parts[-1].isdigit() else parts[-1:])


def _is_run(run: Storage) -> bool:
    return any(_holds(run, name) for name in _FOLDERS) or run.exists(LEASE_FILE)


def _holds(run: Storage, name: str) -> bool:
    """Return whether a folder has content, or is damaged and cannot be listed."""
    return attempt(lambda: run.list(name)) != ([], None)


def _no_run(run: Storage) -> str:
    text = f"there is no run in {run.locate('')}. Expected a run's folder, STORAGE/NAME, such as ~/raytf-runs/mnist"
    names = [n.rstrip("/") for n in run.list() if n.endswith("/")]
    inner = (run_log.ATTEMPTS, ledger.FOLDER)
    runs = [n for n in names[:20] if any(_holds(run, f"{n}/{i}") for i in inner)]
    return f"{text}. Did you mean {' or '.join(run.locate(name) for name in runs[:3])}?" if runs else f"{text}."


def _rate(spans: Sequence[Span], events: Sequence[Event], result: dict[str, Any] | None) -> float | None:
    if result is not None and result.get("samples_per_second"):
        return float(result["samples_per_second"])
    records = _last(events, "samples_per_step").get("samples_per_step")
    if records:
        return timeline.steps_per_second(spans) * float(records)
    # Earlier versions did not record the number of samples in a step.
    rates = sorted(float(e["samples_per_second"]) for e in events if e.get("samples_per_second"))
    return rates[len(rates) // 2] if rates else None


def _happenings(events: Sequence[Event]) -> Iterator[HistoryEvent]:
    before: Event | None = None
    is_open = has_failed = False
    for event in events:
        kind = event["kind"]
        has_failed |= kind == "fault" and event.get("retry") is False
        if kind == "driver":
            if event.get("state") == "started" and is_open and before is not None:
                gap = max(0.0, event["time"] - before["time"])
                text = f"the driver died; another one started {gap:.1f} s after its last event"
                yield HistoryEvent(before["time"], "driver", "fault", _step(before), text)
            is_open = event.get("state") == "started"
        if kind not in _QUIET:
            yield HistoryEvent(event["time"], kind, _sort(event, has_failed), _step(event), describe(event))
        has_failed &= kind != "driver"
        before = event


def _sort(event: Event, has_failed: bool) -> str:
    """Return the sort of an event; see `HistoryEvent`.

    Args:
        has_failed: whether an earlier fault has ended the run, so that the driver's end is not another fault.
    """
    if event["kind"] == "driver" and event.get("outcome") == "failed" and event.get("text") != "KeyboardInterrupt":
        return "driver" if has_failed else "fault"
    return _CLASSES.get(event["kind"], "note")


def _step(event: Event) -> int | None:
    step = event.get("of_step", event.get("step"))
    return None if step is None else int(step)


def _restarts(events: Sequence[Event]) -> list[RestartRecord]:
    restarts: list[RestartRecord] = []
    cause, early = "", {}
    highest, is_open = 0, False
    started: float | None = None
    last = 0.0
    for event in events:
        kind = event["kind"]
        if kind == "driver" and event.get("state") == "started":
            cause = "" if not restarts else "the driver died" if is_open else "started again"
            early = {"down": max(0.0, event["time"] - last)} if is_open and restarts else {}
            started, is_open = event["time"], True
        elif kind == "driver":
            is_open = False
        elif event.get("survived") and _lost_workers_unexplained(restarts):
            restarts[-1] = replace(restarts[-1], cause=describe(event))
        elif kind in ("fault", "hang", "resize"):
            cause = cause or describe(event)
        elif kind == "group" and started is not None:
            early, started = {**early, "driver": event["time"] - started}, None
        elif kind == "attempt":
            step = int(event.get("from_step") or 0)
            phases = {**early, **{k: float(v) for k, v in event.get("phases", {}).items()}}
            tier, workers = str(event.get("tier", "")), int(event.get("world_size") or 0)
            why, redone = cause or (_JOINED if tier == HELD else "start"), max(0, highest - step)
            restarts.append(RestartRecord(event["time"], why, not restarts, workers, tier, step, redone, phases))
            cause, early = "", {}
        highest = max(highest, int(event.get("step") or 0))
        last = event["time"]
    return restarts


def _lost_workers_unexplained(restarts: Sequence[RestartRecord]) -> bool:
    """Return whether the last restart has fewer workers for no known reason: surviving workers may continue, and report
    that they do, before the controller reports the fault."""
    return len(restarts) > 1 and restarts[-1].cause == _JOINED and restarts[-1].workers < restarts[-2].workers
