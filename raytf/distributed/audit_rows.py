"""The row of a shard that a second worker has computed, which travels after those of all shards."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from raytf.distributed.shard_span import Span


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
    """Where the rows of a call are. Made once for all of its steps, each of which then needs few operations.

    Attributes:
        beside: how many shards this worker computes beside its own, and after them: 0 or 1.
        rows: [V + 1] for each row that travels, which of this worker's rows it is; the number of these for another's.
        pair: [2] the rows of the audited shard; the last row twice where no shard is audited.
    """

    beside: tf.Tensor
    rows: tf.Tensor
    pair: tf.Tensor


def places(audit: tf.Tensor, shards: Span, total_shards: int) -> AuditPlaces:
    """Where the rows of a call are.

    Args:
        audit: int32 [2]: the shard that another worker computes, too, or -1; and `AuditPlaces.beside`.
        shards: of this worker.
        total_shards: V.
    """
    shard, beside = tf.unstack(audit)
    numbers, own = tf.range(total_shards), shards.stop - shards.start
    nobody = own + beside
    mine = tf.where((numbers >= shards.start) & (numbers < shards.stop), numbers - shards.start, nobody)
    rows = tf.concat([mine, [tf.where(beside > 0, own, nobody)]], 0)
    return AuditPlaces(beside, rows, tf.stack([tf.where(shard < 0, total_shards, shard), total_shards]))


def place(rows: tf.Tensor, where: AuditPlaces) -> tf.Tensor:
    """[V + 1, M] with this worker's rows in their places and zeros elsewhere, bit for bit; the last row is that of the
    audited shard, on the worker that has computed it beside its own."""
    return tf.gather(tf.concat([rows, tf.zeros([1, rows.shape[1]])], 0), where.rows)


def compare(digests: tf.Tensor, where: AuditPlaces, exponents: tf.Tensor) -> AuditRow:
    """The digests of an audited shard, by its own worker and by the other one."""
    pair = tf.gather(digests, where.pair)
    own, other = tf.unstack(tf.bitcast(pair, tf.int32))  # numbers may be NaN
    return AuditRow(tf.reduce_all(own == other), pair, exponents)
