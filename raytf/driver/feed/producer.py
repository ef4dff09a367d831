"""Makes batches in the driver, in a thread of its own, and brings them to the mailbox."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf.data import tree
from raytf.data.plan import BatchPlan
from raytf.data.streams import Batch, Stream, misfit
from raytf.driver.feed.mailbox import Mailbox, Offer, Wish
from raytf.errors import RaytfError
from raytf.training.feed_client import FeedClient

#: Bytes of batches that may wait for the workers, and how many batches at the most and at the least.
_AHEAD_BYTES, _AHEAD_MOST, _AHEAD_LEAST = 64 << 20, 32, 3
#: Seconds in which all of it ends.
_END_SECONDS = 2.0
#: A larger batch is cut into its shards, of which each worker gets only its own.
_WHOLE_BYTES = 1 << 20


@contextlib.contextmanager
def feeding(stream: Stream, plan: BatchPlan, total: int) -> Iterator[FeedClient]:
    """Make batches while the `with` statement lasts. Yields what workers get them by.

    Args:
        stream: of the batches.
        plan: how steps lie in epochs, and how a batch is divided.
        total: steps of the run.
    """
    size = sum(leaf.nbytes for _, leaf in tree.flatten(stream.peek()))
    ahead = max(_AHEAD_LEAST, min(_AHEAD_MOST, _AHEAD_BYTES // max(1, size)))
    # On the driver's node, where all batches are made.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": here, "max_restarts": -1, "max_task_retries": -1}
    # Every rank may wait in a call, beside the driver.
    mailbox: Any = ray.remote(Mailbox).options(**options, max_concurrency=1000).remote(total, ahead)
    producer = threading.Thread(target=_Producer(stream, plan, mailbox).run, name="raytf-feed", daemon=True)
    producer.start()
    try:
        yield FeedClient(mailbox, plan.shards)
    finally:
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(mailbox.close.remote(), timeout=_END_SECONDS)
            producer.join(_END_SECONDS)  # it may be in the program's own code
            ray.kill(mailbox)


class _Producer:
    """Brings the batches that the mailbox wishes.

    Args:
        stream, plan: as for `feeding`.
        mailbox: handle of the actor.
    """

    def __init__(self, stream: Stream, plan: BatchPlan, mailbox: Any):
        self._stream, self._plan, self._mailbox = stream, plan, mailbox
        self._spec = stream.spec()
        #: Batches that may be asked for again, by step.
        self._kept: dict[int, Offer] = {}

    def run(self) -> None:
        """Until the mailbox ends."""
        position = 0
        with contextlib.suppress(ray.exceptions.RayError):
            while True:
                wish: Wish = ray.get(self._mailbox.wish.remote(position))
                step, floor = wish
                if step is None:
                    return
                for old in [old for old in self._kept if old < floor]:
                    del self._kept[old]
                if step not in self._kept:
                    self._kept[step] = self._made(step)
                ray.get(self._mailbox.offer.remote(step, self._kept[step]))
                position = max(self._kept) + 1

    def _made(self, step: int) -> Offer:
        epoch, index = self._plan.locate(step)
        try:
            batch = self._stream.read(epoch, index)
        except RaytfError as error:
            return Offer(0, [], str(error))
        if batch is None:
            return Offer(
                0,
                [],
                f"{self._stream.name} data has ended after {index} of {self._plan.steps_per_epoch} batches in epoch "
                f"{epoch + 1}. Give as many as there are, or make data without end, as with dataset.repeat().",
            )
        why = misfit(batch, self._spec)
        if why:
            name, steps = self._stream.name, self._plan.steps_per_epoch
            return Offer(0, [], f"{name} data: batch {index + 1} of {steps} in epoch {epoch + 1} differs: {why}.")
        return self._put(batch)

    def _put(self, batch: Batch) -> Offer:
        leaves = [np.ascontiguousarray(leaf) for _, leaf in tree.flatten(batch)]
        rows = len(leaves[0])
        if sum(leaf.nbytes for leaf in leaves) <= _WHOLE_BYTES:
            return Offer(rows, [ray.put(leaves)])
        ends = np.cumsum(self._plan.parts(rows))
        return Offer(rows, [ray.put([leaf[a:b] for leaf in leaves]) for a, b in zip([0, *ends], ends, strict=False)])
