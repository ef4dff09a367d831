"""Which logical shards of a step are a worker's, and the table that has a row of each shard."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf


class ShardSpan(NamedTuple):
    """The logical shards from `start` to before `stop`: numbers, as a `range` has them, or int32 scalars of a graph
    that serves for all spans."""

    start: Any
    stop: Any


Span = range | ShardSpan


def in_graph(
    shards: range, is_general: bool, begin: tf.Tensor, seeds: tf.Tensor, audit: tf.Tensor | None = None
) -> Span:
    """A worker's shards in a graph.

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


def placed(rows: tf.Tensor, shards: Span, total_shards: int) -> tf.Tensor:
    """[V, M] with this worker's rows in their places and zeros elsewhere.

    Args:
        rows: [L, M].
        shards: of this worker.
        total_shards: V.
    """
    padded = tf.pad(rows, [[shards.start, total_shards - shards.stop], [0, 0]])
    return tf.ensure_shape(padded, [total_shards, rows.shape[1]])
