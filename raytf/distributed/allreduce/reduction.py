"""The reduction of a step over workers: one sum, which does not depend on the order of addition.

Tensors of one dtype hold the weighted sum of gradients, the weighted sum of layers' updates (BatchNorm statistics), a
matrix with one row per logical shard for loss and metrics, and a few flags. Rows of other workers are zero, so a row
arrives bit for bit, and all ranks add the V rows in the same order.

Gradients need more. The result of float addition depends on its order, and so on the number of workers, and training
amplifies differences in the last bit: after 50 steps, losses may differ in the fourth digit. `FixedPointReduction`
therefore adds integers. Each tensor has an exponent e. Every shard's values are rounded to multiples of 2**(e - b),
with b bits chosen so that V of them cannot overflow an int32 (fixed point; Demmel and Nguyen, Parallel reproducible
summation, 2015, call it pre-rounding). The exponent follows the largest value of the previous step, with headroom, so
that no worker has to wait for a maximum first. If a step exceeds it, all ranks detect this in the reduced rows and
repeat the step's arithmetic with the right exponent. Exponents depend only on the step and are saved with the weights.
As many bytes are sent as with float32.

With compression, a gradient's values become 16-bit numbers, two of which are sent in one int32. The sum of such words
is the word of the sums as long as these fit in 16 bits, so any sum of int32 works. For V shards, each value has
16 - log2(V) bits, including the sign, instead of 32 - log2(V); half-precision floats have only 12. Each bit of headroom
costs one bit, so exponents follow the values more closely, and steps are repeated more often. Values are rounded to the
nearest. Layers' updates are averages that accumulate, in which such rounding would persist, so they are not compressed.

With `--overlap`, gradients are sent in buckets. Each bucket is summed over the workers as soon as it is complete, while
other gradients are still being computed. A backward pass yields the gradients of the last layers first, so buckets go
from the last tensor to the first (Li et al., PyTorch Distributed, VLDB 2020). The sums start inside the body of the
loop over a worker's shards, at its last shard. The loop's body is therefore the same for every number of shards, as
equal bits require. All workers add the buckets one after another in the same order, which NCCL and sums in host memory
need. All loops have the same number of rounds, because TensorFlow also matches the parts of a collective by round.
Workers with fewer shards are idle in the first rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf.distributed.encoding import digests, wire
from raytf.distributed.encoding.fixed_point import EachTensor, InBlocks
from raytf.distributed.encoding.wire import HOST, AllReduce, WireLayout, WireWords, WorkerPart, pack, zeros
from raytf.distributed.step_digest import DigestKind

#: Powers of two by which a tensor's largest value may grow in a step without repeating the step.
_HEADROOM = 3
#: An exponent is lowered only if it exceeds the needed one by more than this, or noise would cause repeated steps.
_SLACK = 4
#: Headroom and slack for compressed tensors, which have 16 bits.
_SMALL_HEADROOM, _SMALL_SLACK = 1, 2
#: The lowest exponent, which keeps the scale a normal float32. Smaller values round to zero.
_LEAST = -90
#: The highest exponent.
_MOST = 128

#: Most bytes in a bucket, as sent. A single tensor may be larger.
BUCKET_BYTES = 32 << 20


class Overlap(NamedTuple):
    """Settings for adding gradients while others are still being computed. They are the same on all workers.

    Attributes:
        bytes: most bytes in a bucket, as sent.
        rounds: rounds of each worker's loop over its shards: the number of shards of the worker that has the most.
    """

    bytes: int
    rounds: int


#: (index of the bucket, its tensors summed over this worker's shards) -> its tensors summed over all workers.
AddBucket = Callable[[int, list[tf.Tensor]], list[tf.Tensor]]


def cut(sizes: Sequence[int], most: int) -> list[range]:
    """Return the ranges of neighboring tensors that form the buckets, from the first bucket to the last.

    Buckets are filled from the last tensor on, so the first bucket gets the rest and is small. This is useful because
    it is complete last, and nothing is computed while it is summed.

    Args:
        sizes: bytes of each tensor, as sent.
        most: most bytes in a bucket, unless it is a single tensor.
    """
    ranges: list[range] = []
    end, held = len(sizes), 0
    for i in reversed(range(len(sizes))):
        if i + 1 < end and held + sizes[i] > most:
            ranges.append(range(i + 1, end))
            end, held = i + 1, 0
        held += sizes[i]
    return [*([range(end)] if end else []), *reversed(ranges)]


def of_kinds(numbers: Sequence[int], compressed: int, most: int | None) -> list[range]:
    """Return the ranges of tensors that are sent together, in order.

    Args:
        numbers: count of numbers in each tensor.
        compressed: how many tensors, from the first, are sent as 2 bytes per number instead of 4. They never share a
            bucket with the others.
        most: most bytes in a bucket; None for one bucket of each kind.
    """
    ranges = []
    for begin, end in pairwise([0, compressed, len(numbers)]):
        sizes = [n * (2 if end <= compressed else 4) for n in numbers[begin:end]]
        parts = cut(sizes, sum(sizes) if most is None else most)
        ranges += [range(begin + part.start, begin + part.stop) for part in parts]
    return ranges


def after(others: list[tf.Tensor], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the tensors, but not before the others are computed.

    The order is part of the data, because the strategy may trace a sum in another context than this one.
    """
    with tf.control_dependencies(others):
        return [tf.identity(t) for t in tensors]


class Buckets:
    """Adds a step's buckets, which are ranges of a shard's tensors, over workers in a loop over shards."""

    def __init__(self, parts: Sequence[range], add: AddBucket, rounds: int):
        self._parts, self._add, self.rounds = parts, add, rounds

    def __call__(self, is_last: tf.Tensor | None, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Return the tensors unchanged or, after the last shard, their sums over the workers.

        Args:
            is_last: whether the tensors include this worker's last shard; None without a loop.
            tensors: sums over the shards so far.
        """
        sums: dict[int, list[tf.Tensor]] = {}
        for place in reversed(range(len(self._parts))):
            part = self._parts[place]
            # Each bucket waits for the sum before it, not for all gradients.
            own = after(sums.get(place + 1, []), tensors[part.start : part.stop])
            sums[place] = self._one(place, is_last, own)
        return [tensor for place in range(len(self._parts)) for tensor in sums[place]]

    def _one(self, place: int, is_last: tf.Tensor | None, own: list[tf.Tensor]) -> list[tf.Tensor]:
        if is_last is None:
            return self._add(place, own)
        return list(tf.cond(is_last, lambda: self._add(place, own), lambda: own))


#: (a shard's tensors, its weight) -> encoded tensors, and the columns that they append to the shard's row.
Encode = Callable[[list[tf.Tensor], tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]]
#: (scales, buckets to add over workers during the computation) -> (encoded tensors summed over this worker's shards or,
#: with buckets, over those of all workers; rows [L, M + digests + extra]; packed slices of this worker's shards).
Compute = Callable[[tf.Tensor, Buckets | None], tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]]


class Reduced(NamedTuple):
    """A step after reduction.

    Attributes:
        tensors: sums of the tensors.
        row: [M] row, added over all shards.
        flags: [F] flags, added over all ranks.
        finite: whether all numbers in the tensors are finite.
        slices: packed slices of this worker's shards, as computed.
        exponents: exponents of the next step, for `settle`; None if there are none.
        digests: [V, D * 2] float32 digests of each shard's values, see `Reduction.digest`; None if there are none.
        audit: result of the audit; None if the step is not audited.
        outputs: all shards' inputs to metrics of the whole batch, filled in by the caller.
    """

    tensors: list[tf.Tensor]
    row: tf.Tensor
    flags: tf.Tensor
    finite: tf.Tensor
    slices: Sequence[tf.Tensor] = ()
    exponents: tf.Tensor | None = None
    digests: tf.Tensor | None = None
    audit: wire.AuditRow | None = None
    outputs: Sequence[tf.Tensor] = ()


class Reduction:
    """A way to add tensors over shards and workers.

    Attributes:
        layout: layout of the tensors.
        shapes, dtype: shapes and dtype of a shard's encoded tensors.
        extra: number of columns that `encode` appends to a shard's row.
        overlap: settings for sums over workers that start while gradients are computed; None for a sum after them.
    """

    layout: WireLayout
    shapes: list[tuple[int, ...]]
    dtype: tf.DType
    extra = 0
    overlap: Overlap | None = None

    def state(self, place: int) -> dict[str, keras.Variable]:
        """Return the variables that must be saved with the weights, by name; `place` is this reduction's index among
        those of a step."""
        return {}

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Return a shard's tensors times its weight, encoded for addition, and [extra] columns of its row."""
        raise NotImplementedError

    def encoder(self, scales: tf.Tensor, is_even: bool = False) -> Encode:
        """Return `encode` with fixed scales. If all shards are even, the caller must apply their weight."""
        return lambda tensors, weight: self.encode(tensors, tf.constant(1.0) if is_even else weight, scales)

    def digest(self, encoded: Sequence[tf.Tensor], slices: Sequence[tf.Tensor], row: tf.Tensor) -> tf.Tensor:
        """Return [digest_width] columns of a shard's row, which precede the columns of `encode`.

        The columns are the digests of each tensor, of all packed slices and of the row.
        """
        return tf.zeros([0])

    def digest_width(self, slices: int) -> int:
        """Return the number of columns that `digest` appends for this many packed slices."""
        return 0

    def reduce(
        self,
        part: WorkerPart,
        compute: Compute,
        flags: tf.Tensor,
        slices: Sequence[tf.TensorSpec] = (),
        outputs: int = 0,
    ) -> Reduced:
        """Compute this worker's shards and add them over all workers, together with flags [F], which are integers. The
        last `outputs` packed slices that `compute` returns are rows for metrics, which have no digests."""
        raise NotImplementedError

    def settle(self, reduced: Reduced) -> None:
        """Update the state for the next step, after all sums of this step are known. Until then nothing has changed, so
        the step can be computed again."""


class FloatReduction(Reduction):
    """Adds floats in one pass. The last bits depend on the number of workers, so there are no digests.

    Args:
        layout: layout of the tensors.
        dtype: dtype in which the tensors are sent.
        overlap: settings to add buckets over workers while gradients are computed; by default, all are added at once.
    """

    def __init__(self, layout: WireLayout, dtype: tf.DType = tf.float32, overlap: Overlap | None = None):
        self.layout, self.dtype, self.shapes = layout, dtype, layout.shapes
        sizes = [size * dtype.size for size in layout.sizes]
        self.overlap, self._parts = overlap, [] if overlap is None else cut(sizes, overlap.bytes)

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        return [tf.cast(t, self.dtype) * tf.cast(weight, self.dtype) for t in tensors], tf.zeros([0])

    def reduce(
        self,
        part: WorkerPart,
        compute: Compute,
        flags: tf.Tensor,
        slices: Sequence[tf.TensorSpec] = (),
        outputs: int = 0,
    ) -> Reduced:
        all_reduce = part.all_reduce
        if all_reduce is None:
            summed, rows, own_slices = compute(tf.zeros([0]), None)
            tensors = [tf.cast(t, d) for t, d in zip(summed, self.layout.dtypes, strict=True)]
            return Reduced(tensors, tf.reduce_sum(rows, 0), flags, all_finite(summed), own_slices)
        early = None
        if self.overlap is not None:
            early = Buckets(self._parts, lambda _, own: all_reduce(own), self.overlap.rounds)
        summed, rows, own_slices = compute(tf.zeros([0]), early)
        beside = [tf.cast(part.placed(rows), self.dtype), tf.cast(flags, self.dtype)]
        if early is None:
            *tensors, matrix, flags_sum = all_reduce([*summed, *beside])
        else:
            tensors, (matrix, flags_sum) = summed, all_reduce(after(summed, beside))
        finite = all_finite(tensors)
        tensors = [tf.cast(t, d) for t, d in zip(tensors, self.layout.dtypes, strict=True)]
        row, flags_sum = tf.reduce_sum(tf.cast(matrix, tf.float32), 0), tf.cast(flags_sum, tf.float32)
        return Reduced(tensors, row, flags_sum, finite, own_slices)


class FixedPointReduction(Reduction):
    """Adds integers in fixed point, with the same bits for every number of workers and every order.

    Args:
        layout: layout of the tensors.
        total_shards: number of logical shards (V).
        compressed: how many of the tensors, from the first, are sent as 16 bits per number.
        words: how the devices represent integers; all choices give the same bits.
        overlap: settings to add buckets over workers while gradients are computed, with the same bits; by default, all
            are added at once, after all gradients are computed.
        digests: kind of the digests in each shard's row; None for none.
    """

    def __init__(
        self,
        layout: WireLayout,
        total_shards: int,
        compressed: int = 0,
        words: WireWords = HOST,
        overlap: Overlap | None = None,
        digests: DigestKind | None = None,
    ):
        self._digests = digests
        self.layout, self.extra, self.overlap = layout, len(layout.sizes), overlap
        self._words, self.dtype = words, words.dtype
        spent = math.ceil(math.log2(max(2, total_shards)))
        #: Bits of a shard's value. Float32 has 24 bits, so the largest is 2**bits minus a few units: V fit in an int32.
        self.bits = 31 - spent
        #: The bits, headroom and slack of each tensor, which depend on whether it is compressed.
        small = np.arange(self.extra) < compressed
        self._bits = np.where(small, 15 - spent, self.bits).astype(np.int32)
        self._headroom = np.where(small, _SMALL_HEADROOM, _HEADROOM).astype(np.int32)
        self._slack = np.where(small, _SMALL_SLACK, _SLACK).astype(np.int32)
        together = of_kinds(layout.sizes, compressed, overlap.bytes if overlap else None)
        make: type[InBlocks | EachTensor] = InBlocks if words.is_on_gpu else EachTensor
        self._encoding = make(layout, compressed, 2.0 ** (15 - spent) - 1, words, together)
        self.shapes = self._encoding.shapes
        self._exponents = keras.Variable(
            np.full(self.extra, _LEAST, np.int32), dtype="int32", trainable=False, name="exponents"
        )

    def state(self, place: int) -> dict[str, keras.Variable]:
        return {f"reduction/{place:05d}/exponents": self._exponents}

    def encode(
        self, tensors: Sequence[tf.Tensor], weight: tf.Tensor, scales: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        return self._encoding.encode(tensors, weight, scales)

    def digest(self, encoded: Sequence[tf.Tensor], slices: Sequence[tf.Tensor], row: tf.Tensor) -> tf.Tensor:
        if self._digests is None:
            return tf.zeros([0])
        beside = digests.columns([*slices, row], self._digests)
        return tf.reshape(tf.concat([self._encoding.digests(encoded, self._digests), beside], 0), [-1])

    def digest_width(self, slices: int) -> int:
        return 0 if self._digests is None else digests.COLUMNS * (self.extra + slices + 1)

    def reduce(
        self,
        part: WorkerPart,
        compute: Compute,
        flags: tf.Tensor,
        slices: Sequence[tf.TensorSpec] = (),
        outputs: int = 0,
    ) -> Reduced:
        all_reduce, total_shards, audit = part.all_reduce, part.total_shards, part.audit
        before, words = tf.convert_to_tensor(self._exponents.value), self._words
        early = None
        if self.overlap is not None:  # even for one worker, so that the loop's body is always the same
            early = Buckets(self._encoding.parts, partial(self._add_bucket, all_reduce), self.overlap.rounds)

        def attempt(_: tf.Tensor, used: tf.Tensor, needed: tf.Tensor, *__: tf.Tensor) -> tuple[tf.Tensor, ...]:
            used = tf.maximum(used, needed)
            summed, matrix, own_slices = compute(self.scales(used), early)
            flags_sum = words.whole(flags)
            if all_reduce is not None:
                matrix = part.placed(matrix) if audit is None else wire.place_audited(matrix, audit)
                beside = [words.of_bits(matrix), flags_sum]
                if early is None:
                    summed, (bits, flags_sum) = words.add(all_reduce, summed, self._encoding.small, beside)
                else:
                    _, (bits, flags_sum) = words.add(all_reduce, [], 0, after(summed, beside))
                matrix = words.bits(bits)
            largest = _largest(matrix[:total_shards], self.extra)
            needed = tf.where(tf.math.is_finite(largest), exponent(largest), used)
            return (tf.reduce_any(needed > used), used, needed, matrix, flags_sum, *own_slices, *summed)

        # A loop, because a branch would add a second copy of the gradients' graph to trace and optimize.
        rows = total_shards if audit is None else total_shards + 1
        start = tf.constant(True), before, before, tf.zeros([rows, 0]), zeros(flags.shape, self.dtype)
        invariants = [*(t.shape for t in start[:3]), tf.TensorShape([rows, None]), flags.shape]
        encoding, travel = self._encoding, len(self.shapes)
        is_packed = all_reduce is not None and early is None
        if is_packed:
            travel = words.travelling(travel, encoding.small)
        sums = [*(tf.zeros([0, s.shape[1]]) for s in slices), *([zeros([0], self.dtype)] * travel)]
        shapes = *invariants, *(s.shape for s in slices), *([tf.TensorShape(None)] * travel)
        again = tf.while_loop(lambda again, *_: again, attempt, (*start, *sums), shapes, parallel_iterations=1)
        _, used, needed, matrix, flags_sum, *sums = again
        own_slices, sums = sums[: len(slices)], sums[len(slices) :]
        lowered = tf.where(used - needed > self._slack, used - 1, used)
        following = tf.clip_by_value(tf.maximum(needed + self._headroom, lowered), _LEAST, _MOST)
        beside, every, matrix = self.extra + self.digest_width(len(slices) - outputs), matrix, matrix[:total_shards]
        largest, row = _largest(matrix, self.extra), tf.reduce_sum(matrix[:, :-beside], 0)
        finite = tf.math.is_finite(largest)
        # A value that is not finite makes its whole tensor not finite.
        steps = tf.where(finite, power_of_two(used - self._bits), largest)
        if is_packed:
            sums = words.unpack(sums, WireLayout(self.shapes), encoding.small)
        sums = [tf.ensure_shape(each, shape) for each, shape in zip(sums, self.shapes, strict=True)]
        decoded = zip(encoding.decode(sums, steps), self.layout.dtypes, strict=True)
        tensors = [tf.cast(tensor, dtype) for tensor, dtype in decoded]
        reduced = Reduced(tensors, row, words.real(flags_sum), tf.reduce_all(finite), own_slices, following)
        if self._digests is None:
            return reduced
        digested = tf.ensure_shape(every[:, -beside : -self.extra], [rows, beside - self.extra])
        audited = None if audit is None else wire.compare_audited(digested, audit, used)
        return reduced._replace(digests=digested[:total_shards], audit=audited)

    def settle(self, reduced: Reduced) -> None:
        self._exponents.assign(reduced.exponents)

    def scales(self, exponents: tf.Tensor) -> tf.Tensor:
        """Return the [extra] factors by which values are multiplied before rounding."""
        return power_of_two(self._bits - exponents)

    def _add_bucket(self, all_reduce: AllReduce, place: int, own: list[tf.Tensor]) -> list[tf.Tensor]:
        if all_reduce is None:
            return own
        small = len(own) if self._encoding.parts[place].stop <= self._encoding.small else 0
        sums, _ = self._words.add(all_reduce, own, small, [])
        return self._words.unpack(sums, WireLayout([t.shape for t in own]), small)


def packed(all_reduce: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    """Return a function that adds tensors over workers, using one that adds a single vector."""

    def reduce(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if len(tensors) == 1:
            return [all_reduce(tensors[0])]
        return WireLayout([t.shape for t in tensors]).split(all_reduce(pack(tensors)))

    return reduce


def all_finite(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return whether all numbers in the tensors are finite."""
    # A non-finite value makes the sum non-finite. The sum of finite values may overflow, so check each value then.
    quick = tf.math.is_finite(tf.add_n([tf.reduce_sum(t) for t in tensors]))
    slow = lambda: tf.reduce_all([tf.reduce_all(tf.math.is_finite(t)) for t in tensors])  # noqa: E731
    return tf.cond(quick, lambda: tf.constant(True), slow)


def everyones(part: WorkerPart, rows: tf.Tensor, words: WireWords = HOST) -> tf.Tensor:
    """Return the [V, M] float32 rows of all shards, bit for bit, on every worker, from its own [L, M] rows."""
    if part.all_reduce is None:
        return rows
    bits = words.of_bits(part.placed(rows))
    return words.bits(words.add(part.all_reduce, [], 0, [bits])[1][0])


def _largest(matrix: tf.Tensor, count: int) -> tf.Tensor:
    largest = matrix[:, -count:]
    # reduce_max alone drops NaN on some devices, but a NaN gradient must stay NaN.
    return tf.reduce_max(largest, 0) + 0.0 * tf.reduce_sum(largest, 0)


def exponent(magnitude: tf.Tensor) -> tf.Tensor:
    """Return the least int32 e >= `_LEAST` with magnitude < 2**e, exactly, for finite float32 magnitudes >= 0."""
    return tf.maximum(tf.bitwise.right_shift(tf.bitcast(magnitude, tf.int32), 23) - 126, _LEAST)


def power_of_two(e: tf.Tensor) -> tf.Tensor:
    """Return 2**e exactly, as float32, for e in [-126, 127]."""
    return tf.bitcast(tf.bitwise.left_shift(e + 127, 23), tf.float32)
