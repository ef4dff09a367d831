"""A `test_step` of the model's own, run for each logical shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from raytf.checkpoint import variables
from raytf.data import tree
from raytf.errors import ModelError
from raytf.inference import own_run
from raytf.inference.own_run import OwnScope, beginning
from raytf.training.model import batch_metrics, losses
from raytf.training.model.notes import notes_of
from raytf.training.step.shard_work import ShardResult, ShardWork, add_to, added, elements, flat


class OwnTest(ShardWork):
    """One logical shard of an evaluation; see `raytf.training.step.microbatch.MicroBatch`.

    Args:
        model: built and compiled.
        template: a batch's structure, (x, y, sample_weight).
        leaves: specs of a full shard's leaves.
        batch: records in a full step.
    """

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
        # A loop must know what a shard returns before it is traced.
        with batch_metrics.noted_while_traced(model, leaves, batch):
            tf.function(self._compute, autograph=False).get_concrete_function(list(leaves), seeds)
        self._gathered = batch_metrics.Gathered(model)
        if self._gathered:
            probe = tf.function(lambda leaves, seeds: self(leaves, seeds, tf.constant(1.0)).row, autograph=False)
            probe.get_concrete_function(list(leaves), seeds)
        self.row_width = 1 + sum(elements(self.metrics)) + len(self.names)

    def __call__(self, leaves, seeds, weight: tf.Tensor, values: Any = None, factors: Any = None) -> ShardResult:
        """Compute a shard."""
        loss, deltas, logs, outputs = self._compute(leaves, seeds, weight)
        means = notes_of(self._model).metrics.means
        deltas = [d * weight if id(v) in means else d for v, d in zip(self.metrics, deltas, strict=True)]
        row = flat([loss * weight, *deltas, *(each * weight for each in logs)])
        return self._result([], [], row, weight, outputs)

    def values(self, known: Any = None) -> None:
        """Return nothing: the step reads variables where they are, since an evaluation changes none."""

    def update_metrics(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics of the whole batch with the outputs of all shards; to be traced."""
        self._gathered.update(outputs)

    def add_metrics(self, row: Any) -> None:
        """Add reduced rows to the model's metrics, but to those of the whole batch."""
        add_to(self.metrics, row[: sum(elements(self.metrics))], self._gathered.variables)

    def logs(self, row: Any, steps: int) -> dict[str, Any]:
        """Return what the step returned, on average over the steps.

        Args:
            row: summed over all shards and steps.
            steps: how many there were.
        """
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
    raise ModelError("test_step calls an optimizer. An evaluation must not change the weights: do it in train_step.")
