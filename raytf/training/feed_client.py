"""How workers get batches that the driver's program makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from raytf.errors import DataError


class FeedClient:
    """Asks the mailbox of `raytf.driver.feed` for batches; can be sent to other processes.

    Args:
        handle: of the mailbox.
        shards: logical shards of a step.
    """

    def __init__(self, handle: ActorHandle, shards: int):
        self._handle: Any = handle  # Ray makes its methods when it runs
        self._shards = shards

    def __call__(self, step: int, shards: range) -> tuple[list[np.ndarray], int]:
        """Leaves of the records of some logical shards at a step, and the number of records of all shards.

        Raises:
            DataError: the program cannot make the batch.
        """
        rows, parts, failure = ray.get(self._handle.ask.remote(step))
        if failure:
            raise DataError(failure)
        if len(parts) == 1:
            first, stop = (n * rows // self._shards for n in (shards.start, shards.stop))
            return [leaf[first:stop] for leaf in ray.get(parts[0])], rows
        found = ray.get(parts[shards.start : shards.stop])
        return [np.concatenate(leaves) for leaves in zip(*found, strict=True)], rows

    def saved(self, step: int) -> None:
        """Tell that a checkpoint of a step is on storage, from rank 0."""
        self._handle.saved.remote(step)
