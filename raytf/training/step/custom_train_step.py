"""Runs a model's custom `train_step` for each logical shard, and postpones its updates.

Each call of an optimizer's `apply` ends a phase. In phase p every shard runs the step up to its p-th `apply`. Earlier
updates have been made by then, and the values before them are still known, so each line of the step sees the values
that it would see on one machine. The gradients are reduced over all shards and applied once. TensorFlow prunes the
operations that a phase's gradients do not need, so a GAN costs as much as in Keras.

In the last phase the step runs to its end. Its changes to metrics and to statistics of BatchNorm are summed over shards
as usual. Values that are computed from the weights after the last update, such as an average of the weights or a target
network, are computed once, after the update. They must not depend on the batch, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from raytf._keras import interception
from raytf._tensorflow import WRITES, ops_of, tracing
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.errors import ModelError, WholeBatchError
from raytf.inference import own_run
from raytf.inference.own_run import Held, OwnScope, beginning
from raytf.training.model import batch_metrics, losses
from raytf.training.model.notes import notes_of
from raytf.training.step.shard_work import ShardResult, ShardWork, add_to, added, elements, flat

#: Kinds of operations that advance a `tf.random.Generator`.
_ADVANCES = re.compile("^(Rng.*|Stateful.*RandomUniform.*)$")
_OF_BOTH = (
    "train_step computes {} from both the batch and the weights after their last update. raytf computes "
    "such values once for all shards, without a batch. Use the batch before optimizer.apply."
)


@dataclass
class Findings:
    """The results of tracing a step.

    Attributes:
        applies: the optimizer and the weights of each update, by their places in `Parts`.
        late: variables that are computed from the weights after the last update.
        names: names of the numbers that the step returns.
        late_names: names of the returned numbers that do not depend on the batch, such as results of metrics.
    """

    applies: list[tuple[int, list[int]]] = field(default_factory=list)
    late: list[keras.Variable] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    late_names: set[str] = field(default_factory=set)


class OwnStep:
    """A model's custom step in phases; replaces `raytf.training.step.microbatch.MicroBatch` in training.

    Args:
        model: the model, built and compiled.
        template: a batch's structure, (x, y, sample_weight).
        leaves: specs of a full shard's leaves.
        batch: records in a full step.
        jit: whether to compile with XLA.
        shards: logical shards of a step. If there is one, the step may assign a weight before its optimizer updates it.

    Raises:
        WholeBatchError: the step works on whole batches only.
    """

    def __init__(
        self,
        model: keras.Model,
        template: tuple[Any, Any, Any],
        leaves: Sequence[tf.TensorSpec],
        batch: int,
        jit: bool = False,
        shards: int = 1,
    ):
        self.model, self._template, self._batch, self._shards = model, template, batch, shards
        self.parts = own_run.parts_of(model, variables.seed_states(model))
        self.seeds, self.metrics, self.trainable = self.parts.seeds, self.parts.metrics, self.parts.trainable
        #: All variables that may change apart from an optimizer's update.
        self.states = [*self.parts.states, *self.parts.trainable]
        self.initial_metrics = [keras.ops.convert_to_numpy(v) for v in self.metrics]
        self._leaves = list(leaves)
        self.findings = Findings()
        #: For the step that is being traced: values of variables at its start and after each update.
        self._start: tuple[list[Any], list[Any]] | None = None
        self._later: list[list[Any]] = []
        #: For the name of each result, whether it depends on the weights after their last update.
        self._of_weights: dict[str, bool] = {}
        with batch_metrics.noted_while_traced(model, self._leaves, batch):
            self._survey_updates()
        self.gathered = batch_metrics.Gathered(model)
        self._survey_end()
        self.phases = [Phase(self, p, jit) for p in range(max(1, len(self.findings.applies)))]

    @property
    def has_other_optimizers(self) -> bool:
        """Return whether the step uses other optimizers than the compiled one."""
        return any(place for place, _ in self.findings.applies)

    def begin(self) -> None:
        """Record the values of variables at the beginning of a step; to be traced."""
        self._start, self._later = (self._now(self.trainable), self._now(self.parts.states)), []

    def note_update(self, place: int) -> None:
        """Record the weights of a phase after its update; to be traced."""
        if self.findings.applies:
            self._later.append(self._now(self._weights_of(place)))

    def values(self, place: int) -> OwnValues:
        """Return the values of variables in a phase."""
        if not place or self._start is None:  # a single shard is computed outside a step
            start = self._now(self.trainable), self._now(self.parts.states)
            return OwnValues(*start, [self._now(self._weights_of(q)) for q in range(place)])
        return OwnValues(*self._start, self._later[:place])

    def fixed(self) -> None:
        """Return None: any value may change."""

    def run(
        self, place: int, values: OwnValues, leaves: Sequence[Any], seeds: Any, part: tf.Tensor
    ) -> tuple[Any, dict[int, Any], OwnScope, Any, list[tf.Tensor]]:
        """Run the step up to the end of a phase.

        Returns:
            The gradients at that end; the values of weights that the step assigned before it, by the weights' `id`; the
            scope with all changes; the numbers that the step returned, or None before the last phase; and, in the last
            phase, the input of the metrics of the whole batch.
        """
        gradients: list[Any] = []
        assigned: dict[int, Any] = {}
        seen = 0

        def on_apply(scope: OwnScope, optimizer: Any, computed: Sequence[Any], weights: Sequence[Any]) -> None:
            nonlocal seen
            at, seen = seen, seen + 1
            if [self._update(optimizer, computed, weights)] != self.findings.applies[at : at + 1]:
                raise ModelError(
                    "train_step makes different updates when it is traced again. It must be the same each time."
                )
            if at < place:
                for variable, value in zip(self._weights_of(at), values.later[at], strict=True):
                    scope.hold(variable, value)
                return
            gradients.extend(gradient for gradient in computed if gradient is not None)
            for variable in self._weights_of(at):
                if id(variable) in scope.changed:
                    assigned[id(variable)] = scope.get_current_value(variable)
                    scope.hold(variable, assigned[id(variable)])
            if at + 1 < len(self.findings.applies):
                raise Held

        scope = OwnScope(self._mapping(values.weights, values.states, seeds, self.initial_metrics))
        with self.gathered.noted() as calls, losses.added_divided(self.model, None, leaves[0].shape[0], part):
            try:
                data = self._data(leaves)
                logs = own_run.run(self.model.train_step, data, seeds[-1], scope, self.trainable, on_apply)
            except Held:
                return gradients, assigned, scope, None, []
        return gradients, assigned, scope, logs, self.gathered.pack(calls)

    def finish(self, row: tf.Tensor) -> None:
        """Compute the values that depend on the updated weights, and keep the results of the step; to be traced."""
        returned = row[1 + sum(elements(self.metrics)) :]
        numbers = {name: returned[i] for i, name in enumerate(self.findings.names)}
        if self.findings.late or self.findings.late_names:
            scope, logs = self._afterwards(self._any_batch(), tf.zeros([len(self.seeds), 2], tf.int32), self._later)
            for variable in self.findings.late:
                variable.assign(scope.get_current_value(variable))
            numbers |= {name: logs[name] for name in self.findings.late_names}
        if numbers:
            own_run.latest(self.model).assign(tf.stack(list(numbers.values())))

    def update_metrics(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics of the whole batch with the outputs of all shards, inside a traced function."""
        self.gathered.update(outputs)

    def add_metrics(self, row: tf.Tensor) -> None:
        """Add reduced rows to the model's metrics, except the metrics of the whole batch."""
        add_to(self.metrics, row[: sum(elements(self.metrics))], self.gathered.variables)

    def _any_batch(self) -> list[tf.Tensor]:
        """Return a batch whose values are not used, with the unknown lengths of the data."""
        return [
            tf.compat.v1.placeholder_with_default(
                tf.zeros([8 if n is None else n for n in spec.shape], spec.dtype), spec.shape
            )
            for spec in self._leaves
        ]

    # -- inspection of the step ----------------------------------------------------------------------------------------

    def _survey_updates(self) -> None:
        def whole(leaves: Any, seeds: Any) -> tf.Tensor:
            marks: list[Any] = []

            def on_apply(scope: OwnScope, optimizer: Any, computed: Sequence[Any], weights: Sequence[Any]) -> None:
                update = self._update(optimizer, computed, weights)
                self._check_weights(scope, [self.trainable[i] for i in update[1]])
                self.findings.applies.append(update)
                marks.clear()  # only the last update counts
                for variable in self._weights_of(-1):
                    marks.append(tf.identity(scope.get_current_value(variable)))
                    scope.hold(variable, marks[-1])

            start = self._now(self.trainable), self._now(self.parts.states)
            scope = OwnScope(self._mapping(*start, seeds, self.initial_metrics))
            logs = own_run.run(self.model.train_step, self._data(leaves), seeds[-1], scope, self.trainable, on_apply)
            known = {id(v) for v in [*self.states, *self.metrics, *self.seeds]}
            for variable in scope.changed.values():
                if id(variable) not in known:
                    raise ModelError(
                        f"train_step changes the variable {variable.path}, which does not belong to the model. Make "
                        "it, or its layer or metric, an attribute of the model, so that it is saved with the model."
                    )
            changed = [v for v in self.states if id(v) in scope.changed]
            is_late = tracing.depends([scope.get_current_value(v) for v in changed], marks)
            self.findings.late = [v for v, late in zip(changed, is_late, strict=True) if late]
            self.findings.names = list(logs)
            self._of_weights.update(zip(logs, tracing.depends(list(logs.values()), marks), strict=True))
            if any(tracing.depends([scope.get_current_value(v) for v in self.metrics], marks)):
                raise ModelError(
                    "train_step updates a metric with a prediction made after the last update of weights. "
                    "Predict before optimizer.apply, as Keras's own train_step does."
                )
            return own_run.loss_of(logs)

        function = tf.function(whole, autograph=False).get_concrete_function(self._leaves, self._seeds_spec())
        for op in ops_of(function):
            if WRITES.match(op.kind) or _ADVANCES.match(op.kind):
                raise ModelError(
                    f"train_step writes a tf.Variable or a tf.random.Generator ({op.name}), which Keras does not "
                    "save. Make it a keras.Variable, or self.add_weight(..., trainable=False), and an attribute of the "
                    "model; draw with keras.random."
                )

    def _survey_end(self) -> None:
        def whole(leaves: Any, seeds: Any) -> tf.Tensor:
            later = [self._now(self._weights_of(q)) for q in range(len(self.findings.applies))]
            scope, logs = self._afterwards(leaves, seeds, later)
            # Random numbers differ between shards like records, so seeds count as part of the batch.
            sources = [leaf for leaf in [*tf.nest.flatten(leaves), seeds] if isinstance(leaf, tf.Tensor)]
            values = [scope.get_current_value(v) for v in self.findings.late]
            for variable, is_of_batch in zip(self.findings.late, tracing.depends(values, sources), strict=True):
                if is_of_batch:
                    raise ModelError(_OF_BOTH.format(variable.path))
            for name, is_of_batch in zip(logs, tracing.depends(list(logs.values()), sources), strict=True):
                if not is_of_batch:
                    self.findings.late_names.add(name)
                elif self._of_weights.get(name):
                    raise ModelError(_OF_BOTH.format(f"the result {name!r}"))
            return own_run.loss_of(logs)

        tf.function(whole, autograph=False).get_concrete_function(self._leaves, self._seeds_spec())

    def _afterwards(self, leaves: Sequence[Any], seeds: Any, later: Sequence[list[Any]]) -> tuple[OwnScope, Any]:
        """Run the step after all updates, with the metrics and states of all shards together."""
        late = {id(v) for v in self.findings.late}
        pinned = [*(v for v in self.states if id(v) not in late), *self.metrics, *self.seeds]
        seen = 0

        def on_apply(scope: OwnScope, optimizer: Any, computed: Sequence[Any], weights: Sequence[Any]) -> None:
            nonlocal seen
            for variable, value in zip(self._weights_of(seen), later[seen], strict=True):
                scope.hold(variable, value)
            seen += 1

        weights = self._start[0] if self._start is not None else self._now(self.trainable)
        # An average of a value that shards have changed must use the sum of their changes.
        states, metrics = self._now(self.parts.states), self._now(self.metrics)
        scope = OwnScope(self._mapping(weights, states, seeds, metrics), pinned)
        logs = own_run.run(self.model.train_step, self._data(leaves), seeds[-1], scope, self.trainable, on_apply)
        return scope, logs

    def _check_weights(self, scope: OwnScope, weights: Sequence[keras.Variable]) -> None:
        """Refuse an update without gradients and, with several shards, of a weight that the step assigned before."""
        if not weights:
            raise ModelError(
                "train_step passes an optimizer gradients that are all None, so the loss depends on none of these "
                "weights. Compute the loss inside `with tf.GradientTape() as tape:`, from outputs of the model."
            )
        for variable in weights:
            if id(variable) in scope.changed and self._shards > 1:
                raise WholeBatchError(
                    f"train_step assigns {variable.path} before its optimizer updates it, as SAM and "
                    "SpectralNormalization do. Each logical shard would assign its own value. Use --logical-shards 1 "
                    "--workers 1 to train as in Keras, or keep such values in a separate weight."
                )

    def _update(self, optimizer: Any, computed: Sequence[Any], weights: Sequence[Any]) -> tuple[int, list[int]]:
        """Return an update in the form of `Findings.applies`."""
        chosen = [v for v, gradient in zip(weights, computed, strict=True) if gradient is not None]
        return self._optimizer(optimizer), [self._weight(v) for v in chosen]

    def _optimizer(self, optimizer: Any) -> int:
        for place, known in enumerate(self.parts.optimizers):
            if optimizer is known:
                return place
        raise ModelError(
            f"train_step uses an optimizer ({optimizer.name}) that is not an attribute of the model, so its state "
            "would not be saved. Set it in __init__ or in compile: self.optimizer_of_mine = ..."
        )

    def _weight(self, variable: Any) -> int:
        for place, known in enumerate(self.trainable):
            if variable is known or variable is interception.variable_of(known):
                return place
        raise ModelError(
            f"train_step updates {getattr(variable, 'path', variable.name)}, which is not among the model's trainable "
            "variables. Make its layer an attribute of the model, with trainable=True."
        )

    def _weights_of(self, place: int) -> list[keras.Variable]:
        return [self.trainable[i] for i in self.findings.applies[place][1]]

    @staticmethod
    def _now(of: Sequence[keras.Variable]) -> list[Any]:
        return [tf.identity(interception.variable_of(v)) for v in of]

    def _data(self, leaves: Sequence[Any]) -> Any:
        return own_run.data_of(tree.unflatten(self._template, leaves))

    def _mapping(self, weights: Any, states: Any, seeds: Any, metrics: Any) -> list[tuple[keras.Variable, Any]]:
        return [
            *zip(self.trainable, weights, strict=True),
            *zip(self.parts.states, states, strict=True),
            *beginning(self.seeds, seeds, self.metrics, metrics),
        ]

    def _seeds_spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([len(self.seeds), 2], tf.int32)


class OwnValues(NamedTuple):
    """The values of variables in a phase.

    Attributes:
        weights, states: values of the variables of `Parts` when the step began.
        later: for each update before this phase, the values of its weights after the update.
    """

    weights: list[Any]
    states: list[Any]
    later: list[list[Any]]


class Phase(ShardWork):
    """One phase of a model's custom step, which ends with its update at `place`, for one logical shard."""

    def __init__(self, step: OwnStep, place: int, jit: bool):
        applies = step.findings.applies
        optimizer = step.parts.optimizers[applies[place][0]] if applies else None
        super().__init__(optimizer, step.trainable, step.states, keeps_slices=True)
        self._step, self._place = step, place
        self.with_gradient = applies[place][1] if applies else []
        self._is_last = place + 1 >= len(applies)
        self.row_width = 1 + (sum(elements(step.metrics)) + len(step.findings.names) if self._is_last else 0)
        self._run = tf.function(self._compute, jit_compile=True) if jit else self._compute

    def __call__(self, leaves, seeds, weight: tf.Tensor, values: OwnValues | None = None, factors=None) -> ShardResult:
        """Compute a shard; see `MicroBatch`."""
        gradients, updates, loss, deltas, logs, outputs = self._run(values or self.values(), leaves, seeds, weight)
        means = notes_of(self._step.model).metrics.means
        deltas = [d * weight if id(v) in means else d for v, d in zip(self._step.metrics, deltas, strict=False)]
        row = flat([loss * weight, *deltas, *(each * weight for each in logs)])
        return self._result(gradients, updates, row, weight, outputs)

    def values(self, known: Any = None) -> OwnValues:
        """Return the values of variables in this phase."""
        return self._step.values(self._place)

    def apply(self, gradients: list[Any], updates: list[tf.Tensor]) -> None:
        super().apply(gradients, updates)
        self._step.note_update(self._place)

    def _compute(self, values: OwnValues, leaves: Any, seeds: Any, weight: tf.Tensor) -> tuple[Any, ...]:
        step = self._step
        computed, assigned, scope, logs, outputs = step.run(self._place, values, leaves, seeds, weight)
        gradients = self._kept(computed)
        before = [*values.states, *values.weights]
        self.before_update = {i for i, v in enumerate(self.states) if id(v) in assigned}
        if not self._is_last:
            return gradients, self._updates(before, assigned), tf.constant(0.0), [], [], []
        deltas = added(scope, step.metrics, step.initial_metrics)
        late = {id(v) for v in step.findings.late}
        changed = [v for v in self.states if id(v) in scope.changed and id(v) not in late]
        after = {id(v): scope.get_current_value(v) for v in changed}
        updates = self._updates(before, assigned | after)
        return gradients, updates, own_run.loss_of(logs), deltas, list(logs.values()), outputs
