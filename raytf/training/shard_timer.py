"""How long this machine takes for a shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf


class ShardTimer:
    """Measures full micro-batches, of which nothing is kept.

    Args:
        compute: a traced micro-batch: (leaves, seeds) -> a `ShardResult`.
        first: leaves of the first records.
        records: of a micro-batch.
        seeds: how many pairs of seeds it takes.
    """

    def __init__(self, compute: Any, first: Sequence[np.ndarray], records: int, seeds: int):
        self._compute, self._first, self._records, self._seeds = compute, first, records, seeds
        #: Whether the graph was prepared by a run.
        self._is_ready = False

    def seconds(self) -> float:
        """Seconds of one micro-batch: the faster of two runs."""
        batch = self._batch()
        return min(self._run(batch), self._run(batch))

    def sample(self, seconds: float) -> tuple[float, float]:
        """Measure one micro-batch after another now.

        Args:
            seconds: least duration of the measurement; at least one micro-batch is computed.

        Returns:
            Average seconds of a micro-batch, and seconds that the measurement took.
        """
        batch = self._batch()
        began, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - began < seconds:
            self._run(batch)
            runs += 1
        taken = time.perf_counter() - began
        return taken / runs, taken

    def _batch(self) -> tuple[list[np.ndarray], np.ndarray]:
        """What is measured: the first records again and again. Not every model takes zeros: CTC takes no empty text."""
        leaves = [np.resize(leaf, (self._records, *np.shape(leaf)[1:])) for leaf in self._first]
        batch = leaves, np.zeros([self._seeds, 2], np.int32)
        if not self._is_ready:
            self._run(batch)
            self._is_ready = True
        return batch

    def _run(self, batch: tuple[list[np.ndarray], np.ndarray]) -> float:
        """Compute one micro-batch to its end, and return the seconds it took.

        Only its row is fetched, a few bytes: fetching gradients from a GPU would take longer than computing them.
        """
        leaves, seeds = batch
        began = time.perf_counter()
        self._compute([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32)).row.numpy()
        return time.perf_counter() - began
