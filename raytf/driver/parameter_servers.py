"""A run with parameter servers, from the driver: its processes are placed, watched, and started anew when it must be.

The processes are Ray actors in one placement group: the coordinator, the parameter servers and the workers. A worker
that dies is started again by Ray in its place, under the same address, while the others go on. Without a parameter
server its weights are lost, and a coordinator whose server was replaced cannot go on in the same process; so when
either dies, all end and a new group begins with the newest checkpoint. They belong to the driver, and end with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytf._ray import state, train
from raytf.cluster import scratch
from raytf.config.resources import HELPER, possible_workers
from raytf.distributed import worker_table
from raytf.distributed.gpu import visibility
from raytf.driver.supervision.retry import Cause, Failure, Retry
from raytf.errors import (
    ClusterError,
    GpuError,
    HangError,
    JobError,
    RaytfError,
    StorageError,
    WorkerLostError,
    one_line,
)
from raytf.runs.restart_phases import Phases
from raytf.training.job import Job
from raytf.training.worker import settle_in

#: Seconds in which a placement group that fits must have come to be, and between two looks at a cluster that is too
#: small, and two words about it.
_PLACE_SECONDS, _WAIT_SECONDS, _WAIT_MESSAGE_SECONDS = 20.0, 0.5, 60.0
#: Seconds in which Ray gives back what processes had that have ended.
_FREE_SECONDS = 8.0
#: Seconds in which all processes must have started: Python, TensorFlow and, on a new node, the job's files.
_START_SECONDS = 300.0


class Process:
    """An actor: one process of the group. TensorFlow is imported while the others start.

    Args:
        threads: of TensorFlow within an operation.
        quiet: silence TensorFlow's messages.
    """

    def __init__(self, threads: int, quiet: bool):
        self._phases = Phases()
        self._threads = threads
        os.environ["KERAS_BACKEND"] = "tensorflow"
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # a peer that is starting again is waited for
        if quiet:
            os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
        #: Told when somebody asks: of an actor that cannot be made, Ray passes on a text alone.
        self._fault: GpuError | None = None
        try:
            self._load()
        except GpuError as error:
            self._fault = error
        self._phases.mark("tensorflow")
        self._server: Any = None

    def _load(self) -> None:
        gpus = visibility.given()
        visibility.heed(gpus)
        visibility.demand_driver(gpus)
        import tensorflow as tf

        devices = tf.config.list_physical_devices("GPU")
        visibility.demand(gpus, devices)
        if devices:
            from raytf.distributed.devices import set_memory

            set_memory(visibility.share())

    def address(self) -> str:
        """HOST:PORT for its TensorFlow server, from now on.

        Raises:
            GpuError: this process has not the GPU that it was given.
        """
        if self._fault is not None:
            raise self._fault
        return train.free_address()

    def join(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Take a place in the cluster; what `--show-cluster` shows of this process.

        Args:
            cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
            job, index: the place in it.
        """
        settle_in()
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        return worker_table.about_me(serves=True)

    def serve(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Join the cluster and begin to serve.

        Raises:
            WorkerLostError: the address is that of another node, on which Ray did not start this process again.
            GpuError: this process has not the GPU that it was given.
        """
        from raytf.distributed import tf_server

        host = cluster[job][index].rpartition(":")[0].strip("[]")
        if ray.util.get_node_ip_address() != host:
            raise WorkerLostError(f"its node {host} is gone")
        if self._fault is not None:
            raise self._fault
        self._server = tf_server.start_server(cluster, job, index, self._threads)
        return self.join(cluster, job, index)

    def live(self) -> None:
        """Never returns."""
        while True:
            time.sleep(3600)

    def coordinate(self, job: Job, cluster: dict[str, list[str]]) -> dict[str, Any] | None:
        """Train, and return the run's result."""
        import tensorflow as tf

        from raytf.training.heartbeat import Pulse
        from raytf.training.parameter_server import loop

        tf.config.threading.set_intra_op_parallelism_threads(self._threads)
        pulse = Pulse(job.monitor, 0, 1)
        try:
            return loop.run(job, pulse, self._phases, cluster)
        except JobError as error:
            error.step = pulse.step
            raise
        finally:
            pulse.stop()
            scratch.end()


# Three names, for `ps` and for Ray's dashboard.
class ParameterServer(Process):
    """Holds weights."""


class ParameterWorker(Process):
    """Computes gradients."""


class Coordinator(Process):
    """Hands out batches."""


def run(job: Job, use_gpu: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Train a job with parameter servers to its end; its result.

    Args:
        say: takes a line for the user.

    Raises:
        RaytfError: another attempt would end alike.
    """
    monitor, retry, failures = job.monitor, Retry(), 0
    most = job.config.cluster.max_failures
    while True:
        with _placed(job, use_gpu, say) as group:
            try:
                return group.train()
            except (RaytfError, ray.exceptions.RayError) as error:
                failure = classify(error, group.lost)
                raised = error
        failures += 1
        reached = ray.get(monitor.reached.remote())
        decided = retry.decide(failure, reached)
        goes_on = decided.retry and (most < 0 or failures <= most)
        fields: dict[str, Any] = {"cause": failure.cause.value, "ranks": [], "nodes": [], "text": failure.text}
        monitor.event.remote("fault", {**fields, "retry": goes_on, "preemption": False})
        if goes_on:
            say(decided.why)
            time.sleep(decided.pause)
            continue
        if decided.retry:
            say(f"{failure.text}; not tried again: --max-failures is used up")
        elif not failure.is_final and failure.text != decided.why:
            say(f"not tried again: {decided.why}")
        if isinstance(raised, RaytfError):
            raise raised
        raise ClusterError(f"training failed: {failure.text}", passes=True)


def classify(error: Exception, lost: str) -> Failure:
    """What failed.

    Args:
        error: that ended the group.
        lost: which process died, as the driver saw it; empty for none.
    """
    inner = getattr(error, "cause", None) or error
    if lost:
        return Failure(Cause.WORKER_DIED, lost)
    if "ModuleNotFoundError" in str(error):
        missing = one_line(str(error)[str(error).index("ModuleNotFoundError") :], 200)
        text = (
            f"the processes cannot load the job: {missing}. Every node needs the job's modules: give them with "
            "`ray job submit --working-dir .`, or install them on the nodes"
        )
        return Failure(Cause.ERROR, text, is_final=True)
    if isinstance(inner, RaytfError) and not inner.retryable:
        kind = type(inner).__name__
        text = one_line(inner, 200).rstrip(".")
        return Failure(
            Cause.ERROR, text, f"{kind}: {inner}", getattr(inner, "step", None), not isinstance(inner, JobError)
        )
    if isinstance(inner, HangError):
        return Failure(Cause.HANG, one_line(inner, 200).rstrip("."))
    if isinstance(inner, GpuError):
        return Failure(Cause.GPU, one_line(inner).rstrip("."))
    if isinstance(inner, WorkerLostError):
        return Failure(Cause.PEER_LOST, "a parameter server does not answer")
    if isinstance(inner, StorageError):
        return Failure(Cause.STORAGE, one_line(inner, 200).rstrip("."))
    return Failure(Cause.OTHER, f"the group was lost ({type(inner).__name__}: {one_line(inner, 160)})")


class Group:
    """The processes of one attempt.

    Attributes:
        lost: what of it died, for people; empty as long as nothing did.
    """

    def __init__(self, job: Job, bundles: Any, workers: int, use_gpu: bool, say: Callable[[str], None]):
        self._job, self._say, self.lost = job, say, ""
        cluster, quiet = job.config.cluster, not job.config.run.verbose
        threads = max(1, int(cluster.cpus))
        servers = job.config.strategy.ps or 1

        def start(kind: type[Process], bundle: int, restarts: int, cpus: float, gpus: float, own_threads: int) -> Any:
            place = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=bundle)
            made = ray.remote(kind).options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=restarts,
                max_concurrency=4,
                scheduling_strategy=place,
            )
            return made.remote(own_threads, quiet)

        self._chief = start(Coordinator, 0, 0, 1, 0, 1)
        self._servers = [start(ParameterServer, 1 + i, 0, 1, 0, 1) for i in range(servers)]
        each, gpus = cluster.cpus, cluster.gpus_per_worker if use_gpu else 0
        self._workers = [start(ParameterWorker, 1 + servers + i, -1, each, gpus, threads) for i in range(workers)]
        self._cluster: dict[str, list[str]] = {}

    def train(self) -> dict[str, Any] | None:
        """Have the processes train; watch them meanwhile."""
        everyone = [self._chief, *self._servers, *self._workers]
        asked = [process.address.remote() for process in everyone]
        try:
            chief, *others = ray.get(asked, timeout=_START_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise WorkerLostError(f"the processes did not start within {_START_SECONDS:.0f} s") from None
        servers = len(self._servers)
        self._cluster = {"chief": [chief], "ps": others[:servers], "worker": others[servers:]}
        starts = [(p, "ps", i) for i, p in enumerate(self._servers)]
        starts += [(p, "worker", i) for i, p in enumerate(self._workers)]
        joined = [self._chief.join.remote(self._cluster, "chief", 0)]
        joined += [p.serve.remote(self._cluster, kind, i) for p, kind, i in starts]
        self._show(ray.get(joined, timeout=_START_SECONDS))
        watched = {p.live.remote(): (kind, i) for p, kind, i in starts}
        result = self._chief.coordinate.remote(self._job, self._cluster)
        watched[result] = ("chief", 0)
        return self._watch(watched, result)

    def _show(self, processes: list[dict[str, Any]]) -> None:
        if self._job.config.strategy.show_cluster:
            servers = worker_table.count(len(self._servers), "parameter server")
            title = (
                f"{worker_table.count(len(self._workers), 'worker')}, {servers} and the coordinator, parameter-server"
            )
            self._say(worker_table.table(title, processes))

    def _watch(self, watched: dict[Any, tuple[str, int]], result: Any) -> dict[str, Any] | None:
        missing: set[int] = set()
        while True:
            done, _ = ray.wait(list(watched), num_returns=1, timeout=60)
            # A process that died explains what the coordinator says of it.
            for ref in sorted(done, key=lambda r: watched[r][0] == "chief"):
                kind, i = watched.pop(ref)
                error = _error_of(ref)
                if kind == "ps":
                    self.lost = f"parameter server {i} died"
                    raise WorkerLostError(self.lost)
                if kind == "worker":
                    self._replace(i, error, watched, missing)
                elif kind == "again":
                    self._came_back(i, ref, error, watched, missing)
                elif error is None:
                    return ray.get(ref)
                else:
                    self._explain(error, watched)
                    raise error

    def _explain(self, error: Exception, watched: dict[Any, tuple[str, int]]) -> None:
        """The coordinator has failed: a server that died at the same time is why."""
        if isinstance(error, ray.exceptions.RayActorError):
            self.lost = "the coordinator died"
            return
        if isinstance(error, WorkerLostError):
            for ref in ray.wait(list(watched), num_returns=1, timeout=3)[0] if watched else []:
                if watched[ref][0] == "ps":
                    self.lost = f"parameter server {watched[ref][1]} died"

    def _replace(self, i: int, error: Exception | None, watched: dict[Any, tuple[str, int]], missing: set[int]) -> None:
        missing.add(i)
        self._job.monitor.event.remote("worker_lost", {"worker": i, "text": one_line(error, 200)})
        self._say(f"worker {i} died; the others go on, and it is started again")
        watched[self._workers[i].serve.remote(self._cluster, "worker", i)] = ("again", i)

    def _came_back(
        self, i: int, ref: Any, error: Exception | None, watched: dict[Any, tuple[str, int]], missing: set[int]
    ) -> None:
        if error is None:
            missing.discard(i)
            self._say(f"worker {i} is back")
            if self._job.config.strategy.show_cluster:
                self._say(worker_table.table(f"worker {i}, started again", [ray.get(ref)]))
            watched[self._workers[i].live.remote()] = ("worker", i)
            return
        if isinstance(error, ray.exceptions.ActorUnavailableError):  # it died once more while it started
            watched[self._workers[i].serve.remote(self._cluster, "worker", i)] = ("again", i)
            return
        left, least = len(self._workers) - len(missing), self._job.config.cluster.worker_range[0]
        if left < least:
            self.lost = f"{len(missing)} of {len(self._workers)} workers are gone"
            raise WorkerLostError(self.lost)
        self._say(f"worker {i} cannot be started again where it was; {left} go on")

    def close(self) -> None:
        """End all processes."""
        for process in [self._chief, *self._servers, *self._workers]:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(process)


def _error_of(ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except (RaytfError, ray.exceptions.RayError) as error:
        cause = getattr(error, "cause", None)  # without the traceback that Ray adds
        return cause if isinstance(cause, RaytfError) else error
    return None


@contextlib.contextmanager
def _placed(job: Job, use_gpu: bool, say: Callable[[str], None]) -> Iterator[Group]:
    """A group on as many workers as there is room for; waits where there is too little."""
    config, told_at, began = job.config, float("-inf"), time.monotonic()
    least, most = config.cluster.worker_range
    each = {"CPU": config.cluster.cpus, **({"GPU": config.cluster.gpus_per_worker} if use_gpu else {})}
    helpers = config.strategy.helpers
    with contextlib.ExitStack() as stack:
        while True:
            workers = possible_workers(_free(), each, [HELPER] * helpers, most)
            bundles = _reserve(each, workers, helpers) if workers >= least else None
            if bundles is not None:
                break
            if time.monotonic() - began < _FREE_SECONDS:  # what the last group had is free in a moment
                time.sleep(_WAIT_SECONDS)
                continue
            if time.monotonic() - told_at >= _WAIT_MESSAGE_SECONDS:
                told_at = time.monotonic()
                job.monitor.event.remote("waiting", {"possible": max(0, workers), "wanted": least})
                say(
                    f"waiting: the cluster has room for {max(0, workers)} workers beside {helpers} processes for "
                    f"parameter servers and coordinator now, and at least {least} workers are wanted"
                )
            _wait_for(each, least, helpers)
        stack.callback(_release, bundles)
        job.monitor.event.remote("group", {"workers": workers, "nodes": []})
        ray.get(job.monitor.begin_group.remote())
        group = Group(job, bundles, workers, use_gpu, say)
        stack.callback(group.close)
        yield group


def _bundles(each: dict[str, float], workers: int, helpers: int) -> Any:
    return placement_group([HELPER] * helpers + [each] * workers, strategy="SPREAD")


def _release(bundles: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        remove_placement_group(bundles)


def _reserve(each: dict[str, float], workers: int, helpers: int) -> Any:
    """Room for a group; None where it is not there after all."""
    bundles = _bundles(each, workers, helpers)
    if bundles.wait(_PLACE_SECONDS):
        return bundles
    _release(bundles)
    return None


def _wait_for(each: dict[str, float], workers: int, helpers: int) -> None:
    """Ask for room, which an autoscaler sees, until it is there or what is free has changed."""
    wish, before = _bundles(each, workers, helpers), _free()
    try:
        while not wish.wait(_WAIT_SECONDS) and _free() == before:
            pass
    finally:
        _release(wish)
        time.sleep(_WAIT_SECONDS)  # until Ray has the room back


def _free() -> list[dict[str, float]]:
    """What each node has free; processor and GPU alone."""
    nodes = state.free_resources().values()
    return [{kind: node.get(kind, 0.0) for kind in ("CPU", "GPU")} for node in nodes]
