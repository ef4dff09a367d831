"""The interface between the training loop and what computes the steps: synchronous workers or parameter servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import keras

from raytf.data.pipeline import Pipeline
from raytf.distributed.group import Group
from raytf.training.step_journal import StepOutcome

if TYPE_CHECKING:
    from raytf.training.attempt import Attempt
    from raytf.training.context import Context


class CompiledStep(Protocol):
    """The training step of an executor."""

    def reduction_state(self) -> dict[str, keras.Variable]:
        """What the sums of gradients keep from step to step, by name; saved with the model."""
        ...

    @property
    def probe_function(self) -> Any:
        """The traced micro-batch, whose graph TensorBoard shows."""
        ...

    def trace(self) -> None:
        """Let TensorFlow trace the step now, while the newest checkpoint is still being read."""
        ...

    def named_gradients(self, outcome: StepOutcome) -> Mapping[str, Any]:
        """The gradients of a call's last step, by the path of their weight."""
        ...


class Executor(Protocol):
    """Trains the steps between two points at which the model must hold the complete state of the run.

    Methods are called in this order: `join`, `make_step`, `admit`, `imbalance_seconds` and `begin`; then for each epoch
    `begin_epoch`, `train_until` and `rest`; at the end `settle` and `result`. All ranks make the same calls.
    """

    @property
    def workers(self) -> int:
        """Number of processes that compute gradients; known after `join`."""
        ...

    def join(self) -> Group:
        """Join the ranks as this process; must come before any TensorFlow operation."""
        ...

    def make_step(self, attempt: Attempt, model: keras.Model, pipeline: Pipeline) -> CompiledStep:
        """Create the step that this executor runs, not traced yet."""
        ...

    def admit(self, attempt: Attempt, pipeline: Pipeline) -> dict[str, str]:
        """In exact mode, check that all machines compute the same bits.

        Returns:
            What exact mode adds to the run's identity; empty without exact mode.

        Raises:
            ExactnessError: they do not.
        """
        ...

    def imbalance_seconds(self, attempt: Attempt, pipeline: Pipeline) -> float:
        """Average seconds that a worker waits in each step because shards do not divide evenly among workers."""
        ...

    def begin(self, context: Context) -> None:
        """Called when the model holds the initial or restored state, before the first step."""
        ...

    def begin_epoch(self, epoch: int) -> None:
        """Run the callbacks' `on_epoch_begin`, and apply what it changes to the epoch's steps."""
        ...

    def train_until(self, stop: int) -> None:
        """Train to step `stop`, which lies within the current epoch or at its end, or until a callback stops the run.

        On return the model holds the state of the last step, and its outcome has been recorded; `rest` has not been
        called for it.
        """
        ...

    def rest(self) -> None:
        """Do what is due between two steps: save, and wait if the number of workers is about to change."""
        ...

    def settle(self) -> None:
        """Called after the last step; on return the model holds the final state of the run."""
        ...

    def result(self) -> dict[str, Any]:
        """What this executor adds to the run's result."""
        ...
