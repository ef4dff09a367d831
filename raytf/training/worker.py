"""A worker's process: prepared for its place in the group, then training; and what its errors mean to the driver."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ray
import ray.train

from raytf._ray import worker_process
from raytf.cluster import orphaned_processes, scratch
from raytf.distributed.gpu import determinism, health, visibility
from raytf.errors import ExactnessError, JobError, RaytfError, WorkerLostError, one_line
from raytf.runs.restart_phases import Phases
from raytf.training import gpu_errors, warm_pool
from raytf.training.heartbeat import Heartbeat
from raytf.training.job import TrainingJob
from raytf.training.process_settings import ProcessSettings


def set_up(addresses: list[str], rank: int, settings: ProcessSettings, gpus: Sequence[str] | None = None) -> None:
    """Prepare this worker's process for its strategy, before any TensorFlow operation.

    Args:
        addresses: HOST:PORT of every rank's collective server.
        rank: of this worker.
        settings: of the run.
        gpus: that this process was given; by default, Ray is asked.

    Raises:
        GpuError: one that it was given is not there, or not fit for work.
    """
    global _phases
    _phases = Phases()
    warm_pool.become_worker()
    settle_in()
    gpus = visibility.given() if gpus is None else gpus
    visibility.heed(gpus)
    visibility.demand_driver(gpus)
    if gpus:
        health.await_fit(health.read_mine, visibility.here(), visibility.share())
    if settings.one_worker:
        os.environ.pop("TF_CONFIG", None)  # one that the node's environment has says nothing of this run
    else:
        task = {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if settings.quiet:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if settings.jit:
        compiled = worker_process.session_folder() / "raytf-xla"
        compiled.mkdir(exist_ok=True)
        flags = f"{os.environ.get('TF_XLA_FLAGS', '')} --tf_xla_persistent_cache_directory={compiled}"
        os.environ["TF_XLA_FLAGS"] = flags.strip()
    if settings.exact and gpus:
        determinism.prepare(os.environ, settings.jit)
    warm_pool.import_all()
    import tensorflow as tf

    if settings.exact:
        tf.config.experimental.enable_op_determinism()
    threads = visibility.threads() if settings.threads is None else settings.threads
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        # As many threads within an operation as elsewhere, since they cut sums, but one more operation for each device.
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
    _phases.mark("tensorflow")


def settle_in() -> None:
    """This process ends with its raylet from now on, and has a folder of its own for temporary files."""
    if ray.is_initialized():  # not a benchmark's
        orphaned_processes.die_with_parent()  # Ray's own look at the raylet is that of a thread, which may be stopped
        scratch.begin(worker_process.session_folder() / scratch.FOLDER)


#: Since this process was given its rank.
_phases = Phases()

#: Freeing TensorFlow's objects can take longer than the process has left to live.
_keep: list[Any] = []


def run(job: TrainingJob) -> dict[str, Any] | None:
    """Train, and return the run's result on rank 0.

    Raises:
        WorkerLostError: a peer is gone; Ray Train starts a new group.
        RaytfError: any other is one that another attempt would meet again.
    """
    context = ray.train.get_context()
    pulse = Heartbeat(job.monitor, context.get_world_rank(), context.get_world_size())
    try:
        return _run(job, pulse)
    except JobError as error:
        error.step = pulse.step
        raise
    finally:
        pulse.stop()
        scratch.end()


def _run(job: TrainingJob, pulse: Heartbeat) -> dict[str, Any] | None:
    from raytf.training.loop import Worker

    return explained(job, lambda: Worker(job, pulse, _phases))


def explained(job: TrainingJob, make: Callable[[], Any]) -> dict[str, Any] | None:
    """Make a worker and have it train; what TensorFlow raises becomes an error that says whether to try again."""
    import tensorflow as tf

    try:
        worker = make()
        _keep.append(worker)
        return worker.train()
    except tf.errors.OpError as error:
        raise _of_gpu(job, error) or _of_others(job, error) from None
    except JobError as error:
        raise _of_gpu(job, error.__cause__) or _inexact(job, error) or error from None
    except (RaytfError, OSError, ray.exceptions.RayError) as error:
        raise _inexact(job, error) or error from None
    except Exception as error:
        raise _inexact(job, error) or _as_job_error(error) from None


def _of_gpu(job: TrainingJob, error: BaseException | None) -> RaytfError | None:
    """What an error of TensorFlow says about a GPU.

    Returns:
        None for any other.
    """
    import tensorflow as tf

    if not isinstance(error, tf.errors.OpError):
        return None
    config = job.config
    is_mixed = config.compute.mixed_precision not in (None, "off")
    load = partial(gpu_errors.load_of, config.batch.global_batch_size, config.logical_shards, is_mixed)
    return gpu_errors.explain(error, traceback.format_exc(), load)


def _of_others(job: TrainingJob, error: Exception) -> RaytfError:
    """What an error of TensorFlow is that says nothing of a GPU: a peer's end, exact mode's, or the job's own."""
    import tensorflow as tf

    errors = tf.errors
    if isinstance(
        error, (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    ):
        return WorkerLostError(one_line(error, 500))
    if isinstance(error, (errors.InternalError, errors.UnknownError, errors.FailedPreconditionError)):
        # What gRPC says of a peer that died in the middle of a message, and of a port that was just taken.
        is_lost = any(word in str(error) for word in ("ollective", "onnection", "gRPC"))
        return WorkerLostError(one_line(error, 500)) if is_lost else _as_job_error(error)
    return _inexact(job, error) or _as_job_error(error)


def _inexact(job: TrainingJob, error: Exception) -> RaytfError | None:
    """What an error says about exact mode, where that is on."""
    from raytf.training import exact

    return exact.explain(error) if job.config.compute.exact and not isinstance(error, ExactnessError) else None


def _as_job_error(error: Exception) -> JobError:
    return JobError(f"training raised {type(error).__name__}: {one_line(error, 500)}", traceback.format_exc())
