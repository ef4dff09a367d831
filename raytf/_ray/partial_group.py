"""Ray Train's controller and worker group, which can replace or drop some workers while the others train.

Ray Train can replace only failing replica groups, of one worker each, while the number of workers stays the same; see
its `WorkerGroup.replace_replica_group`. Here, workers whose nodes disappeared may also be dropped.

Each worker has its own placement group, on nodes that Ray has chosen for all workers together, since Ray cannot remove
one bundle from a placement group. Ray keeps bundles whose node disappeared and counts them as demand. In 2.60 the GCS
retries without a pause to place them while a node is large enough but has no room, which keeps a core of the head busy
until another node joins (https://github.com/ray-project/ray/pull/65007). The bundles of workers that have left would
hold unused resources.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.train.v2._internal.execution import controller as ray_train
from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import RunningState
from ray.train.v2._internal.execution.scaling_policy import ResizeDecision
from ray.train.v2._internal.execution.worker_group import ReplicaGroup, Worker, WorkerGroup, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.train.v2._internal.util import bundle_to_remote_args
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytf._ray import state, train

_log = logging.getLogger(__name__)

#: Ray's label for the id of a node.
NODE_LABEL = "ray.io/node-id"
#: The id in Ray of a worker's node, and the worker's process id.
WorkerPlace = tuple[str, int]
#: Seconds between two checks whether returned resources are free, and whether the nodes of starting workers exist.
_POLL_SECONDS, _LOST_SECONDS = 0.01, 1.0
#: Seconds to find room for added workers, and to wait for the answers of the workers that stay.
_ROOM_SECONDS, _ANSWER_SECONDS = 5.0, 5.0
#: The smallest fraction of a resource in Ray.
_LEAST = 1e-4


class Places(PlacementGroupHandle):
    """The numbered placement groups of a group's workers, each with one bundle.

    Args:
        resources: the resources of a worker.
        strategy: how Ray chooses nodes for workers that start together.
        selectors: labels of nodes for each of the workers with which the group starts.
    """

    def __init__(self, resources: dict[str, float], strategy: str, selectors: Sequence[dict[str, str]]):
        self._resources, self._strategy, self._selectors = resources, strategy, selectors
        self._places: dict[int, PlacementGroup] = {}
        self._reserved = 0

    def of(self, numbers: Sequence[int]) -> list[PlacementGroup]:
        """Return the placement groups with these numbers, without removed ones."""
        return [self._places[number] for number in numbers if number in self._places]

    @property
    def placement_group(self) -> Any:
        """None, as no placement group has all workers. Ray Train passes it to `_create_workers`, which uses numbers."""
        return None

    def ready(self) -> Any:
        raise NotImplementedError("`wait` reserves places")

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Reserve places for the workers with which the group starts."""
        return bool(self.reserve(self._selectors, timeout_seconds))

    def reserve(self, selectors: Sequence[dict[str, str]], seconds: float) -> list[int]:
        """Reserve places for more workers, all or none.

        Args:
            selectors: labels of nodes for each of the workers.
            seconds: how long to wait for room.

        Returns:
            The numbers of the places; empty if there is no room.
        """
        deadline = time.monotonic() + seconds
        together = placement_group(
            [self._resources] * len(selectors), self._strategy, bundle_label_selector=list(selectors)
        )
        if not _are_ready([together], deadline):
            return []
        if len(selectors) == 1:
            return self._keep([together])
        nodes: Mapping[int, str] = placement_group_table(together)["bundles_to_node_id"]
        remove_placement_group(together)
        # Requesting the placement groups earlier would take longer, since Ray retries less and less often.
        wanted = Counter(nodes.values())
        while not self._are_free(wanted) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        groups = [
            placement_group([self._resources], bundle_label_selector=[{**selector, NODE_LABEL: nodes[bundle]}])
            for bundle, selector in enumerate(selectors)
        ]
        return self._keep(groups) if _are_ready(groups, deadline) else []

    def _are_free(self, wanted: Mapping[str, int]) -> bool:
        free = state.free_resources()
        return all(
            free.get(node, {}).get(name, 0.0) >= count * amount - _LEAST
            for node, count in wanted.items()
            for name, amount in self._resources.items()
        )

    def _keep(self, places: Sequence[PlacementGroup]) -> list[int]:
        numbers = list(range(self._reserved, self._reserved + len(places)))
        self._reserved += len(places)
        self._places |= dict(zip(numbers, places, strict=True))
        return numbers

    @property
    def numbers(self) -> list[int]:
        return list(self._places)

    def remove_lost(self, numbers: Sequence[int]) -> None:
        """Remove those of these placement groups whose node disappeared. Actors would wait for them forever."""
        about = placement_group_table()
        there = [number for number in numbers if number in self._places]
        self.remove([n for n in there if about.get(self._places[n].id.hex(), {}).get("state") != "CREATED"])

    def remove(self, numbers: Sequence[int]) -> None:
        """Return placement groups to Ray, which kills the workers in them."""
        for number in numbers:
            if number in self._places:
                remove_placement_group(self._places.pop(number))

    def shutdown(self) -> None:
        self.remove(self.numbers)


def _are_ready(places: Sequence[PlacementGroup], deadline: float) -> bool:
    """Return whether all placement groups are created before the deadline; otherwise remove all of them."""
    if all(place.wait(max(0.0, deadline - time.monotonic())) for place in places):
        return True
    for place in places:
        remove_placement_group(place)
    return False


class PartialGroup(WorkerGroup):
    """A group of workers in which workers can be added, replaced or dropped.

    Attributes:
        take_rank: a function that a worker calls with Ray Train's context if its rank changes; set before workers are
            added or dropped.
    """

    _worker_group_state: Any
    _replica_groups: Any
    take_rank: Callable[[Any], None]

    #: The workers' places. They are not in Ray's state of the group, which is created once all have started.
    _places: Places

    def _create_placement_group(self, scaling_config: Any, worker_group_context: Any) -> Places:
        group = worker_group_context
        selectors = group.label_selector or [{}] * group.num_workers
        self._places = Places(group.resources_per_worker, group.placement_strategy, selectors)
        return self._places

    def add(self, count: int, selector: dict[str, str]) -> list[int]:
        """Start more workers beside the others.

        Args:
            count: the number of new workers.
            selector: labels of the nodes on which they may start.

        Returns:
            The ranks of the new workers; empty if there is no room.

        Raises:
            WorkerGroupStartupFailedError, RayError: the workers did not start.
        """
        places = self._places.reserve([selector] * count, _ROOM_SECONDS)
        if not places:
            return []
        size, resources = len(self.get_workers()), self._worker_group_context.resources_per_worker
        try:
            whole = size + count
            new = self._create_workers(count, None, resources, places, size, whole, 1)
        except Exception:
            self._places.remove(places)
            raise
        self._take(new)
        return list(range(size, whole))

    def _take(self, new: list[Any]) -> None:
        """Make workers that have just started train with the others."""
        before = self._worker_group_state
        self._worker_group_state = dataclasses.replace(before, workers=[*before.workers, *new])
        groups = [
            ReplicaGroup([worker], self._worker_group_context.resources_per_worker, self._replica_group_callbacks)
            for worker in new
        ]
        self._replica_groups = [*self._replica_groups, *groups]
        self._renumber()
        try:
            self._init_train_context(new, before.sync_actor)
            for group in groups:
                group.start_training(self._worker_group_context)
        except Exception:
            for worker in new:  # the next poll of the workers reports them as dead
                ray.kill(worker.actor)
            raise

    def _create_workers(
        self,
        num_workers: int,
        placement_group: None,
        resources_per_worker: dict[str, float],
        placement_group_bundle_indices: list[int] | None = None,
        starting_world_rank: int = 0,
        world_size: int | None = None,
        replica_group_size: int | None = None,
    ) -> list[Any]:
        # As in Ray Train's own method, except that its workers are bundles of one placement group.
        numbers = placement_group_bundle_indices or self._places.numbers
        env = self._get_worker_runtime_env(custom_runtime_env=self._train_run_context.run_config.worker_runtime_env)
        actor: Any = ray.remote(runtime_env=env, **bundle_to_remote_args(resources_per_worker))(self._worker_cls)
        strategies = [PlacementGroupSchedulingStrategy(place, 0) for place in self._places.of(numbers)]
        actors = [actor.options(scheduling_strategy=strategy).remote() for strategy in strategies]
        try:
            about = self._wait_for(actors, numbers)
        except (ray.exceptions.RayError, train.WorkerGroupStartupFailedError) as error:
            for one in actors:
                ray.kill(one)
            raise train.WorkerGroupStartupFailedError(f"a worker did not start: {error}") from error
        made = [
            Worker(*pair, resources_per_worker, placement_group_bundle_index=n)
            for *pair, n in zip(actors, about, numbers, strict=True)
        ]
        ranked: list[Any] = WorkerGroup._assign_worker_ranks(made, starting_world_rank, world_size, replica_group_size)
        return ranked

    def _wait_for(self, actors: list[Any], numbers: list[int]) -> list[Any]:
        """Wait until all actors have started, and return their metadata.

        Raises:
            RayError: an actor has died.
            WorkerGroupStartupFailedError: the node of an actor disappeared. Ray would wait for another node.
        """
        metadata = [actor.get_metadata.remote() for actor in actors]
        while len(self._places.of(numbers)) == len(numbers):
            if not ray.wait(metadata, num_returns=len(metadata), timeout=_LOST_SECONDS)[1]:
                return ray.get(metadata)
            self._places.remove_lost(numbers)
        raise train.WorkerGroupStartupFailedError("its node disappeared")

    def end(self, ranks: Collection[int]) -> None:
        """Shut lost workers down, without waiting for their answers."""
        for rank in ranks:
            self._replica_groups[rank].shutdown()

    def drop(self, ranks: Collection[int]) -> None:
        """Continue without the workers of these ranks. The others get new ranks, in the same order."""
        workers = self.get_workers()
        self._places.remove([workers[rank].placement_group_bundle_index for rank in ranks])
        kept = [worker for rank, worker in enumerate(workers) if rank not in ranks]
        self._worker_group_state = dataclasses.replace(self._worker_group_state, workers=kept)
        self._replica_groups = [group for rank, group in enumerate(self._replica_groups or []) if rank not in ranks]
        self._renumber()

    def _renumber(self) -> None:
        workers = self.get_workers()
        self._worker_rank_to_replica_group_rank = {rank: rank for rank in range(len(workers))}
        self._world_rank_to_ongoing_poll.clear()
        self._latest_poll_status = None
        answers = []
        for rank, worker in enumerate(workers):
            context = dataclasses.replace(worker.distributed_context, world_rank=rank, world_size=len(workers))
            if context != worker.distributed_context:
                worker.distributed_context = context
                answers.append(worker.execute_async(self.take_rank, context))
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_SECONDS)
        ray.get(self._worker_group_state.sync_actor.reset.remote())
        for callback in self._callbacks:
            if isinstance(callback, ReportCallbackHandler):
                callback.after_worker_group_start(self)


class TrainController(ray_train.TrainController):
    """Ray Train's controller, which can replace or drop lost workers while the others continue.

    It has the name of Ray Train's own class, which `ps` and Ray show. Its scaling policy is raytf's. Its failure policy
    has `lost`, the ranks of lost workers or None if all have to restart. The controller sets the failure policy's
    `size`, the number of workers, and `left`, the ranks of workers that have left as planned.
    """

    worker_group_cls = PartialGroup
    _return_value: Any

    async def _step(self) -> TrainControllerLoopIterationResult:
        group: Any = self._worker_group
        policy: Any = self._failure_policy
        policy.size = len(group.get_workers()) if _is_there(group) else 0
        result = await super()._step()
        if self._return_value is None and _is_there(group) and (status := group.get_latest_poll_status()):
            # Dismissed workers return None, and all others the same value.
            values = (one.return_value for one in status.worker_statuses.values())
            self._return_value = next((value for value in values if value is not None), None)
        return result

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        status = await super()._poll_workers()
        policy: Any = self._failure_policy
        # Workers that reached the end of the run have its result.
        policy.left = {
            rank
            for rank, one in status.worker_statuses.items()
            if not one.running and one.error is None and one.return_value is None
        }
        return status

    def _execute_resize_decision(self, decision: ResizeDecision) -> TrainControllerLoopIterationResult:
        group: Any = self._worker_group
        policy: Any = self._failure_policy
        places: Any = self._scaling_policy
        workers = group.get_workers() if _is_there(group) else []
        lost: set[int] | None = policy.lost
        policy.lost = set()  # the policy collects later failures from here
        if lost is None or len(lost) >= len(workers):
            return super()._execute_resize_decision(decision)
        failed = self._run_controller_hook("before_controller_execute_resize_decision", decision)
        if failed is not None:
            return failed
        group.take_rank = places.take_rank()
        try:
            with places.guarding():
                if lost:
                    self._repair(group, places, lost, decision.num_workers)
                else:
                    self._change(group, places, decision.num_workers)
        except (ray.exceptions.RayError, train.WorkerGroupStartupFailedError) as error:
            # Other or new workers have died during the change. The next poll of the workers reports them.
            _log.debug("not all workers were replaced: %s", error)
            places.is_full()
        return TrainControllerLoopIterationResult(
            run_attempt_id=self._get_run_attempt_id(), previous_state=self.get_state(), next_state=RunningState()
        )

    @staticmethod
    def _repair(group: PartialGroup, places: Any, lost: set[int], wanted: int) -> None:
        """Replace lost workers if possible, and continue without the others."""
        workers = group.get_workers()
        new = places.ranks_to_replace([worker.metadata.node_id for worker in workers], lost, wanted)
        group.end(lost)
        for rank in new:
            group.replace_replica_group(rank)
            places.replaced([rank], _nodes(group))
        if len(new) < len(lost):
            group.drop(lost - set(new))
            places.replaced(range(len(workers)), _nodes(group))

    @staticmethod
    def _change(group: PartialGroup, places: Any, wanted: int) -> None:
        gone, workers = places.take_gone(), group.get_workers()
        if gone:
            group.end(gone)
            group.drop(gone)
            places.replaced(range(len(workers)), _nodes(group))
            return
        going, more = places.planned_change([worker.metadata.node_id for worker in workers], wanted)
        new = group.add(more, places.selector()) if more else []
        if more and not new:
            places.is_full()
            return
        if new:
            places.replaced(new, _nodes(group))
        if going:
            joined = group.get_workers()[len(workers) :]
            places.dismiss([place_of(workers[rank]) for rank in going], [place_of(worker) for worker in joined])


def _is_there(group: Any) -> bool:
    return group is not None and bool(group.has_started())


def place_of(worker: Any) -> WorkerPlace:
    """Return the node and process of one of Ray Train's workers."""
    return worker.metadata.node_id, worker.metadata.pid


def _nodes(group: PartialGroup) -> dict[int, str]:
    return {rank: worker.metadata.node_id for rank, worker in enumerate(group.get_workers())}


def run(env_vars: dict[str, str], arguments: dict[str, Any], is_partial: bool, poll: Callable[[], None]) -> Any:
    """Run a controller that can replace single workers, or Ray Train's own; see `raytf._ray.train.run_controller`."""
    kind = TrainController if is_partial else ray_train.TrainController
    return train.run_controller(env_vars, arguments, kind, poll)
