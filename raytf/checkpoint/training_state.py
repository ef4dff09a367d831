"""The part of a checkpoint beside its tensors: the progress of the run, and the interface through which it is read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.checkpoint.step_rows import StepRows
from raytf.distributed.step_digest import GENESIS

if TYPE_CHECKING:
    from raytf.checkpoint.variables import TensorSource


@dataclass
class TrainingState:
    """The progress of a run, which is the same on every rank.

    Attributes:
        step: global steps done.
        train_seconds: in calls of the training step.
        imbalance_seconds: that a worker waited, on average, because shards did not divide evenly.
        history: logs of each epoch, with its `epoch` and the `step` after it.
        stopped_early: a callback has stopped the run.
        durable_step: of the newest checkpoint on storage; None where there is none.
        chain: of all steps, see `raytf.distributed.step_digest.chained`.
        best: the metric of `--keep-best` and the best of its values at a checkpoint on storage; None for none yet.
    """

    step: int = 0
    train_seconds: float = 0.0
    imbalance_seconds: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)
    stopped_early: bool = False
    durable_step: int | None = None
    best: tuple[str, float] | None = None
    chain: bytes = GENESIS

    @classmethod
    def of(cls, chosen: Checkpoint | None, known_step: int | None = None) -> TrainingState:
        """Return the state of a checkpoint in memory or on storage; of a new run for None.

        Args:
            known_step: of the newest checkpoint on storage, where the driver knows it.
        """
        if chosen is None:
            return cls()
        document = chosen.document
        durable = document.durable_step if chosen.is_in_memory else chosen.step
        if known_step and known_step <= chosen.step:  # a save may have ended after the copy in memory was made
            durable = max(durable or 0, known_step)
        return cls(
            chosen.step,
            document.train_seconds,
            document.imbalance_seconds,
            document.history,
            document.stopped_early,
            durable,
            document.best,
            bytes.fromhex(document.chain),
        )

    def document(self, identity: dict[str, str], world_size: int) -> CheckpointDocument:
        """Return the document of a checkpoint made now. The caller adds callbacks and the fields for memory."""
        return CheckpointDocument(
            identity=identity,
            history=list(self.history),
            train_seconds=self.train_seconds,
            imbalance_seconds=self.imbalance_seconds,
            stopped_early=self.stopped_early,
            best=self.best,
            chain=self.chain.hex(),
            world_size=world_size,
        )


@dataclass(frozen=True)
class Extras:
    """Values that rank 0 alone knows and that do not follow from the step.

    Attributes:
        callbacks: state of the user's callbacks, JSON values.
        arrays: of callbacks, by the names that they have in a checkpoint.
        files: of callbacks, packed, where they are small.
    """

    callbacks: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] | None = None

    def pack(self) -> bytes:
        """Return the extras as bytes for the memory of nodes."""
        return pickle.dumps((self.callbacks, self.arrays, self.files))

    @classmethod
    def unpack(cls, data: bytes) -> Extras:
        """Return the extras that `pack` has written, in this version or an earlier one."""
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
        """Return the number of values of each variable, by name."""
        ...

    def variables(self, names: Sequence[str]) -> TensorSource:
        """Return the source of the values of some variables."""
        ...

    def must_be_finite(self) -> Collection[str]:
        """Return the names of variables without which a state is not worth keeping when they hold NaN or infinity."""
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
        """Return the values that rank 0 alone knows; empty on the other ranks.

        Args:
            with_files: of callbacks, too, which storage gets by another way.
        """
        ...

    def rows_since(self, step: int) -> StepRows:
        """Return the rows of the log after a step."""
        ...

    def weighed(self, step: int, value: int) -> None:
        """Note the hash of the weights after a step."""
        ...

    def records(self) -> Callable[[], None]:
        """Take what must be on storage before a checkpoint is: the attempt, the log, and files.

        Returns:
            What writes it, in any thread.
        """
        ...

    def saved(self, step: int) -> None:
        """Note that a checkpoint of a step is complete."""
        ...

    def renew_log(self) -> None:
        """Continue the log under another name, because the rows taken last may still be written late."""
        ...
