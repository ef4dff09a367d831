"""One group with parameter servers: its processes, which are actors, are placed, started, watched and restarted."""

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

#: Seconds in which all processes must have started: Python, TensorFlow and, on a new node, the job's files.
_START_SECONDS = 300.0
#: Seconds in which Ray reports the death of a server that the coordinator has lost.
_DEATH_SECONDS = 3.0
#: Seconds in which a placement group that fits must become ready.
_PLACE_SECONDS = 20.0
#: Seconds between two polls of a cluster that is too small.
_WAIT_SECONDS = 0.5
#: Seconds between two messages about that.
_WAIT_MESSAGE_SECONDS = 60.0
#: Seconds in which Ray frees the resources of processes that have ended.
_FREE_SECONDS = 8.0


class GroupProcess:
    """An actor: one process of the group, with threads within an operation. It imports TensorFlow while the others
    start."""

    def __init__(self, threads: int, quiet: bool):
        self._phases = Phases()
        self._threads = threads
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # wait for a peer that is restarting
        #: Raised by the first call: if an actor's constructor raises, Ray passes on only the text.
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
            GpuError: this process does not have the GPU that it was given.
        """
        if self._fault is not None:
            raise self._fault
        return rendezvous.joined(*train.free_address())

    def join(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Take a place in the cluster.

        Args:
            cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
            job: this process's kind, one of these three.
            index: of this process among those of its kind.

        Returns:
            What `--show-cluster` shows about this process.
        """
        settle_in()
        take_place(cluster, job, index)
        return worker_table.about_me(serves=True)

    def serve(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Join the cluster and start to serve.

        Raises:
            WorkerLostError: the address is on another node: Ray has not restarted this process on the same one.
            GpuError: this process does not have the GPU that it was given.
        """
        host = cluster[job][index].rpartition(":")[0].strip("[]")
        if ray.util.get_node_ip_address() != host:
            raise WorkerLostError(f"its node {host} is gone")
        if self._fault is not None:
            raise self._fault
        self._server = start_server(cluster, job, index, self._threads)
        return self.join(cluster, job, index)

    def live(self) -> None:
        """Wait forever: the call ends with the process."""
        while True:
            time.sleep(3600)

    def coordinate(self, job: TrainingJob, cluster: dict[str, list[str]]) -> dict[str, Any] | None:
        """Train the model, and return the run's result."""
        import tensorflow as tf

        from raytf.parameter_server.coordinator import ParameterServerExecutor

        tf.config.threading.set_intra_op_parallelism_threads(self._threads)
        with worker.beating(job, 0, 1) as pulse:
            return worker.train(job, pulse, self._phases, ParameterServerExecutor(job.config, cluster))


# Three names, which `ps` and Ray's dashboard show.
class ParameterServer(GroupProcess):
    """Holds weights."""


class ParameterWorker(GroupProcess):
    """Computes gradients."""


class CoordinatorProcess(GroupProcess):
    """Hands out batches."""


def start_server(cluster: dict[str, list[str]], job: str, index: int, threads: int) -> Any:
    """Run a TensorFlow server, with threads within an operation, in this process for as long as the process lives."""
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
        job: to train.
        bundles: the placement group: a bundle for the coordinator, one for each server, one for each worker.
        workers: how many to start.
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
        #: Reference that is waited for -> kind and index of its process; kind `again` is a worker that is restarting.
        self._watched: dict[Any, tuple[str, int]] = {}
        #: Indices of workers that are dead now.
        self._missing: set[int] = set()

    def train(self) -> dict[str, Any] | None:
        """Have the processes train, watch them meanwhile, and return the run's result. A ProcessDiedError says that a
        process died without which the group cannot continue; other errors are the coordinator's, or Ray's."""
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
        """Return why the coordinator failed: the death of a server at the same time explains it."""
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
                self._say(worker_table.table(f"worker {i}, started again", [ray.get(reference)]))
            self._watched[workers[i].live.remote()] = ("worker", i)
            return
        if isinstance(error, ray.exceptions.ActorUnavailableError):  # it died again while it started
            self._serve_again(i)
            return
        left = len(workers) - len(self._missing)
        if left < self._job.config.cluster.worker_range[0]:
            raise ProcessDiedError(f"{len(self._missing)} of {len(workers)} workers are gone")
        self._say(f"worker {i} cannot be started again where it was; {left} continue")


def _error_of(reference: Any) -> Exception | None:
    try:
        ray.get(reference)
    except (RaytfError, ray.exceptions.RayError) as error:
        cause = getattr(error, "cause", None)  # without the traceback that Ray adds to the text
        return cause if isinstance(cause, RaytfError) else error
    return None


@contextlib.contextmanager
def placed(job: TrainingJob, use_gpu: bool, say: Callable[[str], None]) -> Iterator[tuple[Any, int]]:
    """Yield a placement group for as many workers as there is room for, and their number."""
    shown_at, began = float("-inf"), time.monotonic()
    least, most = job.config.cluster.worker_range
    each = {"CPU": job.config.cluster.cpus, **({"GPU": job.config.cluster.gpus_per_worker} if use_gpu else {})}
    helpers = job.config.strategy.helpers
    while True:
        workers = possible_workers(_free(), each, [HELPER] * helpers, most)
        bundles = _reserve(each, workers, helpers) if workers >= least else None
        if bundles is not None:
            break
        if time.monotonic() - began < _FREE_SECONDS:  # the last group's resources are free in a moment
            time.sleep(_WAIT_SECONDS)
            continue
        if time.monotonic() - shown_at >= _WAIT_MESSAGE_SECONDS:
            shown_at = time.monotonic()
            job.monitor.book(Waiting(max(0, workers), least))
            say(
                f"waiting: the cluster has room for {max(0, workers)} workers beside {helpers} processes for "
                f"parameter servers and coordinator now, and at least {least} workers are wanted"
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
    """Return a placement group for a group; None if the room is not there after all."""
    bundles = _bundles(each, workers, helpers)
    if bundles.wait(_PLACE_SECONDS):
        return bundles
    _release(bundles)
    return None


def _wait_for(each: dict[str, float], workers: int, helpers: int) -> None:
    """Ask for room, which an autoscaler sees, until it is there or the free resources have changed."""
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
    """Train a job with one group of processes, and return the run's result; raises the error that ended the group."""
    with placed(job, use_gpu, say) as (bundles, workers):
        job.monitor.book(GroupStart(workers))
        job.monitor.begin_group()
        group = ParameterServerGroup(job, start(job, bundles, workers, use_gpu), say)
        with contextlib.closing(group):
            return group.train()
