"""Gradients of embeddings: only the rows that occur, from all shards, in shard order.

TensorFlow represents the gradient of a lookup as `tf.IndexedSlices`: the index and the values of each row's occurrence.
An optimizer may treat them differently from their dense sum: Keras's Adam squares each occurrence by itself. So nothing
is added here. Every worker receives the occurrences of all shards, bit for bit, and passes its optimizer the same
slices as one machine with the whole batch would. The bytes sent grow with the occurrences, not with the table's rows.

An occurrence is a row of float32: the bits of its index, then its values. Nothing is computed with these numbers. A GPU
can copy, pad and concatenate float32, but not int64. Only for the sum over workers, two float32 become one int64. Other
workers' rows are zero in this sum, so all bits stay the same.
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
        shape: the variable's shape, (rows, ...).
        dtype: the variable's dtype.
        count: occurrences in a full shard; None if their number differs from shard to shard.
    """

    shape: tuple[int, ...]
    dtype: tf.DType
    count: int | None

    @classmethod
    def of(cls, variable: Any, gradient: tf.IndexedSlices) -> SliceLayout:
        return cls(tuple(variable.shape), tf.as_dtype(variable.dtype), gradient.indices.shape[0])

    @property
    def size(self) -> int:
        """Number of values in a row of the variable."""
        return int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def width(self) -> int:
        """Number of float32 words of an occurrence, which is even."""
        return 2 + (2 * self.size if self.dtype == tf.float64 else self.size + self.size % 2)

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([None, self.width], tf.float32)

    def pack(self, slices: tf.IndexedSlices, weight: tf.Tensor) -> tf.Tensor:
        """Return [n, width] the occurrences of a shard, with values multiplied by the shard's weight."""
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
    """Return on every worker, for each variable, [n, width] the occurrences of all shards, in shard order.
    `counts` are each variable's occurrences in any shard; None if they differ from shard to shard."""
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
    """Return, for each variable, the place of this worker's first occurrence, and the occurrences of all shards."""
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
    """Return slices with the same sum, in which each row occurs once.

    TensorFlow's kernels that add slices to a variable add several occurrences of a row in no fixed order, so the last
    bits would differ from run to run.
    """
    rows, places = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, slices.dense_shape)
