"""What the driver sends to each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raytf import precision, rates
from raytf.config import TrainConfig
from raytf.data.order import StepPlan
from raytf.data.pipeline import Augment
from raytf.data.sources import Source
from raytf.precision import Precision


@dataclass(frozen=True)
class Job:
    """A run, ready to be started.

    Attributes:
        model: function that returns a compiled keras.Model.
        sources: reference to a `Sources` in Ray's object store.
        monitor: handle of the driver's `Monitor` actor.
        run_uri: the run's folder.
        lease: id of the process that owns the run.
        total_steps: global steps at which the run ends.
        identity: what the driver knows of settings and data that the run is told by later.
        precision: what the job has set in the driver's Keras.
    """

    model: Callable[[], Any]
    config: TrainConfig
    sources: Any
    monitor: Any
    run_uri: str
    plan: StepPlan
    total_steps: int
    callbacks: Any
    class_weight: dict[int, float] | None
    augment: Augment | None
    validation_freq: int
    lease: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    precision: Precision = precision.DEFAULT


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    train: Source
    validation: Source | None
    test: Source | None


def strategy_identity(config: TrainConfig) -> dict[str, str]:
    """What of the strategy must not change; empty for synchronous ones, which may follow each other."""
    if not config.strategy.has_servers:
        return {}
    return {"--strategy": config.strategy.strategy, "--sync-replicas": str(config.strategy.sync_replicas)}


def batch_identity(config: TrainConfig, records: int, own: Precision = precision.DEFAULT) -> dict[str, str]:
    """What of batch and data size must not change when a run is resumed; known without TensorFlow."""
    return {
        "--global-batch-size": str(config.batch.global_batch_size),
        "--logical-shards": str(config.logical_shards),
        "--seed": str(config.batch.seed),
        **precision.identity(config.compute.mixed_precision, own),
        "--reduction": config.compute.reduction,
        # Only where it is on: runs from before there was such a flag have none.
        **({"--compress-gradients": "True"} if config.compute.compress_gradients else {}),
        "--exact": str(config.compute.exact),
        # Other numbers of threads cut sums in other places.
        **({"--cpus-per-worker": f"{config.cluster.cpus:g}"} if config.compute.exact else {}),
        **rates.rate_identity(config.rate),
        "training records": str(records),
        **strategy_identity(config),
    }


def differences(before: dict[str, str], now: dict[str, str]) -> str:
    """What differs between two identities, for people; empty when nothing does."""
    lines = []
    for key in sorted(set(before) | set(now)):
        old, new = before.get(key, "nothing"), now.get(key, "nothing")
        if old != new:
            at = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
            lines.append(f"{key}: {_around(old, at)} in storage, {_around(new, at)} now")
    return "; ".join(lines)


def _around(text: str, at: int, width: int = 60) -> str:
    if len(text) <= width:
        return text
    start = max(0, at - width // 3)
    return f"{'...' if start else ''}{text[start : start + width]}{'...' if start + width < len(text) else ''}"
