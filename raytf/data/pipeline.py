"""Gathers the batches of one worker, its logical shards of the next steps, in a background thread."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.data import class_weights, tree
from raytf.data.order import BatchOrder, EpochOrder, Order, step_seeds
from raytf.data.plan import BatchPlan, StepPlan
from raytf.data.sources import Source, Spec
from raytf.data.sources.base import record_bytes
from raytf.data.sources.batches import LiveBatches
from raytf.errors import DataError

#: (batch, seed) -> batch, where batch is (x, y, sample_weight) of tensors [b, ...] and seed an int32 tensor [2].
Augment = Callable[[tuple[Any, Any, Any], Any], tuple[Any, Any, Any]]
#: The most bytes of records that are read ahead of their window.
_AHEAD_BYTES = 32 << 20
#: The most steps, and the most bytes, whose records are taken from the source at once.
_ROWS_STEPS, _ROWS_BYTES = 16, 4 << 20
#: Calls gathered ahead: one in the thread and one ready, so that no call waits for the thread to wake up.
DEPTH = 2


@dataclass(frozen=True)
class CallBatch:
    """The input of one call into TensorFlow: K steps of this worker's L shards.

    Attributes:
        start, stop: global steps [start, stop), K of them.
        leaves: each [K, L, b, ...]; arrays, or the results of the pipeline's `send`.
        counts: [L] int32 number of records in each shard; in a full step, fewer than b only if V does not divide G.
        full: whether every shard of every worker is full.
        seeds: [K, L, S, 2] int32.
        records: number of records of all workers in these steps.
    """

    start: int
    stop: int
    leaves: list[Any]
    counts: np.ndarray
    full: bool
    seeds: np.ndarray
    records: int

    @classmethod
    def of_zeros(cls, specs: Sequence[Spec], plan: StepPlan, seeds: int, steps: int, full: bool) -> CallBatch:
        """Return a call of one shard and `steps` steps, which may be 0, with records and seeds of zeros."""
        b = plan.micro_batch_size
        leaves = [spec.zeros([steps, 1, b, *(max(1, n) for n in spec.shape)]) for spec in specs]
        return cls(0, steps, leaves, np.full(1, b, np.int32), full, np.zeros([steps, 1, seeds, 2], np.int32), b)


@dataclass(frozen=True)
class _Rows:
    """The records of full steps [first, stop) of an epoch: leaves [(stop - first) * L * b, ...]."""

    order: Order
    first: int
    stop: int
    leaves: list[np.ndarray]


class Pipeline:
    """Reads the records of a range of logical shards.

    Args:
        source: provides the records.
        plan: the sizes of shards and steps.
        shards: this worker's logical shards.
        seed: the run's seed.
        shuffle: False reads in the source's order (evaluation).
        class_weight: weight of each class, multiplied into sample weights, as in Keras.
        augment: applied to each micro-batch with its own seed.
        seeds: `step_seeds`, or another function with the same arguments.

    Attributes:
        send: applied to the leaves of a call in the background thread; may be set before the first `submit`.
    """

    def __init__(
        self,
        source: Source,
        plan: StepPlan,
        shards: range,
        seed: int,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        augment: Augment | None = None,
        seeds: Callable[[int, np.ndarray, np.ndarray, int], np.ndarray] = step_seeds,
    ):
        self._whole, self.plan = source, plan
        self._seed, self._shuffle, self._seeds = seed, shuffle, seeds
        self.send: Callable[[list[np.ndarray]], list[Any]] = list
        self._class_weight = class_weight or None
        self._augment = _compile(augment) if augment is not None else None
        self._seeds_per_shard = 0
        self._classes: int | None = None
        self._template = source.spec
        if self._class_weight is not None:
            self._template = (*source.spec[:2], class_weights.weight_spec(source.spec, source.name))
        self._begin(shards)
        self.template, self.leaf_specs = self._describe()

    def prepare(self, seeds_per_shard: int, classes: int | None) -> None:
        """Set the model's requirements, before the first `submit`.

        Args:
            seeds_per_shard: number of random seeds for each micro-batch.
            classes: number of classes, which labels must be below; None for no check.
        """
        self._seeds_per_shard = seeds_per_shard
        # If the source knows its labels, they were checked before the first step.
        self._classes = classes if self.source.label_range() is None else None

    def sample(self, records: int = 2) -> tuple[Any, Any, Any]:
        """Return a batch of the first records, as the model will receive it."""
        ids = np.arange(min(records, self.source.records))
        return self._finish(self.source.take(ids), np.zeros(2, np.int32))

    def submit(self, start: int, stop: int, beside: int | None = None) -> Future[CallBatch]:
        """Start gathering global steps [start, stop) of one epoch; `beside` appends another worker's shard."""
        return self._pool.submit(self._gather, start, stop, beside)

    def numbers(self, step: int) -> np.ndarray | None:
        """Return the record numbers [n] of this pipeline's shards in a step, one shard after another.

        Return None if the program makes the records while the run trains.
        """
        if isinstance(self.source, LiveBatches):
            return None
        epoch, inside = self.plan.locate(step)
        order = self._make_order(epoch)  # not the one that the background thread uses
        return np.concatenate([order.of_steps(v, inside, inside + 1) for v in self.shards])

    def of(self, shards: range) -> Pipeline:
        """Close this pipeline, and return one of other shards in its place."""
        self.close()
        other = copy.copy(self)
        other._begin(shards)
        if self._order is not None:  # computing the order of an epoch again is costly
            other._order = self._order[0], self._order[1].for_another_thread()
        return other

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, shards: range) -> None:
        whole = self._whole
        self.shards = shards
        # A reader of its own: validation may read the same source while training reads ahead.
        self.source: Source = whole.reader(len(shards)) if hasattr(whole, "reader") else whole
        self._order: tuple[int, Order] | None = None
        self._rows: _Rows | None = None
        self._expect = getattr(self.source, "expect", None) if self._shuffle and shards else None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raytf-input")

    def _describe(self) -> tuple[Any, list[Spec]]:
        batch = self.sample()
        specs = [Spec.of(np.asarray(leaf)) for _, leaf in tree.flatten(batch)]
        if self._augment is not None:
            return batch, specs
        declared = [spec for _, spec in tree.flatten(self._template)]  # lengths may vary between batches
        return batch, [spec if known.has_lengths else known for known, spec in zip(declared, specs, strict=True)]

    def _epoch_order(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, self._make_order(epoch)
        return self._order[1]

    def _make_order(self, epoch: int) -> Order:
        if isinstance(self.plan, BatchPlan):
            return BatchOrder(self.plan)
        source = self.source
        blocks = source.block_sizes if self._shuffle else None
        return EpochOrder(self.plan, blocks, self._seed, epoch, source.window, self._shuffle)

    def _gather(self, start: int, stop: int, beside: int | None = None) -> CallBatch:
        """Gather a call and send its leaves, in the background thread.

        It may replace no attribute but `_order` and `_rows`: `of` may copy this pipeline in another thread.
        """
        call = self._gather_own(start, stop) if beside is None else self._gather_beside(start, beside)
        return dataclasses.replace(call, leaves=self.send(call.leaves))

    def _gather_own(self, start: int, stop: int) -> CallBatch:
        if isinstance(self.source, LiveBatches):
            return self._gather_live(self.source, start)
        epoch, inside = self.plan.locate(start)
        order, steps = self._epoch_order(epoch), stop - start
        full = self.plan.is_full(inside)
        local = self.plan.counts(inside, self.shards).astype(np.int32)
        shard_steps = np.arange(start, stop)
        model_seeds = self._seeds(self._seed, shard_steps, np.array(self.shards, np.int64), self._seeds_per_shard + 1)
        records = self.plan.records_of(inside) * steps  # a call that is not full has one step
        if full and self.plan.is_even and self._augment is None:
            flat = self._full_rows(order, inside, steps)
            self._check_labels(flat, start)
            shape = steps, len(self.shards), self.plan.micro_batch_size
            shaped = [leaf.reshape(*shape, *leaf.shape[1:]) for leaf in self._with_class_weight(flat)]
        else:
            # [L][K*b]: consecutive steps of a shard are consecutive positions of its range.
            ids = [order.of_steps(v, inside, inside + steps) for v in self.shards]
            flat = self.source.take(np.concatenate(ids) if ids else np.zeros(0, np.int64))
            self._check_labels(flat, start)
            shaped = self._by_shard(flat, [len(i) for i in ids], steps, model_seeds[:, :, -1])
        self._read_ahead(order, inside + steps)
        return CallBatch(start, stop, shaped, local, full, model_seeds[:, :, :-1], records)

    def _gather_beside(self, step: int, shard: int) -> CallBatch:
        """Return one step of this pipeline's shards, followed by another worker's shard: two calls, joined."""
        own = self._gather_own(step, step + 1)
        other = self.alone(shard, step)
        leaves = [np.concatenate(pair, 1) for pair in zip(own.leaves, other.leaves, strict=True)]
        counts, seeds = np.concatenate([own.counts, other.counts]), np.concatenate([own.seeds, other.seeds], 1)
        return dataclasses.replace(own, leaves=leaves, counts=counts, seeds=seeds)

    def alone(self, shard: int, step: int) -> CallBatch:
        """Return one step of any shard, as arrays; may be called from any thread."""
        other = copy.copy(self)
        other._begin(range(shard, shard + 1))
        known = self._order  # another thread may replace it
        if known is not None:
            other._order = known[0], known[1].for_another_thread()
        other._expect = None
        try:
            return other._gather_own(step, step + 1)
        finally:
            other.close()

    def _gather_live(self, source: LiveBatches, step: int) -> CallBatch:
        """Return this worker's part of a batch that the program made, as a call of one step."""
        assert source.fetch is not None
        assert isinstance(self.plan, BatchPlan)
        flat, rows = source.fetch(step, self.shards)
        self._check_labels(flat, step)
        own = self.plan.parts(rows)[self.shards.start : self.shards.stop].astype(np.int32)
        shards = np.array(self.shards, np.int64)
        seeds = self._seeds(self._seed, np.array([step]), shards, self._seeds_per_shard + 1)
        shaped = self._by_shard(flat, list(own), 1, seeds[:, :, -1])
        is_full = rows == self.plan.global_batch_size
        return CallBatch(step, step + 1, shaped, own, is_full, seeds[:, :, :-1], rows)

    def _full_rows(self, order: Order, inside: int, steps: int) -> list[np.ndarray]:
        """Return the leaves [steps * L * b, ...] of full steps of an epoch, one step after another.

        They are taken several steps at a time, however short calls are: taking few records costs as much as many.
        """
        size, end = len(self.shards) * self.plan.micro_batch_size, inside + steps
        pieces: list[list[np.ndarray]] = []
        while inside < end:
            rows = self._rows
            if rows is None or rows.order is not order or not rows.first <= inside < rows.stop:
                # Start at the end of the last rows: a source expects each record to be requested once.
                rows = self._rows = self._take_rows(order, inside, end)
            stop = min(end, rows.stop)
            cut = slice((inside - rows.first) * size, (stop - rows.first) * size)
            pieces.append([leaf[cut] for leaf in rows.leaves])
            inside = stop
        return pieces[0] if len(pieces) == 1 else [np.concatenate(parts) for parts in zip(*pieces, strict=True)]

    def _take_rows(self, order: Order, first: int, end: int) -> _Rows:
        """Take the records of the epoch's steps from `first` on, at least up to `end`."""
        b, shards = self.plan.micro_batch_size, len(self.shards)
        most = min(_ROWS_STEPS, _ROWS_BYTES // max(1, shards * b * record_bytes(self.source.spec)))
        stop = max(end, min(first + most, self.plan.full_until(first)))
        ids = np.empty((stop - first, shards, b), np.int64)
        for i, v in enumerate(self.shards):
            ids[:, i] = order.of_steps(v, first, stop).reshape(-1, b)
        return _Rows(order, first, stop, self.source.take(ids.reshape(-1)))

    def _read_ahead(self, order: Order, step: int) -> None:
        """Make the source read, in its own threads, the blocks that follow the window of a step."""
        if self._expect is not None:
            most = _AHEAD_BYTES // (max(1, record_bytes(self.source.spec)) * len(self.shards))
            self._expect(np.concatenate([order.coming(v, step, most) for v in self.shards]))

    def _check_labels(self, leaves: list[np.ndarray], step: int) -> None:
        if self._classes is None or not len(leaves[0]):
            return
        y = tree.unflatten(self.source.spec, leaves)[1]
        if isinstance(y, np.ndarray) and y.dtype.kind in "biuf" and (y.min() < 0 or y.max() >= self._classes):
            raise DataError(
                f"{self.source.name}: labels near step {step + 1} range from {y.min()} to {y.max()}, but the model has "
                f"{self._classes} outputs. Number the classes from 0, or add units to the last layer."
            )

    def _by_shard(
        self, flat: list[np.ndarray], lengths: Sequence[int], steps: int, seeds: np.ndarray
    ) -> list[np.ndarray]:
        b = max(self.plan.micro_batch_size, *(length // steps for length in lengths), 0)
        # Only leaves of the source have lengths that vary, and `leaf_specs` and `flat` have them in the same order.
        shapes = [s.shape if s.has_lengths else flat[i].shape[1:] for i, s in enumerate(self.leaf_specs)]
        head = steps, len(self.shards), b
        out = [s.zeros([*head, *shape]) for s, shape in zip(self.leaf_specs, shapes, strict=True)]
        begin = 0
        for i, length in enumerate(lengths):
            size = length // steps  # a call of several steps is full, so its shards divide evenly
            for k in range(steps if size else 0):
                batch = self._finish([leaf[begin : begin + size] for leaf in flat], seeds[k, i])
                for target, (_, leaf) in zip(out, tree.flatten(batch), strict=True):
                    target[k, i, :size] = leaf
                begin += size
        return out

    def _finish(self, leaves: list[np.ndarray], seed: np.ndarray) -> tuple[Any, Any, Any]:
        batch = tree.unflatten(self._template, self._with_class_weight(leaves))
        return batch if self._augment is None else self._augment(batch, seed)

    def _with_class_weight(self, leaves: list[np.ndarray]) -> list[np.ndarray]:
        if self._class_weight is None:
            return leaves
        x, y, weight = tree.unflatten(self.source.spec, leaves)
        factor = class_weights.weights_of(y, self._class_weight)
        merged = factor if weight is None else np.asarray(weight, np.float32) * factor
        return [leaf for _, leaf in tree.flatten((x, y, merged))]


def _compile(augment: Augment) -> Callable[[tuple[Any, Any, Any], np.ndarray], tuple[Any, Any, Any]]:
    import tensorflow as tf

    traced = tf.function(augment, reduce_retracing=True)

    def apply(batch: tuple[Any, Any, Any], seed: np.ndarray) -> tuple[Any, Any, Any]:
        # The input thread must not compete with the step for the accelerator.
        with tf.device("CPU:0"):
            out = traced(tree.map_leaves(tf.convert_to_tensor, batch), tf.convert_to_tensor(seed))
        if not isinstance(out, tuple) or len(out) != 3:
            raise DataError("augment must return a tuple (x, y, sample_weight) like its argument; parts may be None.")
        return tree.map_leaves(lambda t: t.numpy(), out)

    return apply


class Prefetch:
    """Gathers the calls of a pipeline in order, up to `DEPTH` calls ahead of the running one.

    Args:
        pipeline: gathers the calls.
        start: the first step of the first call.
        call_end: (start of a call, end of all calls) -> its end.
        beside: (start of a call) -> another worker's shard that it includes, or None.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        start: int,
        call_end: Callable[[int, int], int],
        beside: Callable[[int], int | None] = lambda start: None,
    ):
        self._pipeline, self._asked, self._call_end, self._beside = pipeline, start, call_end, beside
        self._ahead: deque[Future[CallBatch]] = deque()

    @property
    def asked(self) -> int:
        """The step up to which calls were submitted."""
        return self._asked

    def fill(self, stop: int) -> bool:
        """Submit calls up to step `stop` until `DEPTH` are ahead. Return whether there is a call to take."""
        while self._asked < stop and len(self._ahead) < DEPTH:
            end = self._call_end(self._asked, stop)
            self._ahead.append(self._pipeline.submit(self._asked, end, self._beside(self._asked)))
            self._asked = end
        return bool(self._ahead)

    def __bool__(self) -> bool:
        return bool(self._ahead)

    def take(self) -> CallBatch:
        return self._ahead.popleft().result()
