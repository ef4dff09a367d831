"""What a checkpoint takes from a worker: whoever trains gives it, and whoever saves asks for it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState

if TYPE_CHECKING:  # it loads TensorFlow
    from raytf.checkpoint.variables import TensorSource


@dataclass(frozen=True)
class Extras:
    """What rank 0 alone knows, which no function of the step gives.

    Attributes:
        callbacks: state of the user's callbacks, JSON values.
        arrays: of callbacks, by the names that they have in a checkpoint.
        files: of callbacks, packed, where they are small.
    """

    callbacks: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] | None = None

    def pack(self) -> bytes:
        """As they lie in the memory of nodes."""
        return pickle.dumps((self.callbacks, self.arrays, self.files))

    @classmethod
    def unpack(cls, data: bytes) -> Extras:
        """What `pack` gave, of this raytf or of an earlier one."""
        return cls(*pickle.loads(data))


class StateSource(Protocol):
    """The state of a run, as one of its ranks has it now: variables, progress, rank 0's extras and rows of the log.

    Attributes:
        progress: where the run is; `durable_step` and `best` are kept up to date by who saves.
        identity: of the run; a checkpoint of another one is refused.
    """

    progress: TrainingState
    identity: dict[str, str]

    def sizes(self) -> dict[str, int]:
        """Values of each variable, by name."""
        ...

    def variables(self, names: Sequence[str]) -> TensorSource:
        """Where the values of some variables are."""
        ...

    def must_be_finite(self) -> Collection[str]:
        """Names of variables without which a state is not worth keeping when they hold NaN or infinity."""
        ...

    @property
    def has_callbacks(self) -> bool:
        """Whether there are callbacks, whose state is saved too."""
        ...

    @property
    def has_batch_hooks(self) -> bool:
        """Whether callbacks hear of each batch, so that their state may change with it."""
        ...

    def extras(self, with_files: bool) -> Extras:
        """What rank 0 alone knows; empty on the others.

        Args:
            with_files: of callbacks, too, which storage gets by another way.
        """
        ...

    def rows_since(self, step: int) -> StepRows:
        """Rows of the log of steps after a step."""
        ...

    def weighed(self, step: int, value: int) -> None:
        """The hash of the weights after a step is known."""
        ...

    def records(self) -> Callable[[], None]:
        """Take what must be on storage before a checkpoint is: the attempt, the log, and files.

        Returns:
            What writes it, in any thread.
        """
        ...

    def saved(self, step: int) -> None:
        """A checkpoint of a step is complete."""
        ...

    def renew_log(self) -> None:
        """Go on with the log under another name: the rows taken last may still be written, late."""
        ...
