"""The loop over a worker's logical shards of one step, on each of its devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from raytf.data.plan import StepPlan
from raytf.distributed.allreduce import reduction as reductions
from raytf.distributed.allreduce.reduction import Buckets, Encode, FixedPointReduction, after
from raytf.distributed.devices import Devices
from raytf.distributed.encoding import wire
from raytf.distributed.encoding.sparse_gradients import SliceLayout, gather
from raytf.distributed.encoding.wire import AuditRow, Span, WorkerPart
from raytf.training.model import losses
from raytf.training.step.microbatch import MicroBatch, StepValues
from raytf.training.step.shard_work import OutputLayout, ShardResult, ShardWork

#: The number of times that a rank recomputes a shard whose audit failed.
TIMES = 4


@dataclass(frozen=True)
class ShardBatch:
    """The records of some shards of one step.

    Attributes:
        leaves: the leaves of the batch, each [L, b, ...].
        seeds: [L, S, 2].
        counts: the number of records in each shard, [L]; None if all shards are full.
        total: the number of records in all shards of this step, unless all are full.
        factors: the factors of the losses that are divided by data, [L, n].
    """

    leaves: list[tf.Tensor]
    seeds: tf.Tensor
    counts: tf.Tensor | None = None
    total: tf.Tensor | int = 0
    factors: tf.Tensor | None = None

    def part(self, own: range) -> ShardBatch:
        """Return the batch of the shards with the indices `own`."""
        at = slice(own.start, own.stop)
        counts, factors = (None if each is None else each[at] for each in (self.counts, self.factors))
        return ShardBatch([leaf[at] for leaf in self.leaves], self.seeds[at], counts, self.total, factors)


@dataclass(frozen=True)
class ShardSum:
    """How the results of shards are summed.

    Attributes:
        encode: (tensors, weight) -> encoded tensors, and their columns of the row.
        like: specs of a shard's encoded tensors and of its row.
        shards: number of shards of all workers.
        alike: whether a shard's bits must not depend on the number of shards.
        early: all-reduces the tensors in buckets, each as soon as this worker has computed it; only for a worker with
            one device.
        digest: (encoded tensors, slices, row) -> digests, which precede the columns of `encode` in the row.
        beside: the number of last shards that are not summed: at most one, and none with `early`. None if all shards
            are always summed.
    """

    encode: Encode
    like: tuple[list[tf.TensorSpec], tf.TensorSpec]
    shards: int
    alike: bool = True
    early: Buckets | None = None
    digest: Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], tf.Tensor], tf.Tensor] | None = None
    beside: tf.Tensor | None = None


def loop_shards(
    micro: ShardWork, how: ShardSum, shards: ShardBatch, values: Any
) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
    """Sum the encoded tensors of a device's shards of one step.

    Shards are computed one after another, so a device needs memory for only one micro-batch. Even a single shard is
    computed in a loop: TensorFlow optimizes a loop's body separately, so the body is the same for any number of shards.
    Only if the last bits may differ, a single shard needs no loop.

    A shard that is not summed is computed first, and the sum begins after it. This avoids a sum with zeros, which a CPU
    would write and read, and a separate branch for audits.

    Args:
        micro: the micro-batch.
        how: how the results are summed.
        shards: the records of the device's shards.
        values: the values of the model from which all shards start.

    Returns:
        The sums, the shards' rows [L, M], and the slices and outputs of the shards, in order.
    """
    like, early, counts, factors = how.like, how.early, shards.counts, shards.factors
    size, layouts = shards.seeds.shape[0], micro.layouts
    count = tf.shape(shards.seeds)[0] if size is None else size
    packed = [layout.spec for layout in layouts]

    def one(i: tf.Tensor) -> ShardResult:
        batch, weight = [leaf[i] for leaf in shards.leaves], tf.constant(1.0 / how.shards)
        if counts is not None:
            batch = [leaf[: counts[i]] for leaf in batch]
            weight = tf.cast(counts[i], tf.float32) / tf.cast(shards.total, tf.float32)
        made = micro(batch, shards.seeds[i], weight, values, None if factors is None else factors[i])
        tensors, row, slices, outputs = made
        encoded, extra = how.encode(tensors, weight)
        digests = [] if how.digest is None else [how.digest(encoded, slices, row)]
        row = tf.concat([row, *digests, extra], 0)
        return ShardResult(encoded, tf.ensure_shape(row, like[1].shape), [*slices, *outputs])

    def nothing() -> ShardResult:
        empty = [tf.zeros([0, spec.shape[1]]) for spec in packed]
        zeros = [wire.zeros(spec.shape, spec.dtype) for spec in like[0]]
        return ShardResult(zeros, tf.zeros(like[1].shape, like[1].dtype), empty)

    if size == 1 and counts is None and not how.alike and (early is None or early.rounds == 1):
        tensors, row, slices, _ = one(tf.constant(0))
        return tensors if early is None else early(None, tensors), row[None], slices

    rounds, idle = (count, 0) if early is None else (early.rounds, early.rounds - size)
    beside = 0 if how.beside is None else how.beside

    def body(
        k: tf.Tensor, summed: list[tf.Tensor], rows: tf.TensorArray, slices: list[tf.TensorArray]
    ) -> tuple[Any, Any, Any, Any]:
        place = k if how.beside is None else (k - beside) % rounds
        i = tf.maximum(k - idle, 0) if early else place
        conditions = [*([k >= idle] if early else []), *([] if counts is None else [counts[i] > 0])]
        more, row, parts, _ = tf.cond(tf.reduce_all(conditions), lambda: one(i), nothing) if conditions else one(i)
        summed = tf.cond(k <= beside, lambda: more, lambda: _added(summed, more))
        if how.beside is not None:
            parts = [f[: tf.where(k < beside, 0, tf.shape(f)[0])] for f in parts]
        if early is not None:
            summed = early(tf.equal(k, rounds - 1), summed)
        return k + 1, summed, rows.write(place, row), [a.write(place, f) for a, f in zip(slices, parts, strict=True)]

    rows = tf.TensorArray(tf.float32, rounds, element_shape=like[1].shape)
    arrays = [tf.TensorArray(tf.float32, rounds, element_shape=s.shape, infer_shape=False) for s in packed]
    start = (tf.constant(0), [wire.zeros([0], spec.dtype) for spec in like[0]], rows, arrays)
    # The sum is empty until the first shard that is summed, so its shape is unknown.
    free = None, [tf.TensorShape(None)] * len(like[0]), None, [None] * len(arrays)
    _, summed, rows, arrays = tf.while_loop(lambda k, *_: k < rounds, body, start, free, parallel_iterations=1)
    summed = [tf.ensure_shape(each, spec.shape) for each, spec in zip(summed, like[0], strict=True)]
    has_gaps = bool(idle) or counts is not None or how.beside is not None
    slices = [_joined(a, layout, has_gaps) for a, layout in zip(arrays, layouts, strict=True)]
    return summed, tf.ensure_shape(rows.stack()[idle:], [size, *like[1].shape]), slices


def _added(before: list[tf.Tensor], more: list[tf.Tensor]) -> list[tf.Tensor]:
    return [tf.ensure_shape(a, b.shape) + b for a, b in zip(before, more, strict=True)]


def _joined(array: tf.TensorArray, layout: SliceLayout | OutputLayout, has_gaps: bool) -> tf.Tensor:
    """Return the concatenated slices of all shards."""
    if has_gaps or layout.count is None:
        return array.concat()
    # On a GPU, `concat` would copy the lengths of the parts to the host.
    return tf.reshape(array.stack(), [-1, layout.width])


def spread_shards(
    devices: Devices, micro: ShardWork, how: ShardSum, shards: ShardBatch, fixed: Sequence[Any]
) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
    """Do the work of `loop_shards` for all shards of this worker, in parallel on its devices. Each device uses its own
    copies of the values that no step changes (`fixed`)."""
    summed, rows, slices = [], [], []
    size = shards.seeds.shape[0]
    parts = [shards] if size is None else [shards.part(own) for own in devices.spread(size)]
    for device, (part, known) in enumerate(zip(parts, fixed, strict=False)):
        with devices.on(device):
            tensors, row, more = loop_shards(micro, how, part, micro.values(known))
            summed.append(tensors)
            rows.append(row)
            slices.append(more)
    with devices.at_home():
        return devices.add(summed), tf.concat(rows, 0), [tf.concat(each, 0) for each in zip(*slices, strict=True)]


class StepShards(NamedTuple):
    """The shards of a step that a worker computes.

    Attributes:
        part: this worker's part in the sums, with the numbers of its shards.
        counts: the number of records in each shard, [L]; None if all shards are full.
        total: the number of records in all shards of the step, unless all are full.
    """

    part: WorkerPart
    counts: tf.Tensor | None
    total: tf.Tensor | int


def full_counts(plan: StepPlan, shards: Span, audit: tf.Tensor | None = None) -> tuple[tf.Tensor | None, int]:
    """Return `counts` and `total` of `ShardBatch` for a full step of some shards, and of an audited shard, if any."""
    if plan.is_even:
        return None, 0
    sizes = tf.constant(plan.sizes, tf.int32)
    own = sizes[shards.start : shards.stop]
    if audit is not None:
        own = tf.concat([own, sizes[audit[0] : audit[0] + audit[1]]], 0)
    return own, plan.global_batch_size


def shard_divisors(
    micro: MicroBatch, leaves: list[tf.Tensor], seeds: tf.Tensor, counts: Any, values: StepValues
) -> Any:
    """Return the divisors of each shard's losses that are divided by data, [L, n]; 0 for an empty shard."""
    count = len(micro.divided)

    def one(i: tf.Tensor) -> tf.Tensor:
        if counts is None:
            return micro.divisors([leaf[i] for leaf in leaves], seeds[i], values)
        batch = [leaf[i][: counts[i]] for leaf in leaves]
        return tf.cond(counts[i] > 0, lambda: micro.divisors(batch, seeds[i], values), lambda: tf.zeros([count]))

    spec = tf.TensorSpec([count], tf.float32)
    return tf.map_fn(one, tf.range(tf.shape(seeds)[0]), fn_output_signature=spec, parallel_iterations=1)


def shard_factors(own: tf.Tensor, totals: tf.Tensor, counts: Any, total: Any, plan: StepPlan) -> tf.Tensor:
    """Return the factors of the shards' losses for `loop_shards`, [L, n].

    Args:
        own: the result of `shard_divisors`, [L, n].
        totals: the divisors summed over all shards of the step, [n].
        counts: the number of records in each shard, [L]; None if all shards are full.
        total: the number of records in all shards of the step.
        plan: the plan, for its number of shards.
    """
    weights = tf.constant(1.0 / plan.shards) if counts is None else counts / total
    return losses.factors(own, totals, weights)


def fixed_values(devices: Devices, fixed: Callable[[], Any]) -> list[Any]:
    """Return each device's copies of the values that no step changes (`ShardWork.fixed`), made once per call."""
    copies = []
    for device in range(len(devices.names)):
        with devices.on(device):
            copies.append(fixed())
    return copies


class ShardSums(NamedTuple):
    """Computes and sums the shards of all workers; to be traced.

    Attributes:
        devices: this process's devices.
        part: this worker's part in the sums.
        of: the number of shards into which a batch is divided.
    """

    devices: Devices
    part: WorkerPart
    of: int

    def add(
        self,
        work: ShardWork,
        reduction: reductions.Reduction,
        batch: ShardBatch,
        flags: tf.Tensor,
        fixed: Sequence[Any],
    ) -> tuple[reductions.Reduced, list[Any]]:
        """Return the sums, and the gradients of the update: tensors, or slices of all shards.

        Args:
            work: the computation of a shard.
            reduction: how its tensors are added.
            batch: this worker's shards.
            flags: this worker's flags, [F], which are whole numbers.
            fixed: each device's copies of the values that no step changes.
        """
        is_float, part, of = isinstance(reduction, reductions.FloatReduction), self.part, self.of
        # If all shards have the same weight, the sum is multiplied by it once, after the shards. With overlap this is
        # too late, because the sum already contains gradients of other workers.
        is_even = is_float and batch.counts is None and reduction.overlap is None
        beside = None if part.audit is None else part.audit.beside

        def compute(scales: tf.Tensor, early: Buckets | None) -> tuple[list[tf.Tensor], tf.Tensor, list[tf.Tensor]]:
            encode = reduction.encoder(scales, is_even)
            how = ShardSum(encode, encoded_specs(work, reduction), of, not is_float, early, reduction.digest, beside)
            summed, rows, slices = spread_shards(self.devices, work, how, batch, fixed)
            return [s / of for s in summed] if is_even and of > 1 else summed, rows, slices

        count, layouts = len(work.slices), work.layouts
        reduced = reduction.reduce(part, compute, flags, [layout.spec for layout in layouts], len(work.outputs))
        known = [layout.count if batch.counts is None else None for layout in layouts]
        own = reduced.slices
        if part.all_reduce is not None and own:
            own = after(results(reduced, []), list(own))
        slices = gather(part, own, known)
        gradients = work.gradients(reduced.tensors, slices[:count])
        values = [g.values for g in gradients if isinstance(g, tf.IndexedSlices)]
        finite = reduced.finite & reductions.all_finite(values) if values else reduced.finite
        return reduced._replace(finite=finite, outputs=slices[count:]), gradients


def encoded_specs(work: ShardWork, reduction: reductions.Reduction) -> tuple[list[tf.TensorSpec], tf.TensorSpec]:
    """Return `ShardSum.like` for a computation and the reduction of its tensors."""
    width = work.row_width + reduction.digest_width(len(work.slices)) + reduction.extra
    return [tf.TensorSpec(s, reduction.dtype) for s in reduction.shapes], tf.TensorSpec([width], tf.float32)


def results(reduced: reductions.Reduced, gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return the tensors that are known once all sums of a computation over the workers are done.

    TensorFlow does not order calls of Python in a graph (`auto_control_deps.py`), but the workers of a host must make
    their sums in the same order. So the next sum must wait for these tensors.
    """
    every = [*reduced.tensors, reduced.row, reduced.flags, *gradients, *reduced.outputs]
    return [each.values if isinstance(each, tf.IndexedSlices) else each for each in every]


class ShardTimer:
    """Measures the duration of full micro-batches, whose results are dropped.

    Args:
        compute: a traced function (leaves, seeds) -> `ShardResult`.
        first: the leaves of the first records.
        records: records of a micro-batch.
        seeds: pairs of seeds of a micro-batch.
    """

    def __init__(self, compute: Any, first: Sequence[np.ndarray], records: int, seeds: int):
        self._compute, self._first, self._records, self._seeds = compute, first, records, seeds
        #: Whether a first run has prepared the graph.
        self._is_ready = False

    def seconds(self) -> float:
        """Return the seconds of one micro-batch, measured as the faster of two runs."""
        batch = self._batch()
        return min(self._run(batch), self._run(batch))

    def sample(self, seconds: float) -> tuple[float, float]:
        """Measure one or more micro-batches for at least `seconds`. Return the average seconds of a micro-batch and
        the total seconds."""
        batch = self._batch()
        began, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - began < seconds:
            self._run(batch)
            runs += 1
        taken = time.perf_counter() - began
        return taken / runs, taken

    def _batch(self) -> tuple[list[np.ndarray], np.ndarray]:
        """Return the first records, repeated, because some models reject zeros: CTC rejects an empty text."""
        leaves = [np.resize(leaf, (self._records, *np.shape(leaf)[1:])) for leaf in self._first]
        batch = leaves, np.zeros([self._seeds, 2], np.int32)
        if not self._is_ready:
            self._run(batch)
            self._is_ready = True
        return batch

    def _run(self, batch: tuple[list[np.ndarray], np.ndarray]) -> float:
        """Compute one micro-batch, and return the seconds that this takes.

        Only its row is fetched: fetching gradients from a GPU would take longer than computing them.
        """
        leaves, seeds = batch
        began = time.perf_counter()
        self._compute([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32)).row.numpy()
        return time.perf_counter() - began


class StepAudit:
    """Compares the digests of audited shards, and recomputes them if they differ; only for sums in fixed point."""

    def __init__(self, work: Any, reduction: FixedPointReduction, shards: int):
        self._work, self._reduction, self._shards = work, reduction, shards
        self._width = reduction.digest_width(len(work.slices))
        with tf.device("CPU:0"):
            self._digests = tf.Variable(tf.zeros([2, self._width]), trainable=False)
            self._exponents = tf.Variable(tf.zeros([reduction.extra], tf.int32), trainable=False)
        self._again: Any = tf.function(self._one_shard, autograph=False)

    def check(self, row: AuditRow) -> tf.Operation:
        """Fail the step if the digests differ; to be traced. Changes of the state must wait for this operation.

        The digests and exponents of each step are kept, because this takes less time than a branch.
        """
        with tf.device("CPU:0"):
            kept = [self._digests.assign(row.digests), self._exponents.assign(row.exponents)]
            with tf.control_dependencies(kept):
                why = "two workers have computed different bits for a shard"
                return tf.raw_ops.Assert(condition=row.agreed, data=[why])

    def take(self) -> tuple[bytes, bytes] | None:
        """Return the digests of the shard's owner and of the auditor; None if no step failed since the last call."""
        own, other = (each.tobytes() for each in self._digests.numpy())
        if own == other:
            return None
        self._digests.assign(tf.zeros_like(self._digests))
        return own, other

    def again(self, leaves: list[np.ndarray], seeds: np.ndarray, count: int | None, total: int) -> list[bytes]:
        """Compute a shard of a full step again, several times, with the current weights and the exponents of the failed
        step, and return its digests.

        Args:
            leaves: leaves of the shard, each [1, b, ...].
            seeds: [1, S, 2].
            count: records of the shard; None if all shards have the same number.
            total: records of the step.
        """
        batch = [tf.constant(leaf) for leaf in leaves]
        counts = None if count is None else tf.constant([count], tf.int32)
        numbers = tf.constant(seeds, tf.int32), counts, tf.constant(total, tf.int32)
        return [self._again(batch, *numbers).numpy().tobytes() for _ in range(TIMES)]

    def _one_shard(
        self, leaves: list[tf.Tensor], seeds: tf.Tensor, counts: tf.Tensor | None, total: tf.Tensor
    ) -> tf.Tensor:
        """Return the columns of digests, [D * 2], from the loop body of training: another graph may differ in bits."""
        reduction, work = self._reduction, self._work
        encode = reduction.encoder(reduction.scales(self._exponents))
        how = ShardSum(encode, encoded_specs(work, reduction), self._shards, digest=reduction.digest)
        _, rows, _ = loop_shards(work, how, ShardBatch(leaves, seeds, counts, total), work.values(work.fixed()))
        return rows[0, work.row_width : work.row_width + self._width]
