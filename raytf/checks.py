"""What the driver can refuse in seconds, before any worker starts."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
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


def stored_identity(run: Storage) -> dict[str, str]:
    """With what settings the run in storage was made; empty where it has no checkpoint that can be read."""
    for name in manifest.list_complete(run)[:1]:
        try:
            return manifest.read(run, name)["document"]["identity"]
        except (CheckpointError, KeyError):
            break
    return {}


def compare_batch(before: dict[str, str], config: TrainConfig, records: int) -> None:
    """Refuse a changed batch before anything is started; the model is compared by the workers.

    Args:
        before: of `stored_identity`.

    Raises:
        RunMismatchError: shows the difference.
    """
    if not before:
        return
    now = batch_identity(config, records)
    difference = differences({k: before.get(k, "nothing") for k in now}, now)
    if difference:
        raise RunMismatchError(
            f"run {config.run.run!r} in storage was made with other settings: {difference}. "
            "Give them as they were, or choose another --run name."
        )


def check_memory(config: TrainConfig, worker_bytes: int) -> int:
    """The number of workers that this machine can hold, at most the most that were asked for.

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
    return min(fits, config.cluster.worker_range[1])


def check_address(address: str, seconds: float = 5.0) -> None:
    """Refuse a Ray that does not answer; Ray's own client tries for more than a minute.

    Raises:
        ClusterError: nothing listens there.
    """
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not port.isdigit():
        return  # auto, or a way to connect of Ray's own
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray answers at RAY_ADDRESS={address} ({error}). Start it with `ray start --head`, correct the "
            "address, or unset RAY_ADDRESS to train on this machine alone."
        ) from error


def check_cluster(config: TrainConfig, local: bool, say: Callable[[str], None]) -> bool:
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
    cpu = {"CPU": config.cluster.cpus_per_worker}
    if use_gpu and config.cluster.use_gpu is None and _fits({**cpu, "GPU": 1.0}, most) < wanted <= _fits(cpu, most):
        say(
            f"this cluster has {gpus:g} GPU, too few for {wanted} workers: training on CPUs; --workers {gpus:g} uses it"
        )
        use_gpu = False
    need = {**cpu, **({"GPU": 1.0} if use_gpu else {})}
    deadline = time.monotonic() + (0 if local or most else _SETTLE_SECONDS)
    while (fits := _fits(need, most)) < wanted:
        if time.monotonic() >= deadline:
            each = " and ".join(f"{v:g} {k}" for k, v in need.items())
            raise ClusterError(
                f"--workers {config.cluster.workers} with {each} each: this cluster can give {fits} at the most. Use "
                f"--workers {max(1, fits)}, fewer --cpus-per-worker, {'--no-use-gpu, ' if use_gpu else ''}or add nodes."
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
