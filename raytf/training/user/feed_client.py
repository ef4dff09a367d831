"""A worker's client for batches that the driver's program makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from raytf.data.plan import StepPlan
from raytf.errors import DataError


class FeedClient:
    """Requests batches from the mailbox of `raytf.driver.feed`; can be sent to other processes."""

    def __init__(self, handle: ActorHandle, plan: StepPlan):
        self._handle: Any = handle  # Ray adds its methods at run time
        self._plan = plan
        #: The latest offer, and the leaves of its batches for the shards that were requested last.
        self._offer: Any = None
        self._batches: tuple[range, list[list[np.ndarray]]] = range(0), []

    def __call__(self, step: int, shards: range) -> tuple[list[np.ndarray], int]:
        """Return the leaves of these logical shards' records at a step, and the number of records of all shards.

        Raises:
            DataError: the program could not make the batch.
        """
        if self._offer is None or not self._offer.has(step) or self._batches[0] != shards:
            self._offer = ray.get(self._handle.ask.remote(step))
            self._batches = shards, self._taken(shards)
        at = step - self._offer.start
        if at == len(self._offer.rows):
            raise DataError(self._offer.failure)
        return self._batches[1][at], self._offer.rows[at]

    def _taken(self, shards: range) -> list[list[np.ndarray]]:
        """Return the leaves of these shards' records, for each batch of the offer."""
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
        """Report from rank 0 that a step's checkpoint is in storage."""
        self._handle.saved.remote(step)
