"""What travels between workers in a step: one flat vector, reduced once.

It holds the weighted sum of gradients, the weighted sum of what layers updated (BatchNorm statistics), a matrix with
one row a logical shard for loss and metrics, and a few flags. Rows of other workers are zero, so a row arrives bit
for bit, and all ranks add the V rows in the same order: metrics do not depend on the number of workers, even in their
last bit. Gradients are added in float, whose last bits do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf


class Layout:
    """Packs tensors of fixed shapes into a vector and back.

    Args:
        shapes: of the tensors.
        dtypes: of the tensors; everything travels in `wire`.
        wire: float32, or float64 where some tensor needs it.
    """

    def __init__(self, shapes: Sequence[Sequence[int]], dtypes: Sequence[tf.DType], wire: tf.DType):
        self.shapes, self.dtypes, self.wire = [tuple(s) for s in shapes], list(dtypes), wire
        self.sizes = [int(np.prod(s, dtype=np.int64)) for s in self.shapes]
        self.size = sum(self.sizes)

    def pack(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        if not self.sizes:
            return tf.zeros([0], self.wire)
        return tf.concat([tf.reshape(tf.cast(t, self.wire), [-1]) for t in tensors], 0)

    def unpack(self, vector: tf.Tensor) -> list[tf.Tensor]:
        if not self.sizes:
            return []
        parts = tf.split(vector, self.sizes)
        return [tf.cast(tf.reshape(p, s), d) for p, s, d in zip(parts, self.shapes, self.dtypes, strict=True)]


def reduce_step(
    all_reduce: Callable[[tf.Tensor], tf.Tensor],
    sums: tf.Tensor,
    rows: tf.Tensor,
    flags: tf.Tensor,
    shards: range,
    total_shards: int,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reduce a step over all workers with one collective.

    Args:
        all_reduce: sums a vector over workers.
        sums: [D] this worker's weighted sums.
        rows: [L, M] loss and metrics of this worker's shards.
        flags: [F] this worker's flags.
        shards: the L shards of this worker.
        total_shards: V.

    Returns:
        [D] sums, [M] rows added over all V shards, [F] flags added over workers.
    """
    width = rows.shape[1]
    everyones = tf.pad(rows, [[shards.start, total_shards - shards.stop], [0, 0]])
    vector = tf.concat([sums, tf.reshape(tf.cast(everyones, sums.dtype), [-1]), tf.cast(flags, sums.dtype)], 0)
    reduced = all_reduce(vector)
    sums, matrix, flags_sum = tf.split(reduced, [sums.shape[0], total_shards * width, flags.shape[0]])
    return sums, tf.reduce_sum(tf.reshape(matrix, [total_shards, width]), 0), flags_sum
