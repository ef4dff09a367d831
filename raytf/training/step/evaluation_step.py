"""The evaluation step, which computes loss and metrics of this worker's logical shards without an update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf.checkpoint import variables
from raytf.data import tree
from raytf.data.pipeline import CallBatch
from raytf.data.plan import StepPlan
from raytf.data.sources import Spec
from raytf.distributed.devices import Devices
from raytf.distributed.encoding.wire import in_graph
from raytf.errors import ModelError
from raytf.inference import own_run
from raytf.inference.own_run import OwnScope, beginning, overrides_test
from raytf.training.model import batch_metrics, losses
from raytf.training.model.notes import notes_of
from raytf.training.step.microbatch import MicroBatch
from raytf.training.step.shard_loop import (
    ShardBatch,
    ShardSum,
    fixed_values,
    full_counts,
    shard_divisors,
    shard_factors,
    spread_shards,
)
from raytf.training.step.shard_work import ShardResult, ShardWork, add_to, added, elements, flat


class EvalStep:
    """Computes loss and metrics over a whole source, without an update.

    Metrics are added within each shard and then over the shards, always in the same order, so they do not depend on
    the number of workers.

    Attributes:
        is_general: whether one graph works for any shards, see `take`.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: StepPlan,
        shards: range,
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        devices: Devices | None = None,
    ):
        self._plan, self._shards, self._devices = plan, shards, devices or Devices()
        self.micro, self._specs = self._make_micro(model, template, specs), specs
        self._update: Any = tf.function(self.micro.update_metrics, autograph=False)
        self.is_general = len(self._devices.names) == 1
        count = None if self.is_general else len(shards)
        signature = [
            [tf.TensorSpec([None, count, plan.micro_batch_size, *s.shape], s.dtype) for s in specs],
            tf.TensorSpec([None, count, len(self.micro.seeds), 2], tf.int32),
        ]
        one = tf.TensorSpec([], tf.int32)
        some = [*signature, tf.TensorSpec([count], tf.int32)]
        totals = tf.TensorSpec([None, len(self.micro.divided)], tf.float32)
        self._full = tf.function(self._full_steps, input_signature=[*signature, one, totals], autograph=False)
        self._partial = tf.function(self._partial_step, input_signature=[*some, one, totals], autograph=False)
        self._full_divisors = tf.function(self._divisors_of_steps, input_signature=[*signature, one], autograph=False)
        self._partial_divisors = tf.function(self._divisors, input_signature=some, autograph=False)

    def _make_micro(
        self, model: keras.Model, template: tuple[Any, Any, Any], specs: list[Spec]
    ) -> MicroBatch | OwnTest:
        leaves = [tf.TensorSpec([self._plan.micro_batch_size, *s.signature], s.dtype) for s in specs]
        micro: MicroBatch | OwnTest
        if overrides_test(model):
            micro = OwnTest(model, template, leaves, self._plan.global_batch_size)
        else:
            micro = MicroBatch(model, template, training=False)
        if notes_of(model).metrics.whole:  # a loop must know the shapes of their inputs before it is traced
            seeds = tf.TensorSpec([len(micro.seeds), 2], tf.int32)
            probe = tf.function(lambda leaves, seeds: micro(leaves, seeds, tf.constant(1.0)).row, autograph=False)
            probe.get_concrete_function(leaves, seeds)
        return micro

    def __call__(self, call: CallBatch, totals: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray | None]:
        """Evaluate the steps of a call for this worker's shards.

        Args:
            call: a call with K steps.
            totals: [K, n] `divisors`, summed over all shards; by default this worker is assumed to have all shards.

        Returns:
            The sums of loss and metrics for each shard, [L, 1 + M]; and the rows of each step for metrics of the whole
            batch, [K, n, width], or None if there are no such metrics.
        """
        if totals is None:
            totals = self.divisors(call).sum(1)
        if call.full:
            rows, outputs = self._full(call.leaves, call.seeds, np.int32(self._shards.start), totals)
        else:
            rows, outputs = self._partial(call.leaves, call.seeds, call.counts, np.int32(call.records), totals)
        return rows.numpy(), outputs[0].numpy() if outputs else None

    @property
    def output_width(self) -> int:
        """Return the number of float32 words per record for metrics of the whole batch; 0 without such metrics."""
        return sum(layout.width for layout in self.micro.outputs)

    def update(self, rows: np.ndarray) -> None:
        """Update the metrics of the whole batch with the rows of all records of a step, in order."""
        self._update([tf.constant(rows)])

    def take(self, shards: range) -> None:
        """Compute other shards from the next call on; only if `is_general`."""
        assert self.is_general
        self._shards = shards

    def trace(self) -> None:
        """Trace the graphs and run them on zeros, before the first evaluation needs them; only if `is_general`."""
        assert self.is_general
        shards, self._shards, plan = self._shards, range(1), self._plan
        for full, are_there in ((True, plan.full_steps), (False, plan.full_steps < plan.steps_per_epoch)):
            if are_there:
                with suppress(tf.errors.OpError):  # a model may refuse zeros, unlike its records
                    self(CallBatch.of_zeros(self._specs, plan, len(self.micro.seeds), 1, full))
        self._shards = shards

    def divisors(self, call: CallBatch) -> np.ndarray:
        """Return the divisors of the losses that are divided by data, for each step and shard, as [K, L, n]."""
        if not self.micro.divided:
            return np.zeros((call.stop - call.start, len(self._shards), 0), np.float32)
        if call.full:
            return self._full_divisors(call.leaves, call.seeds, np.int32(self._shards.start)).numpy()
        return self._partial_divisors(call.leaves, call.seeds, call.counts).numpy()

    def _divisors_of_steps(self, leaves, seeds, begin):
        count = len(self.micro.divided)
        counts, _ = full_counts(self._plan, in_graph(self._shards, self.is_general, begin, seeds))

        micro = self.micro
        assert isinstance(micro, MicroBatch)

        def one(k: tf.Tensor) -> tf.Tensor:
            return shard_divisors(micro, [leaf[k] for leaf in leaves], seeds[k], counts, micro.values())

        spec = tf.TensorSpec([seeds.shape[1], count], tf.float32)
        return tf.map_fn(one, tf.range(tf.shape(seeds)[0]), fn_output_signature=spec, parallel_iterations=1)

    def _divisors(self, leaves, seeds, counts):
        assert isinstance(self.micro, MicroBatch)
        return shard_divisors(self.micro, [leaf[0] for leaf in leaves], seeds[0], counts, self.micro.values())[None]

    def _full_steps(self, leaves, seeds, begin, totals):
        fixed = fixed_values(self._devices, self.micro.fixed)  # all values: an evaluation changes none
        counts, total = full_counts(self._plan, in_graph(self._shards, self.is_general, begin, seeds))

        def body(k, rows, *arrays):
            batch = [leaf[k] for leaf in leaves]
            more, outputs = self._rows(batch, seeds[k], counts, total, fixed, totals[k])
            return k + 1, rows + more, *(array.write(k, o) for array, o in zip(arrays, outputs, strict=True))

        steps = tf.shape(seeds)[0]
        arrays = [tf.TensorArray(tf.float32, steps, element_shape=layout.spec.shape) for layout in self.micro.outputs]
        start = (tf.constant(0), tf.zeros([tf.shape(seeds)[1], self.micro.row_width]), *arrays)
        _, rows, *arrays = tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)
        return rows, [array.stack() for array in arrays]

    def _partial_step(self, leaves, seeds, counts, total, totals):
        fixed = fixed_values(self._devices, self.micro.fixed)
        rows, outputs = self._rows([leaf[0] for leaf in leaves], seeds[0], counts, total, fixed, totals[0])
        return rows, [each[None] for each in outputs]

    def _rows(self, leaves, seeds, counts, total, fixed, totals) -> tuple[tf.Tensor, list[tf.Tensor]]:
        def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            return [], tf.zeros([0])

        like: tuple[list[tf.TensorSpec], tf.TensorSpec] = [], tf.TensorSpec([self.micro.row_width], tf.float32)
        factors = None
        if isinstance(self.micro, MicroBatch) and self.micro.divided:
            own = shard_divisors(self.micro, leaves, seeds, counts, self.micro.values())
            factors = shard_factors(own, totals, counts, total, self._plan)
        how = ShardSum(encode, like, self._plan.shards)
        batch = ShardBatch(leaves, seeds, counts, total, factors)
        return spread_shards(self._devices, self.micro, how, batch, fixed)[1:]


class OwnTest(ShardWork):
    """A model's custom `test_step` for one logical shard of an evaluation, with steps of `batch` records."""

    divided: tuple[int, ...] = ()

    def __init__(self, model: keras.Model, template: tuple[Any, Any, Any], leaves: Sequence[tf.TensorSpec], batch: int):
        parts = own_run.parts_of(model, variables.seed_states(model))
        super().__init__(None, parts.trainable, parts.states, keeps_slices=False)
        self._model, self._template = model, template
        self.seeds, self.metrics = parts.seeds, parts.metrics
        self._initial_metrics = [keras.ops.convert_to_numpy(v) for v in self.metrics]
        #: Names of the numbers that the step returns.
        self.names: list[str] = []
        self._gathered = batch_metrics.Gathered(model)
        seeds = tf.TensorSpec([len(self.seeds), 2], tf.int32)
        # A loop must know the results of a shard before it is traced.
        with batch_metrics.noted_while_traced(model, leaves, batch):
            tf.function(self._compute, autograph=False).get_concrete_function(list(leaves), seeds)
        self._gathered = batch_metrics.Gathered(model)
        self.row_width = 1 + sum(elements(self.metrics)) + len(self.names)

    def __call__(self, leaves, seeds, weight: tf.Tensor, values: Any = None, factors: Any = None) -> ShardResult:
        loss, deltas, logs, outputs = self._compute(leaves, seeds, weight)
        means = notes_of(self._model).metrics.means
        deltas = [d * weight if id(v) in means else d for v, d in zip(self.metrics, deltas, strict=True)]
        row = flat([loss * weight, *deltas, *(each * weight for each in logs)])
        return self._result([], [], row, weight, outputs)

    def values(self, known: Any = None) -> None:
        """Return None: the step reads the variables directly, because an evaluation changes none."""

    def update_metrics(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics of the whole batch with the outputs of all shards, inside a traced function."""
        self._gathered.update(outputs)

    def add_metrics(self, row: Any) -> None:
        """Add reduced rows to the model's metrics, except the metrics of the whole batch."""
        add_to(self.metrics, row[: sum(elements(self.metrics))], self._gathered.variables)

    def logs(self, row: Any, steps: int) -> dict[str, Any]:
        """Return the results of the step, averaged over the steps, from the row summed over all shards and steps."""
        numbers = row[len(row) - len(self.names) :]
        return dict(sorted((name, float(value) / steps) for name, value in zip(self.names, numbers, strict=True)))

    def _compute(self, leaves: Any, seeds: Any, weight: Any = 1.0) -> tuple[Any, Any, Any, Any]:
        scope = OwnScope(beginning(self.seeds, seeds, self.metrics, self._initial_metrics))
        data = own_run.data_of(tree.unflatten(self._template, leaves))
        added_by = losses.added_divided(self._model, None, leaves[0].shape[0], weight)
        with self._gathered.noted() as calls, added_by:
            logs = own_run.run(self._model.test_step, data, seeds[-1], scope, self.trainable, _refuse)
        deltas = added(scope, self.metrics, self._initial_metrics)
        self.names = list(logs)
        return own_run.loss_of(logs), deltas, list(logs.values()), self._gathered.pack(calls)


def _refuse(scope: OwnScope, optimizer: Any, gradients: Sequence[Any], weights: Sequence[Any]) -> None:
    raise ModelError(
        "test_step calls an optimizer, but an evaluation must not change weights. Update them in train_step."
    )
