"""The demands of a strategy on the cluster, and settings that it excludes: decisions without Ray or TensorFlow.

Which strategies refuse a single setting is said at its field; here is what takes two settings to say.
"""

from __future__ import annotations

from typing import Any

from raytf.config import setting
from raytf.config.sections import ONE_WORKER, ClusterSection, ComputeSection, StrategySection
from raytf.errors import ConfigError


def worker_range(strategy: StrategySection, cluster: ClusterSection) -> tuple[int, int]:
    """Return the fewest and the most workers, or refuse a number that the strategy does not have."""
    if strategy.strategy not in ONE_WORKER:
        return cluster.worker_range
    if cluster.workers is not None and cluster.worker_range != (1, 1):
        raise ConfigError(
            f"--workers {cluster.workers} with --strategy {strategy.strategy}: that is one worker, whose devices share "
            "the work. Leave out --workers, or take --strategy multi-worker-mirrored."
        )
    return 1, 1


def check_taken(section: Any, strategy: StrategySection) -> None:
    """Refuse settings of a section that the strategy does not take."""
    name = strategy.strategy
    for its, value in setting.values(section):
        for refused in its.refusals:
            is_fine = value == its.default or value in refused.unless
            if name in refused.by and refused.sync_replicas in (None, strategy.sync_replicas) and not is_fine:
                raise ConfigError(refused.message.format(typed=its.typed(value), flag=its.flag, strategy=name))


def check(strategy: StrategySection, cluster: ClusterSection, compute: ComputeSection) -> None:
    """Refuse flags that do not go together."""
    if strategy.logical_devices is not None and cluster.use_gpu:
        raise ConfigError(
            f"--logical-devices {strategy.logical_devices} with --use-gpu: logical devices are parts of the CPU. Pass "
            "one of them."
        )
    if strategy.communication == "nccl" and cluster.use_gpu is False:
        raise ConfigError(NCCL_WITHOUT_GPU)
    share = cluster.gpus_per_worker
    if strategy.communication == "nccl" and share < 1:
        raise ConfigError(
            f"--communication nccl with --gpus-per-worker {share:g}: NCCL refuses two workers on one GPU. Leave out "
            "one of them; by default workers that share a GPU add their gradients in the host's memory."
        )
    if share != 1 and (cluster.use_gpu is False or strategy.is_without_gpus):
        why = "--no-use-gpu" if cluster.use_gpu is False else f"--strategy {strategy.strategy} on other devices"
        raise ConfigError(f"--gpus-per-worker {share:g} with {why}: the workers have no GPU. Pass one of them.")
    if compute.compress_gradients and compute.reduction == "float":
        raise ConfigError(
            "--compress-gradients with --reduction float: the 16 bits are fixed point, since a sum of 16-bit floats "
            "depends on its order and loses what is small. Leave out one of them."
        )
    _check_aggregation(strategy, worker_range(strategy, cluster)[1])


def _check_aggregation(strategy: StrategySection, most_workers: int) -> None:
    parts = strategy.replicas_to_aggregate
    if parts is None:
        return
    if not strategy.sync_replicas:
        raise ConfigError(
            f"--replicas-to-aggregate {parts}: without --sync-replicas every gradient is an update of its own. "
            "Add --sync-replicas, or leave it out."
        )
    if not isinstance(parts, int) or not 1 <= parts <= most_workers:
        raise ConfigError(
            f"--replicas-to-aggregate {parts} with up to {most_workers} workers: expected 1 to {most_workers}. "
            "The workers beyond it are backups."
        )


NCCL_WITHOUT_GPU = (
    "--communication nccl: NCCL adds gradients between GPUs, and the workers have none. Leave it out, or pass "
    "--communication host."
)
