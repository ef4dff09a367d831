"""Ray's GCS, asked directly."""

from __future__ import annotations

from typing import Any

from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.core.generated import autoscaler_pb2

_ALIVE = 0


def head_starts(address: str) -> list[float]:
    """Return when the living heads were started, as Unix time in seconds by their clocks; usually one.

    Args:
        address: HOST:PORT of the GCS.
    """
    infos = GcsClient(address=address).get_all_node_info().values()
    return [info.start_time_ms / 1000 for info in infos if info.is_head_node and info.state == _ALIVE]


def drain_for_preemption(address: str, node_id: str, reason: str, deadline_ms: int, timeout: float) -> tuple[bool, str]:
    """Tell Ray that a node is about to be taken away.

    Args:
        address: HOST:PORT of the GCS.
        node_id: 56 hexadecimal digits.
        reason: for people.
        deadline_ms: Unix time at which the node goes; 0 where nobody knows.
        timeout: seconds for the answer.

    Returns:
        Whether Ray accepts it, and why not.
    """
    reasons: Any = autoscaler_pb2  # generated code, of which mypy knows no names
    preemption = reasons.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    return GcsClient(address=address).drain_node(node_id, preemption, reason, deadline_ms, timeout=timeout)
