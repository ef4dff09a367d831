"""The workers' side of batches that the driver's program makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from raytf.data.plan import StepPlan
from raytf.errors import DataError


class FeedClient:
    """Asks the mailbox of `raytf.driver.feed` for batches; can be sent to other processes."""

    def __init__(self, handle: ActorHandle, plan: StepPlan):
        self._handle: Any = handle  # Ray makes its methods when it runs
        self._plan = plan
        #: The offer that was had last, and the leaves of its batches for some shards.
        self._offer: Any = None
        self._batches: tuple[range, list[list[np.ndarray]]] = range(0), []

    def __call__(self, step: int, shards: range) -> tuple[list[np.ndarray], int]:
        """Return the leaves of some logical shards' records at a step, and the number of records of all shards.

        Raises:
            DataError: the program cannot make the batch.
        """
        if self._offer is None or not self._offer.has(step) or self._batches[0] != shards:
            self._offer = ray.get(self._handle.ask.remote(step))
            self._batches = shards, self._taken(shards)
        at = step - self._offer.start
        if at == len(self._offer.rows):
            raise DataError(self._offer.failure)
        return self._batches[1][at], self._offer.rows[at]

    def _taken(self, shards: range) -> list[list[np.ndarray]]:
        """Return the leaves of some shards' records, for each batch of the offer."""
        rows, parts = self._offer.rows, self._offer.parts
        if len(parts) > 1:
            batches = ray.get(parts[shards.start : shards.stop])
            return [
                [np.concatenate(leaves) for leaves in zip(*batch, strict=True)] for batch in zip(*batches, strict=True)
            ]
        cut: list[list[np.ndarray]] = []
        for count, leaves in zip(rows, ray.get(parts[0]) if parts else [], strict=True):
            first, stop = self._plan.cuts(count)[[shards.start, shards.stop]]
            cut.append([leaf[first:stop] for leaf in leaves])
        return cut

    def saved(self, step: int) -> None:
        """Report that a checkpoint of a step is on storage, from rank 0."""
        self._handle.saved.remote(step)
