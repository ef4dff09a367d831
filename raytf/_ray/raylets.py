"""Ray's nodes, asked directly: whether raylets answer, their free memory, and worker processes started ahead."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import grpc
import psutil
from ray._private import grpc_utils, utils
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

_pb: Any = node_manager_pb2  # generated code, of which mypy knows no names
_PYTHON = 0  # of its enumeration of languages
#: Seconds within which the raylet of a living node answers, also on a loaded machine.
_ANSWER_SECONDS, _START_SECONDS = 1.5, 10.0


class NodeReply(enum.Enum):
    """The answer of a node's raylet."""

    LIVES = "lives"
    SILENT = "silent"  # the system accepts the connection, or not even that, but nothing answers: frozen, or cut off
    REFUSES = "refuses"  # nothing listens there any more


def ask(nodes: Iterable[dict[str, Any]]) -> dict[str, NodeReply]:
    """Ask the raylets of nodes at once, and return their answers within 1.5 s, by the nodes' ids.

    A connection alone proves nothing: the system accepts it for a raylet that is frozen.

    Args:
        nodes: as of `ray.nodes()`.
    """
    asked = []
    for node in nodes:
        channel = _channel(node["NodeManagerAddress"], node["NodeManagerPort"])
        stub = node_manager_pb2_grpc.NodeManagerServiceStub(channel)
        call = stub.GetWorkerPIDs.future(_pb.GetWorkerPIDsRequest(), timeout=_ANSWER_SECONDS)
        asked.append((node["NodeID"], channel, call))
    replies = {}
    for node_id, channel, call in asked:
        error = call.exception()
        if error is None or error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            replies[node_id] = NodeReply.LIVES
        else:
            replies[node_id] = NodeReply.REFUSES if "refused" in str(error.details()) else NodeReply.SILENT
        channel.close()
    return replies


def free_bytes() -> int:
    """Return how much memory of this node a process can still take."""
    # That of the machine counts cached files as free; that of a container knows its limit.
    return min(psutil.virtual_memory().available, utils.estimate_available_memory())


def all_bytes() -> int:
    """Return how much memory this node, or its container, has."""
    return min(psutil.virtual_memory().total, utils.get_system_memory())


def prestart(host: str, port: int, job_id: str, runtime_env: str, count: int, keep_seconds: int) -> None:
    """Have a node's raylet start worker processes ahead of need.

    Ray gives them to actors of the same job with the very same runtime environment.

    Args:
        host, port: of the raylet.
        job_id: hexadecimal; they end with the job.
        runtime_env: serialized.
        count: of processes. Ray drops some of those beyond the node's CPUs.
        keep_seconds: how long they are kept unused.

    Raises:
        grpc.RpcError: it does not answer.
    """
    request = _pb.PrestartWorkersRequest(
        language=_PYTHON,
        job_id=bytes.fromhex(job_id),
        keep_alive_duration_secs=keep_seconds,
        num_workers=count,
    )
    request.runtime_env_info.serialized_runtime_env = runtime_env
    with _channel(host, port) as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_START_SECONDS)


def _channel(host: str, port: int) -> grpc.Channel:
    return grpc_utils.init_grpc_channel(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
