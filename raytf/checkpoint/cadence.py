"""Decisions when to save: the interval between checkpoints, retries after a failure, and the interval between copies.

Pure functions and small state machines of numbers; clocks are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

#: The cadence where the user gives none.
DEFAULT_EVERY_SECONDS = 30.0


#: A run of which nothing is on storage saves after this many seconds, and so does a group that went on from an earlier
#: one's state, and then each time it is twice as old.
YOUNG_SECONDS = 2.0


@dataclass(frozen=True)
class Cadence:
    """The cadence of saves: after this many steps, this many seconds, or whichever comes first if both are set.

    It is the run's, not that of a group of workers: it counts from the newest state that is on storage, or on its way
    there. A run of which nothing is on storage saves at once; where a number of steps was asked for, after so many, but
    YOUNG_SECONDS after its first steps at the latest. After a restart another fault is likely soon, so that a group
    which went on from an earlier one's state also saves while it is young: were faults more frequent than the cadence,
    a run without memory would make the same steps for ever.
    """

    every_steps: int | None
    every_seconds: float | None

    @classmethod
    def of(cls, every_steps: int | None, every_seconds: float | None) -> Cadence:
        if every_steps is None and every_seconds is None:
            every_seconds = DEFAULT_EVERY_SECONDS
        return cls(every_steps, every_seconds)

    def is_due(
        self,
        step: int,
        now: float,
        saved_step: int | None,
        saved_at: float,
        restarted_at: float | None = None,
        takes: float = 0.0,
    ) -> bool:
        """Return whether to save after `step`, at time `now`, in seconds.

        Args:
            saved_step: of the newest state on storage, or on its way there; None for none.
            saved_at: when the run was in that state; not before this group began. For none when its first steps ended.
            restarted_at: when this group began, where it went on from an earlier one's state.
            takes: seconds of a save, which is to end within the cadence.
        """
        if saved_step is None:
            return step >= (self.every_steps or 1) or (step > 0 and now - saved_at >= YOUNG_SECONDS)
        if step <= saved_step:
            return False
        age = now - saved_at
        by_steps = self.every_steps is not None and step // self.every_steps > saved_step // self.every_steps
        by_time = self.every_seconds is not None and age >= self.every_seconds - min(takes, self.every_seconds / 2)
        is_young = restarted_at is not None and age >= max(YOUNG_SECONDS, saved_at - restarted_at)
        return by_steps or by_time or is_young

    @property
    def most_pause(self) -> float:
        """The most seconds between two tries of a save that fails: storage that is back is used within a cadence."""
        return min(MOST_RETRY_SECONDS, max(DEFAULT_EVERY_SECONDS, self.every_seconds or 0.0))


#: Seconds to the first new try after a save that failed, and the most between two tries.
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 300.0


#: A save may take so long, or this many times as long as the last good one.
DEADLINE_SECONDS, DEADLINE_FACTOR = 120.0, 10.0


def deadline(good_seconds: float) -> float:
    """Return the seconds after which a save is given up, when the last good one took `good_seconds`; 0 for none yet."""
    return max(DEADLINE_SECONDS, DEADLINE_FACTOR * good_seconds)


def retry_pause(failures: int, chance: float, most: float = MOST_RETRY_SECONDS) -> float:
    """Return the seconds to the next try after some failures in a row.

    They double with each failure, and half of them are chosen at random ("equal jitter", M. Brooker, Exponential
    Backoff and Jitter, AWS Architecture Blog, 2015).

    Args:
        failures: 1 or more.
        chance: in [0, 1).
        most: seconds.
    """
    return min(most, RETRY_SECONDS * 2.0 ** min(failures - 1, 32)) * (1 + chance) / 2


class Outage:
    """Saves that failed in a row, and when to try again.

    Args:
        random: numbers in [0, 1).
        most: seconds between two tries.

    Attributes:
        failures: in a row.
        since: time of the first, in seconds.
        retry_at: time of the next try.
        why: the last failed.
    """

    def __init__(self, random: Callable[[], float], most: float = MOST_RETRY_SECONDS):
        self._random, self._most = random, most
        self.failures, self.since, self.retry_at, self.why = 0, 0.0, float("-inf"), ""

    def fail(self, now: float, why: str) -> None:
        if not self.failures:
            self.since = now
        self.failures += 1
        self.retry_at, self.why = now + retry_pause(self.failures, self._random(), self._most), why

    def end(self) -> None:
        """Note that a save is complete."""
        self.failures, self.retry_at = 0, float("-inf")

    def allows(self, now: float, due: bool) -> bool:
        """Return whether to save at time `now`: from `retry_at` on after a failed try, otherwise if it is due."""
        return now >= self.retry_at if self.failures else due


#: Share of the run time that snapshots in memory may cost, where their cadence is chosen by itself.
SNAPSHOT_SHARE = 0.008


#: The cadence as long as that cost is not known.
SNAPSHOT_STEPS = 10


def snapshot_every(asked: int | None, copy_seconds: float, step_seconds: float) -> int:
    """Return the number of steps between two snapshots in memory; 0 for none.

    Args:
        asked: by the user; None chooses it so that copying takes at most SNAPSHOT_SHARE of the time.
        copy_seconds: that one snapshot holds training up; 0 where it is not known yet.
        step_seconds: of one step; likewise.
    """
    if asked is not None:
        return asked
    if not (copy_seconds and step_seconds):
        return SNAPSHOT_STEPS
    return max(1, math.ceil(copy_seconds / (SNAPSHOT_SHARE * step_seconds)))
