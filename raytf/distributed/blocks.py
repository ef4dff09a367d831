"""Tensors packed into one vector of equal blocks, each of one tensor: a few large operations instead of many small.

On a GPU every operation is a kernel launch of some microseconds, and a model has hundreds of tensors. What differs from
tensor to tensor, such as an exponent, is looked up for each block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

#: Numbers in a block. A tensor's last block is padded with zeros, on average half a block.
SIZE = 512


class Blocks:
    """Where some tensors lie in a matrix of blocks.

    Args:
        shapes: the tensors' shapes.

    Attributes:
        shape: of the matrix: (blocks, `SIZE`).
    """

    def __init__(self, shapes: Sequence[Sequence[int]]):
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        counts = [-(-size // SIZE) for size in self._sizes]
        self.shape = (sum(counts), SIZE)
        #: The index of each block's tensor. int64, because a GPU keeps int32 in host memory.
        self._owners = np.repeat(np.arange(len(counts)), counts).astype(np.int64)

    def lay(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """The tensors as float32 [blocks, SIZE]."""
        parts = []
        for tensor, size in zip(tensors, self._sizes, strict=True):
            parts.append(tf.reshape(tf.cast(tensor, tf.float32), [-1]))
            if size % SIZE:
                parts.append(tf.zeros([-size % SIZE]))
        return tf.reshape(tf.concat(parts, 0), self.shape)

    def largest(self, blocks: tf.Tensor) -> tf.Tensor:
        """[tensors] the largest magnitude in each tensor; NaN where one of its numbers is NaN."""
        largest = tf.maximum(tf.reduce_max(blocks, 1), -tf.reduce_min(blocks, 1))
        # Devices may drop NaN when they compute a maximum. Numbers whose sum overflows count as not finite, too.
        largest += 0.0 * tf.reduce_sum(blocks, 1)
        count, is_nan = len(self._sizes), tf.cast(tf.math.is_nan(largest), tf.float32)
        found = tf.math.unsorted_segment_max(largest, self._owners, count)
        lost = tf.math.unsorted_segment_max(is_nan, self._owners, count)
        # A tensor without elements has no block; the maximum over none would be the lowest float32.
        return tf.where(lost > 0, np.float32(np.nan), tf.maximum(found, 0.0))

    def spread(self, values: tf.Tensor) -> tf.Tensor:
        """[blocks, 1] the value of each block's tensor, from [tensors] values."""
        return tf.gather(values, self._owners)[:, None]

    def tensors(self, blocks: tf.Tensor) -> list[tf.Tensor]:
        """The tensors from [blocks, SIZE]."""
        cuts = [cut for size in self._sizes for cut in ([size, -size % SIZE] if size % SIZE else [size])]
        parts = iter(tf.split(tf.reshape(blocks, [-1]), cuts))
        found = []
        for size, shape in zip(self._sizes, self._shapes, strict=True):
            found.append(tf.reshape(next(parts), shape))
            if size % SIZE:
                next(parts)
        return found
