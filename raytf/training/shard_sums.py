"""The shards of a step, computed on this worker's devices and summed over all workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from raytf.data.plan import StepPlan
from raytf.distributed import reduction as reductions
from raytf.distributed.audit_rows import AuditPlaces
from raytf.distributed.buckets import Buckets, after
from raytf.distributed.devices import Devices
from raytf.distributed.shard_span import Span
from raytf.distributed.slices import gather
from raytf.training.shard_loop import ShardBatch, ShardSum, spread_shards
from raytf.training.shard_work import ShardWork


@dataclass(frozen=True)
class ShardSums:
    """Computes and sums shards; to be traced.

    Attributes:
        devices: of this process.
        plan: sizes of batches and shards.
        all_reduce: sums tensors over workers; None if this is the only worker.
        shards: of this worker.
        total_shards: V.
        has_overlap: whether sums over workers start while gradients are computed.
        audit: as for `Reduction.reduce`.
    """

    devices: Devices
    plan: StepPlan
    all_reduce: reductions.AllReduce
    shards: Span
    total_shards: int
    has_overlap: bool
    audit: AuditPlaces | None = None

    def __call__(
        self,
        work: ShardWork,
        reduction: reductions.Reduction,
        batch: ShardBatch,
        flags: tf.Tensor,
        fixed: Sequence[Any],
    ) -> tuple[reductions.Reduced, list[Any]]:
        """What all shards together make of a computation.

        Args:
            work: the computation of a shard.
            reduction: how its tensors are added.
            batch: this worker's shards.
            flags: [F] this worker's flags, whole numbers.
            fixed: for each device, its copies of the values that no step changes.

        Returns:
            The sums, and the gradients of the update: tensors, or slices of all shards.
        """
        width = work.row_width + reduction.digest_width(len(work.slices)) + reduction.extra
        like = [tf.TensorSpec(s, reduction.dtype) for s in reduction.shapes], tf.TensorSpec([width], tf.float32)
        is_float, of = isinstance(reduction, reductions.FloatReduction), self.plan.shards
        # If all shards have the same weight, the sum is multiplied by it once, after the shards. With overlap that is
        # too late: the sum already has the gradients of other workers.
        is_even = is_float and batch.counts is None and not self.has_overlap
        beside = None if self.audit is None else self.audit.beside

        def compute(scales: tf.Tensor, early: Buckets | None) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
                return reduction.encode(tensors, tf.constant(1.0) if is_even else weight, scales)

            how = ShardSum(encode, like, of, not is_float, early, reduction.digest, beside)
            summed, rows, found = spread_shards(self.devices, work, how, batch, fixed)
            return [s / of for s in summed] if is_even and of > 1 else summed, rows, found

        all_reduce, count, layouts = self.all_reduce, len(work.slices), work.layouts
        specs = [layout.spec for layout in layouts]
        told = self.shards, self.total_shards, specs, self.audit, len(work.outputs)
        reduced = reduction.reduce(all_reduce, compute, flags, *told)
        known = [layout.count if batch.counts is None else None for layout in layouts]
        own = reduced.slices
        if all_reduce is not None and own:
            own = after(results(reduced, []), list(own))
        slices = gather(all_reduce, own, known, self.shards, self.total_shards)
        gradients = work.gradients(reduced.tensors, slices[:count])
        values = [g.values for g in gradients if isinstance(g, tf.IndexedSlices)]
        finite = reduced.finite & reductions.all_finite(values) if values else reduced.finite
        return reduced._replace(finite=finite, outputs=slices[count:]), gradients


def results(reduced: reductions.Reduced, gradients: Sequence[Any]) -> list[tf.Tensor]:
    """What is known when all sums over workers of a computation are done.

    TensorFlow keeps no order among calls of Python in a graph (`auto_control_deps.py`), and those add what the workers
    of a host bring at the same time. So whatever is added next must wait for these.
    """
    every = [*reduced.tensors, reduced.row, reduced.flags, *gradients, *reduced.outputs]
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in every]
