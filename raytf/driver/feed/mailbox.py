"""The actor that workers ask for batches, and that tells the driver which one to make next.

Its process may be killed. Ray then starts another one under the same handle and sends unanswered calls again; the
driver, which has all batches that may be asked for, learns from what is missing what to bring again.
"""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple


class Offer(NamedTuple):
    """A batch in Ray's object store.

    Attributes:
        rows: records that it has.
        parts: a reference to the leaves of all records, or one for the leaves of each logical shard.
        failure: why there is no such batch; empty if there is one.
    """

    rows: int
    parts: list[Any]
    failure: str = ""


class Wish(NamedTuple):
    """What the driver should do.

    Attributes:
        step: whose batch it should bring; None for nothing more.
        floor: no earlier batch will be asked for, unless a checkpoint turns out to be damaged.
    """

    step: int | None
    floor: int


class Mailbox:
    """Batches between the driver and the workers, by global step.

    Args:
        total: steps of the run.
        ahead: batches that may wait here for the workers.
    """

    def __init__(self, total: int, ahead: int):
        self._total, self._ahead = total, ahead
        self._offers: dict[int, Offer] = {}
        #: The step that a worker has asked for last, and steps that somebody waits for.
        self._asked: int | None = None
        self._missing: set[int] = set()
        self._floor = 0
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def ask(self, step: int) -> Offer:
        """The batch of a step, when it is there."""
        async with self._changed:
            self._asked = step
            if step not in self._offers:
                self._missing.add(step)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: step in self._offers)
            return self._offers[step]

    async def wish(self, position: int) -> Wish:
        """The batch that the driver should bring next; waits until there is one.

        Args:
            position: the step after the newest one that it has made.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or self._next(position) is not None)
            return Wish(None if self._is_closed else self._next(position), self._floor)

    async def offer(self, step: int, offer: Offer) -> None:
        """Bring a batch."""
        async with self._changed:
            self._offers[step] = offer
            self._missing.discard(step)
            self._changed.notify_all()

    async def saved(self, step: int) -> None:
        """Told that a checkpoint of a step is on storage: batches of the steps before it can go."""
        async with self._changed:
            self._floor = max(self._floor, step)
            for old in [old for old in self._offers if old < self._floor]:
                del self._offers[old]
            self._changed.notify_all()

    async def close(self) -> None:
        """Wish for nothing more."""
        async with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self, position: int) -> int | None:
        if self._missing:
            return min(self._missing)
        if self._asked is None or position >= self._total or position > self._asked + self._ahead:
            return None
        return position
