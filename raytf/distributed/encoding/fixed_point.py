"""Tensors as whole numbers times a power of two, encoded one by one or all in blocks, with the same numbers.

Encoding one tensor at a time reads and writes the least memory, which matters on a CPU. Blocks need few operations,
which matters on a GPU: see `Blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from raytf.distributed.encoding import digests
from raytf.distributed.encoding.digests import multilinear
from raytf.distributed.encoding.wire import WireLayout, WireWords
from raytf.distributed.step_digest import DigestKind

#: Numbers in a block. A tensor's last block is padded with zeros, on average half a block.
SIZE = 512
#: How many values are compared at a time to find a tensor's largest.
_FAN = 256


class EachTensor:
    """Encodes one tensor at a time.

    Args:
        layout: the tensors' shapes and dtypes.
        compressed: how many tensors, from the first, must fit into 16 bits.
        most: the largest magnitude of their encoded numbers.
        words: how the device holds whole numbers.
        ranges: tensors that are sent together, in order; no range mixes compressed and other tensors.

    Attributes:
        shapes: the encoded tensors' shapes.
        small: how many of them, from the first, hold numbers within 16 bits.
        parts: the encoded tensors that belong to each range.
    """

    def __init__(self, layout: WireLayout, compressed: int, most: float, words: WireWords, ranges: Sequence[range]):
        self.shapes, self.small, self.parts = layout.shapes, compressed, list(ranges)
        self._most, self._words = most, words

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return whole numbers near tensor * weight * scale, and [tensors] the largest magnitude of tensor * weight.
        Scales are powers of two, and a weight usually is."""
        encoded_parts = [self._encode(part, tensors, weight, scales) for part in self.parts]
        return [each for encoded, _ in encoded_parts for each in encoded], tf.concat(
            [largest for _, largest in encoded_parts], 0
        )

    def _encode(
        self, part: range, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        values = [tf.cast(tensors[i], tf.float32) for i in part]
        for i, value in zip(part, values, strict=True):
            # While tracing, TensorFlow may not know a gradient's shape if the number of records is not fixed.
            value.set_shape(self.shapes[i])
        # Two reductions only read the tensor; computing absolute values would write them, which costs more than both.
        largest = tf.abs(tf.stack([_largest(v) for v in values])) * weight
        # Scales are powers of two, so each product is exactly the `value * weight` of `largest`, shifted by some bits.
        factors = tf.unstack(scales[part.start : part.stop] * weight, len(values))
        with tf.control_dependencies([largest]):  # the tensors' memory can then be reused for the products
            products = [v * f for v, f in zip(values, factors, strict=True)]
        whole = [_whole(p, i < self.small, self._most, self._words) for i, p in zip(part, products, strict=True)]
        return whole, largest

    def digests(self, encoded: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
        """Return [tensors, 2] float32 digests of a shard's encoded tensors, see `digests.columns`."""
        return digests.columns(encoded, kind)

    def decode(self, sums: list[tf.Tensor], steps: tf.Tensor) -> list[tf.Tensor]:
        """Return encoded tensors, or sums of them, multiplied by [tensors] steps, as float32."""
        each = tf.unstack(steps, len(self.shapes))
        return [self._words.real(part) * step for part, step in zip(sums, each, strict=True)]


class InBlocks:
    """Encodes each range of tensors as one matrix of blocks, with programs that XLA compiles. See `EachTensor`.

    Without XLA, each operation on a GPU reads and writes all numbers; a compiled program fuses the operations. Only the
    whole numbers are rounded, so XLA computes the same bits. Ranges that workers sum early must not wait for the
    others, so each range has its own programs.
    """

    def __init__(self, layout: WireLayout, compressed: int, most: float, words: WireWords, ranges: Sequence[range]):
        self._most, self._words, self._ranges = most, words, list(ranges)
        self._blocks = [Blocks([layout.shapes[i] for i in part]) for part in self._ranges]
        self.shapes: list[tuple[int, ...]] = [each.shape for each in self._blocks]
        self.small = sum(part.stop <= compressed for part in self._ranges)
        self.parts = [range(i, i + 1) for i in range(len(self._ranges))]
        places = range(len(self._ranges))
        self._encoders = [tf.function(partial(self._encode, i), jit_compile=True, autograph=False) for i in places]
        self._decoders = [tf.function(partial(self._decode, i), jit_compile=True, autograph=False) for i in places]
        self._digests = [tf.function(each.digests, jit_compile=True, autograph=False) for each in self._blocks]

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        factors, encoded, largest = scales * weight, [], []
        for part, encoder in zip(self._ranges, self._encoders, strict=True):
            whole, part_largest = encoder([tensors[i] for i in part], factors[part.start : part.stop])
            encoded.append(whole)
            largest.append(part_largest)
        return encoded, tf.concat(largest, 0) * weight

    def _encode(self, place: int, tensors: list[tf.Tensor], factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        blocks = self._blocks[place]
        values = blocks.lay(tensors)
        product = values * blocks.spread(factors)
        return _whole(product, place < self.small, self._most, self._words), blocks.largest(values)

    def digests(self, encoded: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
        # Blocks are for GPUs, so their digests are always multilinear.
        sums = [digest(whole) for digest, whole in zip(self._digests, encoded, strict=True)]
        return digests.of_sums(tf.concat(sums, 0))

    def decode(self, sums: list[tf.Tensor], steps: tf.Tensor) -> list[tf.Tensor]:
        tensors = []
        for part, decoder, whole in zip(self._ranges, self._decoders, sums, strict=True):
            tensors += decoder(whole, steps[part.start : part.stop])
        return tensors

    def _decode(self, place: int, whole: tf.Tensor, steps: tf.Tensor) -> list[tf.Tensor]:
        blocks = self._blocks[place]
        return blocks.tensors(self._words.real(whole) * blocks.spread(steps))


def _largest(values: tf.Tensor) -> tf.Tensor:
    # The maximum over no elements would be minus infinity.
    has_elements = values.shape.num_elements() > 0
    return tf.maximum(tf.reduce_max(values), -tf.reduce_min(values)) if has_elements else tf.constant(0.0)


def _whole(product: tf.Tensor, is_small: bool, most: float, words: WireWords) -> tf.Tensor:
    if is_small:
        # Rounding may exceed the limit by one. After clipping, the sum of V values always fits 16 bits.
        product = tf.clip_by_value(tf.round(product), -most, most)
    return words.whole(product)


# On a GPU every operation is a kernel launch of some microseconds, and a model has hundreds of tensors. So values that
# differ from tensor to tensor, such as exponents, are looked up for each block.


class Blocks:
    """The places of tensors in a matrix of blocks, whose `shape` is (blocks, `SIZE`)."""

    def __init__(self, shapes: Sequence[Sequence[int]]):
        self._shapes = [tuple(shape) for shape in shapes]
        self._sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self._shapes]
        counts = [-(-size // SIZE) for size in self._sizes]
        self.shape = (sum(counts), SIZE)
        #: The index of each block's tensor. int64, because a GPU keeps int32 in host memory.
        self._owners = np.repeat(np.arange(len(counts)), counts).astype(np.int64)
        self._levels = tree(counts)

    def lay(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Return the tensors as float32 [blocks, SIZE]."""
        parts = []
        for tensor, size in zip(tensors, self._sizes, strict=True):
            parts.append(tf.reshape(tf.cast(tensor, tf.float32), [-1]))
            if size % SIZE:
                parts.append(tf.zeros([-size % SIZE]))
        return tf.reshape(tf.concat(parts, 0), self.shape)

    def largest(self, blocks: tf.Tensor) -> tf.Tensor:
        """Return [tensors] the largest magnitude in each tensor; NaN if one of its numbers is NaN."""
        largest = tf.maximum(tf.reduce_max(blocks, 1), -tf.reduce_min(blocks, 1))
        # A device's maximum may ignore NaN, a sum does not. Numbers whose sum overflows then count as not finite, too.
        largest += 0.0 * tf.reduce_sum(blocks, 1)
        largest = tf.concat([largest, tf.zeros([1])], 0)  # for empty tensors, which have no block
        for level in self._levels:
            values = tf.gather(largest, level)
            lost = tf.reduce_max(tf.cast(tf.math.is_nan(values), tf.float32), 1)
            largest = tf.where(lost > 0, np.float32(np.nan), tf.reduce_max(values, 1))
        return largest

    def digests(self, blocks: tf.Tensor) -> tf.Tensor:
        """Return [tensors] int64, the multilinear digest of each tensor's 32-bit words, from [blocks, SIZE]."""
        words = tf.cast(tf.bitcast(blocks, tf.uint32), tf.uint64)
        of_blocks = multilinear(words, tf.constant(0, tf.int64))
        return tf.math.unsorted_segment_sum(of_blocks, self._owners, len(self._shapes))

    def spread(self, values: tf.Tensor) -> tf.Tensor:
        """Return [blocks, 1] the value of each block's tensor, from [tensors] values."""
        return tf.gather(values, self._owners)[:, None]

    def tensors(self, blocks: tf.Tensor) -> list[tf.Tensor]:
        """Return the tensors from [blocks, SIZE]."""
        cuts = [cut for size in self._sizes for cut in ([size, -size % SIZE] if size % SIZE else [size])]
        parts = iter(tf.split(tf.reshape(blocks, [-1]), cuts))
        tensors = []
        for size, shape in zip(self._sizes, self._shapes, strict=True):
            tensors.append(tf.reshape(next(parts), shape))
            if size % SIZE:
                next(parts)
        return tensors


def tree(counts: Sequence[int]) -> list[np.ndarray]:
    """Return the indices with which to find the largest value of each row, `_FAN` values at a time.

    The values of all rows are one vector, with a zero at its end. A segment maximum would need only one operation, but
    its GPU kernel compares one value after another: thousands of blocks of a tensor would wait for the same number.

    Args:
        counts: the number of values in each row.

    Returns:
        For each level [groups, at most `_FAN`] int64, the indices of the values that a group compares. The last level
        has one group for each row. A short group is filled by repeating an index, which does not change its maximum.
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
