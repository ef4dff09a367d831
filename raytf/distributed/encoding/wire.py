"""32-bit integers ("words") that a device can add and that workers can sum with collectives.

Fixed-point encoding needs sums of int32. CPUs can add int32 (`HOST`). With GPUs, TensorFlow keeps int32 in host memory,
because it uses int32 for shapes and counters, and it refuses to add int32 across GPUs (tensorflow#56184). On a GPU the
same bits are therefore held as uint32, for which additions, shifts and casts run on the device (`DEVICE`): the sum of
two's complements is the two's complement of the sum. To be sent, two uint32 are packed into an int64, which collectives
can add; `widen` explains how both sums are recovered. Both ways take 4 bytes per value and return the same bits.

Integers within 16 bits, from compressed gradients, are first joined in pairs into 32-bit words (`join`), so an int64
holds four of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

#: Sums tensors of one dtype over workers; None if there is only one worker.
AllReduce = Callable[[list[tf.Tensor]], list[tf.Tensor]] | None


class WireLayout:
    """The shapes and dtypes, in order, of the tensors that workers send."""

    def __init__(self, shapes: Sequence[Sequence[int]] = (), dtypes: Sequence[tf.DType] = ()):
        self.shapes, self.dtypes = [tuple(s) for s in shapes], list(dtypes)
        self.sizes = [int(np.prod(s, dtype=np.int64)) for s in self.shapes]
        self.size = sum(self.sizes)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reshape(p, s) for p, s in zip(_split(vector, self.sizes), self.shapes, strict=True)]


class WireWords:
    """Signed 32-bit integers held as int32, for CPUs and any other device that can add int32.

    Attributes:
        dtype: dtype of the tensors that hold the words; `+` adds such tensors.
        is_on_gpu: whether the words are for GPUs, where a few large operations are faster than many small ones.
    """

    dtype, is_on_gpu = tf.int32, False

    def whole(self, values: tf.Tensor) -> tf.Tensor:
        """Return float32 values, which must fit int32, as words, rounded towards zero."""
        return tf.cast(values, tf.int32)

    def real(self, words: tf.Tensor) -> tf.Tensor:
        """Return the integers as float32, rounded to the nearest."""
        return tf.cast(words, tf.float32)

    def of_bits(self, values: tf.Tensor) -> tf.Tensor:
        """Return the bits of float32 values as words. Adding zero words to them keeps every bit."""
        return tf.bitcast(values, self.dtype)

    def bits(self, words: tf.Tensor) -> tf.Tensor:
        """Return the float32 values whose bits the words hold; the inverse of `of_bits`."""
        return tf.bitcast(words, tf.float32)

    def travelling(self, tensors: int, small: int) -> int:
        """Return how many sums `add` returns for `tensors` tensors, the first `small` of which are within 16 bits."""
        return 1 + tensors - small if small else tensors

    def add(
        self, all_reduce: Callable, tensors: list[tf.Tensor], small: int, others: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return two sums over all workers: of `tensors`, to be passed to `unpack`, and of `others`, ready to use.

        Args:
            all_reduce: sums tensors of one dtype over workers.
            tensors: words whose sums, and each worker's part of the sums, fit 32 bits.
            small: how many of the tensors, counted from the first, also fit 16 bits.
            others: more words whose sums fit 32 bits.
        """
        sent = [join(pack(tensors[:small])), *tensors[small:]] if small else tensors
        sums = all_reduce([*sent, *others])
        return sums[: len(sent)], sums[len(sent) :]

    def unpack(self, sums: list[tf.Tensor], layout: WireLayout, small: int) -> list[tf.Tensor]:
        """Return the sums of the tensors passed to `add`. Tensors that were packed get their own shapes back."""
        if not small:
            return sums
        joined = WireLayout(layout.shapes[:small])
        return [*joined.split(part(sums[0], joined.size)), *sums[1:]]


class _DeviceWords(WireWords):
    # A GPU has no Fill, Slice, Split, Pad, Sum, Equal or Maximum for uint32, and only casts and shifts for int32.
    dtype, is_on_gpu = tf.uint32, True

    def whole(self, values: tf.Tensor) -> tf.Tensor:
        return tf.bitcast(tf.cast(values, tf.int32), tf.uint32)

    def real(self, words: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.bitcast(words, tf.int32), tf.float32)

    def travelling(self, tensors: int, small: int) -> int:
        return 1

    def add(
        self, all_reduce: Callable, tensors: list[tf.Tensor], small: int, others: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        sent = [*([join(pack(tensors[:small]))] if small else []), *tensors[small:]]
        sizes = [t.shape.num_elements() for t in sent]
        vector = _lay(sent + others)
        (total,) = all_reduce([widen(vector)])
        sums, end = narrow(total, vector.shape[0]), _even_size(sizes)
        beside = _take(sums[end:], [t.shape.num_elements() for t in others])
        return [sums[:end]], [tf.reshape(b, o.shape) for b, o in zip(beside, others, strict=True)]

    def unpack(self, sums: list[tf.Tensor], layout: WireLayout, small: int) -> list[tf.Tensor]:
        joined = WireLayout(layout.shapes[:small])
        sizes = [*([-(-joined.size // 2)] if small else []), *layout.sizes[small:]]
        blocks = _take(tf.ensure_shape(sums[0], [_even_size(sizes)]), sizes)
        begin = joined.split(part(blocks.pop(0), joined.size)) if small else []
        return [*begin, *(tf.reshape(b, s) for b, s in zip(blocks, layout.shapes[small:], strict=True))]


HOST = WireWords()
#: Words as uint32, sent as int64: for GPUs, but it works on every device that TensorFlow supports.
DEVICE: WireWords = _DeviceWords()


def zeros(shape: Sequence[int] | tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Return zeros of any dtype, created on the device although GPUs have no Fill for uint32."""
    return tf.bitcast(tf.zeros(shape), dtype) if dtype == tf.uint32 else tf.zeros(shape, dtype)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the values of all tensors, which share a dtype, in one vector."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


def widen(words: tf.Tensor) -> tf.Tensor:
    """Return [n] uint32 (two's complements) as [ceil(n/2)] int64 that can be added; `narrow` reverses it.

    Two integers a, b become a + b * 2**32. A sum of such words is A + B * 2**32 for the sums A, B. As long as A fits 32
    bits, both can be recovered: A is the lower half, read as a signed integer, and B is the rest. The bits of a and b
    side by side are a' + b * 2**32, where a' is a, or a + 2**32 if a is negative; so 2**32 is subtracted in that case.
    """
    wide = tf.bitcast(tf.reshape(_even(words), [-1, 2]), tf.int64)
    return wide + _borrow(wide)


def narrow(wide: tf.Tensor, count: int) -> tf.Tensor:
    """Return the [count] sums in a sum of `widen` words, as two's complements in uint32; each must fit 32 bits."""
    return tf.reshape(tf.bitcast(wide - _borrow(wide), tf.uint32), [-1])[:count]


def _borrow(wide: tf.Tensor) -> tf.Tensor:
    """Return -2**32 where the lower half of an int64 is negative as a signed integer, else 0."""
    sign = tf.bitwise.right_shift(tf.bitwise.left_shift(wide, tf.constant(32, tf.int64)), tf.constant(63, tf.int64))
    return tf.bitwise.left_shift(sign, tf.constant(32, tf.int64))


def join(values: tf.Tensor) -> tf.Tensor:
    """Return [n] int32 or uint32, each within 16 bits, as [ceil(n/2)] words that can be added; `part` reverses it.

    If the upper sum in a word is -2**15 and the lower sum is negative, the word exceeds 32 bits. `part` still returns
    the right sums, but `narrow`, which runs before it on GPUs, does not. Values clipped at -(2**15 - 1)/V, for V
    shards, never reach such a sum.
    """
    if values.dtype == tf.uint32:
        both = _even(values)
        half = both.shape[0] // 2
        return tf.bitwise.left_shift(both[:half], tf.constant(16, tf.uint32)) + both[half:]
    count = values.shape[0]
    high, low = tf.split(tf.pad(values, [[0, count % 2]]), 2)
    return high * 65536 + low


def part(words: tf.Tensor, count: int) -> tf.Tensor:
    """Return the [count] sums in a sum of `join` words; each must fit 16 bits."""
    if words.dtype == tf.uint32:
        low = _shift_right(tf.bitwise.left_shift(words, tf.constant(16, tf.uint32)))
        return tf.concat([_shift_right(words - low), low], 0)[:count]
    low = tf.bitwise.right_shift(tf.bitwise.left_shift(words, 16), 16)  # keeps the sign
    high = tf.bitwise.right_shift(words - low, 16)
    return tf.concat([high, low], 0)[:count]


def _shift_right(words: tf.Tensor) -> tf.Tensor:
    """Return uint32 words shifted right by 16 bits as if they were int32, which keeps the sign."""
    return tf.bitcast(tf.bitwise.right_shift(tf.bitcast(words, tf.int32), 16), tf.uint32)


def _even(words: tf.Tensor) -> tf.Tensor:
    return tf.concat([words, tf.constant([0], words.dtype)], 0) if words.shape[0] % 2 else words


def _lay(blocks: list[tf.Tensor]) -> tf.Tensor:
    """Return all values in one vector in which each block starts at an even index, so no two blocks share an int64.

    If sums of a block exceed 32 bits, for example because values are not finite, other blocks are not affected.
    """
    return tf.concat([_even(tf.reshape(b, [-1])) for b in blocks], 0)


def _take(vector: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    """Return the blocks of a vector from `_lay`, as vectors of `sizes` values."""
    cuts = [cut for size in sizes for cut in ([size, 1] if size % 2 else [size])]
    parts = iter(_split(vector, cuts))
    taken = []
    for size in sizes:
        taken.append(next(parts))
        if size % 2:
            next(parts)
    return taken


def _even_size(sizes: list[int]) -> int:
    return sum(size + size % 2 for size in sizes)


def _split(vector: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    if not sizes:
        return []
    if vector.dtype != tf.uint32:
        return tf.split(vector, sizes)
    # A GPU can split float32, and the bitcast costs nothing. Nothing is computed, so the bits do not change.
    return [tf.bitcast(p, tf.uint32) for p in tf.split(tf.bitcast(vector, tf.float32), sizes)]


class ShardSpan(NamedTuple):
    """The logical shards from `start` up to, but not including, `stop`: integers as in a `range`, or int32 scalars in a
    graph that works for any span."""

    start: Any
    stop: Any


Span = range | ShardSpan


def in_graph(
    shards: range, is_general: bool, begin: tf.Tensor, seeds: tf.Tensor, audit: tf.Tensor | None = None
) -> Span:
    """Return a worker's shards, for use in a graph.

    Args:
        shards: the worker's current shards.
        is_general: whether the graph works for any shards and takes them from `begin`, `seeds` and `audit`.
        begin: the worker's first shard.
        seeds: [K, L, S, 2], the seeds of all shards that the worker computes.
        audit: int32 [2]: the audited shard, and how many of the L seeds, at their end, belong to it; None for no audit.
    """
    if not is_general:
        return shards
    count = tf.shape(seeds)[1]
    return ShardSpan(begin, begin + (count if audit is None else count - audit[1]))


class WorkerPart(NamedTuple):
    """A worker's part in the sums of a step.

    Attributes:
        all_reduce: sums tensors over workers; None if this is the only worker.
        shards: the L shards of this worker.
        total_shards: V, the shards of all workers.
        audit: places of the rows if two workers compute a shard, to compare it; None if no step is audited.
    """

    all_reduce: AllReduce
    shards: Span
    total_shards: int
    audit: AuditPlaces | None = None

    def placed(self, rows: tf.Tensor) -> tf.Tensor:
        """Return [V, M] with this worker's rows [L, M] at the places of its shards, and zeros elsewhere."""
        padded = tf.pad(rows, [[self.shards.start, self.total_shards - self.shards.stop], [0, 0]])
        return tf.ensure_shape(padded, [self.total_shards, rows.shape[1]])


class AuditRow(NamedTuple):
    """The digests of a shard that two workers have computed in a step.

    Attributes:
        agreed: whether both digests are equal; also true if no shard was audited.
        digests: [2, D * 2] float32: from the shard's own worker, and from the other worker.
        exponents: the exponents with which both were computed.
    """

    agreed: tf.Tensor
    digests: tf.Tensor
    exponents: tf.Tensor


class AuditPlaces(NamedTuple):
    """The places of a call's rows, computed once for all steps of the call, so that a step needs few operations.

    Attributes:
        beside: how many shards of other workers this worker computes, after its own: 0 or 1.
        rows: [V + 1]: for each row that is sent, its index in this worker's rows; their number if the row is another's.
        pair: [2]: the two rows of the audited shard; the last row twice if no shard is audited.
    """

    beside: tf.Tensor
    rows: tf.Tensor
    pair: tf.Tensor


def audit_places(audit: tf.Tensor, shards: Span, total_shards: int) -> AuditPlaces:
    """Return the places of a call's rows.

    Args:
        audit: int32 [2]: the shard that a second worker also computes, or -1; and `AuditPlaces.beside`.
        shards: this worker's shards.
        total_shards: V, the shards of all workers.
    """
    shard, beside = tf.unstack(audit)
    numbers, own = tf.range(total_shards), shards.stop - shards.start
    nobody = own + beside
    mine = tf.where((numbers >= shards.start) & (numbers < shards.stop), numbers - shards.start, nobody)
    rows = tf.concat([mine, [tf.where(beside > 0, own, nobody)]], 0)
    return AuditPlaces(beside, rows, tf.stack([tf.where(shard < 0, total_shards, shard), total_shards]))


def place_audited(rows: tf.Tensor, where: AuditPlaces) -> tf.Tensor:
    """Return [V + 1, M] with this worker's rows, bit for bit, in their places and zeros elsewhere.

    The last row is the audited shard's, on the worker that computed it in addition to its own shards.
    """
    return tf.gather(tf.concat([rows, tf.zeros([1, rows.shape[1]])], 0), where.rows)


def compare_audited(digests: tf.Tensor, where: AuditPlaces, exponents: tf.Tensor) -> AuditRow:
    """Compare the digests of an audited shard from its own worker and from the other worker."""
    pair = tf.gather(digests, where.pair)
    own, other = tf.unstack(tf.bitcast(pair, tf.int32))  # as float32 they may be NaN, which equals nothing
    return AuditRow(tf.reduce_all(own == other), pair, exponents)
