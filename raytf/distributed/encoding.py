"""Tensors as whole numbers times a power of two, one tensor at a time or all in blocks; both give the same numbers.

One tensor at a time reads and writes the least memory, which counts on a CPU. Blocks need few operations, which counts
on a GPU: see `blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol

import tensorflow as tf

from raytf.distributed import digests
from raytf.distributed.blocks import Blocks
from raytf.distributed.step_digest import DigestKind
from raytf.distributed.wire import WireLayout, WireWords


class Encoding(Protocol):
    """A form in which the tensors of a step can be summed.

    Attributes:
        shapes: the encoded tensors' shapes.
        small: how many of them, from the first, hold numbers within 16 bits.
        parts: for each range of tensors that the encoding was made for, which encoded tensors belong to it.
    """

    shapes: list[tuple[int, ...]]
    small: int
    parts: list[range]

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Whole numbers near tensor * weight * scale, and [tensors] the largest magnitude in each tensor * weight.

        Args:
            tensors: of a shard.
            weight: by which all numbers are multiplied, usually a power of two.
            scales: [tensors] powers of two.
        """
        ...

    def digests(self, encoded: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
        """[tensors, 2] float32 digests of a shard's encoded tensors, see `digests.columns`."""
        ...

    def decode(self, sums: list[tf.Tensor], steps: tf.Tensor) -> list[tf.Tensor]:
        """The tensors as float32: encoded tensors, or sums of them, times [tensors] steps."""
        ...


class EachTensor:
    """One tensor at a time.

    Args:
        layout: of the tensors.
        compressed: how many tensors, from the first, must fit into 16 bits.
        most: the largest magnitude of their encoded numbers.
        words: how the device holds whole numbers.
        ranges: tensors that travel together, in order; no range mixes compressed tensors and others.
    """

    def __init__(self, layout: WireLayout, compressed: int, most: float, words: WireWords, ranges: Sequence[range]):
        self.shapes, self.small, self.parts = layout.shapes, compressed, list(ranges)
        self._most, self._words = most, words

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        found = [self._encode(part, tensors, weight, scales) for part in self.parts]
        return [each for encoded, _ in found for each in encoded], tf.concat([largest for _, largest in found], 0)

    def _encode(
        self, part: range, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        values = [tf.cast(tensors[i], tf.float32) for i in part]
        for i, value in zip(part, values, strict=True):
            # While tracing, TensorFlow may not know a gradient's shape if the number of records is not fixed.
            value.set_shape(self.shapes[i])
        # Two reductions read the tensor; its absolute values would be written first, which costs more than both.
        largest = tf.abs(tf.stack([_largest(v) for v in values])) * weight
        # Scales are powers of two, so these are exactly the `value * weight` of `largest`, shifted by some bits.
        factors = tf.unstack(scales[part.start : part.stop] * weight, len(values))
        with tf.control_dependencies([largest]):  # the tensors' memory can then be reused for the products
            products = [v * f for v, f in zip(values, factors, strict=True)]
        whole = [_whole(p, i < self.small, self._most, self._words) for i, p in zip(part, products, strict=True)]
        return whole, largest

    def digests(self, encoded: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
        return digests.columns(encoded, kind)

    def decode(self, sums: list[tf.Tensor], steps: tf.Tensor) -> list[tf.Tensor]:
        each = tf.unstack(steps, len(self.shapes))
        return [self._words.real(part) * step for part, step in zip(sums, each, strict=True)]


class InBlocks:
    """Each range of tensors in one vector of blocks, by programs that XLA compiles. See `EachTensor`.

    Operation by operation, a GPU reads and writes all numbers with each of them; a compiled program fuses them. Nothing
    is rounded but the whole numbers themselves, so XLA gives the same bits. What is added over workers early must not
    wait for the rest, so each range has programs of its own.
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
            whole, found = encoder([tensors[i] for i in part], factors[part.start : part.stop])
            encoded.append(whole)
            largest.append(found)
        return encoded, tf.concat(largest, 0) * weight

    def _encode(self, place: int, tensors: list[tf.Tensor], factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        blocks = self._blocks[place]
        values = blocks.lay(tensors)
        product = values * blocks.spread(factors)
        return _whole(product, place < self.small, self._most, self._words), blocks.largest(values)

    def digests(self, encoded: Sequence[tf.Tensor], kind: DigestKind) -> tf.Tensor:
        # As on a GPU, for which blocks are.
        sums = [digest(whole) for digest, whole in zip(self._digests, encoded, strict=True)]
        return digests.of_sums(tf.concat(sums, 0))

    def decode(self, sums: list[tf.Tensor], steps: tf.Tensor) -> list[tf.Tensor]:
        found = []
        for part, decoder, whole in zip(self._ranges, self._decoders, sums, strict=True):
            found += decoder(whole, steps[part.start : part.stop])
        return found

    def _decode(self, place: int, whole: tf.Tensor, steps: tf.Tensor) -> list[tf.Tensor]:
        blocks = self._blocks[place]
        return blocks.tensors(self._words.real(whole) * blocks.spread(steps))


def _largest(values: tf.Tensor) -> tf.Tensor:
    # The maximum over no elements would be minus infinity.
    has_elements = values.shape.num_elements() > 0
    return tf.maximum(tf.reduce_max(values), -tf.reduce_min(values)) if has_elements else tf.constant(0.0)


def _whole(product: tf.Tensor, is_small: bool, most: float, words: WireWords) -> tf.Tensor:
    if is_small:
        # Rounding to the nearest may exceed the limit by one; V clipped values fit 16 bits, whatever the values were.
        product = tf.clip_by_value(tf.round(product), -most, most)
    return words.whole(product)
