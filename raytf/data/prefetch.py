"""Calls that a pipeline gathers ahead of the one that runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from raytf.data.pipeline import CallBatch, Pipeline

#: Calls gathered ahead: with one that is gathered and one that is ready, no call waits for the thread to wake up.
DEPTH = 2


class Prefetch:
    """The calls of a pipeline in order, up to `DEPTH` of them ahead.

    Args:
        pipeline: gathers them.
        start: the step at which the first one begins.
        call_end: (start of a call, step at which all end) -> where it ends.
        beside: (start of a call) -> another worker's shard that it has, too; None for none.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        start: int,
        call_end: Callable[[int, int], int],
        beside: Callable[[int], int | None] = lambda start: None,
    ):
        self._pipeline, self._asked, self._call_end, self._beside = pipeline, start, call_end, beside
        self._ahead: deque[Future[CallBatch]] = deque()

    @property
    def asked(self) -> int:
        """The step up to which calls were asked for."""
        return self._asked

    def fill(self, stop: int) -> bool:
        """Ask for calls, as many as may be ahead, up to step `stop`; whether there is one to take."""
        while self._asked < stop and len(self._ahead) < DEPTH:
            end = self._call_end(self._asked, stop)
            self._ahead.append(self._pipeline.submit(self._asked, end, self._beside(self._asked)))
            self._asked = end
        return bool(self._ahead)

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def take(self) -> CallBatch:
        """The next call, once it is gathered."""
        return self._ahead.popleft().result()
