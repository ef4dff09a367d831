"""Computes a micro-batch, which is one logical shard of one step.

Each micro-batch is a pure function of the weights, the layers' states at the start of the step, its records and its
seeds. It runs in a `keras.StatelessScope`: every shard of a step starts from the same state, on any worker, and the
values that layers and metrics would write are returned, so that they can be reduced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from raytf import _keras
from raytf._keras import interception
from raytf._tensorflow import tracing
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.errors import ModelError
from raytf.inference import user_model
from raytf.inference.own_run import OwnScope, beginning
from raytf.training.model import batch_metrics, losses, program_variables
from raytf.training.model import model as models
from raytf.training.model.notes import notes_of
from raytf.training.step.shard_work import ShardResult, ShardWork, add_to, added, elements, flat


class StepValues(NamedTuple):
    """Tensors for a model's trainable weights and layers' states; None for unknown values.

    If only rows of a weight are read, its variable takes the place of a tensor, which would be a copy of all rows.
    """

    weights: list[Any]
    states: list[Any]


class MicroBatch(ShardWork):
    """One logical shard of one step, as a pure function.

    Args:
        model: the model, built and compiled.
        template: a batch's structure, (x, y, sample_weight).
        training: whether to compute gradients and layers' updates.
        jit: whether to compile with XLA.
        keeps_slices: whether gradients of lookups stay slices; otherwise all gradients are dense.
    """

    def __init__(
        self,
        model: keras.Model,
        template: tuple[Any, Any, Any],
        training: bool,
        jit: bool = False,
        keeps_slices: bool = False,
    ):
        self.seeds = variables.seed_states(model)
        seeds = {id(v) for v in self.seeds}
        states = [v for v in model.non_trainable_variables if id(v) not in seeds]
        super().__init__(model.optimizer, model.trainable_variables, states, keeps_slices)
        self.model, self._template, self._training = model, template, training
        self._kwargs = {"training": training} if user_model.takes_training(model) else {}
        self._sums = models.sums_over_batch(model)
        self.metrics = list(model.metrics_variables)
        self._loss_metric = _keras.loss_tracker(model)
        self._initial_metrics = [keras.ops.convert_to_numpy(v) for v in self.metrics]
        # With several outputs, Keras tracks the loss of each.
        trackers = getattr(_keras.compiled_loss(model), "metrics", [])
        self._output_losses = {id(v) for tracker in trackers for v in tracker.variables}
        self._gathered = batch_metrics.Gathered(model)
        self._means = [id(v) in notes_of(model).metrics.means for v in self.metrics]
        #: Indices of compiled losses that are divided by data; a step has a factor for each, see `losses`.
        self.divided = notes_of(model).divided
        self.row_width = 1 + sum(elements(self.metrics))
        self._is_compiled = jit
        self._run = tf.function(self._compute, jit_compile=True) if jit else self._compute

    def __call__(
        self, leaves, seeds, weight: tf.Tensor, values: StepValues | None = None, factors: tf.Tensor | None = None
    ) -> ShardResult:
        """Compute the shard; see `ShardWork`."""
        weights, states = values or self.values()
        gradients, updates, deltas, loss, outputs = self._run(weights, states, leaves, seeds, weight, factors)
        return self._result(gradients, updates, flat([loss * weight, *deltas]), weight, outputs)

    def divisors(self, leaves, seeds, values: StepValues) -> tf.Tensor:
        """Return the divisors of a shard's losses in `divided`, [n]; TensorFlow prunes the rest of the graph."""
        x, y, sample_weight = tree.unflatten(self._template, leaves)
        scope = keras.StatelessScope(state_mapping=self._mapping(*values, seeds), collect_losses=True)
        with scope, losses.measured_divisors(self.model) as divisors:
            predicted = self.model(x, **self._kwargs)
            models.compute_loss(self.model, x, y, predicted, sample_weight, self._training)
        records = tf.cast(tf.shape(leaves[0])[0], tf.float32)  # for a loss whose divisor does not depend on data here
        known = [divisors[place] for place in self.divided]
        return tf.stack([records if divisor is None else divisor for divisor in known])

    def _mapping(self, weights, states, seeds) -> list[tuple[keras.Variable, tf.Tensor]]:
        return [
            *zip(self.trainable, weights, strict=True),
            *zip(self.states, states, strict=True),
            *beginning(self.seeds, seeds, self.metrics, self._initial_metrics),
        ]

    def values(self, known: StepValues | None = None) -> StepValues:
        """Return the current weights and layers' states; see `ShardWork`."""
        fixed = known or StepValues([None] * len(self.trainable), [None] * len(self.states))
        pairs = (zip(self.trainable, fixed.weights, strict=True), zip(self.states, fixed.states, strict=True))
        tables = () if self._is_compiled else self.slices
        by_rows = {id(self.trainable[self.with_gradient[place]]) for place in tables}

        def read(variable: keras.Variable) -> Any:
            return variable.value if id(variable) in by_rows else tf.identity(variable.value)

        return StepValues(*([read(v) if value is None else value for v, value in each] for each in pairs))

    def fixed(self) -> StepValues:
        """Return the values that no step changes, on the current device; None for the others."""
        changed = {id(self.trainable[i]) for i in self.with_gradient} | {id(self.states[i]) for i in self.updated}
        groups = self.trainable, self.states
        return StepValues(*([None if id(v) in changed else tf.identity(v.value) for v in group] for group in groups))

    def _compute(self, weights, states, leaves, seeds, part: tf.Tensor, factors: tf.Tensor | None):
        model = self.model
        x, y, sample_weight = tree.unflatten(self._template, leaves)
        mapping = self._mapping(weights, states, seeds)
        divided: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if factors is not None:
            divided = losses.scaled(model, self.divided, factors)
        elif self._sums and models.overrides_loss(model):  # compute_loss may scale its terms, and add others
            divided = losses.divided_by(model, part)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(weights)
            # Without `collect_losses` a stateless scope drops losses that layers add, and activity regularizers.
            scope = OwnScope(mapping)
            added_by = losses.added_divided(model, self._training, leaves[0].shape[0], part)
            with scope, divided as called, tracing.seeded(seeds[-1]), added_by, self._gathered.noted() as noted:
                predicted = model(x, **self._kwargs)
                loss = models.compute_loss(model, x, y, predicted, sample_weight, self._training)
                models.check_added(model, scope.losses)
                if self._sums and not called:
                    extras = [tf.reduce_sum(tf.cast(e, loss.dtype)) for e in model.losses]
                    extra = tf.add_n(extras) if extras else 0.0
                    loss = (loss - extra) / tf.cast(part, loss.dtype) + extra  # the weighted mean is then the sum
                objective = loss
                if loss.shape.rank:
                    # With reduction=None, Keras shows the mean of the loss, but uses the gradient of its sum.
                    objective = tf.reduce_sum(loss) / tf.cast(part, loss.dtype)
                    loss = tf.reduce_mean(loss)
                size = tf.shape(leaves[0])[0]
                self._loss_metric.update_state(loss, sample_weight=size)
                model.compute_metrics(x, y, predicted, sample_weight)
                if self._training:
                    objective = model.optimizer.scale_loss(objective)
        metrics = self._loss_metric, *interception.metrics_within(model)  # includes metrics that `model.metrics` omits
        known = [*(v for v, _ in mapping), *(v for metric in metrics for v in metric.variables)]
        program_variables.check_unchanged(scope.changed.values(), known)
        deltas = added(scope, self.metrics, self._initial_metrics)
        if leaves[0].shape[0] is None:
            # Keras weights an output's loss by the batch size if that is known while tracing, otherwise by one.
            deltas = [
                d * tf.cast(size, d.dtype) if id(v) in self._output_losses else d
                for v, d in zip(self.metrics, deltas, strict=True)
            ]
        deltas = [d * tf.cast(part, d.dtype) if is_mean else d for d, is_mean in zip(deltas, self._means, strict=True)]
        gradients, updates = [], []
        if self._training:
            gradients = self._gradients(tape, objective, weights)
            updates = self._updates(states, {id(v): scope.get_current_value(v) for v in self.states})
        return gradients, updates, deltas, tf.cast(loss, tf.float32), self._gathered.pack(noted)

    def _gradients(self, tape: tf.GradientTape, objective: tf.Tensor, weights: list[tf.Tensor]) -> list[Any]:
        every = tape.gradient(objective, weights)
        self.with_gradient = [i for i, g in enumerate(every) if g is not None]
        if weights and not self.with_gradient:
            raise ModelError("the loss depends on none of the trainable weights. Check compute_loss and the outputs.")
        return self._kept([every[i] for i in self.with_gradient])

    @property
    def phases(self) -> list[MicroBatch]:
        """Return the parts of the step, each of which ends with an update."""
        return [self]

    def begin(self) -> None:
        """Do nothing: a step with one phase needs no record of its beginning."""

    def finish(self, row: tf.Tensor) -> None:
        """Do nothing: no work remains after the update."""

    def update_metrics(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics of the whole batch with the outputs of all shards, inside a traced function."""
        self._gathered.update(outputs)

    def add_metrics(self, row: tf.Tensor) -> None:
        """Add reduced rows to the model's metrics, except the metrics of the whole batch."""
        add_to(self.metrics, row, self._gathered.variables)
