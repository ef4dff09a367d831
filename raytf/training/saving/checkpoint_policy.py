"""Decides when to save a state, and whether it is the best one so far according to `--keep-best`.

Everything here is a pure function or a small state machine of numbers; clocks are passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint.training_state import TrainingState
from raytf.config.flags import CheckpointSection
from raytf.config.objective import MetricObjective, flat
from raytf.errors import ConfigError

#: Seconds between two saves if the user sets no cadence.
DEFAULT_EVERY_SECONDS = 30.0
#: A run with nothing in storage saves after this many seconds. So does a group that continues from an earlier group's
#: state, and it saves again whenever its age has doubled.
YOUNG_SECONDS = 2.0
#: Seconds until the first retry after a failed save, and the most seconds between two tries.
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 300.0

#: A metric's name and its value at a state; None if there is no value.
Scored = tuple[str, float] | None


@dataclass(frozen=True)
class Cadence:
    """The cadence of saves: after this many steps, this many seconds, or whichever comes first if both are set.

    The cadence belongs to the run, not to a group of workers: it counts from the newest state that is in storage or
    being saved. A run with nothing in storage saves at once. If the user set a number of steps, it saves after that
    many, but at the latest YOUNG_SECONDS after its first steps. After a restart another fault is likely soon, so a
    group that continues from an earlier group's state also saves while it is young. Otherwise, with faults more
    frequent than the cadence and no copies in memory, a run would repeat the same steps forever.
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
            saved_step: step of the newest state that is in storage or being saved; None if there is none.
            saved_at: time when the run was in that state, but not before this group began. Without such a state, the
                time when the first steps of the group ended.
            restarted_at: time when this group began, if it continues from an earlier group's state.
            takes: seconds that a save takes, which must end within the cadence.
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
        """Return the most seconds between two tries of a failed save, so that recovered storage is used soon."""
        return min(MOST_RETRY_SECONDS, max(DEFAULT_EVERY_SECONDS, self.every_seconds or 0.0))


def retry_pause(failures: int, chance: float, most: float = MOST_RETRY_SECONDS) -> float:
    """Return the seconds until the next try after some failures in a row.

    The pause doubles with each failure, and half of it is random ("equal jitter", M. Brooker, Exponential Backoff and
    Jitter, AWS Architecture Blog, 2015).

    Args:
        failures: number of failures, 1 or more.
        chance: a random number in [0, 1).
        most: the longest pause, in seconds.
    """
    return min(most, RETRY_SECONDS * 2.0 ** min(failures - 1, 32)) * (1 + chance) / 2


class Outage:
    """Saves that failed in a row, and when to try again.

    Args:
        random: returns numbers in [0, 1).
        most: the most seconds between two tries.

    Attributes:
        failures: number of failures in a row.
        since: time of the first failure, in seconds.
        retry_at: time of the next try.
        why: reason of the last failure.
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
        self.failures, self.retry_at = 0, float("-inf")

    def allows(self, now: float, due: bool) -> bool:
        """Return whether to save at time `now`: after a failure from `retry_at` on, otherwise if a save is due."""
        return now >= self.retry_at if self.failures else due


class SaveSchedule:
    """Decides when to begin the next save, given the run's saves so far.

    Args:
        cadence: how often to save.
        step: the step at which this group of workers begins.
        saved_step: step of the newest state in storage; None if there is none.
        now: seconds of a clock that only moves forward, as in all methods.
        random: returns numbers in [0, 1).

    Attributes:
        outage: the saves that failed in a row.
    """

    def __init__(self, cadence: Cadence, step: int, saved_step: int | None, now: float, random: Callable[[], float]):
        self.outage = Outage(random, cadence.most_pause)
        self._cadence = cadence
        #: Step of the newest state in storage or being saved, and when the run was in it, but not before this group.
        self._saved_step, self._saved_at = saved_step, now
        self._restarted_at = now if step else None
        self._has_stepped = False

    def stepped(self, now: float) -> None:
        """Note that a call of steps has ended."""
        if not self._has_stepped and self._saved_step is None:
            self._saved_at = now  # do not count the first steps, which include tracing
        self._has_stepped = True

    def begin(self, step: int, made_at: float) -> None:
        """Note that a save of the state after `step`, which was copied at `made_at`, begins."""
        self._saved_step, self._saved_at = step, made_at

    def is_due(self, stop: int, now: float, takes: float, is_waiting: bool = False) -> bool:
        """Return whether to begin a save after step `stop`.

        Args:
            takes: seconds that a save takes.
            is_waiting: whether a copy of the state waits to be saved.
        """
        saved_at = now if self._saved_step is None and not self._has_stepped else self._saved_at
        due = self._cadence.is_due(stop, now, self._saved_step, saved_at, self._restarted_at, takes)
        return self.outage.allows(now, is_waiting or due)


@dataclass(frozen=True)
class CheckpointPolicy:
    """When to save, and which state is worth keeping in addition to the newest.

    Attributes:
        cadence: how often to save to storage.
        goal: the objective of `--keep-best`; None without that flag.
    """

    cadence: Cadence
    goal: MetricObjective | None = None

    @classmethod
    def of(cls, config: CheckpointSection) -> CheckpointPolicy:
        when = Cadence.of(config.checkpoint_every_steps, config.checkpoint_every_seconds)
        return cls(when, None if config.keep_best is None else MetricObjective.of(config.keep_best))

    def check_goal(self, logs: Mapping[str, Any]) -> None:
        """Check that the metric of `--keep-best` is among the metrics of an epoch.

        Raises:
            ConfigError: it is not.
        """
        goal = self.goal
        logs = flat(logs)
        if goal is None or goal.metric in logs:
            return
        if any(name.startswith("val_") for name in logs) or not goal.metric.startswith("val_"):
            raise ConfigError(f"--keep-best {goal.metric}: there is no such metric. Expected one of {', '.join(logs)}.")

    def better(self, state: TrainingState, rivals: Iterable[Scored]) -> Scored:
        """Return the metric and its value at a state if this value beats those of all rivals, otherwise None.

        Args:
            rivals: metrics and values of the states that are in storage or being saved; values of another metric are
                ignored.
        """
        goal = self.goal
        value = None if goal is None else goal.value_at(state.step, state.history)
        if goal is None or value is None:
            return None
        values = [rival[1] for rival in rivals if rival is not None and rival[0] == goal.metric]
        return (goal.metric, value) if all(goal.is_better(value, other) for other in values) else None
