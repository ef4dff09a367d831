"""What of a run's settings must not change when it is resumed, as texts that can be compared."""

from __future__ import annotations

from raytf.config import precision
from raytf.config.precision import Precision
from raytf.config.sections import RateSection
from raytf.config.train_config import TrainConfig


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
        **rate_identity(config.rate),
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


def rate_identity(section: RateSection) -> dict[str, str]:
    """What must not change when a run is resumed; nothing where no flag is given, as in runs of earlier versions."""
    asked: dict[str, str] = {}
    if section.scale_learning_rate != "none":
        base = f"--base-batch-size {section.base_batch_size}"
        asked["--scale-learning-rate"] = f"{section.scale_learning_rate} from {base}"
    if section.warmup_epochs:
        asked["--warmup-epochs"] = f"{section.warmup_epochs:g}"
    return asked
