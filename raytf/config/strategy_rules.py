"""What a way to distribute asks of the cluster, and what does not go together: decisions without Ray or TensorFlow."""

from __future__ import annotations

from raytf.config.sections import ClusterSection, ComputeSection, StrategySection
from raytf.errors import ConfigError

#: Strategies of one process: one worker, whose devices share the work.
ONE_WORKER = ("mirrored", "one-device", "central-storage", "tpu")


#: Those that take all GPUs of their machine, or logical CPU devices in their place.
ALL_DEVICES = ("mirrored", "central-storage")


def worker_range(strategy: StrategySection, cluster: ClusterSection) -> tuple[int, int]:
    """(fewest, most) workers.

    Raises:
        ConfigError: `--workers` is no number, or another one than the strategy has.
    """
    if strategy.strategy not in ONE_WORKER:
        return cluster.worker_range
    if cluster.workers is not None and cluster.worker_range != (1, 1):
        raise ConfigError(
            f"--workers {cluster.workers} with --strategy {strategy.strategy}: that is one worker, whose devices share "
            "the work. Leave out --workers, or take --strategy multi-worker-mirrored."
        )
    return 1, 1


def check(strategy: StrategySection, cluster: ClusterSection, compute: ComputeSection) -> None:
    """Refuse flags that do not go together.

    Raises:
        ConfigError: says which, why, and what to do.
    """
    name = strategy.strategy
    worker_range(strategy, cluster)
    if strategy.logical_devices is not None and name not in ALL_DEVICES:
        mend = (
            "Give --workers to have more of them"
            if name in ("multi-worker-mirrored", "parameter-server")
            else "Leave it out"
        )
        raise ConfigError(
            f"--logical-devices {strategy.logical_devices} with --strategy {name}: only {' and '.join(ALL_DEVICES)} "
            f"share the work among devices of one machine. {mend}, or take --strategy mirrored."
        )
    if strategy.logical_devices is not None and cluster.use_gpu:
        raise ConfigError(
            f"--logical-devices {strategy.logical_devices} with --use-gpu: logical devices are parts of the CPU. Give "
            "one of them."
        )
    if strategy.communication != "auto" and name != "multi-worker-mirrored":
        raise ConfigError(
            f"--communication {strategy.communication} with --strategy {name}: only multi-worker-mirrored adds "
            "gradients over the network. Leave out --communication."
        )
    if compute.overlap and name != "multi-worker-mirrored":
        raise ConfigError(
            f"--overlap with --strategy {name}: only multi-worker-mirrored adds gradients over workers while they are "
            "computed. Leave out --overlap."
        )
    if strategy.communication == "nccl" and cluster.use_gpu is False:
        raise ConfigError(NCCL_WITHOUT_GPU)
    share = cluster.gpus_per_worker
    if strategy.communication == "nccl" and share < 1:
        raise ConfigError(
            f"--communication nccl with --gpus-per-worker {share:g}: NCCL refuses two workers on one GPU. Leave out "
            "one of them; by default workers that share a GPU add their gradients in the host's memory."
        )
    if share != 1 and name in ALL_DEVICES:
        raise ConfigError(
            f"--gpus-per-worker {share:g} with --strategy {name}: its one worker takes all GPUs of its machine. Leave "
            "it out, or take --strategy multi-worker-mirrored."
        )
    if share != 1 and (cluster.use_gpu is False or strategy.is_without_gpus):
        why = "--no-use-gpu" if cluster.use_gpu is False else f"--strategy {name} on other devices"
        raise ConfigError(f"--gpus-per-worker {share:g} with {why}: the workers have no GPU. Give one of them.")
    if name == "tpu" and cluster.use_gpu:
        raise ConfigError("--use-gpu with --strategy tpu: a worker computes on one kind of device. Give one of them.")
    if compute.compress_gradients and compute.reduction == "float":
        raise ConfigError(
            "--compress-gradients with --reduction float: the 16 bits are fixed point, since a sum of 16-bit floats "
            "depends on its order and loses what is small. Leave out one of them."
        )


NCCL_WITHOUT_GPU = (
    "--communication nccl: NCCL adds gradients between GPUs, and the workers have none. Leave it out, or give "
    "--communication host."
)
