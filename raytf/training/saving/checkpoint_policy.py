"""Decides when to save a state, and whether it is the best one so far according to `--keep-best`. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytf.checkpoint.cadence import Cadence
from raytf.checkpoint.training_state import TrainingState
from raytf.config.objective import MetricObjective, flat
from raytf.config.sections import CheckpointSection
from raytf.errors import ConfigError

#: A metric's name and its value at a state; None if there is no value.
Scored = tuple[str, float] | None


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
        """Compare a state with those that are on storage or being saved.

        Args:
            rivals: the other states' metrics and values; those of another metric are ignored.

        Returns:
            The metric and its value at `state` if that is better than all rivals. None if it is not better, or if the
            state has no value.
        """
        goal = self.goal
        value = None if goal is None else goal.value_at(state.step, state.history)
        if goal is None or value is None:
            return None
        values = [rival[1] for rival in rivals if rival is not None and rival[0] == goal.metric]
        return (goal.metric, value) if all(goal.is_better(value, other) for other in values) else None
