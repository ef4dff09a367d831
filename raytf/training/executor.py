"""The interface between the training loop and what computes the steps: synchronous workers or parameter servers."""

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
        digests: what a step's digests stand for; None where there are none.
    """

    digests: DigestLayout | None

    def reduction_state(self) -> dict[str, keras.Variable]:
        """Return what the sums of gradients keep from step to step, by name; it is saved with the model."""
        ...

    @property
    def probe_function(self) -> Any:
        """Return the traced micro-batch, whose graph TensorBoard shows."""
        ...

    def trace(self, is_late: bool = False) -> None:
        """Let TensorFlow trace the step now, while the newest checkpoint is still being read.

        Args:
            is_late: others will wait for this worker's first step.
        """
        ...

    def named_gradients(self, outcome: StepOutcome) -> Mapping[str, Any]:
        """Return the gradients of a call's last step, by the path of their weight."""
        ...


class Executor(ABC):
    """Trains the steps between two points at which the model must hold the complete state of the run.

    Methods are called in this order: `join`, `make_step`, `admit`, `imbalance_seconds` and `begin`; then for each epoch
    `begin_epoch`, `train_until` and `rest`; at the end `settle`, `result` and `ended`. All ranks make the same calls.
    Where ranks meet again, `meet` and `take_shards` come after `admit`, and also later, in each case followed by the
    methods from `imbalance_seconds` on. What is implemented here is right for ranks that do not meet again.
    """

    # -- the ranks -----------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def workers(self) -> int:
        """Number of processes that compute gradients; known after `join`."""

    @property
    def meets_again(self) -> bool:
        """Return whether the surviving ranks continue when one is lost, and others may join them."""
        return False

    @property
    def is_late(self) -> bool:
        """Return whether other ranks were training already when this one joined; known after `join`."""
        return False

    @property
    def first_rank(self) -> int | None:
        """Return this worker's rank before the ranks have met; None if another worker speaks for the group."""
        return 0

    @abstractmethod
    def join(self) -> Group:
        """Join the ranks as this process; must come before any TensorFlow operation. Where ranks meet again, this one
        is alone until it has called `meet`."""

    def meet(self, step: int) -> Generation:
        """Meet the surviving ranks and the ranks that wait to join; where ranks meet again.

        Args:
            step: the last step that this rank has finished; -1 if it has no state.

        Raises:
            WorkerLostError: the ranks continue without this one, or nobody reports who they are.
        """
        raise NotImplementedError

    def take_shards(self, pipeline: Pipeline) -> None:
        """Compute the shards of another pipeline from now on; where ranks meet again."""
        raise NotImplementedError

    def ended(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the result of a run that has ended, which rank 0 knows; where ranks meet again, all ranks get it."""
        return result

    # -- before training -----------------------------------------------------------------------------------------------

    @abstractmethod
    def make_step(self, session: RankSession) -> CompiledStep:
        """Create the step that this executor runs, not traced yet; the session has its model and its shards."""

    def admit(self, session: RankSession) -> dict[str, str]:
        """Check, in exact mode, that all machines compute the same bits.

        Returns:
            What exact mode adds to the run's identity; empty without exact mode.

        Raises:
            ExactnessError: they do not.
        """
        return {}

    def imbalance_seconds(self, session: RankSession) -> float:
        """Return the average seconds that a worker waits in each step because shards do not divide evenly."""
        return 0.0

    @abstractmethod
    def begin(self, session: RankSession) -> None:
        """Take the session when the model holds the initial or restored state, before the first step."""

    # -- the steps -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_epoch(self, epoch: int) -> None:
        """Run the callbacks' `on_epoch_begin`, and apply what it changes to the epoch's steps."""

    @abstractmethod
    def train_until(self, stop: int) -> None:
        """Train to step `stop`, which lies within the current epoch or at its end, or until a callback stops the run.

        On return the model holds the state of the last step, and its outcome has been recorded; `rest` has not been
        called for it.
        """

    @abstractmethod
    def rest(self) -> None:
        """Do what is due between two steps: save, and wait if the number of workers is about to change."""

    def settle(self) -> None:  # noqa: B027
        """Finish after the last step; on return the model holds the final state of the run."""

    def result(self) -> dict[str, Any]:
        """Return what this executor adds to the run's result."""
        return {}
