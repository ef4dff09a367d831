"""This node's keeper as one of its ranks sees it: asked with each beat what it holds, and replaced where it has gone.

A rank's own mapping of the memory stays valid when the keeper dies, so that copying into it would go on; but nobody
could restore what is there. Where the keeper is gone the memory is not in /proc any more, which is looked at with each
beat. One that lives and answers nobody is ended. Each replacement begins empty: the ranks then copy the state again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.actor import ActorHandle

from raytf._process import in_thread
from raytf.checkpoint import memory_keeper
from raytf.checkpoint.memory_keeper import ReservedSlots
from raytf.errors import one_line

#: Seconds between two questions.
_ASK_SECONDS = 0.5
#: What Ray raises for a keeper that cannot be had: a ValueError where one of its name dies while it is looked up.
_REFUSED = (ray.exceptions.RayError, ValueError)
#: Seconds for which an answer counts, and after which a keeper that gives none is ended: as long as a new group waits.
FRESH_SECONDS, SILENT_SECONDS = 10.0, 20.0
#: Between two looks that are further apart it was this process that was held up, and perhaps the whole machine.
_GAP_SECONDS = 5.0
#: A keeper that lived so long is replaced at once; where keepers die sooner the next one comes later, at most so much.
STEADY_SECONDS, MOST_PAUSE_SECONDS = 60.0, 60.0
#: Tries to get memory of a node that has too little: other ranks may still hold that of the keeper before.
_TRIES = 5
_RESERVE_SECONDS = 60.0


def pause(deaths: int) -> float:
    """Seconds before the next keeper is started, after this many that died soon, one after another: none at first, then
    doubled."""
    return 0.0 if deaths <= 1 else min(MOST_PAUSE_SECONDS, 2.0 ** min(deaths - 2, 32))


class Health:
    """What a keeper's answers say: what of its word counts, and whether it has fallen silent.

    Args:
        now: seconds.
    """

    def __init__(self, now: float):
        self._heard_at = now
        self._told: int | None = None

    def hear(self, step: int | None, now: float) -> None:
        """It holds the state after `step`, whole. None while ranks write is no loss: its memory lives as long as it."""
        self._heard_at, self._told = now, self._told if step is None else step

    def step(self, now: float) -> int | None:
        """The newest step that it holds.

        Returns:
            None for none, and where it has not answered lately.
        """
        return self._told if now - self._heard_at < FRESH_SECONDS else None

    def forgive(self, seconds: float) -> None:
        """For so long nobody listened."""
        self._heard_at += seconds

    def is_silent(self, now: float) -> bool:
        return now - self._heard_at >= SILENT_SECONDS


class KeeperClient:
    """Memory for one rank's copies, from this node's keeper.

    Args:
        run_uri: the run's folder.
        attempt: name of this start of the worker group.
        state_bytes: about how large a copy is.
        monitor: the driver's Monitor actor.
        clock: seconds, of one that only goes forward.

    Attributes:
        is_lost: the keeper is gone, and with it all that was copied; until `replace`.
    """

    def __init__(
        self,
        run_uri: str,
        attempt: str,
        state_bytes: int,
        monitor: ActorHandle,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run_uri, self._attempt, self._bytes, self._monitor = run_uri, attempt, state_bytes, monitor
        self._clock = clock
        self._turn = threading.Lock()
        self.is_lost = False
        self._keeper: Any = None
        #: Path of a slot and what it is; another process with the keeper's number has another file there, or none.
        self._mark: tuple[str, tuple[int, int]] | None = None
        self._asking: Future[tuple[Any, ReservedSlots]] | None = None
        self._question: Any = None
        self._asked_at = self._looked_at = self._since = clock()
        self._health = Health(self._since)
        self._deaths = 0

    def begin(self) -> None:
        """Ask for memory, without waiting for it."""
        self._asking = in_thread(self._reserve, "raytf-keeping")

    def take(self) -> ReservedSlots | None:
        """The memory, or the reason why there is none: once. None while nobody has answered, and after that."""
        if self._asking is None or not self._asking.done():
            return None
        asking, self._asking = self._asking, None
        self._asked_at = self._looked_at = self._since = self._clock()
        try:
            keeper, place = asking.result()
            mark = (place.paths[0], _identity(place.paths[0])) if place.paths else None
        except _REFUSED as error:
            return ReservedSlots(reason=one_line(error, 300))
        except OSError:  # it has died since
            self.is_lost = True
            return None
        with self._turn:
            self._keeper, self._mark, self._question, self._health = keeper, mark, None, Health(self._since)
        return place

    def replace(self) -> None:
        """The rank has let go of the memory that is lost: ask for other memory, later where keepers die often."""
        with self._turn:
            lived, self._keeper, self._mark, self.is_lost = self._clock() - self._since, None, None, False
        self._deaths = self._deaths + 1 if lived < STEADY_SECONDS else 1
        wait = pause(self._deaths)

        def later() -> tuple[Any, ReservedSlots]:
            time.sleep(wait)
            return self._reserve()

        self._asking = in_thread(later, "raytf-keeping")

    def look(self) -> None:
        """Ask the keeper, and take its last answer; for any thread, and never waits."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._keeper is not None and not self.is_lost:
                self._look(self._clock())
        finally:
            self._turn.release()

    @property
    def step(self) -> int | None:
        """The newest step of which this attempt's whole state is in this node's memory, as far as the keeper said."""
        return None if self._keeper is None or self.is_lost else self._health.step(self._clock())

    def tidy(self) -> Any:
        """Have the keeper drop what earlier attempts left, once this one has a whole copy; returns a reference."""
        keeper = self._keeper
        return None if keeper is None else keeper.tidy.remote(self._attempt)

    def _look(self, now: float) -> None:
        gap, self._looked_at = now - self._looked_at, now
        if gap > _GAP_SECONDS:
            self._health.forgive(gap)
        if self._is_gone():
            self.is_lost = True
            return
        if self._question is not None and ray.wait([self._question], timeout=0)[0]:
            question, self._question = self._question, None
            try:
                self._health.hear(ray.get(question), now)
            except ray.exceptions.ActorDiedError:
                self.is_lost = True
                return
            except ray.exceptions.RayError:
                pass  # out of reach for the moment
        if self._question is None and now - self._asked_at >= _ASK_SECONDS:
            self._question, self._asked_at = self._keeper.newest.remote(self._attempt), now
        if self._health.is_silent(now):
            self._end()
            self.is_lost = True

    def _is_gone(self) -> bool:
        if self._mark is None:
            return False
        path, identity = self._mark
        try:
            return _identity(path) != identity
        except OSError:
            return True

    def _end(self) -> None:
        """End the process that owns the memory; it may be stopped, and would stand in the way of the next one."""
        if self._mark is not None and not self._is_gone():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(self._mark[0].split("/")[2]), signal.SIGKILL)

    def _reserve(self) -> tuple[Any, ReservedSlots]:
        """Memory of this node's keeper, which is started where there is none; waits for it."""
        request = uuid.uuid4().hex  # also of the tries whose answers come too late
        for n in range(_TRIES):
            try:
                keeper = memory_keeper.keeper(self._run_uri)
                reserve = keeper.reserve.remote(self._attempt, self._bytes, self._monitor, request)
                place = ray.get(reserve, timeout=_RESERVE_SECONDS)
                if place.paths or n == _TRIES - 1:
                    return keeper, place
            except _REFUSED:  # Ray may not know yet that the one before is dead
                if n == _TRIES - 1:
                    raise
            time.sleep(pause(n + 2))
        raise AssertionError


def _identity(path: str) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
