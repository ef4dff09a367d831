"""Whole numbers of 32 bits, as a device adds them and as they travel between workers.

Fixed point needs sums of int32. On a CPU these exist (`HOST`). On a GPU TensorFlow keeps int32 in host memory, because
it uses it for shapes and counters, and it refuses to add int32 over GPUs (tensorflow#56184). There the same bits are
held as uint32, for which additions, shifts and casts run on the device (`DEVICE`): the sum of two's complements is the
two's complement of the sum. On the wire two of them share an int64, which collectives do add: the sum of such words is
the word of the sums, as `widen` shows. So a value takes 4 bytes either way, and the bits of a sum are equal.

Numbers within 16 bits, of compressed gradients, are first joined in pairs into words of 32 bits (`join`), so an int64
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
    """Shapes and dtypes of the tensors that travel, in order."""

    def __init__(self, shapes: Sequence[Sequence[int]] = (), dtypes: Sequence[tf.DType] = ()):
        self.shapes, self.dtypes = [tuple(s) for s in shapes], list(dtypes)
        self.sizes = [int(np.prod(s, dtype=np.int64)) for s in self.shapes]
        self.size = sum(self.sizes)

    def split(self, vector: tf.Tensor) -> list[tf.Tensor]:
        return [tf.reshape(p, s) for p, s in zip(_split(vector, self.sizes), self.shapes, strict=True)]


class WireWords:
    """Whole numbers of 32 bits, sign included, as int32: for CPUs and any other device that adds it.

    Attributes:
        dtype: of the tensors that hold them; `+` adds them.
        is_on_gpu: whether this way is for GPUs, where few large operations are better than many small ones.
    """

    dtype, is_on_gpu = tf.int32, False

    def whole(self, values: tf.Tensor) -> tf.Tensor:
        """Return float32 values within int32 as words, rounded towards zero."""
        return tf.cast(values, tf.int32)

    def real(self, words: tf.Tensor) -> tf.Tensor:
        """Return the numbers as float32, rounded to the nearest."""
        return tf.cast(words, tf.float32)

    def of_bits(self, values: tf.Tensor) -> tf.Tensor:
        """Return the bits of float32 values as words; added to zeros, they stay as they are."""
        return tf.bitcast(values, self.dtype)

    def bits(self, words: tf.Tensor) -> tf.Tensor:
        """Return the float32 values of words from `of_bits`."""
        return tf.bitcast(words, tf.float32)

    def travelling(self, tensors: int, small: int) -> int:
        """Return how many sums `add` returns for this many tensors, of which the first `small` are within 16 bits."""
        return 1 + tensors - small if small else tensors

    def add(
        self, all_reduce: Callable, tensors: list[tf.Tensor], small: int, others: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Return the sums over all workers: of the tensors, for `unpack`; and of the others, ready to use.

        Args:
            all_reduce: sums tensors of one dtype.
            tensors: whose sums, and each worker's part of them, are within 32 bits.
            small: how many of the tensors, from the first, are even within 16 bits.
            others: also within 32 bits.
        """
        sent = [join(pack(tensors[:small])), *tensors[small:]] if small else tensors
        sums = all_reduce([*sent, *others])
        return sums[: len(sent)], sums[len(sent) :]

    def unpack(self, sums: list[tf.Tensor], layout: WireLayout, small: int) -> list[tf.Tensor]:
        """Return the sums of `add`'s tensors. Tensors that were packed to be sent have their shapes again."""
        if not small:
            return sums
        joined = WireLayout(layout.shapes[:small])
        return [*joined.split(part(sums[0], joined.size)), *sums[1:]]


class _DeviceWords(WireWords):
    # For uint32 a GPU has no Fill, Slice, Split, Pad, Sum, Equal or Maximum; for int32 it only has casts and shifts.
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
#: uint32 and int64, for GPUs; it works wherever TensorFlow does.
DEVICE: WireWords = _DeviceWords()


def zeros(shape: Sequence[int] | tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
    """Return zeros of any dtype, made on the device: GPUs have no Fill for uint32."""
    return tf.bitcast(tf.zeros(shape), dtype) if dtype == tf.uint32 else tf.zeros(shape, dtype)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return all values of some tensors of one dtype in a vector."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], 0)


def widen(words: tf.Tensor) -> tf.Tensor:
    """Return [n] uint32, two's complements of numbers, as [ceil(n/2)] int64 that may be added; see `narrow`.

    Two numbers a, b become a + b * 2**32. A sum of such words is A + B * 2**32 for the sums A, B, and as long as A is
    within 32 bits, both can be recovered: A is the lower half as a signed number, B is what is left. Laid side by side,
    the two are a' + b * 2**32, where a' is a, or a + 2**32 if a is negative; so 2**32 is subtracted in that case.
    """
    wide = tf.bitcast(tf.reshape(_even(words), [-1, 2]), tf.int64)
    return wide + _borrow(wide)


def narrow(wide: tf.Tensor, count: int) -> tf.Tensor:
    """Return the [count] numbers of a sum of `widen` words, as two's complements in uint32; each must fit 32 bits."""
    return tf.reshape(tf.bitcast(wide - _borrow(wide), tf.uint32), [-1])[:count]


def _borrow(wide: tf.Tensor) -> tf.Tensor:
    """Return -2**32 where the lower half of an int64 is a negative number, else 0."""
    sign = tf.bitwise.right_shift(tf.bitwise.left_shift(wide, tf.constant(32, tf.int64)), tf.constant(63, tf.int64))
    return tf.bitwise.left_shift(sign, tf.constant(32, tf.int64))


def join(values: tf.Tensor) -> tf.Tensor:
    """Return [n] int32 or uint32, each within 16 bits, as [ceil(n/2)] words that may be added; see `part`.

    With a sum of -2**15 and a negative one beside it a word exceeds 32 bits. `part` is right all the same, but not
    `narrow` before it; values that were clipped to -(2**15 - 1)/V of V shards have no such sum.
    """
    if values.dtype == tf.uint32:
        both = _even(values)
        half = both.shape[0] // 2
        return tf.bitwise.left_shift(both[:half], tf.constant(16, tf.uint32)) + both[half:]
    count = values.shape[0]
    high, low = tf.split(tf.pad(values, [[0, count % 2]]), 2)
    return high * 65536 + low


def part(words: tf.Tensor, count: int) -> tf.Tensor:
    """Return the [count] values of a sum of `join` words, where each of these sums is within 16 bits."""
    if words.dtype == tf.uint32:
        low = _shift_right(tf.bitwise.left_shift(words, tf.constant(16, tf.uint32)))
        return tf.concat([_shift_right(words - low), low], 0)[:count]
    low = tf.bitwise.right_shift(tf.bitwise.left_shift(words, 16), 16)  # keeps the sign
    high = tf.bitwise.right_shift(words - low, 16)
    return tf.concat([high, low], 0)[:count]


def _shift_right(words: tf.Tensor) -> tf.Tensor:
    """Return uint32 shifted right by 16 bits, keeping the sign that they have as int32."""
    return tf.bitcast(tf.bitwise.right_shift(tf.bitcast(words, tf.int32), 16), tf.uint32)


def _even(words: tf.Tensor) -> tf.Tensor:
    return tf.concat([words, tf.constant([0], words.dtype)], 0) if words.shape[0] % 2 else words


def _lay(blocks: list[tf.Tensor]) -> tf.Tensor:
    """Return all values in a vector, where each block starts at an even index: no two blocks share an int64.

    Sums of a block that exceed 32 bits, such as those of values that are not finite, then do not affect other blocks.
    """
    return tf.concat([_even(tf.reshape(b, [-1])) for b in blocks], 0)


def _take(vector: tf.Tensor, sizes: list[int]) -> list[tf.Tensor]:
    """Return the blocks of `_lay`, as vectors of these sizes."""
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
    # As float32, which costs nothing and which a GPU can split. Nothing is computed with them, so the bits stay.
    return [tf.bitcast(p, tf.uint32) for p in tf.split(tf.bitcast(vector, tf.float32), sizes)]


class ShardSpan(NamedTuple):
    """The logical shards from `start` to before `stop`: numbers, as a `range` has them, or int32 scalars of a graph
    that serves for all spans."""

    start: Any
    stop: Any


Span = range | ShardSpan


def in_graph(
    shards: range, is_general: bool, begin: tf.Tensor, seeds: tf.Tensor, audit: tf.Tensor | None = None
) -> Span:
    """Return a worker's shards in a graph.

    Args:
        shards: those that it has now.
        is_general: whether the graph serves for any shards, which are told by its arguments.
        begin: the first one.
        seeds: [K, L, S, 2] of all of them.
        audit: int32 [2]: a shard, and how many of the seeds, the last ones, are of that one; None for none.
    """
    if not is_general:
        return shards
    count = tf.shape(seeds)[1]
    return ShardSpan(begin, begin + (count if audit is None else count - audit[1]))


class WorkerPart(NamedTuple):
    """A worker's part in the sums of a step.

    Attributes:
        all_reduce: sums tensors over workers; None if this is the only worker.
        shards: L shards of this worker.
        total_shards: V, the shards of all workers.
        audit: where the rows are of a shard that another worker computes, too; None where no step is audited.
    """

    all_reduce: AllReduce
    shards: Span
    total_shards: int
    audit: AuditPlaces | None = None

    def placed(self, rows: tf.Tensor) -> tf.Tensor:
        """Return [V, M] with this worker's rows, [L, M], in their places and zeros elsewhere."""
        padded = tf.pad(rows, [[self.shards.start, self.total_shards - self.shards.stop], [0, 0]])
        return tf.ensure_shape(padded, [self.total_shards, rows.shape[1]])


class AuditRow(NamedTuple):
    """A shard of a step that two workers have computed.

    Attributes:
        agreed: whether both digests are equal, or nothing was audited.
        digests: [2, D * 2] float32, of the shard's own worker and of the other one.
        exponents: with which they were computed.
    """

    agreed: tf.Tensor
    digests: tf.Tensor
    exponents: tf.Tensor


class AuditPlaces(NamedTuple):
    """The places of a call's rows. They are computed once for all of its steps, which then need few operations.

    Attributes:
        beside: how many shards this worker computes beside its own, and after them: 0 or 1.
        rows: [V + 1] for each row that travels, which of this worker's rows it is; the number of these for another's.
        pair: [2] the rows of the audited shard; the last row twice where no shard is audited.
    """

    beside: tf.Tensor
    rows: tf.Tensor
    pair: tf.Tensor


def audit_places(audit: tf.Tensor, shards: Span, total_shards: int) -> AuditPlaces:
    """Return where the rows of a call are, for `audit`, int32 [2]: the shard that another worker computes, too, or -1;
    and `AuditPlaces.beside`."""
    shard, beside = tf.unstack(audit)
    numbers, own = tf.range(total_shards), shards.stop - shards.start
    nobody = own + beside
    mine = tf.where((numbers >= shards.start) & (numbers < shards.stop), numbers - shards.start, nobody)
    rows = tf.concat([mine, [tf.where(beside > 0, own, nobody)]], 0)
    return AuditPlaces(beside, rows, tf.stack([tf.where(shard < 0, total_shards, shard), total_shards]))


def place_audited(rows: tf.Tensor, where: AuditPlaces) -> tf.Tensor:
    """Return [V + 1, M] with this worker's rows in their places and zeros elsewhere, bit for bit.

    The last row is that of the audited shard, on the worker that has computed it beside its own.
    """
    return tf.gather(tf.concat([rows, tf.zeros([1, rows.shape[1]])], 0), where.rows)


def compare_audited(digests: tf.Tensor, where: AuditPlaces, exponents: tf.Tensor) -> AuditRow:
    """Return the digests of an audited shard, by its own worker and by the other one."""
    pair = tf.gather(digests, where.pair)
    own, other = tf.unstack(tf.bitcast(pair, tf.int32))  # numbers may be NaN
    return AuditRow(tf.reduce_all(own == other), pair, exponents)
