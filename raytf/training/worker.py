"""Entry points of a worker process, which takes a rank, trains, and converts errors for the driver."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import ray.train

from raytf._ray import train_env
from raytf.cluster import scratch
from raytf.config.train_config import TrainConfig
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.member import DismissedError, RunOverError
from raytf.errors import ExactnessError, JobError, RaytfError, WorkerLostError, one_line
from raytf.runs.timeline import Phases
from raytf.training.job import TrainingJob
from raytf.training.process import gpu, process, warm_pool
from raytf.training.process.heartbeat import Heartbeat
from raytf.training.process.process import ProcessSettings
from raytf.training.user import user_code

if TYPE_CHECKING:  # importing these loads TensorFlow
    from raytf.training.executor import Executor
    from raytf.training.loop import TrainLoop
    from raytf.training.synchronous import SynchronousExecutor


@dataclass
class _WorkerProcess:
    """The state that this process keeps between calls from Ray Train.

    Attributes:
        phases: phases of the restart, measured since this process received its rank.
        heartbeat, executor: this rank's heartbeat and executor; None until training starts.
        loop: the training loop, kept so that TensorFlow's objects are not freed, which could delay the process's exit.
    """

    phases: Phases = field(default_factory=Phases)
    heartbeat: Heartbeat | None = None
    executor: SynchronousExecutor | None = None
    loop: TrainLoop | None = None


_here = _WorkerProcess()


def listen() -> str:
    """Start listening for the other ranks, and return this process's HOST:PORT."""
    return rendezvous.listen(ray.util.get_node_ip_address())


def take_rank(context: Any) -> None:
    """Take a new rank after the Ray Train group has lost workers.

    Args:
        context: this worker's Ray Train context, with its new rank and the group's new size.
    """
    train_env.set_rank(context)
    if _here.heartbeat is not None:
        _here.heartbeat.take_rank(context.world_rank, context.world_size)
    if _here.executor is not None:
        _here.executor.want(context.world_size)


def set_up(place: rendezvous.Meeting, settings: ProcessSettings, gpus: Sequence[str] | None = None) -> None:
    """Prepare this worker's process for its strategy, before any TensorFlow operation.

    Args:
        place: this worker's rank, and the addresses of all ranks.
        settings: the run's process settings.
        gpus: the GPUs assigned to this process; by default, those that Ray reports.

    Raises:
        GpuError: an assigned GPU does not exist or is not healthy.
    """
    _here.phases = Phases()
    warm_pool.become_worker()
    hosts, rank = [address.rpartition(":")[0] for address in place.addresses], place.rank
    if settings.is_next_soon and warm_pool.is_new() and rank == hosts.index(hosts[rank]):
        # Start them while this process imports TensorFlow: later, they would take CPU time from the training group.
        warm_pool.prepare(hosts.count(hosts[rank]), ray.get_runtime_context().get_runtime_env_string())
    process.settle_in()
    if settings.one_worker:
        os.environ.pop("TF_CONFIG", None)  # a value from the node's environment does not belong to this run
    else:
        process.take_place({"worker": place.addresses}, "worker", rank)
        rendezvous.take(place)
    if place.world_size == 1:
        place.close()
    process.load_tensorflow(settings, gpus)
    _here.phases.mark("tensorflow")


def run(job: TrainingJob) -> dict[str, Any] | None:
    """Train the model, and return the run's result on rank 0.

    Raises:
        WorkerLostError: another rank was lost; Ray Train starts a new group.
        RaytfError: any other error; `RaytfError.retryable` is set if another attempt may succeed.
    """
    context = ray.train.get_context()
    with beating(job, context.get_world_rank(), context.get_world_size()) as heartbeat:
        _here.heartbeat = heartbeat
        from raytf.training.synchronous import SynchronousExecutor

        _here.executor = SynchronousExecutor(job.config, job.arbiter, heartbeat.progress)
        return train(job, heartbeat, _here.phases, _here.executor)


@contextlib.contextmanager
def beating(job: TrainingJob, rank: int, world_size: int) -> Iterator[Heartbeat]:
    """Yield a rank's heartbeat, and stop it after the `with` statement; add the last step to a JobError."""
    heartbeat = Heartbeat(job.monitor, rank, world_size)
    try:
        yield heartbeat
    except JobError as error:
        error.step = heartbeat.step
        raise
    finally:
        heartbeat.stop()
        scratch.end()


def train(job: TrainingJob, heartbeat: Heartbeat, phases: Phases, executor: Executor) -> dict[str, Any] | None:
    """Train a job until it is complete.

    Args:
        job: the run to train.
        heartbeat: this rank's heartbeat.
        phases: phases of the restart; each phase is marked when it ends.
        executor: trains the steps.

    Returns:
        The run's result on rank 0, None on any other.

    Raises:
        WorkerLostError: another rank was lost; another group can resume the run.
        RaytfError: any other error; `RaytfError.retryable` is set if another attempt may succeed.
    """
    from raytf.training import startup
    from raytf.training.loop import TrainLoop

    def call() -> dict[str, Any] | None:
        try:
            _here.loop = TrainLoop(startup.start(job, heartbeat, phases, executor))
            return _here.loop.train()
        except RunOverError as over:
            return over.result
        except DismissedError:
            return None

    return explained(job.config, call)


def explained(config: TrainConfig, call: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
    """Call a function that trains, and convert its exceptions to those that the driver's retry decision expects."""
    try:
        return call()
    except Exception as error:
        raise _converted(config, error) from None


def _converted(config: TrainConfig, error: Exception) -> Exception:
    """Return the exception to raise for a training error; call this while that error is being handled."""
    import tensorflow as tf

    from raytf.inference.user_model import own_traceback
    from raytf.training import exact

    raised = error.__cause__ if isinstance(error, JobError) else error
    if isinstance(raised, tf.errors.OpError):
        is_mixed = config.compute.mixed_precision not in (None, "off")
        load = partial(gpu.load_of, config.batch.global_batch_size, config.logical_shards, is_mixed)
        of_gpu = gpu.explain(raised, traceback.format_exc(), load)
        if of_gpu is not None:
            return of_gpu
    if _is_peer_lost(error):
        return WorkerLostError(one_line(error, 500))
    inexact = exact.explain(error) if config.compute.exact and not isinstance(error, ExactnessError) else None
    if inexact is not None:
        return inexact
    if isinstance(error, RaytfError):
        return user_code.carrying(error)
    if isinstance(error, (OSError, ray.exceptions.RayError)):
        return error
    message = f"training raised {type(error).__name__}: {one_line(error, 500)}"
    return user_code.carrying(JobError(message, own_traceback(error), error), error)


def _is_peer_lost(error: Exception) -> bool:
    from tensorflow import errors

    if isinstance(
        error, (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    ):
        return True
    # gRPC raises these if a peer dies in the middle of a message, or if a port was taken a moment ago.
    kinds = errors.InternalError, errors.UnknownError, errors.FailedPreconditionError
    return isinstance(error, kinds) and any(word in str(error) for word in ("ollective", "onnection", "gRPC"))
