"""A rank's client of its node's keeper, which it queries with each heartbeat, and replaces when it has died.

A rank's own mapping of the memory stays valid when the keeper dies, so the rank could still copy into it, but nobody
could restore the copy. When the keeper dies, its memory disappears from /proc, which is checked with each heartbeat. A
keeper that lives but does not answer is killed. Each new keeper starts empty, and the ranks copy the state again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle

from raytf._process import in_thread
from raytf.checkpoint import memory_keeper
from raytf.checkpoint.slot_ledger import SlotAnswer, SlotRequest
from raytf.errors import one_line

#: Ray's errors for a keeper that cannot be reached: a ValueError if a keeper of this name dies during the lookup.
_REFUSED = (ray.exceptions.RayError, ValueError)
_RESERVE_SECONDS = 60.0
#: Seconds between two questions.
_ASK_SECONDS = 0.5
#: Seconds for which an answer is valid, and after which a silent keeper is killed: as long as a new group waits.
FRESH_SECONDS, SILENT_SECONDS = 10.0, 20.0
#: If two polls are further apart, this process, and perhaps the whole machine, was held up.
_GAP_SECONDS = 5.0
#: A keeper that lived this long is replaced at once; and the longest pause before the next keeper if some died sooner.
STEADY_SECONDS, MOST_PAUSE_SECONDS = 60.0, 60.0


def pause(deaths: int) -> float:
    """Return the seconds to wait before starting the next keeper, after `deaths` keepers in a row died early.

    The first pause is 0. Later ones double.
    """
    return 0.0 if deaths <= 1 else min(MOST_PAUSE_SECONDS, 2.0 ** min(deaths - 2, 32))


#: Seconds between attempts to reserve memory on a node that has too little, since other ranks may still hold the memory
#: of the previous keeper.
TRY_PAUSES = tuple(pause(n + 2) for n in range(4))


class Order(enum.Enum):
    """The action after a poll of the keeper."""

    NOTHING = "nothing"
    ASK = "ask"  # query the newest step that the keeper holds
    END = "end"  # kill the keeper, which does not answer and counts as lost


class KeeperHealth:
    """Decides when to query a node's keeper, when it counts as lost, and when to start the next one.

    Its inputs are times and answers, and its outputs are orders. It uses neither Ray nor processes nor clocks.

    Args:
        now: seconds of a monotonic clock, as in all calls.

    Attributes:
        is_lost: whether the keeper has died, and all copies are lost with it; until `replace`.
    """

    def __init__(self, now: float):
        self.is_lost = False
        self._deaths = 0
        self.begin(now)

    def begin(self, now: float) -> None:
        self._since = self._polled_at = self._asked_at = self._heard_at = now
        self._step: int | None = None

    def poll(self, now: float, is_asking: bool) -> Order:
        """Return the next action. `is_asking` is whether a question waits for its answer."""
        gap, self._polled_at = now - self._polled_at, now
        if gap > _GAP_SECONDS:
            self._heard_at += gap  # this process could not receive answers during the gap
        if now - self._heard_at >= SILENT_SECONDS:
            self.is_lost = True
            return Order.END
        if is_asking or now - self._asked_at < _ASK_SECONDS:
            return Order.NOTHING
        self._asked_at = now
        return Order.ASK

    def hear(self, step: int | None, now: float) -> None:
        """Record that the keeper holds the whole state after `step`; None while ranks write, which is no loss."""
        self._heard_at, self._step = now, self._step if step is None else step

    def lose(self) -> None:
        self.is_lost = True

    def replace(self, now: float) -> float:
        """Record that the rank has released the lost memory, and return the seconds to wait before it requests more."""
        self._deaths = self._deaths + 1 if now - self._since < STEADY_SECONDS else 1
        self.is_lost, self._step = False, None
        return pause(self._deaths)

    def step(self, now: float) -> int | None:
        """Return the newest step that the keeper holds; None if it holds none, or has not answered recently."""
        return self._step if not self.is_lost and now - self._heard_at < FRESH_SECONDS else None


class KeeperClient:
    """Memory for one rank's copies, from this node's keeper.

    Args:
        run_uri: the run's folder.
        request: the rank's first request.
        monitor: the driver's Monitor actor.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        run_uri: str,
        request: SlotRequest,
        monitor: ActorHandle,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run_uri, self._monitor, self._clock = run_uri, monitor, clock
        self._request = request
        self._turn = threading.Lock()
        self._keeper: Any = None
        #: The slots' paths and identities. They differ if another process has the keeper's process id, or if the keeper
        #: has freed a slot because later workers requested memory.
        self._marks: dict[str, tuple[int, int]] = {}
        self._asking: Future[tuple[Any, SlotAnswer]] | None = None
        self._question: Any = None
        self._health = KeeperHealth(clock())

    @property
    def is_lost(self) -> bool:
        """Return whether the keeper and all copies in it are lost. True until `replace`."""
        return self._health.is_lost

    def lose(self) -> None:
        """Record that the memory is lost, as the rank that uses it has detected."""
        self._health.lose()

    def begin(self, wait: float = 0.0) -> None:
        """Request memory in the background, `wait` seconds from now."""

        def later(request: SlotRequest) -> tuple[Any, SlotAnswer]:
            time.sleep(wait)
            return self._reserve(request)

        self._asking = in_thread(functools.partial(later, self._request), "raytf-keeping")

    def take(self) -> SlotAnswer | None:
        """Return the memory, or the reason why there is none, once. Return None before the answer, and after it."""
        if self._asking is None or not self._asking.done():
            return None
        asking, self._asking = self._asking, None
        try:
            keeper, place = asking.result()
            marks = {path: _identity(path) for path in place.paths}
        except _REFUSED as error:
            return SlotAnswer(reason=one_line(error, 300))
        except OSError:  # the keeper has died since it answered
            self.lose()
            return None
        with self._turn:
            self._keeper, self._marks, self._question = keeper, marks, None
            self._health.begin(self._clock())
        return place

    def replace(self) -> None:
        """Request other memory, now that the rank has released the lost memory; with a pause if keepers die often."""
        with self._turn:
            self._keeper, self._marks = None, {}
            wait = self._health.replace(self._clock())
        self._request = dataclasses.replace(self._request, serial=self._request.serial + 1)
        self.begin(wait)

    def poll(self) -> None:
        """Read the keeper's last answer and query it again, without waiting. Any thread may call this."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._keeper is not None and not self.is_lost:
                self._poll(self._clock())
        finally:
            self._turn.release()

    @property
    def step(self) -> int | None:
        """The newest step for which the keeper reported to hold this attempt's whole state."""
        return None if self._keeper is None else self._health.step(self._clock())

    def tidy(self) -> Any:
        """Make the keeper drop copies of earlier attempts once this one has a whole copy. Return Ray's reference."""
        keeper = self._keeper
        return None if keeper is None else keeper.tidy.remote(self._request.attempt)

    def _poll(self, now: float) -> None:
        if self._is_gone():
            self.lose()
            return
        if self._question is not None and ray.wait([self._question], timeout=0)[0]:
            question, self._question = self._question, None
            try:
                self._health.hear(ray.get(question), now)
            except ray.exceptions.ActorDiedError:
                self.lose()
                return
            except ray.exceptions.RayError:
                pass  # temporarily unreachable
        order = self._health.poll(now, self._question is not None)
        if order is Order.ASK:
            self._question = self._keeper.newest.remote(self._request.attempt)
        elif order is Order.END:
            self._end()

    def _is_gone(self) -> bool:
        try:
            return any(_identity(path) != identity for path, identity in self._marks.items())
        except OSError:
            return True

    def _end(self) -> None:
        """Kill the process that owns the memory. It may be suspended, and would block the next keeper."""
        if self._marks and not self._is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(next(iter(self._marks)).split("/")[2]), signal.SIGKILL)

    def _reserve(self, request: SlotRequest) -> tuple[Any, SlotAnswer]:
        """Wait for memory of this node's keeper, which is started if there is none, and return both."""
        for wait in TRY_PAUSES:
            with contextlib.suppress(*_REFUSED):  # Ray may not know yet that the previous keeper is dead
                keeper, place = self._reserve_once(request)
                if place.paths or place.is_final:
                    return keeper, place
            time.sleep(wait)
        return self._reserve_once(request)

    def _reserve_once(self, request: SlotRequest) -> tuple[Any, SlotAnswer]:
        keeper = memory_keeper.keeper(self._run_uri)
        return keeper, ray.get(keeper.reserve.remote(request, self._monitor), timeout=_RESERVE_SECONDS)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
