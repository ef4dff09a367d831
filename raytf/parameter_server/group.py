"""Places, starts, watches and restarts the processes of one group with parameter servers, which are actors."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytf._ray import state, train
from raytf.config.resources import HELPER, possible_workers
from raytf.distributed import worker_table
from raytf.distributed.membership import rendezvous
from raytf.errors import GpuError, ProcessDiedError, RaytfError, WorkerLostError, one_line
from raytf.runs.events import GroupStart, Waiting, WorkerLost
from raytf.runs.timeline import Phases
from raytf.training import worker
from raytf.training.job import TrainingJob
from raytf.training.process.process import ProcessSettings, load_tensorflow, settle_in, take_place

#: Seconds within which all processes must start: Python, TensorFlow and, on a new node, the job's files.
_START_SECONDS = 300.0
#: Seconds within which Ray reports the death of a server that the coordinator has lost.
_DEATH_SECONDS = 3.0
#: Seconds within which a placement group that fits must become ready.
_PLACE_SECONDS = 20.0
#: Seconds between two polls of a cluster that is too small.
_WAIT_SECONDS = 0.5
#: Seconds between two messages that the cluster is too small.
_WAIT_MESSAGE_SECONDS = 60.0
#: Seconds within which Ray frees the resources of processes that have exited.
_FREE_SECONDS = 8.0


class GroupProcess:
    """An actor: one process of the group. It imports TensorFlow while the other processes start.
    `threads` is the number of threads within an operation."""

    def __init__(self, threads: int, quiet: bool):
        self._phases = Phases()
        self._threads = threads
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # wait for a peer that is restarting
        #: The first call raises this error, because Ray passes on only the text of an error in an actor's constructor.
        self._fault: GpuError | None = None
        try:
            load_tensorflow(ProcessSettings(quiet=quiet))
        except GpuError as error:
            self._fault = error
        self._phases.mark("tensorflow")
        self._server: Any = None

    def address(self) -> str:
        """Return HOST:PORT for this process's TensorFlow server.

        Raises:
            GpuError: this process does not have the GPU that Ray assigned to it.
        """
        if self._fault is not None:
            raise self._fault
        return rendezvous.joined(*train.free_address())

    def join(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Take this process's place in the cluster.

        Args:
            cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
            job: this process's kind, one of these three.
            index: the index of this process within its kind.

        Returns:
            The row about this process for `--show-cluster`.
        """
        settle_in()
        take_place(cluster, job, index)
        return worker_table.about_me(serves=True)

    def serve(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Start a TensorFlow server, and join the cluster.

        Raises:
            WorkerLostError: Ray restarted this process on another node, where its address does not exist.
            GpuError: this process does not have the GPU that Ray assigned to it.
        """
        host = cluster[job][index].rpartition(":")[0].strip("[]")
        if ray.util.get_node_ip_address() != host:
            raise WorkerLostError(f"its node {host} disappeared")
        if self._fault is not None:
            raise self._fault
        self._server = start_server(cluster, job, index, self._threads)
        return self.join(cluster, job, index)

    def live(self) -> None:
        """Never return: the call ends when the process dies."""
        while True:
            time.sleep(3600)

    def coordinate(self, job: TrainingJob, cluster: dict[str, list[str]]) -> dict[str, Any] | None:
        """Train the model, and return the run's result."""
        import tensorflow as tf

        from raytf.parameter_server.coordinator import ParameterServerExecutor

        tf.config.threading.set_intra_op_parallelism_threads(self._threads)
        with worker.beating(job, 0, 1) as pulse:
            return worker.train(job, pulse, self._phases, ParameterServerExecutor(job.config, cluster))


# Three subclasses, because `ps` and Ray's dashboard show their names.
class ParameterServer(GroupProcess):
    """Holds weights."""


class ParameterWorker(GroupProcess):
    """Computes gradients."""


class CoordinatorProcess(GroupProcess):
    """Hands out batches."""


def start_server(cluster: dict[str, list[str]], job: str, index: int, threads: int) -> Any:
    """Start a TensorFlow server in this process, with `threads` threads within an operation, and return it."""
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(4, threads)
    )
    config.gpu_options.allow_growth = True
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    )


@dataclass(frozen=True)
class Processes:
    """The actors of a group."""

    chief: Any
    servers: list[Any]
    workers: list[Any]

    @property
    def all(self) -> list[Any]:
        return [self.chief, *self.servers, *self.workers]


def start(job: TrainingJob, bundles: Any, workers: int, use_gpu: bool) -> Processes:
    """Start the processes of a group.

    Args:
        job: the job to train.
        bundles: the placement group: a bundle for the coordinator, one for each server, one for each worker.
        workers: the number of workers.
        use_gpu: the workers compute on GPUs.
    """
    cluster, quiet = job.config.cluster, not job.config.run.verbose
    servers = job.config.strategy.ps or 1

    def actor(kind: type[GroupProcess], bundle: int, threads: int = 1, **options: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=bundle)
        made = ray.remote(kind).options(max_concurrency=4, scheduling_strategy=place, **options)
        return made.remote(threads, quiet)

    helper = {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0}
    gpus = cluster.gpus_per_worker if use_gpu else 0
    worker = {"num_cpus": cluster.cpus, "num_gpus": gpus, "max_restarts": -1}
    threads = max(1, int(cluster.cpus))
    return Processes(
        actor(CoordinatorProcess, 0, **helper),
        [actor(ParameterServer, 1 + i, **helper) for i in range(servers)],
        [actor(ParameterWorker, 1 + servers + i, threads, **worker) for i in range(workers)],
    )


class ParameterServerGroup:
    """The processes of one attempt."""

    def __init__(self, job: TrainingJob, processes: Processes, say: Callable[[str], None]):
        self._job, self._processes, self._say = job, processes, say
        self._cluster: dict[str, list[str]] = {}
        #: Awaited reference -> kind and index of its process; kind `again` is a worker that is restarting.
        self._watched: dict[Any, tuple[str, int]] = {}
        #: Indices of workers that are dead now.
        self._missing: set[int] = set()

    def train(self) -> dict[str, Any] | None:
        """Watch the processes while they train, and return the run's result. Raise ProcessDiedError if a process died
        that the group cannot continue without; other errors come from the coordinator or from Ray."""
        all_of = self._processes
        try:
            chief, *others = ray.get([process.address.remote() for process in all_of.all], timeout=_START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise WorkerLostError(f"the processes did not start within {_START_SECONDS:.0f} s") from None
        servers = len(all_of.servers)
        self._cluster = {"chief": [chief], "ps": others[:servers], "worker": others[servers:]}
        starts = [(process, "ps", i) for i, process in enumerate(all_of.servers)]
        starts += [(process, "worker", i) for i, process in enumerate(all_of.workers)]
        joined = [all_of.chief.join.remote(self._cluster, "chief", 0)]
        joined += [process.serve.remote(self._cluster, kind, i) for process, kind, i in starts]
        self._show(ray.get(joined, timeout=_START_SECONDS))
        self._watched = {process.live.remote(): (kind, i) for process, kind, i in starts}
        result = all_of.chief.coordinate.remote(self._job, self._cluster)
        self._watched[result] = ("chief", 0)
        return self._watch()

    def close(self) -> None:
        for process in self._processes.all:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(process)

    def _show(self, processes: list[dict[str, Any]]) -> None:
        if self._job.config.strategy.show_cluster:
            workers = worker_table.count(len(self._processes.workers), "worker")
            servers = worker_table.count(len(self._processes.servers), "parameter server")
            title = f"{workers}, {servers} and the coordinator, parameter-server"
            self._say(worker_table.table(title, processes))

    def _watch(self) -> dict[str, Any] | None:
        while True:
            done, _ = ray.wait(list(self._watched), num_returns=1, timeout=60)
            # Deaths come first: they explain the coordinator's error.
            for reference in sorted(done, key=lambda r: self._watched[r][0] == "chief"):
                kind, i = self._watched.pop(reference)
                error = _error_of(reference)
                if kind == "ps":
                    raise ProcessDiedError(f"parameter server {i} died")
                if kind == "worker":
                    self._replace(i, error)
                elif kind == "again":
                    self._came_back(i, reference, error)
                elif error is None:
                    return ray.get(reference)
                else:
                    raise self._explained(error)

    def _explained(self, error: Exception) -> Exception:
        """Return why the coordinator failed: the death of a server at the same time, or else its own error."""
        if isinstance(error, ray.exceptions.RayActorError):
            return ProcessDiedError("the coordinator died")
        if isinstance(error, WorkerLostError) and self._watched:
            for reference in ray.wait(list(self._watched), num_returns=1, timeout=_DEATH_SECONDS)[0]:
                kind, i = self._watched[reference]
                if kind == "ps":
                    return ProcessDiedError(f"parameter server {i} died")
        return error

    def _replace(self, i: int, error: Exception | None) -> None:
        self._missing.add(i)
        self._job.monitor.book(WorkerLost(i, one_line(error, 200)))
        self._say(f"worker {i} died; the others continue while it is replaced")
        self._serve_again(i)

    def _serve_again(self, i: int) -> None:
        self._watched[self._processes.workers[i].serve.remote(self._cluster, "worker", i)] = ("again", i)

    def _came_back(self, i: int, reference: Any, error: Exception | None) -> None:
        workers = self._processes.workers
        if error is None:
            self._missing.discard(i)
            self._say(f"worker {i} is back")
            if self._job.config.strategy.show_cluster:
                self._say(worker_table.table(f"worker {i}, restarted", [ray.get(reference)]))
            self._watched[workers[i].live.remote()] = ("worker", i)
            return
        if isinstance(error, ray.exceptions.ActorUnavailableError):  # it died again while it started
            self._serve_again(i)
            return
        left = len(workers) - len(self._missing)
        if left < self._job.config.cluster.worker_range[0]:
            raise ProcessDiedError(f"{len(self._missing)} of {len(workers)} workers have died")
        self._say(f"worker {i} cannot be restarted on its node; the other {left} continue")


def _error_of(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except (RaytfError, ray.exceptions.RayError) as error:
        cause = getattr(error, "cause", None)  # the original error, without the traceback that Ray adds to its text
        return cause if isinstance(cause, RaytfError) else error
    return None


@contextlib.contextmanager
def placed(job: TrainingJob, use_gpu: bool, say: Callable[[str], None]) -> Iterator[tuple[Any, int]]:
    """Yield a placement group for as many workers as the cluster has room for, and their number."""
    shown_at, began = float("-inf"), time.monotonic()
    least, most = job.config.cluster.worker_range
    each = {"CPU": job.config.cluster.cpus, **({"GPU": job.config.cluster.gpus_per_worker} if use_gpu else {})}
    helpers = job.config.strategy.helpers
    while True:
        workers = possible_workers(_free(), each, [HELPER] * helpers, most)
        bundles = _reserve(each, workers, helpers) if workers >= least else None
        if bundles is not None:
            break
        if time.monotonic() - began < _FREE_SECONDS:  # Ray may still be freeing the last group's resources
            time.sleep(_WAIT_SECONDS)
            continue
        if time.monotonic() - shown_at >= _WAIT_MESSAGE_SECONDS:
            shown_at = time.monotonic()
            job.monitor.book(Waiting(max(0, workers), least))
            say(
                f"waiting: the cluster has room for {max(0, workers)} workers beside {helpers} processes for "
                f"parameter servers and coordinator now, but the run needs at least {least} workers"
            )
        _wait_for(each, least, helpers)
    try:
        yield bundles, workers
    finally:
        _release(bundles)


def _bundles(each: dict[str, float], workers: int, helpers: int) -> Any:
    return placement_group([HELPER] * helpers + [each] * workers, strategy="SPREAD")


def _release(bundles: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        remove_placement_group(bundles)


def _reserve(each: dict[str, float], workers: int, helpers: int) -> Any:
    """Return a placement group; None if Ray cannot place it after all."""
    bundles = _bundles(each, workers, helpers)
    if bundles.wait(_PLACE_SECONDS):
        return bundles
    _release(bundles)
    return None


def _wait_for(each: dict[str, float], workers: int, helpers: int) -> None:
    """Request room until it is free or the free resources change. An autoscaler acts on the request."""
    wish, before = _bundles(each, workers, helpers), _free()
    try:
        while not wish.wait(_WAIT_SECONDS) and _free() == before:
            pass
    finally:
        _release(wish)
        time.sleep(_WAIT_SECONDS)  # until Ray has freed the room


def _free() -> list[dict[str, float]]:
    nodes = state.free_resources().values()
    return [{kind: node.get(kind, 0.0) for kind in ("CPU", "GPU")} for node in nodes]


def run_group(job: TrainingJob, use_gpu: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Train a job with one group of processes, and return the run's result. Raise the error that ended the group."""
    with placed(job, use_gpu, say) as (bundles, workers):
        job.monitor.book(GroupStart(workers))
        job.monitor.begin_group()
        group = ParameterServerGroup(job, start(job, bundles, workers, use_gpu), say)
        with contextlib.closing(group):
            return group.train()
