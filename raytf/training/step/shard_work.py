"""The result of one shard of a step, and the update with the sum of results, for all kinds of steps."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf.distributed.allreduce import reduction
from raytf.distributed.allreduce.reduction import Reduction
from raytf.distributed.encoding.sparse_gradients import SliceLayout
from raytf.distributed.step_digest import LOSS
from raytf.errors import ModelError


class ShardResult(NamedTuple):
    """The result of computing a shard.

    Attributes:
        tensors: gradients and layers' updates; a gradient with slices has no elements here.
        row: the loss times the shard's weight, and the sums for metrics, [1 + M].
        slices: the packed slices of each gradient with slices, see `SliceLayout`.
        outputs: the inputs of metrics of the whole batch, with a row for each record; empty without such metrics.
    """

    tensors: list[tf.Tensor]
    row: tf.Tensor
    slices: list[tf.Tensor]
    outputs: Sequence[tf.Tensor] = ()


@dataclass(frozen=True)
class OutputLayout:
    """The layout of the records' rows for metrics of the whole batch.

    Attributes:
        width: float32 words of a record, an even number.
        count: records in a full shard; None if the number differs between shards.
    """

    width: int
    count: int | None

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([None, self.width], tf.float32)


class ShardWork:
    """The computation of one logical shard, and the update with the sum of all shards.

    Args:
        optimizer: the optimizer that makes the update, if any.
        trainable: weights that may have gradients.
        states: variables that the computation may change.
        keeps_slices: whether gradients of lookups stay slices; otherwise all gradients are dense.

    Attributes:
        with_gradient: indices of trainable variables with a gradient; set by a trace.
        updated: indices of states that a step changes; set by a trace.
        before_update: indices of states that change before the optimizer's update; set by a trace.
        slices: layouts of the gradients that are slices, by their place in `with_gradient`; set by the first trace.
        outputs: the layouts of `ShardResult.outputs`; set by the first trace.
        row_width: columns of a shard's row.
    """

    row_width: int

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer | None,
        trainable: Sequence[keras.Variable],
        states: Sequence[keras.Variable],
        keeps_slices: bool,
    ):
        self.optimizer, self.trainable, self.states = optimizer, list(trainable), list(states)
        self._keeps_slices = keeps_slices
        self.with_gradient: list[int] = []
        self.updated: list[int] = []
        self.before_update: set[int] = set()
        self.slices: dict[int, SliceLayout] = {}
        self.outputs: list[OutputLayout] = []

    def __call__(
        self, leaves: Any, seeds: Any, weight: tf.Tensor, values: Any = None, factors: Any = None
    ) -> ShardResult:
        """Compute the shard.

        Args:
            leaves: leaves of the batch, each [n, ...].
            seeds: [S, 2].
            weight: the shard's weight in the step: n divided by the records of all shards.
            values: the result of `values`; by default the current values.
            factors: factors of the losses that are divided by data, in a step of several shards.
        """
        raise NotImplementedError

    @property
    def layouts(self) -> list[SliceLayout | OutputLayout]:
        """Return the layouts of the results that are not summed: slices, then outputs; known after a trace."""
        return [*self.slices.values(), *self.outputs]

    def values(self, known: Any = None) -> Any:
        """Return the values of variables at the beginning of a step, on the current device; values from `fixed` are not
        read again."""
        raise NotImplementedError

    def fixed(self) -> Any:
        """Return the values that no step changes, on the current device; None if none is known."""
        return None

    def layout(self) -> reduction.WireLayout:
        """Return the shapes and types of the tensors that a traced shard returns; integers are sent as float32."""
        sent = [*(self.trainable[i] for i in self.with_gradient), *(self.states[i] for i in self.updated)]
        kinds = [tf.as_dtype(v.dtype) if tf.as_dtype(v.dtype).is_floating else tf.float32 for v in sent]
        if not sent:  # all weights are frozen: send a zero, because an empty sum has no digest
            return reduction.WireLayout([(1,)], [tf.float32])
        return reduction.WireLayout([(0,) if i in self.slices else v.shape for i, v in enumerate(sent)], kinds)

    def digested(self) -> list[str]:
        """Return the names of the parts that the digests of a traced shard cover, in order: see `Reduction.digest`."""
        sent = [*(self.trainable[i] for i in self.with_gradient), *(self.states[i] for i in self.updated)]
        paths = [v.path for v in sent] or ["nothing"]
        return [*paths, *(f"rows of {sent[i].path}" for i in self.slices), LOSS]

    def gradients(self, tensors: list[tf.Tensor], slices: Sequence[tf.Tensor]) -> list[Any]:
        """Return the gradients of the variables in `with_gradient`, from reduced tensors and gathered slices."""
        reduced: list[Any] = tensors[: len(self.with_gradient)]
        for (place, layout), words in zip(self.slices.items(), slices, strict=True):
            reduced[place] = layout.unpack(words)
        return reduced

    def apply(self, gradients: list[Any], updates: list[tf.Tensor]) -> None:
        """Update weights, optimizer and layers' states with reduced gradients and layers' updates."""
        changed = list(zip(self.updated, updates[: len(self.updated)], strict=True))
        self._assign([(i, value) for i, value in changed if i in self.before_update])
        if gradients:
            assert self.optimizer is not None
            self.optimizer.apply(gradients, [self.trainable[i] for i in self.with_gradient])
        self._assign([(i, value) for i, value in changed if i not in self.before_update])

    def _assign(self, changed: Sequence[tuple[int, tf.Tensor]]) -> None:
        for i, value in changed:
            variable = self.states[i]
            if tf.as_dtype(variable.dtype).is_floating:
                variable.assign(value)
            else:
                variable.assign_add(tf.cast(tf.round(value), variable.dtype))

    def _result(
        self,
        gradients: list[Any],
        updates: list[tf.Tensor],
        row: list[tf.Tensor],
        weight: tf.Tensor,
        outputs: Sequence[tf.Tensor] = (),
    ) -> ShardResult:
        slices = [layout.pack(gradients[place], weight) for place, layout in self.slices.items()]
        dense = [tf.zeros([0], g.dtype) if i in self.slices else g for i, g in enumerate(gradients)]
        self.outputs = self.outputs or [OutputLayout(int(rows.shape[1]), rows.shape[0]) for rows in outputs]
        return ShardResult([*dense, *updates] or [tf.zeros([1])], tf.concat(row, 0), slices, outputs)

    def _kept(self, computed: Sequence[Any]) -> list[Any]:
        """Return the gradients of the variables in `with_gradient`, dense unless they are kept as slices."""
        if self._keeps_slices and not self.slices:
            for place, gradient in enumerate(computed):
                if isinstance(gradient, tf.IndexedSlices):
                    self.slices[place] = SliceLayout.of(self.trainable[self.with_gradient[place]], gradient)
        return [g if place in self.slices else tf.convert_to_tensor(g) for place, g in enumerate(computed)]

    def _updates(self, before: Sequence[tf.Tensor], after: Mapping[int, tf.Tensor | None]) -> list[tf.Tensor]:
        """Return the tensors to send for the states that have changed, and set `updated` to their indices.

        Args:
            before: the values of all states before the shard.
            after: the values after it, by the variable's `id`.
        """
        self.updated, updates = [], []
        for i, (variable, value_before) in enumerate(zip(self.states, before, strict=True)):
            value = after.get(id(variable))
            # An unchanged value is the same tensor: `value` of a mapped variable is its tensor, perhaps cast.
            if value is None or value is value_before:
                continue
            if not (value.dtype.is_floating or value.dtype.is_integer):
                raise ModelError(
                    f"layer state {variable.path} of dtype {variable.dtype} changes in training, but raytf can only "
                    "sum numbers. Make it a float or an integer."
                )
            self.updated.append(i)
            # An integer is sent as its difference, which a float represents exactly.
            updates.append(value if value.dtype.is_floating else value - value_before)
        return updates


def flat(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return values as columns of a row."""
    return [tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values]


def elements(of: Sequence[keras.Variable]) -> list[int]:
    """Return the number of columns of each variable in a row."""
    return [int(np.prod(v.shape, dtype=np.int64)) for v in of]


def add_to(metrics: Sequence[keras.Variable], row: tf.Tensor, but: Container[int] = ()) -> None:
    """Add the columns of a reduced row to the variables of metrics, except variables with an id in `but`."""
    for variable, part in zip(metrics, tf.split(row, elements(metrics)), strict=True):
        if id(variable) in but:
            continue
        variable.assign_add(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def added(scope: keras.StatelessScope, metrics: Sequence[keras.Variable], before: Sequence[Any]) -> list[tf.Tensor]:
    """Return the amounts that a shard added to the variables of metrics, whose first values were `before`."""
    return [scope.get_current_value(v) - tf.constant(value) for v, value in zip(metrics, before, strict=True)]


class KeptGradients:
    """The gradients of all traced phases of a step, if they are requested."""

    def __init__(self, is_wanted: bool, phases: Sequence[ShardWork], reductions: Sequence[Reduction]):
        self._is_wanted, self._phases, self._reductions = is_wanted, phases, reductions

    def nothing(self) -> list[tf.Tensor]:
        """Return zeros in place of gradients before the first step; to be traced."""
        kept = []
        for phase, adds in zip(self._phases, self._reductions, strict=True):
            variables = [phase.trainable[i] for i in phase.with_gradient] if self._is_wanted else []
            kept += [tf.zeros(v.shape, d) for v, d in zip(variables, adds.layout.dtypes, strict=False)]
        return kept

    def of(self, gradients: list[Any], optimizer: keras.optimizers.Optimizer | None) -> list[tf.Tensor]:
        """Return a phase's gradients to keep; to be traced before the update, which may change the loss scale."""
        if not self._is_wanted:
            return []
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            return [g / tf.cast(scale, g.dtype) for g in gradients]
        return gradients

    def named(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the gradients of a call by the path of their weight; empty if they are not kept."""
        paths = [phase.trainable[i].path for phase in self._phases for i in phase.with_gradient]
        return dict(zip(paths, gradients, strict=True)) if self._is_wanted else {}


def squared_norm(gradients: Sequence[Any], optimizer: keras.optimizers.Optimizer | None) -> tf.Tensor:
    """Return the sum of the squares of all elements, float32; to be traced before an update, which may change the loss
    scale. As in `tf.linalg.global_norm`, slices of the same row are not added first."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    halves = [tf.cast(tf.nn.l2_loss(each), tf.float32) for each in values]
    total = 2.0 * tf.add_n(halves) if halves else tf.constant(0.0)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return total / tf.square(tf.cast(tf.convert_to_tensor(optimizer.dynamic_scale), tf.float32))
    return total
