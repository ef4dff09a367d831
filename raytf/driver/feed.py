"""Batches that the driver's program makes.

A thread makes the batches, and an actor, the mailbox, passes them to workers by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf.data import tree
from raytf.data.plan import BatchPlan
from raytf.data.streams import Stream, misfit
from raytf.errors import RaytfError, one_line
from raytf.training.user.feed_client import FeedClient

#: The most bytes of batches that may wait for the workers, and the largest and smallest number of such batches.
_AHEAD_BYTES, _AHEAD_MOST, _AHEAD_LEAST = 64 << 20, 32, 3
#: Timeout for closing the mailbox, and for the end of the thread, in seconds.
_END_SECONDS = 2.0
#: Batches of more bytes are cut into shards, of which each worker gets only its own. Smaller batches are sent together,
#: as many as are made in this time.
_WHOLE_BYTES, _TOGETHER_SECONDS = 1 << 20, 0.05


@contextlib.contextmanager
def feeding(stream: Stream, plan: BatchPlan, total: int) -> Iterator[FeedClient]:
    """Make the batches of a run of `total` steps while the `with` statement lasts. Yields a client for its workers."""
    size = sum(leaf.nbytes for _, leaf in tree.flatten(stream.peek()))
    ahead = max(_AHEAD_LEAST, min(_AHEAD_MOST, _AHEAD_BYTES // max(1, size)))
    # On the driver's node, where all batches are made.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}
    # Every rank may wait in a call, in addition to the driver.
    mailbox: Any = ray.remote(Mailbox).options(**options, max_concurrency=1000).remote(total, ahead)
    most = max(1, min(ahead, _AHEAD_MOST // 2, _WHOLE_BYTES // max(1, size)))
    making = _Producer(stream, plan, total, most, mailbox)
    producer = threading.Thread(target=making.run, name="raytf-feed", daemon=True)
    producer.start()
    try:
        yield FeedClient(mailbox, plan)
        stream.end()
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(mailbox.close.remote(), timeout=_END_SECONDS)
            producer.join(_END_SECONDS)  # with a timeout, since it may be in the program's own code
            ray.kill(mailbox)


class _Producer:
    """Makes the batches that the mailbox requests, at most `most` together."""

    def __init__(self, stream: Stream, plan: BatchPlan, total: int, most: int, mailbox: Any):
        self._stream, self._plan, self._total, self._most = stream, plan, total, most
        self._mailbox, self._spec = mailbox, stream.spec()
        #: Offers that may be requested again.
        self._kept: list[Offer] = []

    def run(self) -> None:
        position = 0
        with contextlib.suppress(ray.exceptions.RayError):
            while True:
                wish: Wish = ray.get(self._mailbox.wish.remote(position))
                if wish.step is None:
                    return
                self._kept = [old for old in self._kept if old.stop > wish.floor]
                offer = next((old for old in self._kept if old.has(wish.step)), None)
                if offer is None:
                    offer = self._surely_made(wish.step)
                    self._kept.append(offer)
                    position = offer.stop
                elif wish.step == position:
                    position = offer.stop
                ray.get(self._mailbox.offer.remote(offer))

    def _surely_made(self, start: int) -> Offer:
        """Make batches, or an offer that reports the error, since workers wait for an answer."""
        try:
            return self._made(start)
        except Exception as error:  # such as a full object store
            text = f"{self._stream.name} data: batches from step {start + 1} on cannot be sent to the workers: "
            return Offer(start, [], [], text + one_line(error, 300))

    def _made(self, start: int) -> Offer:
        """Make batches from a step on: at least one, and more as long as they are small and made quickly."""
        batches: list[list[np.ndarray]] = []
        failure, began = "", time.monotonic()
        while start + len(batches) < self._total:
            made = self._batch(start + len(batches))
            if isinstance(made, str):
                failure = made
                break
            batches.append(made)
            if len(batches) == self._most or time.monotonic() - began > _TOGETHER_SECONDS:
                break
        return Offer(start, [len(leaves[0]) for leaves in batches], self._put(batches), failure)

    def _batch(self, step: int) -> list[np.ndarray] | str:
        """Return the leaves of a batch, or the reason why there is none."""
        epoch, index = self._plan.locate(step)
        name, steps = self._stream.name, self._plan.steps_per_epoch
        try:
            batch = self._stream.read(*self._plan.pass_of(step))
        except RaytfError as error:
            return str(error)
        if batch is None:
            return (
                f"{name} data has ended after {index} of {steps} batches in epoch {epoch + 1}. Request no more than "
                "there are, or make the data endless, for example with dataset.repeat()."
            )
        why = misfit(batch, self._spec)
        if why:
            return f"{name} data: batch {index + 1} of {steps} in epoch {epoch + 1} differs: {why}."
        return [np.ascontiguousarray(leaf) for _, leaf in tree.flatten(batch)]

    def _put(self, batches: list[list[np.ndarray]]) -> list[Any]:
        """Store batches, and return references to their leaves for `Offer.parts`."""
        if sum(leaf.nbytes for leaves in batches for leaf in leaves) <= _WHOLE_BYTES:
            return [ray.put(batches)]
        shards: list[list[list[np.ndarray]]] = [[] for _ in range(self._plan.shards)]
        for leaves in batches:
            cuts = self._plan.cuts(len(leaves[0]))
            for own, (first, stop) in zip(shards, itertools.pairwise(cuts), strict=True):
                own.append([leaf[first:stop] for leaf in leaves])
        return [ray.put(own) for own in shards]


# -- mailbox -----------------------------------------------------------------------------------------------------------
#
# Its process may be killed. Ray then starts another one under the same handle and sends unanswered calls again. The
# driver keeps all batches that may be requested again, and sends those for which workers wait.


class Offer(NamedTuple):
    """Batches of consecutive steps, in Ray's object store.

    Attributes:
        start: the first step.
        rows: number of records of each batch.
        parts: one reference to the leaves of all batches, or a reference for each logical shard to its part of them.
        failure: why there is no batch for the next step; empty if there may be one.
    """

    start: int
    rows: list[int]
    parts: list[Any]
    failure: str = ""

    @property
    def stop(self) -> int:
        """Return the step after the last step that this offer covers, including a failure."""
        return self.start + len(self.rows) + bool(self.failure)

    def has(self, step: int) -> bool:
        return self.start <= step < self.stop


class Wish(NamedTuple):
    """The mailbox's request to the driver for batches from `step` on; None to stop.

    Batches before the `floor` are requested again only if a checkpoint turns out to be damaged.
    """

    step: int | None
    floor: int


class Mailbox:
    """Passes batches from the driver to the workers, by global step; about `ahead` of them may wait for the workers."""

    def __init__(self, total: int, ahead: int):
        self._total, self._ahead = total, ahead
        self._offers: list[Offer] = []
        #: The step that a worker has requested last, and the steps that workers wait for.
        self._asked: int | None = None
        self._missing: set[int] = set()
        self._floor = 0
        self._is_closed = False
        self._changed = asyncio.Condition()

    async def ask(self, step: int) -> Offer:
        """Wait for the batch of a step, and return an offer that has it."""
        async with self._changed:
            self._asked = step
            if self._with(step) is None:
                self._missing.add(step)
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._with(step) is not None)
            offer = self._with(step)
            assert offer is not None
            return offer

    async def wish(self, position: int) -> Wish:
        """Wait until more batches are needed than those before `position`, and return the request for them."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._is_closed or self._next(position) is not None)
            return Wish(None if self._is_closed else self._next(position), self._floor)

    async def offer(self, offer: Offer) -> None:
        """Add batches from the driver."""
        async with self._changed:
            self._offers = [old for old in self._offers if old.start != offer.start] + [offer]
            self._missing = {step for step in self._missing if not offer.has(step)}
            self._changed.notify_all()

    async def saved(self, step: int) -> None:
        """Drop the batches of steps before a checkpoint that is in storage."""
        async with self._changed:
            self._floor = max(self._floor, step)
            self._offers = [old for old in self._offers if old.stop > self._floor]
            self._changed.notify_all()

    async def close(self) -> None:
        """Stop requesting batches from the driver."""
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
