"""Preparation of a training process before TensorFlow's first operation, whatever its role in the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import ray

from raytf._ray import worker_process
from raytf.cluster import orphaned_processes, scratch
from raytf.distributed import sockets
from raytf.distributed.gpu import determinism, health, visibility
from raytf.training.process import warm_pool

#: Seconds within which an error reaches the driver, if the driver can be reached.
_HEARD_SECONDS = 30.0
#: More than any machine has; TensorFlow's own limit is 64 GiB.
_NO_LIMIT_MB = 1 << 24


@dataclass(frozen=True)
class ProcessSettings:
    """A run's settings for its worker processes, applied before any TensorFlow operation.

    Attributes:
        threads: TensorFlow's threads within an operation. 0 lets TensorFlow decide. None uses the same share of the
            node's CPUs as the process has of the node's GPUs.
        quiet: silence TensorFlow's messages.
        exact: let TensorFlow choose deterministic kernels, and refuse operations that have none.
        jit: compile gradients with XLA. Compiled programs stay on the node for the next group.
        one_worker: the strategy has a single process, which has no cluster and hence no TF_CONFIG.
        logical_devices: number of logical devices into which the CPU is divided.
        is_next_soon: another run may follow at once, as in a notebook, so its processes are prepared from the start.
    """

    threads: int | None = 0
    quiet: bool = True
    exact: bool = False
    jit: bool = False
    one_worker: bool = False
    logical_devices: int = 1
    is_next_soon: bool = False


def end_unheard() -> None:
    """Exit this process soon, because the others continue without it and Ray may be unable to reach it.

    On a node that is cut off, Ray notices nothing until TCP gives up, after about a quarter of an hour. Until then the
    process would keep its memory and its GPU.
    """
    time.sleep(_HEARD_SECONDS)
    os._exit(1)


def settle_in() -> None:
    """Tie this process to its raylet, so that both exit together, and give it its own folder for temporary files."""
    if ray.is_initialized():  # False in benchmarks
        # Ray watches the raylet from a thread, which does not run while the process is stopped.
        orphaned_processes.die_with_parent()
        scratch.begin(worker_process.session_folder() / scratch.FOLDER)
        sockets.close_connections_with(worker_process.local_sockets())


def take_place(cluster: Mapping[str, Sequence[str]], kind: str, index: int) -> None:
    """Set TF_CONFIG to this process's place in TensorFlow's cluster.

    Args:
        cluster: HOST:PORT of each process, by kind.
        kind, index: kind and index of this process.
    """
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})


def load_tensorflow(settings: ProcessSettings, gpus: Sequence[str] | None = None) -> None:
    """Import TensorFlow with the devices, threads and flags of a run.

    Args:
        settings: the run's process settings.
        gpus: the GPUs that this process was assigned; by default, Ray is asked.

    Raises:
        GpuError: an assigned GPU does not exist, or is not healthy.
    """
    mine = visibility.assigned_gpus() if gpus is None else gpus
    visibility.heed(mine)
    visibility.demand_driver(mine)
    if mine:
        health.await_fit(health.read_mine, visibility.here(), visibility.share())
    _set_environment(os.environ, settings, mine)
    warm_pool.import_all()
    _set_up_devices(settings, mine)


def _set_environment(
    environment: MutableMapping[str, str], settings: ProcessSettings, gpus: Sequence[str] | None
) -> None:
    environment["KERAS_BACKEND"] = "tensorflow"
    if settings.quiet:
        environment["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # On GPUs gradients are encoded by compiled programs. Benchmarks have no Ray.
    if (settings.jit or gpus) and ray.is_initialized():
        compiled = worker_process.session_folder() / "raytf-xla"
        compiled.mkdir(exist_ok=True)
        flags = f"{environment.get('TF_XLA_FLAGS', '')} --tf_xla_persistent_cache_directory={compiled}"
        environment["TF_XLA_FLAGS"] = flags.strip()
    if not gpus:
        _keep_memory(environment)
    elif settings.exact:
        determinism.prepare(environment)


def _keep_memory(environment: MutableMapping[str, str]) -> None:
    """Make TensorFlow keep the memory of freed tensors, because the next step needs the same amount again.

    The C library returns large blocks to the system, which clears each page before it hands it out again. This took a
    fifth of the time of steps with large weights. Variables that are already set stay as they are. With oneDNN, which
    TensorFlow uses on processors with VNNI, its allocator keeps memory anyway.
    """
    environment.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    environment.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(_NO_LIMIT_MB))


def _set_up_devices(settings: ProcessSettings, gpus: Sequence[str] | None) -> None:
    import tensorflow as tf

    if settings.exact:
        tf.config.experimental.enable_op_determinism()
    threads = visibility.threads() if settings.threads is None else settings.threads
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # The threads within an operation divide sums, so their number must not depend on the devices. Only the number
        # of operations that run at the same time grows, by one for each additional device.
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads) + settings.logical_devices - 1)
    if settings.logical_devices > 1:
        cpu = tf.config.list_physical_devices("CPU")[0]
        parts = [tf.config.LogicalDeviceConfiguration()] * settings.logical_devices
        tf.config.set_logical_device_configuration(cpu, parts)
    devices = tf.config.list_physical_devices("GPU")
    visibility.demand(gpus, devices)
    if devices:
        from raytf.distributed.devices import set_memory

        set_memory(visibility.share())
