"""What autostop does on the head: it asks for jobs, and ends the cluster's machines through the provider."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

from raytf._ray.autoscaler import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND
from raytf.cluster.autostop import Activity
from raytf.cluster.job_server import AwayError, JobServer
from raytf.errors import ClusterError, one_line

#: Seconds for which the head waits for the end of its workers, and between two polls of them.
_WORKER_SECONDS, _AGAIN_SECONDS = 100.0, 5.0


class HeadJobs:
    """The jobs of this head.

    Args:
        address: of its job server.
    """

    def __init__(self, address: str):
        self._address = address
        self._server: JobServer | None = None
        self._total: int | None = None

    def poll(self) -> Activity:
        """Return what the head shows now. A job that came and went since the last poll counts as running."""
        if not _has_process("gcs_server"):
            return Activity.GONE
        try:
            self._server = self._server or JobServer(self._address)
            unfinished, total = self._server.count()
        except (AwayError, ClusterError):
            self._server = None
            return Activity.BUSY if _has_process("ray::JobSupervisor") else Activity.UNKNOWN
        is_new = self._total not in (None, total)
        self._total = total
        return Activity.BUSY if unfinished or is_new else Activity.IDLE


def _has_process(title: str) -> bool:
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or [""]
        if title in line[0].rpartition("/")[2]:
            return True
    return False


def end_cluster(
    provider: Any,
    say: Callable[[str], None],
    before_head: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """End all workers, and then the head; Ray must have stopped there, since it would replace the workers.

    Args:
        provider: one of raytf's.
        before_head: called once the workers have ended.
    """
    try:
        _end_workers(provider, clock, sleep)
    except Exception as error:  # a worker whose head is gone ends by its own timer
        say(f"cannot end the workers: {one_line(error, 300)}")
    before_head()
    heads = provider.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_HEAD})
    if not heads:  # then the timer shuts this machine down
        raise ClusterError("The cloud lists no head of this cluster.")
    for node in heads:
        say(f"ending the head {node}")
        provider.end_head(node)


def _end_workers(provider: Any, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
    provider.cache_stopped_nodes = False  # or Ray's provider would stop them, and their disks would cost money
    deadline = clock() + _WORKER_SECONDS
    while workers := provider.non_terminated_nodes({TAG_RAY_NODE_KIND: NODE_KIND_WORKER}):
        if clock() >= deadline:
            raise ClusterError(f"{len(workers)} still run")
        provider.end_workers(workers)
        sleep(_AGAIN_SECONDS)
