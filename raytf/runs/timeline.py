"""Computes from a run's ledger how each second of the run was spent, and measures the parts of a start: a worker's, and
a group's from the failure to the first step."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from raytf.runs.events import HELD
from raytf.runs.ledger import Event

#: Categories of time, in display order.
CATEGORIES = {
    "training": "new steps",
    "redone": "steps repeated after a failure",
    "checkpoint": "training paused to save or copy the state",
    "validation": "validation",
    "startup": "until a driver's first step, and later graph traces",
    "restart": "from a failure to the next step",
    "resize": "planned changes of the number of workers",
    "waiting": "waiting for nodes",
    "hang": "a worker made no progress",
    "finish": "the last save, test and export",
    "down": "no driver ran; not counted in goodput",
}
#: Tier -> field of a heartbeat that contains the step of the tier's newest copy.
COPY_TIERS = {"durable": "checkpoint", "memory": "snapshot"}


@dataclass(frozen=True)
class Span:
    """A part of the run's time that belongs to one category.

    Attributes:
        begin, end: Unix times in seconds.
        category: a key of CATEGORIES.
        workers: world size; 0 if no group trains.
        first_step, last_step: global steps at its beginning and end.
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
    """Divides the time between events, which are added in order, into spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._now: float | None = None
        self._state = "startup"
        #: Category of the time from a group's start until it trains.
        self._cause = "startup"
        self._workers = self._step = self._highest = 0
        self._stall = self._trace = 0.0
        self._has_ended = False
        #: Seconds by which the current driver's clock is behind the clocks of earlier drivers.
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
        """Return the spans since the last call."""
        taken, self.spans = self.spans, []
        return taken

    def _book(self, event: Event, time: float) -> None:
        assert self._now is not None
        step = int(event.get("step") or self._step)
        traced, self._trace = self._trace, float(event.get("trace") or self._trace)
        if self._state != "training":
            self._cut(time, self._state, self._step)
            return
        # A fault is noticed `silent` seconds after the last heartbeat.
        silent = 0.0
        if event["kind"] in ("fault", "hang") or event.get("tier") == HELD:
            silent = min(float(event.get("silent") or 0.0), time - self._now)
        step = max(step, self._step)
        length = time - silent - self._now
        stall = min(max(float(event.get("stall") or self._stall) - self._stall, 0.0), length)
        self._stall = max(self._stall, float(event.get("stall") or 0.0))
        again = min(step, self._highest) - self._step
        share = again / (step - self._step) if again > 0 else 0.0
        trace = min(max(self._trace - traced, 0.0), length - stall)
        begin, middle = self._now + stall + trace, self._step + max(0, again)
        self._cut(self._now + stall, "checkpoint", self._step)
        self._cut(begin, self._cause, self._step)  # a start lasts until its graphs are traced
        self._cut(begin + (length - stall - trace) * share, "redone", middle)
        self._cut(time - silent, "training", step)
        self._cut(time, _pause(event), step)
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
        elif kind == "fault" and not event.get("survived"):
            self._state = self._cause = "restart"
        elif kind == "hang":
            self._state = self._cause = "hang"
        elif kind == "waiting":
            self._state = "waiting"
        elif kind == "group":
            self._stall = self._trace = 0.0
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
                # A group may have restored an earlier step.
                self._step = int(event.get("step") or 0) if phase == "training" else self._step
            self._workers = int(event.get("workers") or self._workers)
        elif kind == "attempt" and event.get("tier") == HELD and self._state in ("hang", "restart"):
            self._state, self._cause = "training", "restart"  # no `phase` event follows: the ranks continue


def _pause(event: Event) -> str:
    """Return the category of the time for which a group stood still before an event."""
    if event.get("tier") == HELD and event.get("lost") == 0:
        return "resize"
    return "hang" if event.get("cause") == "hang" or event["kind"] == "hang" else "restart"


def timeline(events: Sequence[Event]) -> list[Span]:
    """Divide a run's time into spans. They adjoin, except where a finished run was later given more steps."""
    line = Timeline()
    for event in events:
        line.add(event)
    last = events[-1] if events else {}
    if last.get("kind") == "driver" and last.get("state") == "ended" and last.get("outcome") != "finished":
        return _without_next_step(line.spans)
    return line.spans


def _without_next_step(spans: list[Span]) -> list[Span]:
    """Return the spans of a run that has ended: the time after its last failure is `finish`, not `restart`."""
    count = len(spans)
    while count and spans[count - 1].category == "restart":
        count -= 1
    return spans[:count] + [replace(span, category="finish") for span in spans[count:]]


def account(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each category that has any, in the order of CATEGORIES."""
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for span in spans:
        seconds[span.category] += span.seconds
    return {category: value for category, value in seconds.items() if value}


def goodput(seconds: dict[str, float]) -> float:
    """Return the share of the run's time that went into new steps; 0 if there is no time. The time without a driver is
    left out, because the run may not have been meant to continue then."""
    total = sum(seconds.values()) - seconds.get("down", 0.0)
    return seconds.get("training", 0.0) / total if total else 0.0


def steps_per_second(spans: Iterable[Span]) -> float:
    """Return new steps per second of training time, over all spans; 0 if no time went into steps. See `Pace`."""
    made = [span for span in spans if span.category == "training"]
    seconds = sum(span.seconds for span in made)
    return sum(span.last_step - span.first_step for span in made) / seconds if seconds else 0.0


class RecoveryPointAges:
    """Tracks the age of the newest copy in each tier through a run's events, which are passed in order.

    Attributes:
        steps: step of each tier's newest copy; 0 before the first copy, None after the newest copy was lost.
    """

    def __init__(self) -> None:
        self.steps: dict[str, int | None] = dict.fromkeys(COPY_TIERS, 0)
        #: The steps that the run passed, in ascending order, and the time of each.
        self._at_steps: list[int] = []
        self._times: list[float] = []

    def see(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "attempt":
            step, tier = int(event.get("from_step") or 0), event.get("tier")
            self._pass(event["time"], step)
            # A group starts from the newest remaining copy, so newer copies were lost.
            self.steps["memory"] = step if tier == "memory" else None if tier == "durable" else 0
            if tier == "durable":
                self.steps["durable"] = max(step, self.steps["durable"] or 0)
        elif kind in ("phase", "progress") and event.get("phase") != "starting":
            self._pass(event["time"], int(event.get("step") or 0))
            for tier, field in COPY_TIERS.items():
                if event.get(field) is not None:
                    self.steps[tier] = int(event[field])

    def seconds(self, now: float) -> dict[str, float]:
        """Return the age of each tier's newest copy, without tiers that lost it; empty before training starts."""
        if not self._times:
            return {}
        return {tier: max(0.0, now - self._when(step)) for tier, step in self.steps.items() if step is not None}

    def _pass(self, time: float, step: int) -> None:
        keep = bisect.bisect_left(self._at_steps, step)
        del self._at_steps[keep:], self._times[keep:]
        self._at_steps.append(step)
        self._times.append(time)

    def _when(self, step: int) -> float:
        after = bisect.bisect_left(self._at_steps, step)
        if after == 0:
            return self._times[0]
        if after == len(self._times):
            return self._times[-1]
        low, high = self._at_steps[after - 1], self._at_steps[after]
        share = (step - low) / (high - low)
        return self._times[after - 1] + share * (self._times[after] - self._times[after - 1])


class Phases:
    """A stopwatch that measures named phases.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._at = clock, clock()
        self._seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Add the time since the last mark to a phase."""
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._at
        self._at = now

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase, in the order of the first marks."""
        return dict(self._seconds)


class RestartPhases:
    """Measures the parts of a group's start by the driver's clock.

    A fault may precede the start; it was noticed some time after the last heartbeat.
    """

    def __init__(self) -> None:
        self._fault: tuple[float, float] | None = None
        self._group: float | None = None
        self._joined: float | None = None

    def fault(self, now: float, silent: float) -> None:
        """Record a fault that was noticed `silent` seconds after the last heartbeat. Only the first in a row counts."""
        if self._fault is None:
            self._fault = (now, silent)

    def group(self, now: float) -> None:
        self._group, self._joined = now, None

    def joined(self, now: float) -> None:
        """Record the time of rank 0's first report."""
        self._joined = now

    def trains(self, now: float, own: dict[str, float]) -> dict[str, float]:
        """Record that the first step is done, and return the seconds of each part, in order.

        Args:
            own: the parts that rank 0 measured; `tensorflow` and `rendezvous` lie before its first report.
        """
        parts: dict[str, float] = {}
        if self._fault is not None:
            at, silent = self._fault
            parts["notice"] = silent
            if self._group is not None:
                parts["placement"] = max(0.0, self._group - at)  # the driver may learn of the fault late
        if self._group is not None and self._joined is not None:
            early = sum(own.get(name, 0.0) for name in ("tensorflow", "rendezvous"))
            parts["processes"] = max(0.0, self._joined - self._group - early)
        self._fault = self._group = None
        return {**parts, **own}


def counted(count: int, in_place: int) -> str:
    """Return the number of restarts in words, and how many kept the workers' state: `3 restarts (1 in place)`."""
    return f"{count} restart{'' if count == 1 else 's'}{f' ({in_place} in place)' if in_place else ''}"


def describe(parts: dict[str, float]) -> str:
    """Return the parts of a start as one line: `9.8 s: notice 0.6, processes 4.1`."""
    return f"{sum(parts.values()):.1f} s: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
