"""What the training loop needs of a way to compute: synchronous workers, or parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import keras

from raytf.data.pipeline import Pipeline
from raytf.distributed.group import Group
from raytf.distributed.reduction import Reduction
from raytf.training.step import StepOutcome

if TYPE_CHECKING:
    from raytf.training.attempt import Attempt
    from raytf.training.context import Context


class CompiledStep(Protocol):
    """A training step as its executor made it."""

    @property
    def reduction(self) -> Reduction:
        """How gradients are added; its state is saved with the model's."""
        ...

    @property
    def probe_function(self) -> Any:
        """The traced micro-batch, whose graph TensorBoard shows."""
        ...

    def trace(self) -> None:
        """Have TensorFlow trace the step now, while the newest checkpoint is still being read."""
        ...

    def named_gradients(self, outcome: StepOutcome) -> Mapping[str, Any]:
        """The gradients of a call's last step, by their weight's path."""
        ...


class Executor(Protocol):
    """Trains the steps between two points at which the run's state must be whole.

    Calls come in this order: `join`, `make_step`, `admit`, `imbalance_seconds` and `begin`; then for each epoch
    `begin_epoch`, `train_until` and `rest`; in the end `settle` and `result`. All ranks make the same ones.
    """

    @property
    def workers(self) -> int:
        """How many processes compute gradients; known after `join`."""
        ...

    def join(self) -> Group:
        """Take this process's place among the ranks, before any operation of TensorFlow."""
        ...

    def make_step(self, attempt: Attempt, model: keras.Model, pipeline: Pipeline) -> CompiledStep:
        """The step that this executor runs, not traced yet."""
        ...

    def admit(self, attempt: Attempt, pipeline: Pipeline) -> dict[str, str]:
        """Have machines prove in exact mode that they compute the same bits.

        Returns:
            What exact mode adds to the run's identity.

        Raises:
            ExactnessError: they do not.
        """
        ...

    def imbalance_seconds(self, attempt: Attempt, pipeline: Pipeline) -> float:
        """For how long a worker waits in each step, on average, because shards do not divide evenly."""
        ...

    def begin(self, context: Context) -> None:
        """The model has the state to begin with; steps come next."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Run the callbacks' hook, and let what they change hold for the epoch's steps."""
        ...

    def train_until(self, stop: int) -> None:
        """Train to step `stop`, which lies in the present epoch or at its end, or until a callback stops the run.

        On return the model holds the state of the last step, which has been accounted for; `rest` has not been called
        for it.
        """
        ...

    def rest(self) -> None:
        """Do what is due between two steps: save, and wait where the number of workers is about to change."""
        ...

    def settle(self) -> None:
        """No steps come any more: the model holds the run's last state."""
        ...

    def result(self) -> dict[str, Any]:
        """What this executor adds to the run's result."""
        ...
