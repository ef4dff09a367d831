"""The driver's side of warm processes: starts them ahead for the first group, for controllers and for the actor beside
each group, and decides when nodes get more."""

from __future__ import annotations

import importlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grpc
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import _process
from raytf._ray import raylets, state, train_env, worker_process
from raytf.config.resources import fitting
from raytf.config.train_config import TrainConfig
from raytf.errors import one_line
from raytf.runs.events import short
from raytf.training.process import warm_pool

#: Seconds between two requests to a node that lacks warm processes, and to a node that has them.
_SOON_SECONDS, _LATER_SECONDS = 2.0, 60.0
#: Seconds to wait for a reply before asking again.
_ANSWER_SECONDS = 30.0
#: A process that imported its modules less than this many seconds ago was not warm.
_COLD_SECONDS = 1.0
#: Time at which this process had imported its modules.
_imported_at = float("-inf")
_log = logging.getLogger(__name__)


class Schedule:
    """Decides when to ask which node. Does not use Ray. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._ready: set[str] = set()
        self._waiting: set[str] = set()

    def restart(self) -> None:
        """Forget the state of all nodes, because the group has changed."""
        self._asked.clear()
        self._ready.clear()
        self._waiting.clear()

    def due(self, nodes: list[str]) -> list[str]:
        """Return the nodes to ask now; they count as asked from now on."""
        now, due_nodes = self._clock(), []
        for node in nodes:
            patience = _LATER_SECONDS if node in self._ready else _SOON_SECONDS
            patience = _ANSWER_SECONDS if node in self._waiting else patience
            if now - self._asked.get(node, float("-inf")) >= patience:
                self._asked[node] = now
                self._waiting.add(node)
                due_nodes.append(node)
        return due_nodes

    def answered(self, node: str, ready: bool) -> None:
        """Record a node's reply: whether it has all the processes that it needs."""
        self._waiting.discard(node)
        (self._ready.add if ready else self._ready.discard)(node)


def spare_nodes(room: dict[str, int], group: dict[str, int]) -> dict[str, int]:
    """Return spare nodes for the workers of the group's fullest node, and how many workers each would run.

    Args:
        room: node -> workers that fit into its free resources, in Ray's order.
        group: node -> number of the group's workers on it.
    """
    wanted, spares = max(group.values(), default=0), {}
    for node, fits in room.items():
        if wanted > 0 and fits > 0 and node not in group:
            spares[node] = min(fits, wanted)
            wanted -= spares[node]
    return spares


class WarmSupply:
    """Keeps the nodes of a run, and a spare one, supplied with warm processes.

    Args:
        resources: resources of each worker.
        say: prints a line for the user, once for each node, on why it has no warm processes.
        is_next_soon: whether the next run may follow at once, as in a notebook, so that supply begins with the group.
        is_partial: whether training continues while lost workers restart, so that warm processes may start slowly.
    """

    def __init__(
        self,
        resources: dict[str, float],
        say: Callable[[str], None],
        is_next_soon: bool = False,
        is_partial: bool = False,
    ):
        self._resources, self._say, self._is_next_soon = resources, say, is_next_soon
        self._nice = warm_pool.BESIDE_TRAINING if is_partial and not is_next_soon else 0
        #: Whether to start warm processes right after the first step: a run's first group recomputes no lost steps.
        self._is_urgent = True
        self._schedule = Schedule()
        self._group: list[Any] = []
        self._runtime_env = ""
        self._began_cold = False
        #: Number of missing processes for the next group's actor and the next run's controller.
        self._helpers_lacking = 2
        self._answers: dict[Any, str] = {}
        self._explained: set[str] = set()

    def begin(self) -> None:
        """Record that the controller has started."""
        self._began_cold = time.monotonic() - _imported_at < _COLD_SECONDS

    def keep(self, workers: list[Any], staying: set[str]) -> None:
        """Start missing processes on nodes without notice; call this often while a group trains. Never waits, and
        reports a failure only once."""
        try:
            self._keep(workers, staying)
        except Exception as error:  # training works without warm processes
            self._say_once("run", f"no warm processes are started now: {type(error).__name__}: {one_line(error, 200)}")

    def _keep(self, workers: list[Any], staying: set[str]) -> None:
        group = [worker.actor for worker in workers]
        if group != self._group:
            # Spare nodes also wait until the group trains: all nodes may be on one machine.
            self._is_urgent = self._is_next_soon or not self._group
            if not set(group) & set(self._group):  # a new group, whose actor has used a warm process
                self._helpers_lacking = self._helpers_lacking or 1
            self._group, self._answers, self._runtime_env = group, {}, ""
            self._schedule.restart()
        if self._is_next_soon and self._began_cold and self._helpers_lacking:
            self._start_helpers()  # while the workers import TensorFlow; a warm group needs the CPUs itself
        self._collect()
        counts = Counter(worker.metadata.node_id for worker in workers)
        speakers = {worker.metadata.node_id: worker for worker in workers}
        for node in self._schedule.due([node for node in counts if node in staying]):
            asked = {"is_urgent": self._is_urgent, "nice": self._nice}
            self._answers[speakers[node].execute_async(warm_pool.prepare, counts[node], **asked)] = node
        if self._runtime_env and self._schedule.due(["the spare nodes"]):
            self._schedule.answered("the spare nodes", False)
            spares = spare_nodes(self._room(staying), counts)
            for node in self._schedule.due(list(spares)):
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                task: Any = ray.remote(num_cpus=0, max_retries=0)(warm_pool.prepare).options(scheduling_strategy=there)
                self._answers[task.remote(spares[node], self._runtime_env, nice=self._nice)] = node

    def _room(self, staying: set[str]) -> dict[str, int]:
        free = state.free_resources()
        return {node: fitting(has, self._resources) for node, has in free.items() if node in staying}

    def _start_helpers(self) -> None:
        # For the next group's actor and the next run's controller.
        context, node = ray.get_runtime_context(), worker_process.worker_node()
        env = context.get_runtime_env_string()
        raylets.prestart(
            node.node_ip_address,
            node.node_manager_port,
            context.get_job_id(),
            env,
            self._helpers_lacking,
            warm_pool.KEEP_SECONDS,
        )
        self._helpers_lacking = 0

    def _collect(self) -> None:
        if not self._answers:
            return
        for ref in ray.wait(list(self._answers), num_returns=len(self._answers), timeout=0)[0]:
            node = self._answers.pop(ref)
            try:
                answer: warm_pool.WarmAnswer = ray.get(ref)
            except ray.exceptions.RayError:  # the worker died, so the group will change
                continue
            if answer.runtime_env and (answer.ready or not self._nice) and self._helpers_lacking:
                self._start_helpers()
            self._schedule.answered(node, answer.ready)
            self._runtime_env = answer.runtime_env or self._runtime_env
            if answer.why:
                self._say_once(
                    node, f"no warm processes on node {short(node)}, so a restart takes longer: {answer.why}"
                )

    def _say_once(self, about: str, text: str) -> None:
        if about not in self._explained:
            self._explained.add(about)
            self._say(text)


def controller_variables() -> dict[str, str]:
    """Return a controller's environment variables, which make its process, and warm ones like it, import its modules at
    start."""
    return warm_pool.calling(__name__, import_controller.__name__)


def import_controller() -> None:
    """Import the modules that controllers need."""
    global _imported_at
    with _process.uncollected():
        for module in importlib.import_module("raytf._ray.train").CONTROLLER_MODULES:
            importlib.import_module(module)
    _imported_at = time.monotonic()


def env_of_workers(config: TrainConfig, resources: Mapping[str, float]) -> dict[str, str]:
    """Return the environment variables of a run's workers, in addition to those that Ray Train passes on."""
    if not config.cluster.warm_workers:
        return {}
    return warm_pool.environment(not config.run.verbose, hidden=not resources.keys() & {"GPU", "TPU"})


def start_ahead(config: TrainConfig, resources: dict[str, float]) -> None:
    """Start the first group's processes early, if the cluster has only one node. A failure costs only time."""
    if not config.cluster.warm_workers or config.strategy.has_servers:
        return
    here = ray.get_runtime_context().get_node_id()
    try:
        if [node["NodeID"] for node in ray.nodes() if node["Alive"]] == [here]:
            count = min(config.worker_range[1], fitting(state.free_resources().get(here, {}), resources))
            env = train_env.of_workers(controller_variables(), env_of_workers(config, resources))
            warm_pool.prepare(count, env)
    except (ray.exceptions.RayError, grpc.RpcError, OSError) as error:
        _log.debug("no process was started ahead: %s", error)
