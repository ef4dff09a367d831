"""This node's keeper as one of its ranks sees it: asked with each beat what it holds, and replaced where it has gone.

A rank's own mapping of the memory stays valid when the keeper dies, so that copying into it would go on; but nobody
could restore what is there. Where the keeper is gone the memory is not in /proc any more, which is looked at with each
beat. One that lives and answers nobody is ended. Each replacement begins empty: the ranks then copy the state again.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from raytf.checkpoint.keeper_health import TRY_PAUSES, KeeperHealth, Order
from raytf.checkpoint.memory_keeper import ReservedSlots
from raytf.checkpoint.slot_ledger import SlotRequest
from raytf.errors import one_line

#: What Ray raises for a keeper that cannot be had: a ValueError where one of its name dies while it is looked up.
_REFUSED = (ray.exceptions.RayError, ValueError)
_RESERVE_SECONDS = 60.0


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
        self._asking: Future[tuple[Any, ReservedSlots]] | None = None
        self._question: Any = None
        self._health = KeeperHealth(clock())

    @property
    def is_lost(self) -> bool:
        """Whether the keeper is gone, and with it all that was copied; until `replace`."""
        return self._health.is_lost

    def lose(self) -> None:
        """Note that the memory is gone, as a rank that uses it has noticed."""
        self._health.lose()

    def begin(self, wait: float = 0.0) -> None:
        """Ask for memory after some seconds, without waiting for it."""

        def later(request: SlotRequest) -> tuple[Any, ReservedSlots]:
            time.sleep(wait)
            return self._reserve(request)

        self._asking = in_thread(functools.partial(later, self._request), "raytf-keeping")

    def take(self) -> ReservedSlots | None:
        """Return the memory, or the reason why there is none: once. None while nobody has answered, and after that."""
        if self._asking is None or not self._asking.done():
            return None
        asking, self._asking = self._asking, None
        try:
            keeper, place = asking.result()
            marks = {path: _identity(path) for path in place.paths}
        except _REFUSED as error:
            return ReservedSlots(reason=one_line(error, 300))
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
        """The newest step of which this attempt's whole state is in this node's memory, as far as the keeper said."""
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

    def _reserve(self, request: SlotRequest) -> tuple[Any, ReservedSlots]:
        """Return memory of this node's keeper, which is started where there is none; waits for it."""
        for wait in TRY_PAUSES:
            with contextlib.suppress(*_REFUSED):  # Ray may not know yet that the one before is dead
                keeper, place = self._reserve_once(request)
                if place.paths or place.is_final:
                    return keeper, place
            time.sleep(wait)
        return self._reserve_once(request)

    def _reserve_once(self, request: SlotRequest) -> tuple[Any, ReservedSlots]:
        keeper = memory_keeper.keeper(self._run_uri)
        return keeper, ray.get(keeper.reserve.remote(request, self._monitor), timeout=_RESERVE_SECONDS)


def _identity(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino
