"""What travels between workers in a step: one flat vector, reduced once, and the sum does not depend on who adds first.

The vector holds the weighted sum of gradients, the weighted sum of what layers updated (BatchNorm statistics), a
matrix with one row a logical shard for loss and metrics, and a few flags. Rows of other workers are zero, so a row
arrives bit for bit, and all ranks add the V rows in the same order.

Gradients need more. Float addition depends on its order, hence on the number of workers, and training amplifies the
last bit: after 50 steps losses may differ in the fourth digit. `Exact` therefore adds integers. Each tensor has an
exponent e; every shard's values are rounded to multiples of 2**(e - b), with b bits chosen so that V of them cannot
overflow an int32 (fixed point; Demmel and Nguyen, Parallel reproducible summation, 2015, call it pre-rounding). The
exponent follows the largest value of the step before, with head-room, so that no worker has to wait for a maximum
first; where a step outgrows it, all ranks see so in the reduced rows and do the step's arithmetic once more with the
right one. Exponents are a function of the step alone and are saved with the weights. The bytes on the wire are those of
float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import keras
import numpy as np
import tensorflow as tf

#: Powers of two by which a tensor's largest value may grow from one step to the next without a repetition.
_HEADROOM = 3
#: Exponents below this round to zero; it keeps the scale a normal float32.
_LEAST, _MOST = -90, 128

AllReduce = Callable[[tf.Tensor], tf.Tensor]
#: scales -> (vector [D] summed over this worker's shards, rows [L, M + extra]).
Compute = Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]


class Reduced(NamedTuple):
    """A step after reduction: tensors, the row [M] added over all shards, flags [F] added over all ranks, and whether
    all numbers in the tensors are finite."""

    tensors: list[tf.Tensor]
    row: tf.Tensor
    flags: tf.Tensor
    finite: tf.Tensor


class Layout:
    """Shapes and dtypes of the tensors that travel, in order."""

    def __init__(self, shapes: Sequence[Sequence[int]] = (), dtypes: Sequence[tf.DType] = ()):
        self.shapes, self.dtypes = [tuple(s) for s in shapes], list(dtypes)
        self.sizes = [int(np.prod(s, dtype=np.int64)) for s in self.shapes]
        self.size = sum(self.sizes)

    def concat(self, tensors: Sequence[tf.Tensor], dtype: tf.DType) -> tf.Tensor:
        if not self.sizes:
            return tf.zeros([0], dtype)
        return tf.concat([tf.reshape(tf.cast(t, dtype), [-1]) for t in tensors], 0)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        if not self.sizes:
            return []
        return [tf.reshape(p, s) for p, s in zip(tf.split(vector, self.sizes), self.shapes, strict=True)]


class Reduction(Protocol):
    """A way to add tensors over shards and workers.

    Attributes:
        dtype: of the vector.
        extra: columns that `encode` appends to a shard's row.
    """

    dtype: tf.DType
    extra: int

    def state(self) -> dict[str, keras.Variable]:
        """What must be saved with the weights."""
        ...

    def encode(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """A shard's tensors times its weight as a vector [D] that may be added, and [extra] columns of its row."""
        ...

    def reduce(
        self, all_reduce: AllReduce, compute: Compute, flags: tf.Tensor, shards: range, total_shards: int
    ) -> Reduced:
        """Compute this worker's shards and add them over all workers.

        Args:
            all_reduce: sums a vector over workers.
            compute: this worker's part.
            flags: [F] this worker's flags, whole numbers.
            shards: the shards of this worker.
            total_shards: V.
        """
        ...


class Float:
    """Plain float addition: one pass, and last bits that depend on the number of workers."""

    extra = 0

    def __init__(self, layout: Layout, dtype: tf.DType = tf.float32):
        self.layout, self.dtype = layout, dtype

    def state(self) -> dict[str, keras.Variable]:
        return {}

    def encode(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self.layout.concat(tensors, self.dtype) * tf.cast(weight, self.dtype), tf.zeros([0])

    def reduce(
        self, all_reduce: AllReduce, compute: Compute, flags: tf.Tensor, shards: range, total_shards: int
    ) -> Reduced:
        vector, rows = compute(tf.zeros([0]))
        rows = tf.cast(_everyones(rows, shards, total_shards), self.dtype)
        packed = tf.concat([vector, tf.reshape(rows, [-1]), tf.cast(flags, self.dtype)], 0)
        vector, matrix, flags_sum = tf.split(all_reduce(packed), [self.layout.size, -1, flags.shape[0]])
        matrix = tf.cast(tf.reshape(matrix, [total_shards, rows.shape[1]]), tf.float32)
        tensors = [tf.cast(t, d) for t, d in zip(self.layout.split(vector), self.layout.dtypes, strict=True)]
        finite = tf.reduce_all(tf.math.is_finite(vector))
        return Reduced(tensors, tf.reduce_sum(matrix, 0), tf.cast(flags_sum, tf.float32), finite)


class Exact:
    """Integer addition in fixed point: the same bits for every number of workers and every order.

    Args:
        layout: what travels.
        total_shards: V.
    """

    dtype = tf.int32

    def __init__(self, layout: Layout, total_shards: int):
        self.layout, self.extra = layout, len(layout.sizes)
        #: Bits of a shard's value; V of them stay below 2**30.
        self.bits = 30 - math.ceil(math.log2(max(2, total_shards)))
        self._exponents = keras.Variable(
            np.full(self.extra, _LEAST, np.int32), dtype="int32", trainable=False, name="exponents"
        )

    def state(self) -> dict[str, keras.Variable]:
        return {"reduction/00000/exponents": self._exponents}

    def encode(self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = [tf.cast(t, tf.float32) * weight for t in tensors]
        rounded = [tf.cast(tf.round(v * scales[i]), tf.int32) for i, v in enumerate(values)]
        return self.layout.concat(rounded, tf.int32), tf.stack([tf.reduce_max(tf.abs(v)) for v in values])

    def reduce(
        self, all_reduce: AllReduce, compute: Compute, flags: tf.Tensor, shards: range, total_shards: int
    ) -> Reduced:
        before = tf.convert_to_tensor(self._exponents.value)
        vector, rows = compute(power_of_two(self.bits - before))
        bits = tf.bitcast(_everyones(rows, shards, total_shards), tf.int32)
        packed = tf.concat([vector, tf.reshape(bits, [-1]), tf.cast(flags, tf.int32)], 0)
        vector, matrix, flags_sum = tf.split(all_reduce(packed), [self.layout.size, -1, flags.shape[0]])
        matrix = tf.reshape(tf.bitcast(matrix, tf.float32), [total_shards, rows.shape[1]])
        row, largest = tf.split(matrix, [rows.shape[1] - self.extra, self.extra], axis=1)
        # Not reduce_max alone: it drops NaN on some devices, and a NaN gradient must stay one.
        largest = tf.reduce_max(largest, 0) + 0.0 * tf.reduce_sum(largest, 0)
        finite = tf.math.is_finite(largest)
        needed = tf.where(finite, exponent(largest), before)

        def again() -> tuple[tf.Tensor, tf.Tensor]:
            exponents = tf.maximum(before, needed)
            repeated, _ = compute(power_of_two(self.bits - exponents))
            return all_reduce(repeated), exponents

        vector, used = tf.cond(tf.reduce_any(needed > before), again, lambda: (vector, before))
        self._exponents.assign(tf.clip_by_value(tf.maximum(needed + _HEADROOM, used - 1), _LEAST, _MOST))
        steps = power_of_two(used - self.bits)
        tensors = []
        for i, part in enumerate(self.layout.split(vector)):
            value = tf.where(finite[i], tf.cast(part, tf.float32) * steps[i], largest[i])
            tensors.append(tf.cast(value, self.layout.dtypes[i]))
        return Reduced(tensors, tf.reduce_sum(row, 0), tf.cast(flags_sum, tf.float32), tf.reduce_all(finite))


def exponent(magnitude: tf.Tensor) -> tf.Tensor:
    """The least e, int32, with magnitude < 2**e, at least `_LEAST`; exact, from the bits of a finite float32 >= 0."""
    return tf.maximum(tf.bitwise.right_shift(tf.bitcast(magnitude, tf.int32), 23) - 126, _LEAST)


def power_of_two(e: tf.Tensor) -> tf.Tensor:
    """2**e as float32, exactly, for e in [-126, 127]."""
    return tf.bitcast(tf.bitwise.left_shift(e + 127, 23), tf.float32)


def _everyones(rows: tf.Tensor, shards: range, total_shards: int) -> tf.Tensor:
    """[V, M] with this worker's rows in their places and zeros elsewhere."""
    return tf.pad(rows, [[shards.start, total_shards - shards.stop], [0, 0]])
