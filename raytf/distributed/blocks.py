"""Tensors packed into one vector of equal blocks, each of one tensor: a few large operations instead of many small.

On a GPU every operation is a kernel launch of some microseconds, and a model has hundreds of tensors. What differs from
tensor to tensor, such as an exponent, is looked up for each block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from raytf.distributed.digests import multilinear

#: Numbers in a block. A tensor's last block is padded with zeros, on average half a block.
SIZE = 512
#: Values of which a tensor's largest is found at a time.
_FAN = 256


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
        self._levels = tree(counts)

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
        largest = tf.concat([largest, tf.zeros([1])], 0)  # of a tensor without elements, which has no block
        for level in self._levels:
            values = tf.gather(largest, level)
            lost = tf.reduce_max(tf.cast(tf.math.is_nan(values), tf.float32), 1)
            largest = tf.where(lost > 0, np.float32(np.nan), tf.reduce_max(values, 1))
        return largest

    def digests(self, blocks: tf.Tensor) -> tf.Tensor:
        """[tensors] int64, the multilinear digest of each tensor's words.

        Args:
            blocks: 32-bit words [blocks, SIZE].
        """
        words = tf.cast(tf.bitcast(blocks, tf.uint32), tf.uint64)
        of_blocks = multilinear(words, tf.constant(0, tf.int64))
        return tf.math.unsorted_segment_sum(of_blocks, self._owners, len(self._shapes))

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


def tree(counts: Sequence[int]) -> list[np.ndarray]:
    """How to find the largest of each of some rows of values, `_FAN` of them at a time.

    The values of all rows are one vector, with a zero at its end. A maximum of segments would do it at once, but on a
    GPU its kernel compares in turn: thousands of blocks of one tensor all wait for the same number.

    Args:
        counts: of values in each row.

    Returns:
        For each level [groups, `_FAN` at most] int64, the indices of what a group's largest is taken of. The last level
        has a group for each row. An index that occurs twice changes no maximum, so it fills what a group lacks.
    """
    levels: list[np.ndarray] = []
    last = sum(counts)
    ends = np.cumsum(counts)
    rows = [np.arange(end - count, end) if count else np.array([last]) for end, count in zip(ends, counts, strict=True)]
    while not levels or any(len(row) > 1 for row in rows):
        parts = [[row[i : i + _FAN] for i in range(0, len(row), _FAN)] for row in rows]
        groups = [group for row in parts for group in row]
        width = max(map(len, groups))
        levels.append(np.stack([np.pad(group, (0, width - len(group)), "edge") for group in groups]).astype(np.int64))
        ends = np.cumsum([len(row) for row in parts])
        rows = [np.arange(end - len(row), end) for end, row in zip(ends, parts, strict=True)]
    return levels
