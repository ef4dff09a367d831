"""This node's keeper as one of its ranks sees it: asked with each beat what it holds, and replaced if it is gone.

A rank's own mapping of the memory stays valid when the keeper dies, so that copying into it would continue; but nobody
could restore what is there. If the keeper is gone, the memory is not in /proc any more, which is checked with each
beat. A keeper that lives and answers nobody is killed. Each replacement begins empty: the ranks copy the state again.
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

#: Ray's errors for a keeper that cannot be reached: a ValueError if one with its name dies during the look-up.
_REFUSED = (ray.exceptions.RayError, ValueError)
_RESERVE_SECONDS = 60.0
#: Seconds between two questions.
_ASK_SECONDS = 0.5
#: Seconds for which an answer counts, and after which a keeper that gives none is ended: as long as a new group waits.
FRESH_SECONDS, SILENT_SECONDS = 10.0, 20.0
#: If two polls are further apart, it was this process that was held up, and perhaps the whole machine.
_GAP_SECONDS = 5.0
#: A keeper that lived so long is replaced at once; where keepers die sooner the next one comes later, at most so much.
STEADY_SECONDS, MOST_PAUSE_SECONDS = 60.0, 60.0


def pause(deaths: int) -> float:
    """Return the seconds before the next keeper is started, after `deaths` keepers in a row that died soon.

    The first pause is 0. Later ones double.
    """
    return 0.0 if deaths <= 1 else min(MOST_PAUSE_SECONDS, 2.0 ** min(deaths - 2, 32))


#: Seconds between tries to get memory of a node that has too little: other ranks may still hold that of the keeper
#: before.
TRY_PAUSES = tuple(pause(n + 2) for n in range(4))


class Order(enum.Enum):
    """The action after a poll of the keeper."""

    NOTHING = "nothing"
    ASK = "ask"  # the keeper what it holds
    END = "end"  # the keeper, which answers nobody and counts as lost


class KeeperHealth:
    """The health of one node's keepers, one after another: when to ask, when one is lost, and when to start another.

    Times and answers go in, and orders come out; it knows neither Ray nor processes nor clocks.

    Args:
        now: seconds of a clock that only goes forward, as in all calls.

    Attributes:
        is_lost: whether the keeper is gone, and with it all that was copied; until `replace`.
    """

    def __init__(self, now: float):
        self.is_lost = False
        self._deaths = 0
        self.begin(now)

    def begin(self, now: float) -> None:
        self._since = self._polled_at = self._asked_at = self._heard_at = now
        self._step: int | None = None

    def poll(self, now: float, is_asking: bool) -> Order:
        """Return what to do now; `is_asking` while a question waits for its answer."""
        gap, self._polled_at = now - self._polled_at, now
        if gap > _GAP_SECONDS:
            self._heard_at += gap  # nobody listened for so long
        if now - self._heard_at >= SILENT_SECONDS:
            self.is_lost = True
            return Order.END
        if is_asking or now - self._asked_at < _ASK_SECONDS:
            return Order.NOTHING
        self._asked_at = now
        return Order.ASK

    def hear(self, step: int | None, now: float) -> None:
        """Note that the keeper holds the whole state after `step`; None while ranks write, which is no loss."""
        self._heard_at, self._step = now, self._step if step is None else step

    def lose(self) -> None:
        self.is_lost = True

    def replace(self, now: float) -> float:
        """Note that the rank has released the lost memory, and return the seconds before it asks for other memory."""
        self._deaths = self._deaths + 1 if now - self._since < STEADY_SECONDS else 1
        self.is_lost, self._step = False, None
        return pause(self._deaths)

    def step(self, now: float) -> int | None:
        """Return the newest step that the keeper holds; None if there is none, or it has not answered lately."""
        return self._step if not self.is_lost and now - self._heard_at < FRESH_SECONDS else None


class KeeperClient:
    """Memory for one rank's copies, from this node's keeper.

    Args:
        run_uri: the run's folder.
        request: the rank's first request.
        monitor: the driver's Monitor actor.
        clock: seconds, of one that only goes forward.
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
        #: Paths of the slots and what they are. Another process with the keeper's number has other files there, or
        #: none; where later workers have asked for memory, the keeper has freed one of the slots at least.
        self._marks: dict[str, tuple[int, int]] = {}
        self._asking: Future[tuple[Any, SlotAnswer]] | None = None
        self._question: Any = None
        self._health = KeeperHealth(clock())

    @property
    def is_lost(self) -> bool:
        """Return whether the keeper and all copies in it are lost. True until `replace`."""
        return self._health.is_lost

    def lose(self) -> None:
        """Note that the memory is gone, as a rank that uses it has noticed."""
        self._health.lose()

    def begin(self, wait: float = 0.0) -> None:
        """Ask for memory after some seconds, without waiting for it."""

        def later(request: SlotRequest) -> tuple[Any, SlotAnswer]:
            time.sleep(wait)
            return self._reserve(request)

        self._asking = in_thread(functools.partial(later, self._request), "raytf-keeping")

    def take(self) -> SlotAnswer | None:
        """Return the memory, or the reason why there is none: once. None while nobody has answered, and after that."""
        if self._asking is None or not self._asking.done():
            return None
        asking, self._asking = self._asking, None
        try:
            keeper, place = asking.result()
            marks = {path: _identity(path) for path in place.paths}
        except _REFUSED as error:
            return SlotAnswer(reason=one_line(error, 300))
        except OSError:  # it has died since
            self.lose()
            return None
        with self._turn:
            self._keeper, self._marks, self._question = keeper, marks, None
            self._health.begin(self._clock())
        return place

    def replace(self) -> None:
        """Ask for other memory, now that the rank has released the lost one; later if keepers die often."""
        with self._turn:
            self._keeper, self._marks = None, {}
            wait = self._health.replace(self._clock())
        self._request = dataclasses.replace(self._request, serial=self._request.serial + 1)
        self.begin(wait)

    def poll(self) -> None:
        """Ask the keeper, and take its last answer; for any thread, and never waits."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._keeper is not None and not self.is_lost:
                self._poll(self._clock())
        finally:
            self._turn.release()

    @property
    def step(self) -> int | None:
        """The newest step of which the keeper reported that it holds this attempt's whole state."""
        return None if self._keeper is None else self._health.step(self._clock())

    def tidy(self) -> Any:
        """Have the keeper drop what earlier attempts left, once this one has a whole copy; returns a reference."""
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
                pass  # out of reach for the moment
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
        """End the process that owns the memory; it may be stopped, and would stand in the way of the next one."""
        if self._marks and not self._is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(next(iter(self._marks)).split("/")[2]), signal.SIGKILL)

    def _reserve(self, request: SlotRequest) -> tuple[Any, SlotAnswer]:
        """Return memory of this node's keeper, which is started where there is none; waits for it."""
        for wait in TRY_PAUSES:
            with contextlib.suppress(*_REFUSED):  # Ray may not know yet that the one before is dead
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
