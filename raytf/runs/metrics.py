"""A run's metrics for Prometheus, through Ray: every node's metrics agent exports them as `ray_raytf_...`.

The driver sets them repeatedly, because Ray drops a gauge that was not set for some seconds. Each has the run's name as
label `run`. Gauges describe the whole run, including earlier drivers. Counters cover this driver, and `increase()` sums
those of all drivers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from raytf.runs.events import HELD
from raytf.runs.ledger import Event
from raytf.runs.timeline import CATEGORIES, RecoveryPointAges, Timeline, account, goodput

#: Seconds between two updates of all metrics.
SECONDS = 5.0

GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "raytf_step": ("global steps done", ()),
    "raytf_steps_wanted": ("global steps that end the run", ()),
    "raytf_world_size": ("workers that train; 0 if none do", ()),
    "raytf_loss": ("running loss of the epoch", ()),
    "raytf_goodput": ("share of the run's time that went into new steps", ()),
    "raytf_samples_per_second": ("samples per second over the last report", ()),
    "raytf_checkpoint_age_seconds": ("seconds since the run was at the step of its newest copy", ("tier",)),
    "raytf_checkpoint_step": ("step of the newest copy", ("tier",)),
    "raytf_snapshot_bytes": ("memory for copies of the state on each node, in bytes", ()),
}
#: Gauge -> field of the latest heartbeat.
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
    """The metrics of a run, computed from its events. One thread may add events while another one reads.

    Args:
        clock: the clock of the events, in seconds since the epoch.
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
        """Add events in order; the next `update` counts them."""
        self._news.extend(events)

    def update(self, earlier: Iterable[Event] = ()) -> None:
        """Count the events that were added.

        Args:
            earlier: events before all of these, to count first.
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
            if kind == "fault":  # a fault follows each hang
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
        """Return the counters: (name, value of its one label or "") -> value. Values never decrease."""
        seconds = {("raytf_seconds_total", category): value for category, value in self._seconds.items() if value}
        return {**seconds, **self._counts}

    def gauges(self) -> dict[tuple[str, str], float]:
        """Return the known gauges: (name, value of its one label or "") -> value."""
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
    """The run's metrics in Ray. Create it after Ray is connected, and use it from one thread."""

    def __init__(self, run: str, figures: RunFigures):
        from ray.util import metrics

        self._figures = figures
        self._metrics: dict[str, Any] = {}
        for kind, table in ((metrics.Gauge, GAUGES), (metrics.Counter, COUNTERS)):
            for name, (text, labels) in table.items():
                metric = kind(name, description=text, tag_keys=("run", *labels))
                metric.set_default_tags({"run": run})
                self._metrics[name] = metric
        # The node's agent sums the reports of all drivers, so each driver reports only its own time.
        self._reported = figures.counters()

    def show(self) -> None:
        """Set all metrics in Ray to the current values."""
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
