"""Where a run is: what its checkpoints keep beside tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raytf.checkpoint.document import CheckpointDocument
from raytf.checkpoint.manifest import Checkpoint
from raytf.distributed.step_digest import GENESIS


@dataclass
class TrainingState:
    """The same on every rank.

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
        """That of a checkpoint from memory or storage; of a new run for None.

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
        """What a checkpoint of this moment says; callbacks and what memory alone keeps are added by who has them."""
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
