"""When a state is saved, and whether it is the best one so far, as `--keep-best` says. Decided from values alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raytf.checkpoint.cadence import Cadence
from raytf.checkpoint.training_state import TrainingState
from raytf.config.objective import MetricObjective
from raytf.config.sections import CheckpointSection
from raytf.errors import ConfigError

#: A metric and its value at a state; None for no value.
Scored = tuple[str, float] | None


@dataclass(frozen=True)
class CheckpointPolicy:
    """When to save, and which state is worth keeping beside the newest.

    Attributes:
        cadence: of saves on storage.
        goal: that of `--keep-best`; None where there is none.
    """

    cadence: Cadence
    goal: MetricObjective | None = None

    @classmethod
    def of(cls, config: CheckpointSection) -> CheckpointPolicy:
        when = Cadence.of(config.checkpoint_every_steps, config.checkpoint_every_seconds)
        return cls(when, None if config.keep_best is None else MetricObjective.of(config.keep_best))

    def check_goal(self, logs: Mapping[str, float]) -> None:
        """Whether the metric of `--keep-best` is among those of an epoch.

        Raises:
            ConfigError: it is not.
        """
        goal = self.goal
        if goal is None or goal.metric in logs:
            return
        if any(name.startswith("val_") for name in logs) or not goal.metric.startswith("val_"):
            raise ConfigError(f"--keep-best {goal.metric}: there is no such metric. Expected one of {', '.join(logs)}.")

    def better(self, state: TrainingState, rivals: Iterable[Scored]) -> Scored:
        """The metric and its value at a state that is better than all that are on storage, or on their way there.

        Args:
            rivals: the others; those of another metric do not count.

        Returns:
            None where it is not better, or has no value.
        """
        goal = self.goal
        value = None if goal is None else goal.value_at(state.step, state.history)
        if goal is None or value is None:
            return None
        values = [rival[1] for rival in rivals if rival is not None and rival[0] == goal.metric]
        return (goal.metric, value) if all(goal.is_better(value, other) for other in values) else None
