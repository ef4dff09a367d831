"""The state of the cluster: free resources, placement groups, draining nodes, actors, and when its head started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray._private.state
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2, common_pb2, gcs_pb2
from ray.util.placement_group import PlacementGroup

_ALIVE = 0


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node, by its id."""
    return ray._private.state.available_resources_per_node()


def draining_nodes() -> dict[str, int]:
    """Return the Unix time in ms at which each draining node leaves, by its id; 0 if it is not known."""
    return ray._private.state.state.get_draining_nodes()


def living_actors(job_id: Any) -> list[dict[str, Any]]:
    """Return the living actors of a job."""
    return list(ray._private.state.state.actor_table(None, job_id, "ALIVE").values())


def system_config() -> dict[str, Any]:
    """Return the system configuration with which the cluster's head was started."""
    return ray._private.state.state.get_system_config()


def abandoned_placement_groups() -> list[PlacementGroup]:
    """Return this job's placement groups whose creator has died and that still hold resources."""
    table: Any = gcs_pb2  # generated code, whose names mypy does not know
    table, job = table.PlacementGroupTableData, ray.get_runtime_context().get_job_id()
    groups = []
    for raw in ray._private.state.state._connect_and_get_accessor().get_placement_group_table():
        group = table.FromString(raw)
        is_ours = group.creator_job_id.hex() == job and group.creator_actor_id and not group.is_detached
        if is_ours and group.creator_actor_dead and group.state != table.REMOVED:
            groups.append(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
    return groups


def _actor(actor_id: str) -> dict[str, Any]:
    return ray._private.state.state.actor_table(actor_id) if ray.is_initialized() else {}


def died_with_node(error: ray.exceptions.RayActorError, actor: Callable[[str], dict[str, Any]] = _actor) -> bool:
    """Return whether an actor died because its node died, by Ray's table. Ray's error has this only in its text.

    Args:
        actor: returns the entry of an actor in Ray's table for its id, empty if there is none.
    """
    if error.actor_id is None:
        return False
    cause = actor(error.actor_id).get("DeathCause")
    reasons: Any = common_pb2  # generated code, whose names mypy does not know
    return cause is not None and cause.actor_died_error_context.reason == reasons.ActorDiedErrorContext.NODE_DIED


def head_starts(address: str) -> list[float]:
    """Return when the living heads of the GCS at HOST:PORT, usually one, were started.
    Times are Unix seconds by the heads' clocks."""
    infos = GcsClient(address=address).get_all_node_info().values()
    return [info.start_time_ms / 1000 for info in infos if info.is_head_node and info.state == _ALIVE]


def drain_for_preemption(address: str, node_id: str, reason: str, deadline_ms: int, timeout: float) -> tuple[bool, str]:
    """Report to Ray that a node will be preempted.

    Args:
        address: HOST:PORT of the GCS.
        node_id: 56 hexadecimal digits.
        reason: text that explains it to users.
        deadline_ms: Unix time of the preemption; 0 if it is not known.
        timeout: seconds for the answer.

    Returns:
        Whether Ray accepted the report and, if not, why.
    """
    reasons: Any = autoscaler_pb2  # generated code, whose names mypy does not know
    preemption = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return GcsClient(address=address).drain_node(node_id, preemption, reason, deadline_ms, timeout=timeout)
