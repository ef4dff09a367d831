"""One phase of a `train_step` of the model's own, which ends with an update, for one logical shard."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from raytf.inference import own_run
from raytf.training import batch_metrics
from raytf.training.shard_work import ShardResult, ShardWork, added, elements, flat

if TYPE_CHECKING:
    from raytf.training.own_step import OwnStep


class OwnValues(NamedTuple):
    """What variables hold in a phase.

    Attributes:
        weights, states: of `Parts`, when the step began.
        later: for each update before this phase, what its weights hold since then.
    """

    weights: list[Any]
    states: list[Any]
    later: list[list[Any]]


class Phase(ShardWork):
    """One update of a model's own step, for one logical shard.

    Args:
        step: which it is a part of.
        place: of the phase in it.
        jit: compile with XLA.
    """

    def __init__(self, step: OwnStep, place: int, jit: bool):
        applies = step.found.applies
        optimizer = step.parts.optimizers[applies[place][0]] if applies else None
        super().__init__(optimizer, step.trainable, step.states, keeps_slices=True)
        self._step, self._place = step, place
        self.with_gradient = applies[place][1] if applies else []
        self._is_last = place + 1 >= len(applies)
        self.row_width = 1 + (sum(elements(step.metrics)) + len(step.found.names) if self._is_last else 0)
        self._run = tf.function(self._compute, jit_compile=True) if jit else self._compute

    def __call__(self, leaves, seeds, weight: tf.Tensor, values: OwnValues | None = None, factors=None) -> ShardResult:
        """Compute a shard; see `MicroBatch`."""
        gradients, updates, loss, deltas, logs, outputs = self._run(values or self.values(), leaves, seeds, weight)
        means = batch_metrics.kinds_of(self._step.model).means
        deltas = [d * weight if id(v) in means else d for v, d in zip(self._step.metrics, deltas, strict=False)]
        row = flat([loss * weight, *deltas, *(each * weight for each in logs)])
        return self._result(gradients, updates, row, weight, outputs)

    def values(self, known: Any = None) -> OwnValues:
        """What variables hold in this phase."""
        return self._step.values(self._place)

    def fixed(self) -> None:
        """No value is known not to change."""

    def apply(self, gradients: list[Any], updates: list[tf.Tensor]) -> None:
        """Make the update."""
        super().apply(gradients, updates)
        self._step.note_update(self._place)

    def _compute(self, values: OwnValues, leaves: Any, seeds: Any, weight: tf.Tensor) -> tuple[Any, ...]:
        step = self._step
        found, assigned, scope, logs, outputs = step.run(self._place, values, leaves, seeds, weight)
        gradients = self._kept(found)
        before = [*values.states, *values.weights]
        self.before_update = {i for i, v in enumerate(self.states) if id(v) in assigned}
        if not self._is_last:
            return gradients, self._updates(before, assigned), tf.constant(0.0), [], [], []
        deltas = added(scope, step.metrics, step.initial_metrics)
        late = {id(v) for v in step.found.late}
        changed = [v for v in self.states if id(v) in scope.changed and id(v) not in late]
        after = {id(v): scope.get_current_value(v) for v in changed}
        updates = self._updates(before, assigned | after)
        return gradients, updates, own_run.loss_of(logs), deltas, list(logs.values()), outputs
