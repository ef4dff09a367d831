"""Ray Train, filled in for TensorFlow: the backend, when to change the number of workers, which failures are worth
another attempt, and the driver's ear."""

from __future__ import annotations

import dataclasses
import time
import types
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer

from raytf import raylets
from raytf.elastic import Move, Resizer, View, fitting
from raytf.errors import JobError, RaytfError, WorkerLostError, one_line
from raytf.progress import Status
from raytf.supply import Supply

#: Seconds in which a worker may end by itself; Ray would wait 5 s for each that hangs.
_END_SECONDS = 0.5
#: Seconds in which Ray hears that the resources of a group that has ended are free.
_FREE_SECONDS = 1.0
#: Seconds between two looks at a cluster that cannot give the fewest workers yet, and between two words about it.
_WAIT_SECONDS, _WAIT_MESSAGE_SECONDS = 0.25, 60.0
#: Ray Train's callbacks that are not wanted: the first would change the workers' folder, while a job's relative paths
#: mean those of the driver; the second starts a process with Ray Data for each group, which raytf does not use.
_LEFT_OUT = ("WorkingDirectorySetupCallback", "DatasetsCallback")
#: Failures in a row without a new step after which a run stops: the next one would end alike.
_FRUITLESS_FAILURES = 5


@dataclasses.dataclass
class MwmsConfig(BackendConfig):
    """Ray Train's TensorFlow backend without its imports.

    Ray's own configuration imports TensorFlow in the controller (10 s) and sets TF_USE_LEGACY_KERAS in every worker.

    Attributes:
        threads: TensorFlow's threads within an operation, for each worker; 0 leaves it to TensorFlow.
        quiet: silence TensorFlow's messages.
        exact: have TensorFlow refuse operations without a deterministic kernel.
        jit: keep what XLA compiled for the next group.
    """

    threads: int = 0
    quiet: bool = True
    exact: bool = False
    jit: bool = False

    @property
    def backend_cls(self) -> type[Backend]:
        return _MwmsBackend


class _MwmsBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        from raytf import worker

        assert isinstance(backend_config, MwmsConfig)
        config, addresses = backend_config, worker_group.execute(_free_address)
        started = [
            worker_group.execute_single_async(
                rank, worker.set_up, addresses, rank, config.threads, config.quiet, config.exact, config.jit
            )
            for rank in range(len(worker_group))
        ]
        ray.get(started)


def _free_address() -> str:
    from ray.train._internal.utils import get_address_and_port

    host, port = get_address_and_port()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Trainer(TensorflowTrainer):
    """TensorflowTrainer with raytf's policies.

    Args:
        train_loop: run by each worker.
        run: names the run on this cluster.
        monitor: handle of the driver's Monitor.
        resize_every_seconds: between two planned changes of the number of workers.
        warm_workers: keep warm processes for the next group.
    """

    def __init__(
        self,
        train_loop: Callable[[], Any],
        run: str,
        monitor: Any,
        resize_every_seconds: float,
        warm_workers: bool,
        **kwargs: Any,
    ):
        self._run, self._monitor, self._resize_every_seconds = run, monitor, resize_every_seconds
        self._warm_workers = warm_workers
        # Past TensorflowTrainer's own __init__, which only fills in a default backend and imports TensorFlow for it.
        super(TensorflowTrainer, self).__init__(train_loop, **kwargs)

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["failure_policy"] = FailurePolicy(self.run_config.failure_config, self._monitor)
        kwargs["scaling_policy"] = ScalingPolicy(
            self.scaling_config, self._run, self._monitor, self._resize_every_seconds, self._warm_workers
        )
        return super()._initialize_and_run_controller(**kwargs)

    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        return [c for c in made if type(c).__name__ not in _LEFT_OUT] + [Teardown()]


class Teardown(WorkerGroupCallback):
    """Ends the workers that hang before Ray waits for them."""

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        answers = {worker.actor.shutdown.remote(): worker.actor for worker in worker_group.get_workers()}
        hanging = ray.wait(list(answers), num_returns=len(answers), timeout=_END_SECONDS)[1]
        for answer in hanging:
            ray.kill(answers[answer])


class ScalingPolicy(ElasticScalingPolicy):
    """Ray Train's elastic policy, with a save before each planned change and an own look at which nodes are alive.

    Ray's tears the group down in the middle of a step, up to a minute after the cluster has changed, and after the loss
    of a node it plans with that node until the cluster has noticed. Here the ranks save and wait first (`Resizer`
    decides when), nodes with notice are left out, and so are those whose raylet does not answer.

    Args:
        scaling_config: Ray Train's.
        run: names the run on this cluster.
        monitor: a Monitor's handle.
        resize_every_seconds: between two planned changes.
        warm_workers: keep warm processes for the next group.
    """

    def __init__(self, scaling_config: Any, run: str, monitor: Any, resize_every_seconds: float, warm_workers: bool):
        super().__init__(scaling_config)
        self._run, self._run_monitor = run, monitor
        self._resizer = Resizer(scaling_config.min_workers, resize_every_seconds)
        self._ticket = 0
        #: Nodes reserved for the run; and all that are alive and have no notice.
        self._nodes: list[str] = []
        self._staying: set[str] = set()
        self._unusable_workers = 0
        self._told_at = float("-inf")
        resources = scaling_config._resources_per_worker_not_none
        self._supply = Supply(resources, lambda text: monitor.say.remote(text)) if warm_workers else None

    def after_controller_start(self, train_run_context: Any) -> None:
        # What a controller that was killed has reserved stays reserved for three minutes, unless it is asked for under
        # the same name again. A run has one controller, since it has one owner.
        super().after_controller_start(types.SimpleNamespace(run_id=self._run))

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        self._maybe_send_resource_request()
        possible = self._look(knock=True)
        if possible is None or possible < self.scaling_config.min_workers:
            if time.monotonic() - self._told_at >= _WAIT_MESSAGE_SECONDS and possible is not None:
                self._told_at = time.monotonic()
                self._run_monitor.say.remote(
                    f"waiting: the cluster can run {possible} workers now, and at least "
                    f"{self.scaling_config.min_workers} are wanted"
                )
            time.sleep(_WAIT_SECONDS)  # Ray's controller would ask again at once, for ever
            return NoopDecision()
        return self._resize(possible)

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> ScalingDecision:
        self._maybe_send_resource_request()
        try:
            possible = self._look(knock=False)
            parked = ray.get(self._run_monitor.parked.remote(self._ticket), timeout=5)
        except ray.exceptions.RayError:
            return NoopDecision()
        if possible is None:
            return NoopDecision()
        if self._supply is not None:
            self._supply.keep(worker_group_state.workers, self._staying)
        mine = {worker.metadata.node_id for worker in worker_group_state.workers}
        workers = worker_group_state.num_workers
        view = View(time.monotonic(), workers, possible, bool(mine - self._staying), parked)
        match self._resizer.decide(view):
            case Move.PARK:
                why = "a node is about to go" if view.leaving else f"the cluster can run {possible}"
                self._run_monitor.say.remote(f"{why}: saving, to go on with {possible} instead of {workers} workers")
                self._ticket = ray.get(self._run_monitor.park.remote())
            case Move.RELEASE:
                self._run_monitor.release.remote()
            case Move.RESIZE:
                return self._resize(possible)
        return NoopDecision()

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str]:
        self._run_monitor.release.remote()  # not sooner: the ranks that wait would train on until they are ended
        self._wait_until_free(num_workers)
        # Ray may not know yet that a node is dead, and would place workers on it.
        return {"ray.io/node-id": f"in({','.join(self._nodes)})"}

    def _wait_until_free(self, workers: int) -> None:
        # What the last group had is free a moment after its end. A placement group that is asked for sooner takes
        # longer, since Ray tries again ever more seldom.
        each, deadline = self.scaling_config._resources_per_worker_not_none, time.monotonic() + _FREE_SECONDS
        while time.monotonic() < deadline:
            free = ray._private.state.available_resources_per_node()
            if sum(fitting(free.get(node, {}), each) for node in self._nodes) >= workers:
                break
            time.sleep(0.02)

    def _resize(self, workers: int) -> ResizeDecision:
        self._resizer.started(workers, time.monotonic())
        return self._get_resize_decision(workers)

    def _get_num_workers_for_resource_request(self) -> int:
        # What is reserved on a node that is about to go is asked for once more, elsewhere.
        return self.scaling_config.max_workers + self._unusable_workers

    def _look(self, knock: bool, known: dict[str, bool] | None = None) -> int | None:
        """Workers that the cluster can run on nodes that stay, at most the most wanted; None where Ray is silent.

        Args:
            knock: see whether each node's raylet answers; Ray takes up to a minute to miss one.
            known: which of them did a moment ago, in a second look after what is asked for has changed.
        """
        try:
            reserved = ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True),
                timeout=5,
            )
            leaving = ray._private.state.state.get_draining_nodes()
            staying = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in leaving}
        except ray.exceptions.RayError:
            return None
        self._staying = set(staying)
        answers = dict(known or {})
        unasked = [about for node, about in staying.items() if node in reserved and node not in answers]
        answering = raylets.answering(unasked) if knock else {about["NodeID"] for about in unasked}
        answers |= {about["NodeID"]: about["NodeID"] in answering for about in unasked}
        usable = {node: resources for node, resources in reserved.items() if answers.get(node)}
        unusable = super()._count_possible_workers({n: r for n, r in reserved.items() if n not in usable})
        if unusable != self._unusable_workers:
            self._unusable_workers = unusable
            self._send_resource_request()
            if known is None:  # a spare node may be reserved now
                return self._look(knock, answers)
        self._nodes = sorted(usable)
        return super()._count_possible_workers(usable)


class FailurePolicy(DefaultFailurePolicy):
    """Ray Train's retry budgets, and two reasons to stop sooner: an error that would come again, and no progress.

    Args:
        failure_config: Ray Train's.
        monitor: answers `reached`, the latest step that a run has reached; a Monitor's handle.
    """

    def __init__(self, failure_config: Any, monitor: Any):
        super().__init__(failure_config)
        self._run_monitor = monitor
        self._reached, self._fruitless = -1, 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        errors = worker_errors(training_failed_error)
        died = any(isinstance(e, ray.exceptions.RayActorError) for e in errors)
        for error in errors:
            # A dying peer can make TensorFlow raise anything.
            if isinstance(error, RaytfError) and not error.retryable and not (died and isinstance(error, JobError)):
                return FailureDecision.RAISE
        reached = self._ask_reached()
        self._fruitless = 0 if died or reached > self._reached else self._fruitless + 1
        self._reached = max(reached, self._reached)
        if self._fruitless >= _FRUITLESS_FAILURES:
            return FailureDecision.RAISE
        decision = super().make_decision(training_failed_error)
        if decision is FailureDecision.RETRY:
            self._run_monitor.say.remote(f"workers were lost ({_short(training_failed_error)}); starting again")
        return decision

    def _ask_reached(self) -> int:
        try:
            return ray.get(self._run_monitor.reached.remote(), timeout=10)
        except ray.exceptions.RayError:
            return self._reached


def _short(error: Exception) -> str:
    found = worker_errors(error) or [error]
    dead = sum(isinstance(e, ray.exceptions.RayActorError) for e in found)
    if dead:
        return f"{dead} worker process{'es' if dead > 1 else ''} died"
    if all(isinstance(e, WorkerLostError) for e in found):
        return "a peer does not answer"
    return f"{type(found[0]).__name__}: {one_line(found[0], 120)}"


def worker_errors(error: Exception) -> list[BaseException]:
    """What was raised or happened in each worker, out of what Ray Train wrapped it in, by rank."""
    found = []
    for _, failure in sorted(getattr(error, "worker_failures", {}).items()):
        inner = getattr(failure, "_base_exc", failure)  # what the worker's code raised
        found.append(getattr(inner, "health_check_failure", inner))  # why Ray could not reach the worker
    return found


class Monitor:
    """An actor that rank 0 talks to and the driver reads; it dies with the driver."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._messages: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._reached = 0
        self._ticket = self._tickets = 0
        self._parked: bool | None = None

    def update(self, status: Status) -> None:
        self._status = status
        self._reached = max(self._reached, status.step)

    def say(self, message: str) -> None:
        self._messages.append(message)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened that the ledger shall know; the time is that of this process's clock, for all."""
        self._events.append({"time": time.time(), "kind": kind, **fields})

    def reached(self) -> int:
        """The latest global step that was ever reported."""
        return self._reached

    def park(self) -> int:
        """Ask the ranks to save and wait; a ticket for this request."""
        self._tickets += 1
        self._ticket, self._parked = self._tickets, None
        return self._ticket

    def release(self) -> None:
        """There is nothing to wait for (any more)."""
        self._ticket = 0

    def wanted(self) -> int:
        """The ticket of the request to save and wait; 0 where there is none."""
        return self._ticket

    def answer(self, ticket: int, saved: bool) -> None:
        """The ranks wait, and could or could not save. Answers to old requests, perhaps of dead ranks, are void."""
        if ticket == self._ticket:
            self._parked = saved

    def parked(self, ticket: int) -> bool | None:
        """The answer to a request; None as long as there is none."""
        return self._parked if ticket and ticket == self._ticket else None

    def read(self) -> tuple[Status | None, list[str], list[dict[str, Any]]]:
        """The latest status, and the messages and events since the last call."""
        messages, self._messages = self._messages, []
        events, self._events = self._events, []
        return self._status, messages, events
