"""Decides the number of workers in the next group: Ray Train's elastic policy with raytf's decisions."""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions
import ray.train
from ray.util.placement_group import remove_placement_group

from raytf._ray import raylets, state, train
from raytf._ray.partial_group import NODE_LABEL, WorkerPlace, place_of
from raytf._ray.raylets import NodeReply
from raytf.config.flags import ClusterSection
from raytf.config.resources import fitting
from raytf.distributed.gpu import kinds
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink, worker_name
from raytf.driver.ray_train import resizing
from raytf.driver.ray_train.resizing import (
    ClusterView,
    Departures,
    NodeChoice,
    ResizeDecision,
    Resizer,
    choose_nodes,
)
from raytf.driver.ray_train.warm_processes import WarmSupply
from raytf.driver.supervision.retry import Supervisor
from raytf.driver.supervision.watchdog import Watchdog
from raytf.errors import WorkerLostError
from raytf.runs import events
from raytf.runs.notebook import in_notebook
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.worker import take_rank

#: Seconds that Ray may take to notice that the resources of an ended group are free.
_FREE_SECONDS = 1.0
#: Seconds between two checks of a cluster that cannot run the fewest workers yet.
_WAIT_SECONDS = 0.25
#: Seconds between two messages about such a cluster.
_WAIT_MESSAGE_SECONDS = 60.0
#: Seconds to wait for a reply from the monitor.
_ANSWER_SECONDS = 5.0


def remove_abandoned() -> None:
    """Remove this job's placement groups whose controller died; Ray would do so only when the driver exits."""
    for group in state.abandoned_placement_groups():
        remove_placement_group(group)


@dataclass(frozen=True)
class PolicyContext:
    """The run for which a policy decides.

    Attributes:
        name: name of the run on this cluster.
        supervisor: the run's Supervisor, shared with the failure policy.
        keeps_kind: whether to keep the first group's kind of GPU, because another kind would compute different bits.
        is_alone: whether no other job uses this Ray.
        arbiter: decides which workers are in the group if they can join and leave while others train; else None.
    """

    name: str
    monitor: MonitorClient
    uri: str
    flags: ClusterSection
    supervisor: Supervisor
    keeps_kind: bool = False
    is_alone: bool = False
    arbiter: ArbiterAddress | None = None


class ScalingPolicy(train.ElasticScalingPolicy):
    """Ray Train's elastic policy, with a save before each planned change and its own check of which nodes are alive.

    Ray's policy shuts the group down in the middle of a step, up to a minute after the cluster has changed. After the
    loss of a node, it counts on that node until the cluster has noticed the loss. Here the ranks save and wait first.
    This class asks Ray and acts. `Resizer` decides when to resize, `choose_nodes` and `NodeExclusion` choose the nodes,
    and `Watchdog` ends a group that hangs.
    """

    def __init__(self, scaling_config: Any, run: PolicyContext):
        super().__init__(scaling_config)
        self._run, self._run_monitor, flags = run, run.monitor, run.flags
        self._is_partial = run.arbiter is not None
        self._resizer = Resizer(scaling_config.min_workers, flags.resize_every_seconds, self._is_partial)
        self._departures = Departures()
        #: Created in the controller's process.
        self._watchdog: Watchdog | None = None
        #: The latest choice of nodes, and the nodes on which workers fail.
        self._choice = NodeChoice(set(), frozenset(), frozenset())
        self._unwanted: list[str] = []
        #: Nodes of stragglers that should be replaced.
        self._slow: list[str] = []
        self._ticket = 0
        #: Usable nodes that are reserved for the run.
        self._nodes: list[str] = []
        #: All nodes that are alive and have no notice.
        self._staying: set[str] = set()
        #: Nodes with notice -> Unix time in ms at which they disappear, 0 if unknown.
        self._leaving: dict[str, int] = {}
        self._ends = NoticeEnds(run.monitor)
        #: The current group's ranks on nodes with notice -> the node.
        self._noticed: dict[int, str] = {}
        #: All nodes of the group that ever had notice, because Ray no longer lists a dead node as draining.
        self._noticed_nodes: set[str] = set()
        self._unusable_workers = 0
        self._reported_at = float("-inf")
        resources = train.resources_of_worker(scaling_config)
        self._has_one_kind = bool(resources.get("GPU")) and not flags.mixed_gpus
        #: The GPU kind of the current group and of the next group.
        self._kind: str | None = None
        self._next_kind: str | None = None
        warm = WarmSupply(resources, run.monitor.say, in_notebook(), self._is_partial)
        self._supply = warm if flags.warm_workers else None

    def after_controller_start(self, train_run_context: Any) -> None:
        if self._supply is not None:
            self._supply.begin()
        if self._run.is_alone:
            self._requester_id = f"train-{self._run.name}"
            self._coordinator_client = train.coordinator_here(self._requester_id)
            self._send_resource_request()
            return
        # Reservations of a killed controller last three minutes, unless they are requested again under the same name.
        # The name is unique, because a run has only one owner and so only one controller.
        super().after_controller_start(types.SimpleNamespace(run_id=self._run.name))

    def after_controller_state_update(self, previous_state: Any, current_state: Any) -> None:
        if self._watchdog is not None and type(current_state).__name__ not in ("RunningState", "SchedulingState"):
            self._watchdog.over()

    def make_decision_for_non_running_worker_group(self) -> train.ScalingDecision:
        self._maybe_send_resource_request()
        if time.monotonic() < self._run.supervisor.resumes_at:
            time.sleep(_WAIT_SECONDS)
            return train.NoopDecision()
        possible, fewest = self._poll_cluster(knock=True), self.scaling_config.min_workers
        workers = resizing.next_size(possible, self._run.supervisor.survivors, fewest)
        if workers is not None:
            return self._resize(workers)
        if time.monotonic() - self._reported_at >= _WAIT_MESSAGE_SECONDS and possible is not None:
            self._reported_at = time.monotonic()
            self._run_monitor.book(events.Waiting(possible, fewest))
            self._run_monitor.say(
                f"waiting: the cluster can run {possible} workers now, but at least {fewest} are needed"
            )
        time.sleep(_WAIT_SECONDS)  # otherwise Ray's controller calls this in a busy loop
        return train.NoopDecision()

    def make_decision_for_running_worker_group(
        self, worker_group_state: Any, worker_group_status: Any
    ) -> train.ScalingDecision:
        self._maybe_send_resource_request()
        self._poll_workers(worker_group_state)
        try:
            possible = self._poll_cluster(knock=False)
            parked = self._run_monitor.parked(self._ticket, 5)
        except ray.exceptions.RayError:
            return train.NoopDecision()
        if possible is None:
            return train.NoopDecision()
        workers = worker_group_state.num_workers
        nodes = {w.distributed_context.world_rank: w.metadata.node_id for w in worker_group_state.workers}
        mine, end = set(nodes.values()), self._follow_notices(nodes)
        ended = {rank for rank, status in worker_group_status.worker_statuses.items() if not status.running}
        left = self._departures.left([place_of(worker) for worker in worker_group_state.workers], ended)
        if left:
            return self._get_resize_decision(workers - len(left))
        if self._departures.are_awaited:
            return train.NoopDecision()
        if self._supply is not None:
            self._supply.keep(worker_group_state.workers, self._staying)
        replaced = mine & {*self._slow, *self._unwanted} - set(self._nodes)
        view = ClusterView(time.monotonic(), workers, possible, bool(mine - self._staying or replaced), parked, end)
        match self._resizer.decide(view):
            case ResizeDecision.PARK:
                why = _why_to_park(view, bool(replaced), self.scaling_config.min_workers)
                self._run_monitor.say(why)
                self._run_monitor.book(events.Park(workers, possible, why, bool(self._noticed)))
                self._ticket = self._run_monitor.park()
            case ResizeDecision.RELEASE:
                self._run_monitor.release(self._ticket)
            case ResizeDecision.RESIZE:
                why = "a node is about to go" if view.leaving else "the cluster has changed"
                self._run_monitor.book(events.Resize(workers, possible, why, bool(self._noticed)))
                return self._resize(possible)
        return train.NoopDecision()

    def ranks_to_replace(self, nodes: Sequence[str], lost: Collection[int], wanted: int) -> list[int]:
        """Return the lost ranks to replace with new workers on the same nodes."""
        return resizing.ranks_to_replace(nodes, lost, wanted, self._nodes)

    def planned_change(self, nodes: Sequence[str], wanted: int) -> tuple[list[int], int]:
        """Return the ranks that leave, and how many workers to add before they leave."""
        return resizing.planned_change(nodes, wanted, self._nodes)

    def replaced(self, ranks: Collection[int], nodes: Mapping[int, str]) -> None:
        """Record that these ranks were reassigned to other workers; `nodes` holds the node of every rank."""
        self._run_monitor.forget(list(ranks))
        self._noticed = {}
        self._follow_notices(nodes)
        self._departures.go_on()
        assert self._watchdog is not None
        self._watchdog.joined(ranks)

    def guarding(self) -> AbstractContextManager[None]:
        """Return a context that ends workers that are stopped while others wait for them."""
        assert self._watchdog is not None
        return self._watchdog.guarding()

    def is_full(self) -> None:
        """Record that there was no room for additional workers, or that they did not start."""
        self._departures.wait_for_room()

    def take_rank(self) -> Callable[[Any], None]:
        """Return the function that a worker calls when Ray Train assigns it another rank."""
        return take_rank

    def selector(self) -> dict[str, str]:
        """Return a label selector for nodes where workers may start; Ray may not know yet that a node is dead."""
        return {NODE_LABEL: f"in({','.join(self._nodes)})"}

    def dismiss(self, workers: Sequence[WorkerPlace], after: Sequence[WorkerPlace]) -> None:
        """Dismiss workers once the workers `after` have joined."""
        assert self._run.arbiter is not None
        dismiss(self._run.arbiter, workers, after)
        self._departures.dismiss(workers)

    def take_gone(self) -> set[int]:
        """Return the ranks of dismissed workers that have left, and forget them."""
        return self._departures.take()

    def _follow_notices(self, nodes: Mapping[int, str]) -> float | None:
        """Report which ranks are on nodes with notice. Return the monotonic time at which the first of these nodes
        disappears, or None if unknown."""
        now, ends = time.monotonic(), self._ends.of(self._leaving, nodes.values())
        for node in sorted(set(ends) - self._noticed_nodes):
            end = ends[node]
            self._run_monitor.book(events.Drain(node, None if end is None else round(end - now, 1)))
        self._noticed_nodes |= set(ends)
        noticed = {rank: node for rank, node in nodes.items() if node in self._noticed_nodes}
        if noticed != self._noticed:
            self._noticed = noticed
            self._run_monitor.set_noticed(noticed)
        return min((end for end in ends.values() if end is not None), default=None)

    def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str]:
        self._watchdog = self._watchdog or Watchdog(self._run_monitor, self._run.uri, self._run.flags.hang_seconds)
        self._watchdog.begin()
        self._kind = self._next_kind
        self._run_monitor.book(events.GroupStart(num_workers, self._nodes))
        self._noticed, self._noticed_nodes = {}, set()
        self._departures.reset()
        self._wait_until_free(num_workers)
        return self.selector()

    def _wait_until_free(self, workers: int) -> None:
        # Resources of the last group are free a moment after its end. A placement group that is requested earlier takes
        # longer, because Ray retries at growing intervals.
        need, deadline = train.resources_of_worker(self.scaling_config), time.monotonic() + _FREE_SECONDS
        while time.monotonic() < deadline:
            free = state.free_resources()
            if sum(fitting(free.get(node, {}), need) for node in self._nodes) >= workers:
                break
            time.sleep(0.02)

    def _resize(self, workers: int) -> train.ResizeDecision:
        self._resizer.started(workers, time.monotonic())
        return self._get_resize_decision(workers)

    def _get_num_workers_for_resource_request(self) -> int:
        # Request replacements on other nodes for reservations on unusable nodes.
        return self.scaling_config.max_workers + self._unusable_workers

    def _poll_workers(self, worker_group_state: Any) -> None:
        """Record the nodes of slow workers. If the group hangs, raise the watchdog's error, which ends it."""
        assert self._watchdog is not None
        for straggler in self._watchdog.poll(worker_group_state.workers):
            if self._run.flags.replace_stragglers and straggler.node not in self._slow:
                self._slow.append(straggler.node)

    def _count_possible_workers(self, reserved_resources: Any) -> int:
        need = train.resources_of_worker(self.scaling_config)  # Ray's count has rounding errors for fractions of GPUs
        room = sum(fitting(has, need) for has in reserved_resources.values())
        return min(room, self.scaling_config.max_workers)

    def _choose(self, usable: dict[str, Any], nodes: Mapping[str, Any]) -> set[str]:
        """Return the nodes for workers, and report nodes that are newly left out.

        Args:
            usable: node -> resources reserved on it.
            nodes: node -> its entry in `ray.nodes()`.
        """
        exclusion, now = self._run.supervisor.exclusion, time.monotonic()
        self._unwanted = exclusion.excluded(usable, now)
        known = {node: kinds.of_node(nodes[node]) for node in usable}

        def of_one_kind(some: set[str]) -> set[str]:
            if not self._has_one_kind:
                return some
            among = {node: known[node] for node in some}
            return kinds.nodes_of(among, kinds.one_kind(among, count, self._kind, self._run.keeps_kind))

        def count(some: Collection[str]) -> int:
            return self._count_possible_workers({node: usable[node] for node in some})

        fewest, before = self.scaling_config.min_workers, self._choice
        self._choice = choice = choose_nodes(usable, self._unwanted, self._slow, fewest, count, of_one_kind)
        self._next_kind = next((known[node] for node in choice.nodes), None)
        for node in choice.failing - before.failing:
            why = exclusion.why(node, now)
            self._run_monitor.say(f"node {events.short(node)} is left out: {why}")
            self._run_monitor.book(events.Exclude(node, why))
        if choice.other_kinds - before.other_kinds:
            self._run_monitor.say(kinds.left_out_text(choice.other_kinds, known, self._next_kind or ""))
        return choice.nodes

    def _poll_cluster(self, knock: bool, known: dict[str, bool] | None = None) -> int | None:
        """Return how many workers the cluster can run on nodes without notice, at most the maximum.

        Args:
            knock: whether to check that each node's raylet answers; Ray takes up to a minute to notice a dead node.
            known: which raylets answered a moment ago, for a second poll after the resource request has changed.

        Returns:
            None if Ray does not answer.
        """
        try:
            reserved = ray.get(
                self._autoscaling_coordinator.get_reserved_resources.remote(self._requester_id, recompute=True),
                timeout=5,
            )
            self._leaving = leaving = state.draining_nodes()
            staying = {n["NodeID"]: n for n in ray.nodes() if n["Alive"] and n["NodeID"] not in leaving}
        except ray.exceptions.RayError:
            return None
        self._staying = set(staying)
        answers = dict(known or {})
        unasked = [about for node, about in staying.items() if node in reserved and node not in answers]
        if knock:
            answers |= {node: answer is NodeReply.LIVES for node, answer in raylets.ask(unasked).items()}
        else:
            answers |= {about["NodeID"]: True for about in unasked}
        usable = {node: resources for node, resources in reserved.items() if answers.get(node) and node in staying}
        chosen = self._choose(usable, staying)
        usable = {node: resources for node, resources in usable.items() if node in chosen}
        # Do not request replacements for nodes with other GPUs: new nodes could be of any kind, so this might not end.
        lost = [n for n in reserved if n not in usable and n not in self._choice.other_kinds]
        lost += [n for n in {*self._slow, *self._unwanted} if n in usable]
        unusable = self._count_possible_workers({n: reserved[n] for n in lost})
        if unusable != self._unusable_workers:
            self._unusable_workers = unusable
            self._send_resource_request()
            if known is None:  # a replacement may be reserved now
                return self._poll_cluster(knock, answers)
        self._nodes = sorted(usable)
        return self._count_possible_workers(usable)


def _why_to_park(view: ClusterView, is_slow: bool, fewest: int) -> str:
    if view.possible < fewest:
        return (
            f"a node is about to go, but the cluster can run only {view.possible} workers without it, and at least "
            f"{fewest} are needed: saving, then training until it goes"
        )
    why = "a node is about to go" if view.leaving else f"the cluster can run {view.possible}"
    why = "a node is slow, and another one is available" if is_slow else why
    return f"{why}: saving, to continue with {view.possible} instead of {view.workers} workers"


class NoticeEnds:
    """Converts each notice to monotonic time when it is first seen, so that later changes of a clock have no effect.

    The monitor knows the seconds left until each deadline that the workers of a node have reported.
    """

    def __init__(self, monitor: MonitorClient):
        self._monitor = monitor
        #: Node -> the deadline that Ray reported, and the monotonic time at which the node disappears.
        self._seen: dict[str, tuple[int, float | None]] = {}

    def of(self, leaving: Mapping[str, int], nodes: Collection[str]) -> dict[str, float | None]:
        """Return the monotonic time at which each of these nodes with notice disappears, or None if unknown.

        Args:
            leaving: nodes with notice -> Unix time in ms as Ray reported it, 0 for none.
        """
        for node, at in leaving.items():
            if node in nodes and (node not in self._seen or self._seen[node][0] != at):
                self._seen[node] = at, self._end(node, at)
        return {node: self._seen[node][1] for node in leaving if node in nodes}

    def _end(self, node: str, at: int) -> float | None:
        left: float | None = None
        with contextlib.suppress(ray.exceptions.RayError):
            left = self._monitor.seconds_left(node, _ANSWER_SECONDS)
        if left is None and at:  # Ray passes on a wall-clock time of the machine that sent the notice
            left = max(0.0, at / 1000 - time.time())
        return None if left is None else time.monotonic() + left


def dismiss(arbiter: ArbiterAddress, workers: Sequence[WorkerPlace], after: Sequence[WorkerPlace]) -> None:
    """Dismiss workers once the workers `after` have joined."""
    with contextlib.suppress(WorkerLostError):  # the arbiter exits with the driver
        link = ArbiterLink.connect(arbiter, "the controller")
        link.dismiss([worker_name(*place) for place in workers], [worker_name(*place) for place in after])
        link.close()
