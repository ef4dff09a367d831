"""Gradients of embeddings: only the rows that occur, from all shards, in shard order.

TensorFlow has the gradient of a lookup as `tf.IndexedSlices`: for each occurrence of a row its index and its values.
Optimizers read more from them than from their dense sum: Keras's Adam squares each occurrence by itself. So nothing is
added here. Every worker gets the occurrences of all shards, bit for bit, and hands the optimizer what it would get from
the whole batch on one machine. What is sent grows with the occurrences, and not with the rows of the table.

An occurrence is a row of float32, with which nothing is computed: the bits of its index, then its values. A GPU can
copy, pad and lay side by side float32, but not int64. Only in the sum over workers two of them are an int64: other
workers' rows are zero there, so they arrive bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.distributed.encoding.wire import ShardSpan, WorkerPart


@dataclass(frozen=True)
class SliceLayout:
    """The slices of one trainable variable.

    Attributes:
        shape: of the variable: (rows, ...).
        dtype: of the variable.
        count: occurrences in a full shard; None if it differs from shard to shard.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    count: int | None

    @classmethod
    def of(cls, variable: Any, gradient: tf.IndexedSlices) -> SliceLayout:
        return cls(tuple(variable.shape), tf.as_dtype(variable.dtype), gradient.indices.shape[0])

    @property
    def size(self) -> int:
        """Values in a row of the variable."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def width(self) -> int:
        """float32 words of an occurrence, an even number."""
        return 2 + (2 * self.size if self.dtype == tf.float64 else self.size + self.size % 2)

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([None, self.width], tf.float32)

    def pack(self, slices: tf.IndexedSlices, weight: tf.Tensor) -> tf.Tensor:
        """Return [n, width] the occurrences of a shard, their values multiplied by the shard's weight."""
        wide = tf.float64 if self.dtype == tf.float64 else tf.float32
        values = tf.reshape(tf.cast(slices.values, wide), [-1, self.size]) * tf.cast(weight, wide)
        if wide == tf.float64:
            values = tf.reshape(tf.bitcast(values, tf.float32), [-1, 2 * self.size])
        index = tf.bitcast(tf.cast(slices.indices, tf.int64), tf.float32)
        filled = tf.pad(values, [[0, 0], [0, self.width - 2 - values.shape[1]]])
        return tf.ensure_shape(tf.concat([index, filled], 1), self.spec.shape)

    def unpack(self, words: tf.Tensor) -> tf.IndexedSlices:
        """Return the slices of [n, width] occurrences."""
        values = words[:, 2:]
        if self.dtype == tf.float64:
            values = tf.bitcast(tf.reshape(values, [-1, self.size, 2]), tf.float64)
        values = tf.reshape(tf.cast(values[:, : self.size], self.dtype), [-1, *self.shape[1:]])
        return tf.IndexedSlices(values, tf.bitcast(words[:, :2], tf.int64), tf.constant(self.shape, tf.int64))


def gather(part: WorkerPart, own: Sequence[tf.Tensor], counts: Sequence[int | None]) -> list[tf.Tensor]:
    """Return on every worker the occurrences of all shards, in shard order: for each variable [n of all shards, width],
    of which any shard has as many as `counts`, or None if only the workers themselves know."""
    if part.all_reduce is None or not own:
        return list(own)
    begins, totals = _places(part, own, counts)
    laid = []
    for words, begin, total in zip(own, begins, totals, strict=True):
        after = total - begin - tf.shape(words, tf.int64)[0]
        laid.append(tf.pad(words, [[begin, after], [0, 0]]))
    flat = tf.concat([tf.reshape(each, [-1, 2]) for each in laid], 0)
    (flat,) = part.all_reduce([tf.bitcast(flat, tf.int64)])
    sizes = [tf.shape(each)[0] * (each.shape[1] // 2) for each in laid]
    gathered = tf.split(tf.bitcast(flat, tf.float32), sizes, num=len(laid))
    return [tf.reshape(each, [-1, words.shape[1]]) for each, words in zip(gathered, own, strict=True)]


def _places(
    part: WorkerPart, own: Sequence[tf.Tensor], counts: Sequence[int | None]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return for each variable at which occurrence this worker's begin, and how many all shards have."""
    assert part.all_reduce is not None
    first = part.shards.start
    if all(count is not None for count in counts):
        known = [tf.constant(count, tf.int64) for count in counts]
        begin = tf.cast(first, tf.int64)
        return [count * begin for count in known], [count * part.total_shards for count in known]
    own_counts = tf.stack([tf.shape(words, tf.int64)[0] for words in own])
    (every,) = part.all_reduce([part._replace(shards=ShardSpan(first, first + 1)).placed(own_counts[None])])
    before, total = tf.reduce_sum(every[:first], 0), tf.reduce_sum(every, 0)
    return tf.unstack(before, len(own)), tf.unstack(total, len(own))


def unique_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return the same sum with each row once.

    TensorFlow's kernels that add slices to a variable add several occurrences of a row in an order of their own, so
    the last bits would differ from run to run.
    """
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)
