"""A micro-batch, which is one logical shard of one step, and the loop over the micro-batches of a worker.

Each micro-batch is a pure function of the weights, the layers' states at the start of the step, its records and its
seeds. It runs in a `keras.StatelessScope`, so every shard of a step starts from the same state, whichever worker it
is on, and the values that layers and metrics would have written are returned and can be reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf.checkpoint import variables
from raytf.data import tree
from raytf.data.plan import StepPlan
from raytf.distributed import reduction, wire
from raytf.distributed.buckets import Buckets
from raytf.distributed.devices import Devices
from raytf.errors import ModelError
from raytf.inference import user_model
from raytf.training import loss_division
from raytf.training import model as models


class StepValues(NamedTuple):
    """Tensors for a model's trainable weights and layers' states; None for values that are not known."""

    weights: list[Any]
    states: list[Any]


class MicroBatch:
    """One logical shard of one step, as a pure function.

    Args:
        model: built and compiled.
        template: a batch's structure, (x, y, sample_weight).
        training: whether to compute gradients and layers' updates.
        jit: compile with XLA.
    """

    def __init__(self, model: keras.Model, template: tuple[Any, Any, Any], training: bool, jit: bool = False):
        self.model, self._template, self._training = model, template, training
        self._kwargs = {"training": training} if user_model.takes_training(model) else {}
        self._sums = models.sums_over_batch(model)
        self.trainable = list(model.trainable_variables)
        self.seeds = variables.seed_states(model)
        seeds = {id(v) for v in self.seeds}
        self.states = [v for v in model.non_trainable_variables if id(v) not in seeds]
        self.metrics = list(model.metrics_variables)
        self._initial_metrics = [keras.ops.convert_to_numpy(v) for v in self.metrics]
        self._output_losses = {id(v) for m in models.output_loss_metrics(model) for v in m.variables}
        self._loss_metric = models.loss_metric(model)
        #: Indices of trainable variables with a gradient, and of layers' states that a step updates; set by a trace.
        self.with_gradient: list[int] = []
        self.updated: list[int] = []
        #: Indices of compiled losses that are divided by data; a step has a factor for each, see `loss_division`.
        self.divided = loss_division.places(model)
        self.row_width = 1 + sum(int(np.prod(v.shape, dtype=np.int64)) for v in self.metrics)
        self._run = tf.function(self._compute, jit_compile=True) if jit else self._compute

    def __call__(
        self, leaves, seeds, weight: tf.Tensor, values: StepValues | None = None, factors: tf.Tensor | None = None
    ) -> tuple[list[tf.Tensor], Any]:
        """Gradients and layers' updates, and the row [1 + M]: the loss times `weight`, and what is added to metrics.

        Args:
            leaves: leaves of the batch, each [n, ...].
            seeds: [S, 2].
            weight: n divided by the records of all shards: the weight of this micro-batch in the step.
            values: of weights and layers' states; by default their current values.
            factors: factors of the losses that are divided by data, in a step of several shards.
        """
        weights, states = values or self.values()
        gradients, updates, deltas, loss = self._run(weights, states, leaves, seeds, weight, factors)
        row = [tf.reshape(loss * weight, [1]), *(tf.reshape(tf.cast(d, tf.float32), [-1]) for d in deltas)]
        return [*gradients, *updates], tf.concat(row, 0)

    def divisors(self, leaves, seeds, values: StepValues) -> tf.Tensor:
        """[n] the divisors of a shard's losses in `divided`. TensorFlow prunes the rest of the model from the graph."""
        x, y, sample_weight = tree.unflatten(self._template, leaves)
        scope = keras.StatelessScope(state_mapping=self._mapping(*values, seeds), collect_losses=True)
        with scope, loss_division.measured(self.model) as found:
            predicted = self.model(x, **self._kwargs)
            models.compute_loss(self.model, x, y, predicted, sample_weight, self._training)
        records = tf.cast(tf.shape(leaves[0])[0], tf.float32)  # for a loss whose divisor here is not from the data
        known = [found[place] for place in self.divided]
        return tf.stack([records if divisor is None else divisor for divisor in known])

    def _mapping(self, weights, states, seeds) -> list[tuple[keras.Variable, tf.Tensor]]:
        return [
            *zip(self.trainable, weights, strict=True),
            *zip(self.states, states, strict=True),
            *((v, tf.cast(seeds[i], v.dtype)) for i, v in enumerate(self.seeds)),
            *((v, tf.constant(a)) for v, a in zip(self.metrics, self._initial_metrics, strict=True)),
        ]

    def values(self, known: StepValues | None = None) -> StepValues:
        """Current weights and layers' states, on the current device.

        Args:
            known: from `fixed`; values in it are used as they are and not read again.
        """
        fixed = known or StepValues([None] * len(self.trainable), [None] * len(self.states))
        pairs = (zip(self.trainable, fixed.weights, strict=True), zip(self.states, fixed.states, strict=True))
        return StepValues(*([tf.identity(v.value) if value is None else value for v, value in each] for each in pairs))

    def fixed(self) -> StepValues:
        """The values that no step changes, on the current device; None for the others."""
        changed = {id(self.trainable[i]) for i in self.with_gradient} | {id(self.states[i]) for i in self.updated}
        groups = self.trainable, self.states
        return StepValues(*([None if id(v) in changed else tf.identity(v.value) for v in group] for group in groups))

    def _compute(self, weights, states, leaves, seeds, part: tf.Tensor, factors: tf.Tensor | None):
        model = self.model
        x, y, sample_weight = tree.unflatten(self._template, leaves)
        mapping = self._mapping(weights, states, seeds)
        divided: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if factors is not None:
            divided = loss_division.scaled(model, self.divided, factors)
        elif self._sums and models.overrides_loss(model):  # which may scale all that it is made of, and add more
            divided = loss_division.divided_by(model, part)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            # Without `collect_losses` a stateless scope drops losses that layers add, and activity regularizers.
            with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope, divided as called:
                predicted = model(x, **self._kwargs)
                loss = models.compute_loss(model, x, y, predicted, sample_weight, self._training)
                models.check_added(model, scope.losses)
                if self._sums and not called:
                    extras = [tf.reduce_sum(tf.cast(e, loss.dtype)) for e in model.losses]
                    extra = tf.add_n(extras) if extras else 0.0
                    loss = (loss - extra) / tf.cast(part, loss.dtype) + extra  # the weighted mean is then the sum
                objective = loss
                if loss.shape.rank:
                    # reduction=None: Keras shows the mean of such a loss, and its gradient is that of the sum.
                    objective = tf.reduce_sum(loss) / tf.cast(part, loss.dtype)
                    loss = tf.reduce_mean(loss)
                size = tf.shape(leaves[0])[0]
                self._loss_metric.update_state(loss, sample_weight=size)
                model.compute_metrics(x, y, predicted, sample_weight)
                if self._training:
                    objective = model.optimizer.scale_loss(objective)
        after = {id(v): scope.get_current_value(v) for v in [*self.states, *self.metrics]}
        deltas = [after[id(v)] - a for v, a in zip(self.metrics, self._initial_metrics, strict=True)]
        if leaves[0].shape[0] is None:
            # Keras weights an output's loss by the batch size if that is known while tracing, otherwise by one.
            deltas = [
                d * tf.cast(size, d.dtype) if id(v) in self._output_losses else d
                for v, d in zip(self.metrics, deltas, strict=True)
            ]
        gradients, updates = [], []
        if self._training:
            gradients = self._gradients(tape, objective, weights)
            updates = self._updates(states, after)
        return gradients, updates, deltas, tf.cast(loss, tf.float32)

    def _gradients(self, tape: tf.GradientTape, objective: tf.Tensor, weights: list[tf.Tensor]) -> list[tf.Tensor]:
        found = tape.gradient(objective, weights)
        self.with_gradient = [i for i, g in enumerate(found) if g is not None]
        if not self.with_gradient:
            raise ModelError("the loss depends on none of the trainable weights. Check compute_loss and the outputs.")
        return [tf.convert_to_tensor(g) for g in found if g is not None]

    def _updates(self, states: list[tf.Tensor], after: dict[int, tf.Tensor]) -> list[tf.Tensor]:
        self.updated, updates = [], []
        for i, (variable, before) in enumerate(zip(self.states, states, strict=True)):
            value = after[id(variable)]
            # A value that was not changed is the same tensor as before: `value` of a mapped variable is its tensor,
            # perhaps cast.
            if value is None or value is before:
                continue
            if not (value.dtype.is_floating or value.dtype.is_integer):
                raise ModelError(
                    f"layer state {variable.path} of dtype {variable.dtype} changes in training; raytf can agree on "
                    "numbers only. Make it a float or an integer."
                )
            self.updated.append(i)
            # An integer is sent as its difference, which a float on the wire holds exactly.
            updates.append(value if value.dtype.is_floating else value - before)
        return updates

    def layout(self) -> reduction.WireLayout:
        """The shapes and types of what a traced micro-batch returns; integers are sent as float32."""
        sent = [*(self.trainable[i] for i in self.with_gradient), *(self.states[i] for i in self.updated)]
        kinds = [tf.as_dtype(v.dtype) if tf.as_dtype(v.dtype).is_floating else tf.float32 for v in sent]
        return reduction.WireLayout([v.shape for v in sent], kinds)

    def apply(self, tensors: list[tf.Tensor]) -> None:
        """Update weights, optimizer and layers' states with reduced tensors."""
        gradients, updates = tensors[: len(self.with_gradient)], tensors[len(self.with_gradient) :]
        self.model.optimizer.apply(gradients, [self.trainable[i] for i in self.with_gradient])
        for i, value in zip(self.updated, updates, strict=True):
            variable = self.states[i]
            if tf.as_dtype(variable.dtype).is_floating:
                variable.assign(value)
            else:
                variable.assign_add(tf.cast(tf.round(value), variable.dtype))

    def add_metrics(self, row: tf.Tensor) -> None:
        """Add reduced rows to the model's metrics."""
        sizes = [int(np.prod(v.shape, dtype=np.int64)) for v in self.metrics]
        for variable, part in zip(self.metrics, tf.split(row, sizes), strict=True):
            variable.assign_add(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


@dataclass(frozen=True)
class ShardBatch:
    """The records of some shards of one step.

    Attributes:
        leaves: each [L, b, ...].
        seeds: [L, S, 2].
        counts: [L] records in each shard, or None if all are full.
        total: number of records in all shards of this step, if not all are full.
        factors: [L, n] factors of the losses that are divided by data.
    """

    leaves: list[tf.Tensor]
    seeds: tf.Tensor
    counts: tf.Tensor | None = None
    total: tf.Tensor | int = 0
    factors: tf.Tensor | None = None

    def part(self, own: range) -> ShardBatch:
        """The part with the shards of `own`, indices into this batch."""
        at = slice(own.start, own.stop)
        counts, factors = (None if each is None else each[at] for each in (self.counts, self.factors))
        return ShardBatch([leaf[at] for leaf in self.leaves], self.seeds[at], counts, self.total, factors)


@dataclass(frozen=True)
class ShardSum:
    """How the results of shards are summed.

    Attributes:
        encode: (tensors, weight) -> encoded tensors, and what they add to the row.
        like: specs of a shard's encoded tensors and row.
        shards: number of shards of all workers.
        alike: whether a shard's bits must not depend on the number of shards.
        early: all-reduces the tensors in buckets, each as soon as this worker has computed it; for a worker with one
            device.
    """

    encode: Callable[[list[tf.Tensor], tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]]
    like: tuple[list[tf.TensorSpec], tf.TensorSpec]
    shards: int
    alike: bool = True
    early: Buckets | None = None


def loop_shards(
    micro: MicroBatch, how: ShardSum, shards: ShardBatch, values: StepValues
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Encoded tensors summed over a device's shards of one step, and their rows [L, M].

    Shards are computed one after another, so that memory is that of one micro-batch however many shards a device has. A
    single shard is computed in a loop as well: TensorFlow optimizes a loop's body separately, so it is the same for
    every number of shards. If the last bits may differ, a single shard needs no loop, which saves a sum.

    Args:
        micro: the micro-batch.
        how: how the results are summed.
        shards: records of the device's shards.
        values: values of the model; all shards start from them.
    """
    like, early, counts, factors = how.like, how.early, shards.counts, shards.factors
    size = shards.seeds.shape[0]

    def one(i: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        batch, weight = [leaf[i] for leaf in shards.leaves], tf.constant(1.0 / how.shards)
        if counts is not None:
            batch = [leaf[: counts[i]] for leaf in batch]
            weight = tf.cast(counts[i], tf.float32) / tf.cast(shards.total, tf.float32)
        tensors, row = micro(batch, shards.seeds[i], weight, values, None if factors is None else factors[i])
        encoded, extra = how.encode(tensors, weight)
        return encoded, tf.ensure_shape(tf.concat([row, extra], 0), like[1].shape)

    def nothing() -> tuple[list[tf.Tensor], tf.Tensor]:
        return [wire.zeros(spec.shape, spec.dtype) for spec in like[0]], tf.zeros(like[1].shape, like[1].dtype)

    if size == 1 and counts is None and not how.alike and (early is None or early.rounds == 1):
        tensors, row = one(tf.constant(0))
        return tensors if early is None else early(None, tensors), row[None]

    rounds = size if early is None else early.rounds
    idle = rounds - size

    def body(k: tf.Tensor, summed: list[tf.Tensor], rows: tf.TensorArray) -> tuple[Any, Any, Any]:
        i = tf.maximum(k - idle, 0) if early else k
        conditions = [*([k >= idle] if early else []), *([] if counts is None else [counts[i] > 0])]
        more, row = tf.cond(tf.reduce_all(conditions), lambda: one(i), nothing) if conditions else one(i)
        summed = [a + b for a, b in zip(summed, more, strict=True)]
        if early is not None:
            summed = early(tf.equal(k, rounds - 1), summed)
        return k + 1, summed, rows.write(k, row)

    rows = tf.TensorArray(tf.float32, rounds, element_shape=like[1].shape)
    start = (tf.constant(0), nothing()[0], rows)
    _, summed, rows = tf.while_loop(lambda k, *_: k < rounds, body, start, parallel_iterations=1)
    return summed, tf.ensure_shape(rows.stack()[idle:], [size, *like[1].shape])


def spread_shards(
    devices: Devices, micro: MicroBatch, how: ShardSum, shards: ShardBatch, fixed: Sequence[StepValues]
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """As `loop_shards`, for all shards of this worker, which its devices compute at the same time.

    Args:
        devices: this process's devices.
        micro, how, shards: as for `loop_shards`, with all shards of this worker.
        fixed: for each device, its copies of the values that no step changes.
    """
    summed, rows = [], []
    for device, (own, known) in enumerate(zip(devices.spread(shards.seeds.shape[0]), fixed, strict=False)):
        with devices.on(device):
            part = shards.part(own)
            tensors, row = loop_shards(micro, how, part, micro.values(known))
            summed.append(tensors)
            rows.append(row)
    with devices.at_home():
        return devices.add(summed), tf.concat(rows, 0)


def full_counts(plan: StepPlan, shards: range) -> tuple[tf.Tensor | None, int]:
    """What `ShardBatch` has as counts and total for a full step of some shards."""
    if plan.is_even:
        return None, 0
    return tf.constant(plan.sizes[shards.start : shards.stop], tf.int32), plan.global_batch_size


def shard_divisors(
    micro: MicroBatch, leaves: list[tf.Tensor], seeds: tf.Tensor, counts: Any, values: StepValues
) -> Any:
    """[L, n] the divisors of each shard's losses that are divided by data; 0 for a shard without records."""
    count = len(micro.divided)

    def one(i: tf.Tensor) -> tf.Tensor:
        if counts is None:
            return micro.divisors([leaf[i] for leaf in leaves], seeds[i], values)
        batch = [leaf[i][: counts[i]] for leaf in leaves]
        return tf.cond(counts[i] > 0, lambda: micro.divisors(batch, seeds[i], values), lambda: tf.zeros([count]))

    told = tf.TensorSpec([count], tf.float32)
    return tf.map_fn(one, tf.range(seeds.shape[0]), fn_output_signature=told, parallel_iterations=1)


def shard_factors(own: tf.Tensor, totals: tf.Tensor, counts: Any, total: Any, plan: StepPlan) -> tf.Tensor:
    """[L, n] the factors by which the shards' losses are multiplied, for `loop_shards`.

    Args:
        own: [L, n] result of `shard_divisors`.
        totals: [n] divisors summed over all shards of the step.
        counts: [L] records in each shard, or None if all are full.
        total: number of records in all shards of the step.
        plan: has the number of shards.
    """
    weights = tf.constant(1.0 / plan.shards) if counts is None else counts / total
    return loss_division.factors(own, totals, weights)


def fixed_values(devices: Devices, micro: MicroBatch) -> list[StepValues]:
    """For each device, copies of the values that no step changes; made once per call."""
    copies = []
    for device in range(len(devices.names)):
        with devices.on(device):
            copies.append(micro.fixed())
    return copies
