"""Queries nodes directly: whether raylets answer, and free memory. Also starts worker processes in advance."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import grpc
import psutil
from ray._private import grpc_utils, utils
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

_pb: Any = node_manager_pb2  # generated code, whose names mypy does not know
_PYTHON = 0  # in Ray's enumeration of languages
#: Seconds within which the raylet of a living node answers, even on a loaded machine, and starts processes.
_ANSWER_SECONDS, _START_SECONDS = 1.5, 10.0


class NodeReply(enum.Enum):
    """The answer of a node's raylet."""

    LIVES = "lives"
    SILENT = "silent"  # no answer, whether or not the system accepts the connection: frozen, or cut off
    REFUSES = "refuses"  # nothing listens there any more


def ask(nodes: Iterable[dict[str, Any]]) -> dict[str, NodeReply]:
    """Query the raylets of nodes concurrently, and return their answers by the nodes' ids, within 1.5 s.

    A connection alone proves nothing: the system accepts it even if the raylet is frozen.

    Args:
        nodes: entries of `ray.nodes()`.
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
    """Return how many bytes of memory a process can still allocate on this node."""
    # The machine's number counts cached files as free, and the container's number respects its limit.
    return min(psutil.virtual_memory().available, utils.estimate_available_memory())


def all_bytes() -> int:
    """Return how many bytes of memory this node, or its container, has."""
    return min(psutil.virtual_memory().total, utils.get_system_memory())


def prestart(host: str, port: int, job_id: str, runtime_env: str, count: int, keep_seconds: int) -> None:
    """Make a node's raylet start worker processes in advance.

    Ray uses them for actors of the same job with exactly the same runtime environment.

    Args:
        host, port: the raylet's address.
        job_id: the job's hexadecimal id; the processes end with the job.
        runtime_env: the serialized runtime environment.
        count: the number of processes. Ray drops some of those that exceed the node's CPUs.
        keep_seconds: how long unused processes are kept.

    Raises:
        grpc.RpcError: the raylet does not answer.
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
