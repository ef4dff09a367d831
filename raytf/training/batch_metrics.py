"""Metrics of the whole batch: their updates get the records of all shards, once a step and on every rank.

What a metric is, is decided before the first step (`metric_kinds`) and noted in the model. The shards then return what
such a metric's updates got, a row of float32 words for each record. Rows of all shards travel like gradients of
embeddings, bit for bit and in the order of the records, so every rank makes the same update from the same state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf._keras import own_steps, updates
from raytf.errors import ModelError
from raytf.training import remarks
from raytf.training.metric_kinds import Kind, Update, kind_of, update_of

#: Bytes of a batch that are gathered on each rank, at most.
MOST_BYTES = 256 << 20
_NOTED = "_raytf_metrics"
_NOTHING = object()
_LEFT_OUT = "WARNING: the metric {} needs the predictions of the whole batch, {}. It is left out of the logs."


@dataclass
class MetricKinds:
    """The kinds of a model's metrics.

    Attributes:
        means: ids of variables to which each shard adds its share of the batch's average.
        whole: metrics that need the whole batch.
        left_out: metrics that need it and do not get it; they are not in the logs.
    """

    means: set[int] = field(default_factory=set)
    whole: list[keras.metrics.Metric] = field(default_factory=list)
    left_out: list[keras.metrics.Metric] = field(default_factory=list)


def kinds_of(model: keras.Model) -> MetricKinds:
    """Return what `note` has stored; before it is called, every metric is a sum."""
    return vars(model).get(_NOTED) or MetricKinds()


def own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the program's metrics in a model, each by itself."""
    return updates.own_metrics(own_steps.metrics_within(model), model)


def needs_call(model: keras.Model) -> bool:
    """Return whether metrics may be updated in a call of the model, and not from its output alone."""
    compiled = updates.compiled_metrics(model)
    return any(all(metric is not known for known in compiled) for metric in own_metrics(model))


@contextlib.contextmanager
def noted(model: keras.Model, records: int) -> Iterator[list[Update]]:
    """Collect the updates of the program's metrics while the `with` statement lasts.

    Args:
        model: whose metrics were updated before.
        records: how many there are in a batch.
    """
    found: list[Update] = []

    def on_update(metric: keras.metrics.Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(update_of(metric, args, kwargs, records))

    with updates.noted_updates(own_metrics(model), on_update):
        yield found


@contextlib.contextmanager
def noted_while_traced(model: keras.Model, leaves: Sequence[tf.TensorSpec], batch: int) -> Iterator[None]:
    """Note the kinds of the metrics that are updated while the `with` statement lasts, which traces a step.

    Args:
        model: has the step.
        leaves: specs of a full shard's leaves.
        batch: records in a full step.
    """
    records = leaves[0].shape[0] or 1
    with noted(model, records) as found:
        yield
    note(model, found, records, batch, all(leaf.shape.is_fully_defined() for leaf in leaves))


def note(model: keras.Model, found: Sequence[Update], records: int, batch: int, has_lengths: bool = True) -> None:
    """Decide what kind each metric of a model is, and store it in the model.

    Args:
        model: the model.
        found: the updates of a batch.
        records: how many records it has; with one, every metric is a sum.
        batch: how many a step has.
        has_lengths: whether all records have the same shape.
    """
    kinds = vars(model).setdefault(_NOTED, MetricKinds())
    for metric in {id(update.metric): update.metric for update in found}.values():
        own = [update for update in found if update.metric is metric]
        made = [kind_of(update, records) for update in own]
        if not any(kind is Kind.WHOLE for kind, _ in made):
            for _, each in made:
                pairs = zip(metric.variables, each, strict=True)
                kinds.means |= {id(variable) for variable, kind in pairs if kind is Kind.MEAN}
            continue
        if any(metric is known for known in [*kinds.whole, *kinds.left_out]):
            continue
        reason = _obstacle(own, has_lengths, batch)
        (kinds.left_out if reason else kinds.whole).append(metric)
        if reason:
            remarks.add(model, _LEFT_OUT.format(metric.name, reason))


def _obstacle(own: Sequence[Update], has_lengths: bool, batch: int) -> str:
    """Return why the arguments of updates cannot be gathered; empty if they can."""
    if not has_lengths:
        return "and the records of this data differ in length"
    tensors = [argument for update in own for argument in update.arguments if isinstance(argument.value, np.ndarray)]
    if not all(argument.has_records for argument in tensors):
        return "and is updated with tensors that do not have a row for each record"
    width = sum(_width(each) for a in tensors for each in (a.value, a.mask) if each is not None)
    if 4 * width * batch > MOST_BYTES:
        return (
            f"which take {4 * width * batch >> 20} MB on each worker, and raytf gathers at most {MOST_BYTES >> 20} MB"
        )
    return ""


def _width(value: np.ndarray) -> int:
    return int(np.prod(value.shape[1:], dtype=np.int64)) * max(1, value.dtype.itemsize // 4)


def leave_out(model: keras.Model, why: str) -> None:
    """Have no metric be computed from the whole batch; those that need it are left out of the logs."""
    kinds = kinds_of(model)
    for metric in kinds.whole:
        remarks.add(model, _LEFT_OUT.format(metric.name, why))
    kinds.left_out, kinds.whole = [*kinds.left_out, *kinds.whole], []


def results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics by name, as Keras does, without those that are left out."""
    left_out = kinds_of(model).left_out
    if not left_out:
        return model.get_metrics_result()
    with updates.replaced_results(left_out, _NOTHING):
        return {name: value for name, value in model.get_metrics_result().items() if value is not _NOTHING}


class Leaf(NamedTuple):
    """An argument of an update as columns of a row.

    Attributes:
        dtype: of the argument; None for one without records, which is `constant`.
        shape: of a record.
        mask: the shape of a record's mask, whose columns follow; None without a mask.
    """

    dtype: tf.DType | None
    shape: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None
    constant: Any = None

    def columns(self) -> list[int]:
        """Return how many columns the argument takes, and its mask."""
        if self.dtype is None:
            return []
        masks = [] if self.mask is None else [_size(self.mask)]
        return [_size(self.shape) * max(1, self.dtype.size // 4), *masks]


class Gathered:
    """The arguments of all updates of the metrics of the whole batch, as rows.

    Args:
        model: that `note` has seen.
    """

    def __init__(self, model: keras.Model):
        self._metrics = kinds_of(model).whole
        self._calls: list[tuple[keras.metrics.Metric, Any, list[Leaf]]] | None = None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def variables(self) -> set[int]:
        """Ids of the metrics' variables."""
        return {id(v) for metric in self._metrics for v in metric.variables}

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[tuple[keras.metrics.Metric, tuple[Any, ...], dict[str, Any]]]]:
        """Collect the calls of the metrics' updates while the `with` statement lasts; to be traced."""
        calls: list[tuple[Any, ...]] = []
        with updates.noted_updates(self._metrics, lambda *call: calls.append(call)):
            yield calls

    def pack(self, calls: list[tuple[Any, ...]]) -> list[tf.Tensor]:
        """Return [n, width] the arguments of the calls as rows; nothing where there are none."""
        if not calls:
            return []
        given = [keras.tree.flatten((args, kwargs)) for _, args, kwargs in calls]
        if self._calls is None:
            leaves = [[_leaf(each) for each in one] for one in given]
            self._calls = [(call[0], call[1:], each) for call, each in zip(calls, leaves, strict=True)]
        known = [leaf for _, _, leaves in self._calls for leaf in leaves]
        tensors = [each for one in given for each in one]
        words = [c for tensor, leaf in zip(tensors, known, strict=True) for c in _packed(tensor, leaf)]
        if sum(self._columns) % 2:
            words.append(tf.zeros([tf.shape(words[0])[0], 1]))
        return [tf.concat(words, 1)]

    @property
    def _columns(self) -> list[int]:
        assert self._calls is not None, "a shard is traced first"
        return [n for _, _, leaves in self._calls for leaf in leaves for n in leaf.columns()]

    @property
    def width(self) -> int:
        """float32 words of a record, an even number: two of them travel as an int64."""
        return sum(self._columns) + sum(self._columns) % 2

    def update(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics with the rows of a whole batch; to be traced.

        Args:
            outputs: the rows, [n, width]; nothing where no metric needs them.
        """
        if not outputs:
            return
        assert self._calls is not None
        sizes = [*self._columns, *([1] if sum(self._columns) % 2 else [])]
        columns = iter(tf.split(outputs[0], sizes, 1))
        with keras.StatelessScope() as scope:
            for metric, structure, leaves in self._calls:
                args, kwargs = keras.tree.pack_sequence_as(structure, [_unpacked(leaf, columns) for leaf in leaves])
                metric.update_state(*args, **kwargs)
        for variable in (v for metric in self._metrics for v in metric.variables):
            value = scope.get_current_value(variable)
            if value is not None:
                variable.assign(value)


def _leaf(leaf: Any) -> Leaf:
    if not keras.ops.is_tensor(leaf) or not leaf.shape.rank:
        return Leaf(None, constant=leaf)
    mask = _keras.mask_of(leaf)
    shapes = [tuple(each.shape[1:]) for each in (leaf, mask) if each is not None]
    if any(length is None for shape in shapes for length in shape):
        raise ModelError(
            f"a metric of the whole batch gets a tensor of shape {tuple(leaf.shape)}. Expected known lengths after the "
            "first one. Give the tensor a fixed shape, for example with keras.ops.reshape."
        )
    return Leaf(leaf.dtype, *shapes)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _packed(tensor: Any, leaf: Leaf) -> list[tf.Tensor]:
    """Return the columns of an argument and of its mask."""
    parts = [] if leaf.dtype is None else [tensor] if leaf.mask is None else [tensor, _keras.mask_of(tensor)]
    return [_words(each, columns) for each, columns in zip(parts, leaf.columns(), strict=True)]


def _words(tensor: tf.Tensor, columns: int) -> tf.Tensor:
    """Return [n, columns] the bits of numbers, as float32."""
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    elif tensor.dtype.size < 4:
        tensor = tf.cast(tensor, tf.int32)
    return tf.reshape(tf.bitcast(tensor, tf.float32), [-1, columns])


def _numbers(words: tf.Tensor, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    """Return the numbers of `_words`."""
    if dtype.size == 8:
        return tf.bitcast(tf.reshape(words, [-1, *shape, 2]), dtype)
    wide = words if dtype.is_floating else tf.bitcast(words, dtype if dtype.size == 4 else tf.int32)
    return tf.reshape(tf.cast(wide, dtype), [-1, *shape])


def _unpacked(leaf: Leaf, columns: Iterator[tf.Tensor]) -> Any:
    if leaf.dtype is None:
        return leaf.constant
    tensor = _numbers(next(columns), leaf.dtype, leaf.shape)
    if leaf.mask is not None:
        updates.set_mask(tensor, _numbers(next(columns), tf.bool, leaf.mask))
    return tensor
