"""When nodes with notice go, by this machine's monotonic clock."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping

import ray.exceptions

from raytf.training.process.monitor_client import MonitorClient

#: Seconds for the monitor's answer.
_ANSWER_SECONDS = 5.0


class NoticeEnds:
    """Converts each notice once, when it is first seen, so that no clock that is set later changes anything.

    Args:
        monitor: knows how long ago the workers of a node reported its notice, and how many seconds they gave it.
    """

    def __init__(self, monitor: MonitorClient):
        self._monitor = monitor
        #: Node -> the time that Ray gives, and when it goes.
        self._seen: dict[str, tuple[int, float | None]] = {}

    def of(self, leaving: Mapping[str, int], nodes: Collection[str]) -> dict[str, float | None]:
        """Return when each of some nodes goes, if it has notice; None if that is not known.

        Args:
            leaving: nodes with notice -> Unix time in ms that Ray gives, 0 for none.
            nodes: Ray's ids of nodes.
        """
        for node, at in leaving.items():
            if node in nodes and (node not in self._seen or self._seen[node][0] != at):
                self._seen[node] = at, self._end(node, at)
        return {node: self._seen[node][1] for node in leaving if node in nodes}

    def _end(self, node: str, at: int) -> float | None:
        left: float | None = None
        with contextlib.suppress(ray.exceptions.RayError):
            left = self._monitor.seconds_left(node, _ANSWER_SECONDS)
        if left is None and at:  # Ray only passes on a time, by the clock of the machine that told Ray
            left = max(0.0, at / 1000 - time.time())
        return None if left is None else time.monotonic() + left
