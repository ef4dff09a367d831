"""The train step: micro-batches of this worker's logical shards, one reduction, one update; several steps a call.

Each micro-batch is a pure function of the weights, the layers' state at the start of the step, its records and its
seeds. It runs in a `keras.StatelessScope`, so every shard of a step starts from the same state, whichever worker it
is on, and what layers and metrics would have written comes back as values that can be reduced.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import model as models
from raytf import reduce
from raytf.data import tree
from raytf.data.order import StepPlan
from raytf.data.pipeline import Call
from raytf.data.sources import Spec
from raytf.devices import Devices, OneDevice
from raytf.errors import ConfigError, ModelError
from raytf.optimizing import LearningRate


class Outcome(NamedTuple):
    """What a call tells: losses, learning rates and whether gradients were finite, [K] each, and its flags [F] added
    over workers; and the reduced gradients of its last step, where they are kept."""

    losses: np.ndarray
    learning_rates: np.ndarray
    finite: np.ndarray
    flags: np.ndarray
    gradients: list[tf.Tensor]


class Values(NamedTuple):
    """Tensors for a model's trainable weights and layers' states; None for those that are not known."""

    weights: list[Any]
    states: list[Any]


class MicroBatch:
    """One logical shard of one step, as a pure function.

    Args:
        model: built and compiled.
        template: a batch's structure, (x, y, sample_weight).
        training: whether gradients and layers' updates are wanted.
        jit: compile with XLA.
    """

    def __init__(self, model: keras.Model, template: tuple[Any, Any, Any], training: bool, jit: bool = False):
        self.model, self._template, self._training = model, template, training
        self._kwargs = {"training": training} if models.takes_training(model) else {}
        self._sums = models.sums_over_batch(model)
        self.trainable = list(model.trainable_variables)
        self.seeds = models.seed_states(model)
        seeds = {id(v) for v in self.seeds}
        self.states = [v for v in model.non_trainable_variables if id(v) not in seeds]
        self.metrics = list(model.metrics_variables)
        self._initial_metrics = [keras.ops.convert_to_numpy(v) for v in self.metrics]
        self._output_losses = {id(v) for m in models.output_loss_metrics(model) for v in m.variables}
        self._loss_metric = next(m for m in model.metrics if m.name == "loss")
        #: Indices of trainable variables with a gradient, and of layers' states that a step updates; known once traced.
        self.with_gradient: list[int] = []
        self.updated: list[int] = []
        self.row_width = 1 + sum(int(np.prod(v.shape, dtype=np.int64)) for v in self.metrics)
        self._run = tf.function(self._compute, jit_compile=True) if jit else self._compute

    def __call__(self, leaves, seeds, weight: tf.Tensor, values: Values | None = None) -> tuple[list[tf.Tensor], Any]:
        """Gradients and layers' updates, and the row [1 + M]: the loss times `weight`, and what the metrics add.

        Args:
            leaves: of the batch, each [n, ...].
            seeds: [S, 2].
            weight: n / n of all shards, the part this micro-batch has in the step.
            values: of weights and layers' states; by default as they are.
        """
        weights, states = values or self.values()
        gradients, updates, deltas, loss = self._run(weights, states, leaves, seeds, weight)
        row = [tf.reshape(loss * weight, [1]), *(tf.reshape(tf.cast(d, tf.float32), [-1]) for d in deltas)]
        return [*gradients, *updates], tf.concat(row, 0)

    def values(self, known: Values | None = None) -> Values:
        """Weights and layers' states as they are, where the present device has them; those not to be read are known.

        Args:
            known: of `fixed`.
        """
        fixed = known or Values([None] * len(self.trainable), [None] * len(self.states))
        pairs = (zip(self.trainable, fixed.weights, strict=True), zip(self.states, fixed.states, strict=True))
        return Values(*([tf.identity(v.value) if value is None else value for v, value in each] for each in pairs))

    def fixed(self) -> Values:
        """Those that no step changes, where the present device has them, and None for the others."""
        changed = {id(self.trainable[i]) for i in self.with_gradient} | {id(self.states[i]) for i in self.updated}
        groups = self.trainable, self.states
        return Values(*([None if id(v) in changed else tf.identity(v.value) for v in group] for group in groups))

    def _compute(self, weights, states, leaves, seeds, part: tf.Tensor):
        model = self.model
        x, y, sample_weight = tree.unflatten(self._template, leaves)
        mapping = [
            *zip(self.trainable, weights, strict=True),
            *zip(self.states, states, strict=True),
            *((v, tf.cast(seeds[i], v.dtype)) for i, v in enumerate(self.seeds)),
            *((v, tf.constant(a)) for v, a in zip(self.metrics, self._initial_metrics, strict=True)),
        ]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            with keras.StatelessScope(state_mapping=mapping) as scope:
                predicted = model(x, **self._kwargs)
                loss = model.compute_loss(x, y, predicted, sample_weight, training=self._training)
                if self._sums:
                    extra = tf.add_n([tf.cast(e, loss.dtype) for e in model.losses]) if model.losses else 0.0
                    loss = (loss - extra) / tf.cast(part, loss.dtype) + extra  # the weighted mean is then their sum
                size = tf.shape(leaves[0])[0]
                self._loss_metric.update_state(loss, sample_weight=size)
                model.compute_metrics(x, y, predicted, sample_weight)
                objective = model.optimizer.scale_loss(loss) if self._training else loss
        after = {id(v): scope.get_current_value(v) for v in [*self.states, *self.metrics]}
        deltas = [after[id(v)] - a for v, a in zip(self.metrics, self._initial_metrics, strict=True)]
        if leaves[0].shape[0] is None:
            # Keras weighs an output's loss by the batch size where that is known while tracing, else by one.
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
            # Untouched values come back as they went in: `value` of a mapped variable is its tensor, perhaps cast.
            if value is None or value is before:
                continue
            if not (value.dtype.is_floating or value.dtype.is_integer):
                raise ModelError(
                    f"layer state {variable.path} of dtype {variable.dtype} changes in training; raytf can agree on "
                    "numbers only. Make it a float or an integer."
                )
            self.updated.append(i)
            # Integers travel as what a shard added, which the wire's float holds exactly.
            updates.append(value if value.dtype.is_floating else value - before)
        return updates

    def layout(self) -> reduce.Layout:
        """What a traced micro-batch returns; integers travel as numbers that float32 holds."""
        sent = [*(self.trainable[i] for i in self.with_gradient), *(self.states[i] for i in self.updated)]
        kinds = [tf.as_dtype(v.dtype) if tf.as_dtype(v.dtype).is_floating else tf.float32 for v in sent]
        return reduce.Layout([v.shape for v in sent], kinds)

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


def loop_shards(
    micro: MicroBatch,
    encode: Callable[[list[tf.Tensor], tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]],
    like: tuple[list[tf.TensorSpec], tf.TensorSpec],
    leaves: list[tf.Tensor],
    seeds: tf.Tensor,
    counts: tf.Tensor | None,
    total: tf.Tensor | int,
    plan: StepPlan,
    values: Values,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Encoded tensors summed over a device's shards of one step, and their rows [L, M].

    One shard after another, so that memory is that of one micro-batch however many shards a device has. One shard
    alone is a loop as well: TensorFlow optimizes a loop's body by itself, so it is the same for every number of them.

    Args:
        encode: (tensors, weight) -> encoded tensors, and what they add to the row.
        like: specs of a shard's encoded tensors and row.
        leaves: each [L, b, ...].
        seeds: [L, S, 2].
        counts: [L] records in each shard, or None where all are full.
        total: records of all shards of this step, where not all are full.
        values: of the model; all shards start from them.
    """
    size = seeds.shape[0]

    def one(i: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        batch, weight = [leaf[i] for leaf in leaves], tf.constant(1.0 / plan.shards)
        if counts is not None:
            batch = [leaf[: counts[i]] for leaf in batch]
            weight = tf.cast(counts[i], tf.float32) / tf.cast(total, tf.float32)
        tensors, row = micro(batch, seeds[i], weight, values)
        encoded, extra = encode(tensors, weight)
        return encoded, tf.ensure_shape(tf.concat([row, extra], 0), like[1].shape)

    def nothing() -> tuple[list[tf.Tensor], tf.Tensor]:
        return [tf.zeros(spec.shape, spec.dtype) for spec in like[0]], tf.zeros(like[1].shape, like[1].dtype)

    def body(i: tf.Tensor, summed: list[tf.Tensor], rows: tf.TensorArray) -> tuple[Any, Any, Any]:
        more, row = one(i) if counts is None else tf.cond(counts[i] > 0, lambda: one(i), nothing)
        return i + 1, [a + b for a, b in zip(summed, more, strict=True)], rows.write(i, row)

    rows = tf.TensorArray(tf.float32, size, element_shape=like[1].shape)
    start = (tf.constant(0), nothing()[0], rows)
    _, summed, rows = tf.while_loop(lambda i, *_: i < size, body, start, parallel_iterations=1)
    return summed, tf.ensure_shape(rows.stack(), [size, *like[1].shape])


def spread_shards(
    devices: Devices,
    micro: MicroBatch,
    encode: Callable[[list[tf.Tensor], tf.Tensor], tuple[list[tf.Tensor], tf.Tensor]],
    like: tuple[list[tf.TensorSpec], tf.TensorSpec],
    leaves: list[tf.Tensor],
    seeds: tf.Tensor,
    counts: tf.Tensor | None,
    total: tf.Tensor | int,
    plan: StepPlan,
    fixed: Sequence[Values],
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """As `loop_shards`, of all of this worker's shards, which its devices compute at the same time.

    Args:
        fixed: for each device, its copies of what no step changes.
    """
    summed, rows = [], []
    for device, (own, known) in enumerate(zip(devices.spread(seeds.shape[0]), fixed, strict=False)):
        with devices.on(device):
            part = slice(own.start, own.stop)
            mine = None if counts is None else counts[part]
            batch = [leaf[part] for leaf in leaves]
            tensors, row = loop_shards(micro, encode, like, batch, seeds[part], mine, total, plan, micro.values(known))
            summed.append(tensors)
            rows.append(row)
    with devices.at_home():
        return devices.add(summed), tf.concat(rows, 0)


def fixed_values(devices: Devices, micro: MicroBatch) -> list[Values]:
    """For each device, copies of what no step changes; made once a call."""
    copies = []
    for device in range(len(devices.names)):
        with devices.on(device):
            copies.append(micro.fixed())
    return copies


class TrainStep:
    """Runs calls of the pipeline on the model.

    Args:
        model: built and compiled.
        plan: sizes.
        shards: this worker's logical shards, at least one.
        all_reduce: sums a vector over workers.
        template, specs: structure and leaves of a batch.
        flags: number of flags that travel with each step.
        jit: compile gradients with XLA.
        exact: add gradients in fixed point, so that the sum is the same for every number of workers.
        compress: send gradients as 16 bits.
        devices: of this process.
        rate: the optimizer's learning rate; by default as it is.
        keeps_gradients: tell those of a call's last step.

    Attributes:
        reduction: how gradients are added; its state must be saved.
        probe_function: the traced micro-batch, a concrete function whose graph tells all operations.
    """

    def __init__(
        self,
        model: keras.Model,
        plan: StepPlan,
        shards: range,
        all_reduce: Callable[[tf.Tensor], tf.Tensor],
        template: tuple[Any, Any, Any],
        specs: list[Spec],
        flags: int,
        jit: bool,
        exact: bool,
        compress: bool = False,
        devices: Devices | None = None,
        rate: LearningRate | None = None,
        keeps_gradients: bool = False,
    ):
        self._model, self._plan, self._shards, self._all_reduce = model, plan, shards, all_reduce
        self._devices = devices or OneDevice()
        self._rate, self._keeps_gradients = rate or LearningRate(model.optimizer, None), keeps_gradients
        self.micro = MicroBatch(model, template, training=True, jit=jit)
        self._specs, self._is_probe_ready = specs, False
        self.reduction = self._make_reduction(exact, compress)
        head = [None, len(shards), plan.micro_batch_size]
        signature = [
            [tf.TensorSpec([*head, *s.shape], s.dtype) for s in specs],
            tf.TensorSpec([None, len(shards), len(self.micro.seeds), 2], tf.int32),
            tf.TensorSpec([flags], tf.float32),
        ]
        self._full = tf.function(self._full_steps, input_signature=signature, autograph=False)
        partial = [*signature, tf.TensorSpec([len(shards)], tf.int32), tf.TensorSpec([], tf.int32)]
        self._partial = tf.function(self._partial_step, input_signature=partial, autograph=False)

    def trace(self) -> None:
        """Make the graph of full steps now, while the state is still on its way, and not in the first call."""
        self._full.get_concrete_function()

    def __call__(self, call: Call, flags: np.ndarray) -> Outcome:
        """Run the steps of a call. All workers must make the same calls.

        Args:
            call: this worker's input.
            flags: [F] float, added over all workers.
        """
        if call.full:
            out = self._full(call.leaves, call.seeds, flags)
        else:
            out = self._partial(call.leaves, call.seeds, flags, call.counts, np.int32(call.records))
        losses, rates, finite, flags_sum, gradients = out
        return Outcome(losses.numpy(), rates.numpy(), finite.numpy(), flags_sum.numpy(), gradients)

    def named_gradients(self, outcome: Outcome) -> dict[str, tf.Tensor]:
        """The gradients that a call has told, by the path of their weight."""
        paths = [self.micro.trainable[i].path for i in self.micro.with_gradient]
        return dict(zip(paths, outcome.gradients, strict=True)) if self._keeps_gradients else {}

    def probe(self, leaves: list[np.ndarray], seeds: np.ndarray) -> bytes:
        """The bits that this machine computes for one full micro-batch: gradients, layers' updates and its row.

        Nothing changes by it. From equal weights, two machines that compute alike give the same answer.

        Args:
            leaves: of the batch, each [b, ...].
            seeds: [S, 2] int32.
        """
        tensors, row = self.probe_function([tf.constant(leaf) for leaf in leaves], tf.constant(seeds, tf.int32))
        return b"".join(t.numpy().tobytes() for t in [*tensors, row])

    def shard_seconds(self) -> float:
        """How long this machine takes for one full micro-batch: the faster of two, of zeros."""
        leaves = [np.zeros([self._plan.micro_batch_size, *s.shape], s.dtype) for s in self._specs]
        seeds = np.zeros([len(self.micro.seeds), 2], np.int32)
        taken = []
        for _ in range(3):  # the first one prepares the graph
            began = time.perf_counter()
            self.probe(leaves, seeds)
            taken.append(time.perf_counter() - began)
        return min(taken[1:])

    def sample_shard(self, seconds: float) -> tuple[float, float]:
        """How long this machine takes for one full micro-batch now, on average, and how long that took to find out.

        Args:
            seconds: to go on for, at least, once it has done one.
        """
        leaves = [np.zeros([self._plan.micro_batch_size, *s.shape], s.dtype) for s in self._specs]
        seeds = np.zeros([len(self.micro.seeds), 2], np.int32)
        if not self._is_probe_ready:
            self.probe(leaves, seeds)  # the first one prepares the graph
            self._is_probe_ready = True
        began, runs = time.perf_counter(), 0
        while not runs or time.perf_counter() - began < seconds:
            self.probe(leaves, seeds)
            runs += 1
        taken = time.perf_counter() - began
        return taken / runs, taken

    def _make_reduction(self, exact: bool, compress: bool) -> reduce.Reduction:
        # Which weights have gradients and which states change is known only from a trace, and loops need it before.
        b = self._plan.micro_batch_size
        leaves = [tf.TensorSpec([b, *s.shape], s.dtype) for s in self._specs]
        seeds = tf.TensorSpec([len(self.micro.seeds), 2], tf.int32)
        probe = tf.function(lambda x, s: self.micro(x, s, tf.constant(1.0)), autograph=False)
        self.probe_function = models.run_user_code("the model", lambda: probe.get_concrete_function(leaves, seeds))
        layout = self.micro.layout()
        if tf.float64 in layout.dtypes:
            if compress:
                raise ConfigError(
                    "--compress-gradients: the model has float64 weights or states, and 16 bits would be less than "
                    "they ask for. Use float32 (keras.config.set_floatx), or leave it out."
                )
            return reduce.Float(layout, tf.float64)  # 32 bits of fixed point would be less than such a model asked for
        compressed = len(self.micro.with_gradient) if compress else 0
        return reduce.Exact(layout, self._plan.shards, compressed) if exact else reduce.Float(layout)

    def _full_steps(self, leaves, seeds, flags):
        steps = tf.shape(seeds)[0]
        rates = tf.TensorArray(tf.float32, steps, element_shape=[])
        losses = tf.TensorArray(tf.float32, steps, element_shape=[])
        finite = tf.TensorArray(tf.bool, steps, element_shape=[])
        fixed = fixed_values(self._devices, self.micro)

        def body(k, losses, rates, finite, *_):
            rate, batch = self._rate.value(), [leaf[k] for leaf in leaves]
            loss, ok, flags_sum, kept = self._step(rate, batch, seeds[k], flags, None, 0, fixed)
            return k + 1, losses.write(k, loss), rates.write(k, rate), finite.write(k, ok), flags_sum, kept

        start = (tf.constant(0), losses, rates, finite, tf.zeros_like(flags), self._nothing_kept())
        _, *arrays, flags_sum, kept = tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)
        return *(array.stack() for array in arrays), flags_sum, kept

    def _partial_step(self, leaves, seeds, flags, counts, total):
        rate, batch = self._rate.value(), [leaf[0] for leaf in leaves]
        fixed = fixed_values(self._devices, self.micro)
        loss, ok, flags_sum, kept = self._step(rate, batch, seeds[0], flags, counts, total, fixed)
        return loss[None], rate[None], ok[None], flags_sum, kept

    def _nothing_kept(self) -> list[tf.Tensor]:
        layout, count = self.reduction.layout, len(self.micro.with_gradient) if self._keeps_gradients else 0
        return [tf.zeros(s, d) for s, d in zip(layout.shapes[:count], layout.dtypes[:count], strict=True)]

    def _kept(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if not self._keeps_gradients:
            return []
        gradients = tensors[: len(self.micro.with_gradient)]
        if isinstance(self._model.optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(self._model.optimizer.dynamic_scale)
            return [g / tf.cast(scale, g.dtype) for g in gradients]
        return gradients

    def _step(
        self, rate, leaves, seeds, flags, counts, total, fixed
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        reduction, micro = self.reduction, self.micro
        like = (
            [tf.TensorSpec(shape, reduction.dtype) for shape in reduction.layout.shapes],
            tf.TensorSpec([micro.row_width + reduction.extra], tf.float32),
        )

        def compute(scales: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
                return reduction.encode(tensors, weight, scales)

            return spread_shards(self._devices, micro, encode, like, leaves, seeds, counts, total, self._plan, fixed)

        with self._devices.at_home():
            reduced = reduction.reduce(self._all_reduce, compute, flags, self._shards, self._plan.shards)
            kept = self._kept(reduced.tensors)  # before the update changes the loss scale
            with self._rate.applied(rate):
                micro.apply(reduced.tensors)
            micro.add_metrics(reduced.row[1:])
        # A loss scale that turns out too large overflows on purpose; its optimizer skips the step.
        expected = isinstance(self._model.optimizer, keras.optimizers.LossScaleOptimizer)
        return reduced.row[0], tf.constant(True) if expected else reduced.finite, reduced.flags, kept


class EvalStep:
    """Loss and metrics over a whole source, without an update.

    Metrics are added shard by shard and then over the shards in one order, so they do not depend on the number of
    workers.
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
        self._plan, self._shards, self._devices = plan, shards, devices or OneDevice()
        self.micro = MicroBatch(model, template, training=False)
        signature = [
            [tf.TensorSpec([None, len(shards), plan.micro_batch_size, *s.shape], s.dtype) for s in specs],
            tf.TensorSpec([None, len(shards), len(self.micro.seeds), 2], tf.int32),
        ]
        self._full = tf.function(self._full_steps, input_signature=signature, autograph=False)
        partial = [*signature, tf.TensorSpec([len(shards)], tf.int32), tf.TensorSpec([], tf.int32)]
        self._partial = tf.function(self._partial_step, input_signature=partial, autograph=False)

    def __call__(self, call: Call) -> np.ndarray:
        """[L, 1 + M] what the call's records add to loss and metrics, for each shard."""
        if call.full:
            return self._full(call.leaves, call.seeds).numpy()
        return self._partial(call.leaves, call.seeds, call.counts, np.int32(call.records)).numpy()

    def _full_steps(self, leaves, seeds):
        fixed = fixed_values(self._devices, self.micro)  # of an evaluation that is all of the model

        def body(k, rows):
            return k + 1, rows + self._rows([leaf[k] for leaf in leaves], seeds[k], None, 0, fixed)

        start = (tf.constant(0), tf.zeros([len(self._shards), self.micro.row_width]))
        steps = tf.shape(seeds)[0]
        return tf.while_loop(lambda k, *_: k < steps, body, start, parallel_iterations=1)[1]

    def _partial_step(self, leaves, seeds, counts, total):
        fixed = fixed_values(self._devices, self.micro)
        return self._rows([leaf[0] for leaf in leaves], seeds[0], counts, total, fixed)

    def _rows(self, leaves, seeds, counts, total, fixed) -> tf.Tensor:
        def encode(tensors: list[tf.Tensor], weight: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
            return [], tf.zeros([0])

        like: tuple[list[tf.TensorSpec], tf.TensorSpec] = [], tf.TensorSpec([self.micro.row_width], tf.float32)
        return spread_shards(self._devices, self.micro, encode, like, leaves, seeds, counts, total, self._plan, fixed)[
            1
        ]
