"""The interface between the training loop and the executors: synchronous workers and parameter servers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import keras

from raytf.data.pipeline import Pipeline
from raytf.distributed.group import Group
from raytf.distributed.membership.generations import Generation
from raytf.distributed.step_digest import DigestLayout
from raytf.training.step.step import StepOutcome

if TYPE_CHECKING:
    from raytf.training.session import RankSession


class CompiledStep(Protocol):
    """The training step of an executor.

    Attributes:
        digests: the layout of a step's digests; None if there are none.
    """

    digests: DigestLayout | None

    def reduction_state(self) -> dict[str, keras.Variable]:
        """Return the variables that reductions keep from step to step, by name; they are saved with the model."""
        ...

    @property
    def probe_function(self) -> Any:
        """Return the traced micro-batch, whose graph TensorBoard shows."""
        ...

    def trace(self, is_late: bool = False) -> None:
        """Trace the step now, while the newest checkpoint is still being read.

        Args:
            is_late: whether other workers will wait for this worker's first step.
        """
        ...

    def named_gradients(self, outcome: StepOutcome) -> Mapping[str, Any]:
        """Return the gradients of a call's last step, by the path of their weight."""
        ...


class Executor(ABC):
    """Trains the steps between two points at which the model must have the complete state of the run.

    Methods are called in this order: `join`, `make_step`, `admit`, `imbalance_seconds` and `begin`; then for each epoch
    `begin_epoch`, `train_until` and `rest`; at the end `settle`, `result` and `ended`. All ranks make the same calls.
    If ranks can meet again, `meet` and `take_shards` follow `admit` and every later loss or join, and each time the
    methods from `imbalance_seconds` on follow them. The implementations here are for ranks that do not meet again.
    """

    # -- the ranks -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> int:
        """Return the number of processes that compute gradients; known after `join`."""

    @property
    def meets_again(self) -> bool:
        """Return whether ranks can meet again: the others continue when one is lost, and new ones can join them."""
        return False

    @property
    def is_late(self) -> bool:
        """Return whether other ranks were already training when this one joined; known after `join`."""
        return False

    @property
    def first_rank(self) -> int | None:
        """Return this worker's rank before the ranks have met; None if another worker reports for the group."""
        return 0

    @abstractmethod
    def join(self) -> Group:
        """Join the other ranks, before any TensorFlow operation. If ranks can meet again, this rank is alone until it
        calls `meet`."""

    def meet(self, step: int) -> Generation:
        """Meet the surviving ranks and the ranks that wait to join; only if ranks can meet again.

        Args:
            step: the last step that this rank completed; -1 if it has no state.

        Raises:
            WorkerLostError: the other ranks continue without this one, or it is unknown who they are.
        """
        raise NotImplementedError

    def take_shards(self, pipeline: Pipeline) -> None:
        """Compute the shards of another pipeline from now on; only if ranks can meet again."""
        raise NotImplementedError

    def ended(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the result of a run that has ended. If ranks can meet again, send rank 0's result to all ranks."""
        return result

    # -- before training -----------------------------------------------------------------------------------------------

    @abstractmethod
    def make_step(self, session: RankSession) -> CompiledStep:
        """Create this executor's step, without tracing it; the session already has its model and its shards."""

    def admit(self, session: RankSession) -> dict[str, str]:
        """Check, in exact mode, that all machines compute the same bits.

        Returns:
            The entries that exact mode adds to the run's identity; empty without exact mode.

        Raises:
            ExactnessError: the machines compute different bits.
        """
        return {}

    def imbalance_seconds(self, session: RankSession) -> float:
        """Return the average seconds that a worker waits in each step because shards do not divide evenly."""
        return 0.0

    @abstractmethod
    def begin(self, session: RankSession) -> None:
        """Prepare for the first step; the session's model already has the initial or restored state."""

    # -- the steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Run the callbacks' `on_epoch_begin`, and apply its changes to the epoch's steps."""

    @abstractmethod
    def train_until(self, stop: int) -> None:
        """Train to step `stop`, which lies in the current epoch or at its end, or until a callback stops the run.

        On return the model has the state of the last step, whose outcome has been recorded, and `rest` has not been
        called for that step.
        """

    @abstractmethod
    def rest(self) -> None:
        """Do the work that is due between two steps: save, or wait if the number of workers is about to change."""

    def settle(self) -> None:  # noqa: B027
        """Finish after the last step. On return the model has the final state of the run."""

    def result(self) -> dict[str, Any]:
        """Return the entries that this executor adds to the run's result."""
        return {}
