"""The contents of a checkpoint besides its tensors: the run's progress, and values that only rank 0 has."""

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
        step: number of global steps done.
        train_seconds: time spent in calls of the training step.
        imbalance_seconds: average time that a worker waited because shards did not divide evenly.
        history: logs of each epoch, with its `epoch` and the `step` after it.
        stopped_early: whether a callback stopped the run.
        durable_step: step of the newest checkpoint in storage; None if there is none.
        chain: digest chain over all steps, see `raytf.distributed.step_digest.chained`.
        best: the metric of `--keep-best` and its best value at a checkpoint in storage; None before the first.
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
        """Return the state of a checkpoint, or of a new run for None.

        `known_step` is the step of the newest checkpoint in storage, if the driver knows it.
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
    """Values that only rank 0 has, and that do not follow from the step.

    Attributes:
        callbacks: state of the user's callbacks, JSON values.
        arrays: arrays of callbacks, by their names in a checkpoint.
        files: files of callbacks, packed, if they are small.
    """

    callbacks: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    files: dict[str, bytes] | None = None

    def pack(self) -> bytes:
        return pickle.dumps((self.callbacks, self.arrays, self.files))

    @classmethod
    def unpack(cls, data: bytes) -> Extras:
        """Return the extras from the result of `pack`, of this version or an earlier one."""
        return cls(*pickle.loads(data))
