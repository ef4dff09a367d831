"""The row of a shard that a second worker has computed, which travels after those of all shards."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from raytf.distributed.shard_span import Span, placed


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


def place(rows: tf.Tensor, shards: Span, total_shards: int, audit: tf.Tensor | None) -> tf.Tensor:
    """As `placed`; with audits there is one more row, that of the audited shard, on the worker that has computed it."""
    if audit is None:
        return placed(rows, shards, total_shards)
    own = tf.shape(rows)[0] - audit[1]
    other = tf.ensure_shape(tf.pad(rows[own:], [[0, 1 - audit[1]], [0, 0]]), [1, rows.shape[1]])
    return tf.concat([placed(rows[:own], shards, total_shards), other], 0)


def compare(digests: tf.Tensor, shard: tf.Tensor, exponents: tf.Tensor) -> AuditRow:
    """The digests of an audited shard, by its own worker and by the other one, in the last row."""
    pair = tf.stack([digests[tf.maximum(shard, 0)], digests[-1]])
    bits = tf.bitcast(pair, tf.int32)  # numbers may be NaN
    return AuditRow((shard < 0) | tf.reduce_all(bits[0] == bits[1]), pair, exponents)
