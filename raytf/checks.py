"""What the driver can refuse in seconds, before any worker starts."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from raytf import runlog
from raytf.checkpoint import manifest
from raytf.config import TrainConfig
from raytf.errors import CheckpointError, ClusterError, ConfigError, RunMismatchError
from raytf.job import batch_identity, differences
from raytf.storage import Storage

#: How long a cluster that still grows may take to show the workers' resources.
_SETTLE_SECONDS = 10.0


def finished(run: Storage, total_steps: int) -> dict[str, Any] | None:
    """The result of a run that has nothing left to do; None where there is work."""
    result = runlog.read_result(run)
    if result is None or not (result.get("stopped_early") or result["steps"] >= total_steps):
        return None
    return result


def compare_batch(run: Storage, config: TrainConfig, records: int) -> None:
    """Refuse a changed batch before anything is started; the model is compared by the workers.

    Raises:
        RunMismatchError: shows the difference.
    """
    for name in manifest.list_complete(run)[:1]:
        try:
            before = manifest.read(run, name)["document"]["identity"]
        except (CheckpointError, KeyError):
            return
        now = batch_identity(config, records)
        difference = differences({k: before.get(k, "nothing") for k in now}, now)
        if difference:
            raise RunMismatchError(
                f"run {config.run.run!r} in storage was made with other settings: {difference}. "
                "Give them as they were, or choose another --run name."
            )


def check_memory(config: TrainConfig, worker_bytes: int) -> None:
    """Refuse more workers than this machine's memory can hold.

    Raises:
        ClusterError: names a number that fits.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = max(1, total // worker_bytes)
    wanted = config.cluster.worker_range[0]
    if wanted > fits:
        raise ClusterError(
            f"--workers {config.cluster.workers}: this machine's {total / 2**30:.0f} GiB of memory hold about {fits} "
            f"workers of at least {worker_bytes / 2**30:.1f} GiB. Use --workers {fits} or fewer, or a cluster."
        )


def check_cluster(config: TrainConfig, local: bool) -> bool:
    """Whether to use GPUs; refuse what the cluster can never give.

    Raises:
        ClusterError, ConfigError: says what the cluster has.
    """
    have, most = ray.cluster_resources(), _ceiling()
    gpus = max(have.get("GPU", 0), most.get("GPU", 0) if most else 0)
    use_gpu = config.cluster.use_gpu if config.cluster.use_gpu is not None else gpus > 0
    if use_gpu and not gpus:
        raise ConfigError("--use-gpu: no node of this cluster has a GPU, nor could one be added. Use --no-use-gpu.")
    wanted = config.cluster.worker_range[0]
    need = {"CPU": config.cluster.cpus_per_worker, **({"GPU": 1.0} if use_gpu else {})}
    deadline = time.monotonic() + (0 if local or most else _SETTLE_SECONDS)
    while (fits := _fits(need, most)) < wanted:
        if time.monotonic() >= deadline:
            each = " and ".join(f"{v:g} {k}" for k, v in need.items())
            raise ClusterError(
                f"--workers {config.cluster.workers} with {each} each: this cluster can give {fits} at the most. "
                f"Use --workers {max(1, fits)}, fewer --cpus-per-worker, or add nodes."
            )
        time.sleep(0.5)
    return use_gpu


def _fits(need: dict[str, float], most: dict[str, float] | None) -> int:
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    now = sum(int(min(node.get(k, 0) // v for k, v in need.items())) for node in nodes)
    grown = int(min(most.get(k, 0) // v for k, v in need.items())) if most else 0
    return max(now, grown)


def _ceiling() -> dict[str, float] | None:
    """Resources that the autoscaler may bring the cluster to; None where there is no autoscaler."""
    from ray._private.state import state

    most = state.get_max_resources_from_cluster_config()
    return None if most is None else {name: float(value) for name, value in most.items()}
