"""The part of a checkpoint beside its tensors: the progress of the run, and what rank 0 alone knows."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.distributed.step_digest import GENESIS


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
        """Return the state of a checkpoint in memory or on storage; of a new run for None. The driver may know the step
        of the newest checkpoint on storage."""
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
        return pickle.dumps((self.callbacks, self.arrays, self.files))

    @classmethod
    def unpack(cls, data: bytes) -> Extras:
        """Return the extras that `pack` has written, in this version or an earlier one."""
        return cls(*pickle.loads(data))
