"""The result of one shard of a step, and the update made of it: the part that all kinds of steps share."""

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
        tensors: gradients and layers' updates; a gradient that is slices has no elements here.
        row: [1 + M] the loss times the shard's weight, and what is added to metrics.
        slices: for each gradient that is slices, its packed occurrences, see `SliceLayout`.
        outputs: what metrics of the whole batch get, a row for each record; nothing where there are none.
    """

    tensors: list[tf.Tensor]
    row: tf.Tensor
    slices: list[tf.Tensor]
    outputs: Sequence[tf.Tensor] = ()


@dataclass(frozen=True)
class OutputLayout:
    """The rows of records that metrics of the whole batch get.

    Attributes:
        width: float32 words of a record, an even number.
        count: records in a full shard; None if it differs from shard to shard.
    """

    width: int
    count: int | None

    @property
    def spec(self) -> tf.TensorSpec:
        return tf.TensorSpec([None, self.width], tf.float32)


class ShardWork:
    """The computation of one logical shard, and the update that is made of all shards.

    Args:
        optimizer: makes the update.
        trainable: weights that may have gradients.
        states: variables that the computation may change.
        keeps_slices: return gradients of lookups as slices; otherwise all gradients are dense.

    Attributes:
        with_gradient: indices of trainable variables with a gradient; set by a trace.
        updated: indices of states that a step changes; set by a trace.
        before_update: those of them that change before the optimizer's update; set by a trace.
        slices: the gradients that are slices, by their place in `with_gradient`; set by the first trace.
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
            weight: n divided by the records of all shards: the weight of this shard in the step.
            values: from `values`; by default the current ones.
            factors: factors of the losses that are divided by data, in a step of several shards.
        """
        raise NotImplementedError

    @property
    def layouts(self) -> list[SliceLayout | OutputLayout]:
        """Return what a traced shard returns that is not summed: slices, then outputs."""
        return [*self.slices.values(), *self.outputs]

    def values(self, known: Any = None) -> Any:
        """Return what variables hold at the beginning of a step, on the current device; those of `fixed` are not read
        again."""
        raise NotImplementedError

    def fixed(self) -> Any:
        """Return the values that no step changes, on the current device; None where none is known."""
        return None

    def layout(self) -> reduction.WireLayout:
        """Return the shapes and types of the tensors that a traced shard returns; integers are sent as float32."""
        sent = [*(self.trainable[i] for i in self.with_gradient), *(self.states[i] for i in self.updated)]
        kinds = [tf.as_dtype(v.dtype) if tf.as_dtype(v.dtype).is_floating else tf.float32 for v in sent]
        if not sent:  # all weights are frozen: a zero travels, as a sum of no tensors has no digest
            return reduction.WireLayout([(1,)], [tf.float32])
        return reduction.WireLayout([(0,) if i in self.slices else v.shape for i, v in enumerate(sent)], kinds)

    def digested(self) -> list[str]:
        """Return what the digests of a traced shard are made of, in order: see `Reduction.digest`."""
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
        """Return the gradients of the variables in `with_gradient`, dense where they are not kept as slices."""
        if self._keeps_slices and not self.slices:
            for place, gradient in enumerate(computed):
                if isinstance(gradient, tf.IndexedSlices):
                    self.slices[place] = SliceLayout.of(self.trainable[self.with_gradient[place]], gradient)
        return [g if place in self.slices else tf.convert_to_tensor(g) for place, g in enumerate(computed)]

    def _updates(self, before: Sequence[tf.Tensor], after: Mapping[int, tf.Tensor | None]) -> list[tf.Tensor]:
        """Return what is sent of the states that have changed, from their values before and, by the variable's `id`,
        after; set `updated` to their indices."""
        self.updated, updates = [], []
        for i, (variable, value_before) in enumerate(zip(self.states, before, strict=True)):
            value = after.get(id(variable))
            # A value that was not changed is the same tensor as before: `value` of a mapped variable is its tensor,
            # perhaps cast.
            if value is None or value is value_before:
                continue
            if not (value.dtype.is_floating or value.dtype.is_integer):
                raise ModelError(
                    f"layer state {variable.path} of dtype {variable.dtype} changes in training; raytf can agree on "
                    "numbers only. Make it a float or an integer."
                )
            self.updated.append(i)
            # An integer is sent as its difference, which a float on the wire holds exactly.
            updates.append(value if value.dtype.is_floating else value - value_before)
        return updates


def flat(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the columns of a row."""
    return [tf.reshape(tf.cast(value, tf.float32), [-1]) for value in values]


def elements(of: Sequence[keras.Variable]) -> list[int]:
    """Return how many columns each variable takes in a row."""
    return [int(np.prod(v.shape, dtype=np.int64)) for v in of]


def add_to(metrics: Sequence[keras.Variable], row: tf.Tensor, but: Container[int] = ()) -> None:
    """Add the columns of a reduced row to the variables of metrics, but not to those with the ids in `but`."""
    for variable, part in zip(metrics, tf.split(row, elements(metrics)), strict=True):
        if id(variable) in but:
            continue
        variable.assign_add(tf.cast(tf.reshape(part, variable.shape), variable.dtype))


def added(scope: keras.StatelessScope, metrics: Sequence[keras.Variable], before: Sequence[Any]) -> list[tf.Tensor]:
    """Return what a shard has added to the variables of metrics, which began with the values `before`."""
    return [scope.get_current_value(v) - tf.constant(value) for v, value in zip(metrics, before, strict=True)]


class KeptGradients:
    """The gradients of all traced phases of a step, if they are wanted."""

    def __init__(self, is_wanted: bool, phases: Sequence[ShardWork], reductions: Sequence[Reduction]):
        self._is_wanted, self._phases, self._reductions = is_wanted, phases, reductions

    def nothing(self) -> list[tf.Tensor]:
        """Return the gradients that are kept before the first step; to be traced."""
        kept = []
        for phase, adds in zip(self._phases, self._reductions, strict=True):
            variables = [phase.trainable[i] for i in phase.with_gradient] if self._is_wanted else []
            kept += [tf.zeros(v.shape, d) for v, d in zip(variables, adds.layout.dtypes, strict=False)]
        return kept

    def of(self, gradients: list[Any], optimizer: keras.optimizers.Optimizer | None) -> list[tf.Tensor]:
        """Return what to keep of a phase, before the update, which may change a loss scale; to be traced."""
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
    """Return the sum of the squares of all elements, float32, before gradients are clipped and an update changes a loss
    scale; of slices, those of the same row are not added first, as in `tf.linalg.global_norm`. To be traced."""
    values = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    halves = [tf.cast(tf.nn.l2_loss(each), tf.float32) for each in values]
    total = 2.0 * tf.add_n(halves) if halves else tf.constant(0.0)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return total / tf.square(tf.cast(tf.convert_to_tensor(optimizer.dynamic_scale), tf.float32))
    return total
