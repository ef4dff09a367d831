"""What a checkpoint says beside its tensors: one class for both tiers, and its spelling in JSON in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Without these nothing can go on from a checkpoint.
_NEEDED = ("identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks")


@dataclass(frozen=True)
class CheckpointDocument:
    """What the driver's and the workers' next start, and people, want to know of a state.

    Attributes:
        identity: settings of the run that made it.
        history: logs of each epoch so far, with its `epoch` and the `step` after it.
        train_seconds: in calls of the training step.
        imbalance_seconds: that a worker waited, on average, because shards did not divide evenly.
        stopped_early: a callback has stopped the run.
        best: the metric of `--keep-best` and the best of its values; None for none yet.
        chain: of all steps, 64 hexadecimal digits, see `raytf.distributed.step_digest.chained`; empty where a version
            without it made the state.
        world_size: ranks that made it; None where it does not say.
        callbacks: state of the user's callbacks, without their arrays.
        durable_step: what was known to be on storage when a copy in memory was made; of memory alone.
        weights_hash: of a copy in memory, where ranks compare their weights; else None.
        missing: what is needed to go on and was not there when it was read.
    """

    identity: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    train_seconds: float = 0.0
    imbalance_seconds: float = 0.0
    stopped_early: bool = False
    best: tuple[str, float] | None = None
    chain: str = ""
    world_size: int | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    durable_step: int | None = None
    weights_hash: int | None = None
    missing: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> CheckpointDocument:
        """From the JSON of a manifest or of a slot in memory; what other versions add is left out."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values and name != "missing"}
        if known.get("best") is not None:
            known["best"] = (known["best"][0], known["best"][1])
        return cls(**known, missing=tuple(name for name in _NEEDED if name not in values))

    def of_manifest(self) -> dict[str, Any]:
        """JSON values for a manifest on storage."""
        return {
            **self._totals(),
            "identity": self.identity,
            "history": self.history,
            "callbacks": self.callbacks,
            "world_size": self.world_size,
            **self._chained(),
        }

    def live(self) -> dict[str, Any]:
        """JSON values for memory: what changes with each copy."""
        hashed = {} if self.weights_hash is None else {"weights_hash": self.weights_hash}
        return {
            **self._totals(),
            "durable_step": self.durable_step,
            "world_size": self.world_size,
            **hashed,
            **self._chained(),
        }

    def slow(self) -> dict[str, Any]:
        """JSON values for memory: what changes when an epoch ends; see `epochs`."""
        return {"identity": self.identity, "history": self.history}

    @property
    def epochs(self) -> int:
        """How many have ended."""
        return len(self.history)

    def _totals(self) -> dict[str, Any]:
        return {
            "train_seconds": self.train_seconds,
            "imbalance_seconds": self.imbalance_seconds,
            "stopped_early": self.stopped_early,
            "best": self.best,
        }

    def _chained(self) -> dict[str, str]:
        return {"chain": self.chain} if self.chain else {}
