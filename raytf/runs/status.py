"""The status of a run and its speed, for the driver's display and for a file that other programs can read."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

from raytf.errors import ConfigError
from raytf.storage import strict_json

#: Phase in which the ranks save and wait at the driver's request; the Monitor knows the reason.
PARKED = "parked"
#: Seconds after which the weight of a step in the pace is 1/e.
_SECONDS = 15.0
#: Seconds and steps of training after which the pace is known well enough to estimate the time left.
_KNOWN_SECONDS, _KNOWN_STEPS = 2.0, 3


@dataclass(frozen=True)
class SaveTrouble:
    """A series of failed saves.

    Attributes:
        seconds: seconds since the first failure of the series.
        retry_seconds: seconds until the next try.
        why: short reason of the last failure.
    """

    seconds: float
    retry_seconds: float
    why: str


@dataclass(frozen=True)
class Status:
    """The status of a run, as rank 0 last reported it.

    Attributes:
        step, total: completed and planned global steps.
        epoch, epochs: the current epoch, counted from 1, and the number of epochs up to step `total`.
        metrics: running loss and metrics of the current epoch.
        samples_per_step: the average number of records in a step.
        samples_per_second: the rate over the last seconds; see `Pace`.
        workers: world size.
        checkpoint: step of the last complete checkpoint, or None.
        snapshot: step of the newest copy of the state in memory, or None.
        snapshot_bytes: memory of the copies on each node.
        stall_seconds: total time for which this group of workers has paused training to save or copy the state.
        trace_seconds: total time for which this group has traced graphs, including the first call of the step.
        phase: `training`, or the current activity instead.
        trouble: why checkpoints cannot be saved; None if they can.
        history: the last completed epochs, each with its metrics, `epoch` (from 0) and `step`.
    """

    step: int
    total: int
    epoch: int
    epochs: int
    workers: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_step: float = 0.0
    samples_per_second: float = 0.0
    seconds_left: float | None = None
    checkpoint: int | None = None
    snapshot: int | None = None
    snapshot_bytes: int = 0
    stall_seconds: float = 0.0
    trace_seconds: float = 0.0
    phase: str = "training"
    trouble: SaveTrouble | None = None
    history: list[dict[str, Any]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {
            "phase": self.phase,
            "step": self.step,
            "total": self.total,
            "workers": self.workers,
            "loss": self.metrics.get("loss"),
            "samples_per_step": self.samples_per_step,
            "samples_per_second": self.samples_per_second,
            "checkpoint": self.checkpoint,
            "snapshot": self.snapshot,
            "snapshot_bytes": self.snapshot_bytes,
            "stall": self.stall_seconds,
            "trace": self.trace_seconds,
        }


def describe(status: Status, shows_saves: bool = False) -> str:
    """Return a status as one line.

    Args:
        shows_saves: whether to show checkpoints and copies in memory even if saves do not fail.
    """
    parts = [*where(status), *learned(status), *saved(status, shows_saves), left(status)]
    return ", ".join(part for part in parts if part)


def where(status: Status) -> list[str]:
    """Return the current epoch and step, as texts."""
    return [f"epoch {status.epoch}/{status.epochs}", f"step {status.step}/{status.total}"]


def left(status: Status) -> str:
    """Return the time left, or the current activity if that is not training; empty if the time is unknown."""
    if status.phase != "training":
        return status.phase
    return "" if status.seconds_left is None else f"ETA {clock_text(status.seconds_left)}"


def learned(status: Status) -> list[str]:
    """Return the epoch's metrics so far, the speed, and the number of workers, as texts."""
    rate = f"{status.samples_per_second:,.0f} samples/s" if status.samples_per_second else ""
    metrics = [f"{name} {number_text(value)}" for name, value in status.metrics.items()]
    return [*metrics, *([rate] if rate else []), workers_text(status.workers)]


def saved(status: Status, shows_saves: bool) -> list[str]:
    """Return the newest saved states, as texts, if saves fail or `shows_saves` is set."""
    parts = []
    if status.trouble is not None or shows_saves:
        parts.append(f"saved {'nothing yet' if status.checkpoint is None else f'step {status.checkpoint}'}")
    if status.trouble is not None:
        since, again = clock_text(status.trouble.seconds), clock_text(status.trouble.retry_seconds)
        parts.append(f"saving has failed for {since} ({status.trouble.why}), next try in {again}")
    if status.snapshot is not None and shows_saves:
        parts.append(f"in memory step {status.snapshot} ({status.snapshot_bytes / 2**20:,.0f} MiB a node)")
    return parts


def workers_text(number: int) -> str:
    """Return a number of workers in words: `1 worker`, `3 workers`."""
    return f"{number} worker{'' if number == 1 else 's'}"


def number_text(value: float | None) -> str:
    """Return a loss or a metric with four significant digits: `0.9731`, `3.2e-05`, `12,345`; `-` for none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def clock_text(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class StatusFile:
    """A local file with the latest status as JSON: the fields of `Status`, and `time` as Unix time in seconds.

    NaN and infinite numbers are written as null.

    Args:
        path: a file in an existing folder; with None, nothing is written.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._status: Status | None = None
        if path is not None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)  # an earlier command's file is not about this run
                with open(f"{path}.part", "w"):
                    pass
                os.remove(f"{path}.part")
            except OSError as error:
                raise ConfigError(
                    f"--status-file {path} cannot be written: {error.strerror or error}. Choose a file in a folder "
                    "that exists."
                ) from error

    def show(self, status: Status) -> None:
        """Replace the file if the status has changed. An error, such as a full disk, does not stop the run."""
        if self._path is None or status == self._status:
            return
        self._status = status
        with contextlib.suppress(OSError):
            with open(f"{self._path}.part", "w") as stream:
                stream.write(strict_json.dumps({**dataclasses.asdict(status), "time": time.time()}))
            os.replace(f"{self._path}.part", self._path)


# -- pace --------------------------------------------------------------------------------------------------------------
#
# The pace is measured from the end of the first call of each group of workers, which traces the step. Traces of other
# graphs, stops to save or copy the state, validation, and pauses because of a failure or a resize do not count. On a
# terminal the pace is an average over the last seconds (`Pace`), so that it does not jump. For a finished run it covers
# all of the ledger's time in `training` (see `timeline.steps_per_second`).


@dataclass(frozen=True)
class Moment:
    """The progress of a group of workers at one moment.

    Attributes:
        step: completed global steps.
        now: seconds of a monotonic clock that stops while the group traces a graph.
        is_training: whether the group makes steps from now on.
        stall: total seconds for which the group has paused to save or copy the state.
    """

    step: int
    now: float
    is_training: bool
    stall: float = 0.0


class Pace:
    """Steps per second of a group of workers, averaged with exponentially decreasing weights.

    Args:
        seconds: time after which a step's weight is 1/e.

    Attributes:
        steps_per_second: the pace while the group trains; 0 if unknown.
    """

    def __init__(self, seconds: float = _SECONDS):
        self._fade = seconds
        self._before: Moment | None = None
        self._steps = self._seconds = 0.0
        #: Unweighted totals since the first call: all seconds, the seconds of training, and the steps.
        self._all_seconds = self._training_seconds = 0.0
        self._all_steps = 0
        self.steps_per_second = 0.0

    def see(self, moment: Moment) -> None:
        """Update the pace with the group's current progress."""
        before, self._before = self._before, moment
        if before is None or not (before.is_training or self._all_seconds):
            return
        passed = max(0.0, moment.now - before.now)
        self._all_seconds += passed
        if not before.is_training:
            return
        seconds = max(0.0, passed - max(0.0, moment.stall - before.stall))
        steps, kept = max(0, moment.step - before.step), math.exp(-seconds / self._fade)
        self._all_steps += steps
        self._steps = self._steps * kept + steps
        self._seconds = self._seconds * kept + seconds
        self._training_seconds += seconds
        self.steps_per_second = self._steps / self._seconds if self._seconds else 0.0

    def seconds_left(self, steps: int) -> float | None:
        """Return the seconds that `steps` more steps will take, or None if the pace is unknown. Other work, such as
        validation and saves, is assumed to take the same share of the time as since the first step."""
        is_known = self._training_seconds >= _KNOWN_SECONDS and self._all_steps >= _KNOWN_STEPS
        if not is_known or not self.steps_per_second:
            return None
        return steps / self.steps_per_second * self._all_seconds / self._training_seconds
