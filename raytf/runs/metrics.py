"""A run's figures for Prometheus, through Ray: every node's metrics agent exports them as `ray_raytf_...`.

They are set from the driver, again and again: Ray drops a gauge that was not set for some seconds. Each carries the
run's name as `run`. Gauges are of the whole run, also of the drivers before this one; counters are of this driver's
time, and `increase()` adds up those of all.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from raytf.runs.events import HELD
from raytf.runs.ledger import Event
from raytf.runs.timeline import CATEGORIES, RecoveryPointAges, Timeline, account, goodput

#: Seconds between two times that all are set.
SECONDS = 5.0

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytf_step": ("global steps done", ()),
    "raytf_steps_wanted": ("global steps that end the run", ()),
    "raytf_world_size": ("workers that train; 0 where none do", ()),
    "raytf_loss": ("running loss of the epoch", ()),
    "raytf_goodput": ("share of the run's time that went into new steps", ()),
    "raytf_samples_per_second": ("over the last report", ()),
    "raytf_checkpoint_age_seconds": ("since the run was at the step of its newest copy", ("tier",)),
    "raytf_checkpoint_step": ("step of the newest copy", ("tier",)),
    "raytf_snapshot_bytes": ("memory that copies of the state take on each node", ()),
}
#: Gauge -> field of the latest sign of life.
_FIELDS = {
    "raytf_step": "step",
    "raytf_steps_wanted": "total",
    "raytf_world_size": "workers",
    "raytf_loss": "loss",
    "raytf_samples_per_second": "samples_per_second",
    "raytf_snapshot_bytes": "snapshot_bytes",
}
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytf_seconds_total": ("seconds of the run by category of the ledger", ("category",)),
    "raytf_restarts_total": ("starts of worker groups after the first, by cause", ("cause",)),
    "raytf_faults_total": ("faults, by cause", ("cause",)),
    "raytf_saves_total": ("checkpoints written to storage", ()),
    "raytf_save_failures_total": ("checkpoints that storage refused", ()),
}


class RunFigures:
    """The metrics of a run, from its events alone. One thread may add while another one reads.

    Args:
        clock: seconds of the epoch, that of the events.
    """

    def __init__(self, clock: Callable[[], float] = time.time):
        self._clock, self._line = clock, Timeline()
        self._news: deque[Event] = deque()
        self._seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._counts: dict[tuple[str, str], float] = {}
        self._cause, self._starts = "", 0
        self._latest: Event | None = None
        self._ages = RecoveryPointAges()

    def add(self, events: Iterable[Event]) -> None:
        """Note what happened, in order; it counts from the next `update` on."""
        self._news.extend(events)

    def update(self, earlier: Iterable[Event] = ()) -> None:
        """Take in what was added.

        Args:
            earlier: what happened before all of that.
        """
        for event in earlier:
            self._see(event)
        while self._news:
            self._see(self._news.popleft())
        for category, seconds in account(self._line.take()).items():
            self._seconds[category] += seconds

    def _see(self, event: Event) -> None:
        self._line.add(event)
        self._ages.see(event)
        kind, cause = event["kind"], str(event.get("cause") or event["kind"])
        if kind in ("fault", "hang"):
            if kind == "fault":  # which follows on a hang
                self._count("raytf_faults_total", cause)
            self._cause, self._latest = self._cause or cause, None
        elif kind == "resize":
            self._cause = self._cause or "resize"
        elif kind == "driver":
            self._cause, self._latest = "driver", None
        elif kind == "group":
            self._latest = None
        elif kind == "attempt":
            self._starts += 1
            if self._starts > 1:
                self._count("raytf_restarts_total", self._cause or ("join" if event.get("tier") == HELD else "unknown"))
            self._cause = ""
        elif kind == "save":
            self._count("raytf_saves_total")
        elif kind == "save_failed":
            self._count("raytf_save_failures_total")
        elif kind in ("phase", "progress"):
            self._latest = event

    def _count(self, name: str, label: str = "") -> None:
        self._counts[name, label] = self._counts.get((name, label), 0.0) + 1.0

    @property
    def goodput(self) -> float:
        return goodput(self._seconds)

    @property
    def restarts(self) -> int:
        return max(0, self._starts - 1)

    def counters(self) -> dict[tuple[str, str], float]:
        """Return (name, value of its one label or "") -> value; none goes down."""
        seconds = {("raytf_seconds_total", category): value for category, value in self._seconds.items() if value}
        return {**seconds, **self._counts}

    def gauges(self) -> dict[tuple[str, str], float]:
        """Return (name, value of its one label or "") -> value; what is not known is left out."""
        gauges = {("raytf_goodput", ""): self.goodput, ("raytf_world_size", ""): 0.0}
        latest = self._latest
        if latest is None:
            return gauges
        for name, field in _FIELDS.items():
            if isinstance(latest.get(field), (int, float)):
                gauges[name, ""] = float(latest[field])
        for tier, seconds in self._ages.seconds(self._clock()).items():
            gauges["raytf_checkpoint_age_seconds", tier] = seconds
        for tier, step in self._ages.steps.items():
            if step is not None:
                gauges["raytf_checkpoint_step", tier] = float(step)
        return gauges


class Metrics:
    """Ray's side of it: to be made where Ray is connected, and used from one thread."""

    def __init__(self, run: str, figures: RunFigures):
        from ray.util import metrics

        self._figures = figures
        self._metrics: dict[str, Any] = {}
        for kind, table in ((metrics.Gauge, GAUGES), (metrics.Counter, COUNTERS)):
            for name, (text, labels) in table.items():
                metric = kind(name, description=text, tag_keys=("run", *labels))
                metric.set_default_tags({"run": run})
                self._metrics[name] = metric
        # The node's agent adds up what all drivers tell it: each tells only of its own time.
        self._reported = figures.counters()

    def show(self) -> None:
        """Set all of them as the figures are now."""
        self._figures.update()
        for (name, label), value in self._figures.gauges().items():
            self._metrics[name].set(value, _labels(GAUGES[name][1], label))
        for (name, label), value in self._figures.counters().items():
            more = value - self._reported.get((name, label), 0.0)
            if more > 0:
                self._metrics[name].inc(more, _labels(COUNTERS[name][1], label))
                self._reported[name, label] = value


def _labels(names: tuple[str, ...], value: str) -> dict[str, str]:
    return {names[0]: value} if names else {}
