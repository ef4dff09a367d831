"""Everything that one rank needs while it trains; created by `raytf.training.startup`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from raytf.checkpoint.memory import MemoryTier
from raytf.checkpoint.training_state import TrainingState
from raytf.config.train_config import TrainConfig
from raytf.data.plan import StepPlan
from raytf.training import model as models
from raytf.training.attempt import Attempt
from raytf.training.callbacks import Callbacks
from raytf.training.checkpointer import Checkpointer
from raytf.training.evaluation import Evaluators
from raytf.training.heartbeat import Heartbeat
from raytf.training.job import TrainingJob
from raytf.training.live_state import LiveState
from raytf.training.program import Program
from raytf.training.reporter import Reporter, Saves

if TYPE_CHECKING:
    from raytf.training.epoch_end import EpochEnd


class BatchEnd(NamedTuple):
    """The end of a call's last batch.

    Attributes:
        start: step at which the call began.
        batch: number of the batch within its epoch.
    """

    start: int
    batch: int


@dataclass
class Context:
    """One rank of a run that is training.

    Attributes:
        attempt: this rank's place in the attempt.
        program: the model, its data and its step.
        state: the progress of the run; the same on every rank.
        callbacks: the user's callbacks.
        memory: the tier of copies in memory.
        live: the state that checkpoints are made from.
        saving: makes the checkpoints.
        evaluators: evaluators of the validation and test data.
        imbalance_seconds: average time that a worker waits in each step because shards do not divide evenly.
        origin: the step at which this attempt began, and the tier of its state: `new`, `memory`, `durable` or `held`.
        ended: step after which the end of an epoch was last completed, or at which this attempt found the run.
        ending: the end of an epoch that was begun last.
        batch_end: what callbacks have not been told yet, as far as this rank knows.
        saves_again: whether a save was under way when the ranks met again.
        seconds_per_step: of the newest call; 0 before the first call.
    """

    attempt: Attempt
    program: Program
    state: TrainingState
    callbacks: Callbacks
    memory: MemoryTier
    live: LiveState
    saving: Checkpointer
    evaluators: Evaluators
    imbalance_seconds: float
    origin: tuple[int, str]
    ended: int
    ending: EpochEnd | None = None
    batch_end: BatchEnd | None = None
    saves_again: bool = False
    seconds_per_step: float = 0.0

    @property
    def job(self) -> TrainingJob:
        return self.attempt.job

    @property
    def config(self) -> TrainConfig:
        return self.attempt.job.config

    @property
    def plan(self) -> StepPlan:
        return self.attempt.job.plan

    @property
    def pulse(self) -> Heartbeat:
        return self.attempt.pulse

    @property
    def reporter(self) -> Reporter:
        return self.attempt.reporter

    @property
    def is_first_rank(self) -> bool:
        """Whether this is rank 0, the only one that writes logs and talks to the driver."""
        return self.attempt.group.rank == 0

    @property
    def has_trained(self) -> bool:
        """Whether this attempt has trained a step."""
        return self.seconds_per_step > 0

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether the run is between two epochs, or at the beginning of the first."""
        return self.plan.is_epoch_end(self.state.step)

    def logs(self) -> dict[str, Any]:
        """Loss and metrics of the current epoch so far."""
        return models.logs(self.program.model)

    def sum(self, values: Sequence[float]) -> np.ndarray:
        """Sum values over all ranks, as float32; every rank must call it."""
        return self.attempt.group.sum(np.asarray(values, np.float32))

    def show(self, phase: str, metrics: dict[str, float] | None = None) -> None:
        """Report the run's status to the driver, from rank 0.

        Args:
            phase: what goes on.
            metrics: of the epoch; by default the model's own, while it trains.
        """
        if metrics is None and phase == "training" and self.is_first_rank and self.has_trained:
            metrics = models.numbers(self.program.model)
        saves = Saves(
            checkpoint=self.state.durable_step,
            snapshot=self.memory.step,
            snapshot_bytes=self.memory.bytes,
            stall_seconds=self.saving.stall_seconds,
            trouble=self.saving.trouble(),
        )
        traced = self.pulse.trace_seconds
        self.reporter.show(phase, self.state.step, saves, metrics, self.state.history, traced)
