"""The actor that workers ask for batches, and that tells the driver which one to make next.

Its process may be killed. Ray then starts another one under the same handle and sends unanswered calls again; the
driver, which has all batches that may be asked for, learns from what is missing what to bring again.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple


class Offer(NamedTuple):
    """Batches of some steps, one after another, in Ray's object store.

    Attributes:
        start: the first step.
        rows: records of each batch.
        parts: a reference to the leaves of each batch, or one for those of each logical shard.
        failure: why there is no batch of the step after these; empty if there may be one.
    """

    start: int
    rows: list[int]
    parts: list[Any]
    failure: str = ""

    @property
    def stop(self) -> int:
        """The step after the last one that it answers for."""
        return self.start + len(self.rows) + bool(self.failure)

    def has(self, step: int) -> bool:
        return self.start <= step < self.stop


class Wish(NamedTuple):
    """What the driver should do.

    Attributes:
        step: from which on it should bring batches; None for nothing more.
        floor: no earlier batch will be asked for, unless a checkpoint turns out to be damaged.
    """

    step: int | None
    floor: int


class Mailbox:
    """Batches between the driver and the workers, by global step.

    Args:
        total: steps of the run.
        ahead: batches that may wait here for the workers, about.
    """

    def __init__(self, total: int, ahead: int):
        self._total, self._ahead = total, ahead
        self._offers: list[Offer] = []
        #: The step that a worker has asked for last, and steps that somebody waits for.
        self._asked: int | None = None
        self._missing: set[int] = set()
        self._floor = 0
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def ask(self, step: int) -> Offer:
        """An offer with the batch of a step, when it is there."""
        async with self._changed:
            self._asked = step
            if self._with(step) is None:
                self._missing.add(step)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._with(step) is not None)
            found = self._with(step)
            assert found is not None
            return found

    async def wish(self, position: int) -> Wish:
        """Where the driver should go on; waits until there is something to do.

        Args:
            position: the step after the newest one that it has made.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or self._next(position) is not None)
            return Wish(None if self._is_closed else self._next(position), self._floor)

    async def offer(self, offer: Offer) -> None:
        """Bring batches."""
        async with self._changed:
            self._offers = [old for old in self._offers if old.start != offer.start] + [offer]
            self._missing = {step for step in self._missing if not offer.has(step)}
            self._changed.notify_all()

    async def saved(self, step: int) -> None:
        """Told that a checkpoint of a step is on storage: batches of the steps before it can go."""
        async with self._changed:
            self._floor = max(self._floor, step)
            self._offers = [old for old in self._offers if old.stop > self._floor]
            self._changed.notify_all()

    async def close(self) -> None:
        """Wish for nothing more."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _with(self, step: int) -> Offer | None:
        return next((offer for offer in self._offers if offer.has(step)), None)

    def _next(self, position: int) -> int | None:
        if self._missing:
            return min(self._missing)
        if self._asked is None or position >= self._total or position > self._asked + self._ahead:
            return None
        return position
