"""Measures how long each part of a start takes: of a worker, and of a restart from the failure to the first step."""

from __future__ import annotations

import time
from collections.abc import Callable


class Phases:
    """A stopwatch with names.

    Args:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._at = clock, clock()
        self._seconds: dict[str, float] = {}

    def mark(self, name: str) -> None:
        """Count the time since the last mark as that of a name."""
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._at
        self._at = now

    @property
    def seconds(self) -> dict[str, float]:
        """Return the seconds of each name, in the order of their first marks."""
        return dict(self._seconds)


class RestartPhases:
    """The parts of one start of a group, as the driver's clock sees them.

    Before a group there may be a fault, which was noticed some time after the last sign of life.
    """

    def __init__(self) -> None:
        self._fault: tuple[float, float] | None = None
        self._group: float | None = None
        self._joined: float | None = None

    def fault(self, now: float, silent: float) -> None:
        """Take a fault that was noticed `silent` seconds after the last sign of life; of several in a row the first
        counts."""
        if self._fault is None:
            self._fault = (now, silent)

    def group(self, now: float) -> None:
        """Take note that a group of workers is asked for."""
        self._group, self._joined = now, None

    def joined(self, now: float) -> None:
        """Take note that rank 0 has reported for the first time."""
        self._joined = now

    def trains(self, now: float, own: dict[str, float]) -> dict[str, float]:
        """Take note that the first step is done; returns seconds of each part, in order.

        Args:
            own: rank 0's parts; those before its first word are named `tensorflow` and `rendezvous`.
        """
        parts: dict[str, float] = {}
        if self._fault is not None:
            at, silent = self._fault
            parts["notice"] = silent
            if self._group is not None:
                parts["placement"] = max(0.0, self._group - at)  # the word of the fault may have been late
        if self._group is not None and self._joined is not None:
            early = sum(own.get(name, 0.0) for name in ("tensorflow", "rendezvous"))
            parts["processes"] = max(0.0, self._joined - self._group - early)
        self._fault = self._group = None
        return {**parts, **own}


def counted(count: int, in_place: int) -> str:
    """Say how often workers began again, and how often of these without losing what they had."""
    return f"{count} restart{'' if count == 1 else 's'}{f' ({in_place} in place)' if in_place else ''}"


def describe(parts: dict[str, float]) -> str:
    """Return the parts of a start as one line: `9.8 s: notice 0.6, processes 4.1`."""
    return f"{sum(parts.values()):.1f} s: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
