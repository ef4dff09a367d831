"""A step that is audited: where two workers have computed other bits of a shard, nothing changes, and both are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from raytf.distributed.allreduce.reduction import FixedPointReduction
from raytf.distributed.encoding.wire import AuditRow
from raytf.training.step.shard_loop import ShardBatch, ShardSum, loop_shards

#: How often a rank computes a doubtful shard again.
TIMES = 4


class StepAudit:
    """Computes the digests of audited shards.

    Args:
        work: the computation of a shard, traced.
        reduction: how its tensors are added.
        shards: V.
    """

    def __init__(self, work: Any, reduction: FixedPointReduction, shards: int):
        self._work, self._reduction, self._shards = work, reduction, shards
        self._width = reduction.digest_width(len(work.slices))
        with tf.device("CPU:0"):
            self._digests = tf.Variable(tf.zeros([2, self._width]), trainable=False)
            self._exponents = tf.Variable(tf.zeros([reduction.extra], tf.int32), trainable=False)
        self._again: Any = tf.function(self._one_shard, autograph=False)

    def check(self, row: AuditRow) -> tf.Operation:
        """Fail the step where the digests differ; to be traced. Changes of the state wait for it.

        There is no branch: a few small numbers are kept of each step, which takes less time than not to keep them.
        """
        with tf.device("CPU:0"):
            kept = [self._digests.assign(row.digests), self._exponents.assign(row.exponents)]
            with tf.control_dependencies(kept):
                why = "two workers have computed other bits of a shard"
                return tf.raw_ops.Assert(condition=row.agreed, data=[why])

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the digests of the shard's own worker and of the other one; None where no step has failed since."""
        own, other = (each.tobytes() for each in self._digests.numpy())
        if own == other:
            return None
        self._digests.assign(tf.zeros_like(self._digests))
        return own, other

    def again(self, leaves: list[np.ndarray], seeds: np.ndarray, count: int | None, total: int) -> list[bytes]:
        """Compute a shard of a full step again, several times, with the present weights and the exponents of the failed
        step; return its digests.

        Args:
            leaves: leaves of the shard, each [1, b, ...].
            seeds: [1, S, 2].
            count: records of the shard; None where all shards have as many.
            total: records of the step.
        """
        batch = [tf.constant(leaf) for leaf in leaves]
        counts = None if count is None else tf.constant([count], tf.int32)
        numbers = tf.constant(seeds, tf.int32), counts, tf.constant(total, tf.int32)
        return [self._again(batch, *numbers).numpy().tobytes() for _ in range(TIMES)]

    def _one_shard(
        self, leaves: list[tf.Tensor], seeds: tf.Tensor, counts: tf.Tensor | None, total: tf.Tensor
    ) -> tf.Tensor:
        """Return [D * 2] the columns of digests, by the loop's body of training: another graph may have other bits."""
        reduction, work, scales = self._reduction, self._work, self._reduction.scales(self._exponents)

        def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            return reduction.encode(tensors, weight, scales)

        width = work.row_width + self._width + reduction.extra
        like = [tf.TensorSpec(s, reduction.dtype) for s in reduction.shapes], tf.TensorSpec([width], tf.float32)
        how = ShardSum(encode, like, self._shards, digest=reduction.digest)
        _, rows, _ = loop_shards(work, how, ShardBatch(leaves, seeds, counts, total), work.values(work.fixed()))
        return rows[0, work.row_width : work.row_width + self._width]
