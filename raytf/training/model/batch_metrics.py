"""Metrics that need the whole batch: every rank updates them once a step, with the records of all shards.

The kind of each metric is determined before the first step (`kind_of`) and noted in the model. The shards then return
the arguments of such a metric's updates, as one row of float32 words per record. The ranks exchange the rows like
gradients of embeddings, bit for bit and in record order, so every rank makes the same update from the same state.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf._keras import interception
from raytf.errors import ModelError
from raytf.training.model.losses import two_parts
from raytf.training.model.notes import notes_of

#: The most bytes of a batch that each rank gathers.
MOST_BYTES = 256 << 20
_NOTHING = object()
_LEFT_OUT = "WARNING: the metric {} needs the predictions of the whole batch, {}. It is left out of the logs."
#: The largest allowed difference between a sum over records and the sum of its parts, relative to its largest number.
_RELATIVE = 1e-4
#: The same for the difference of two states, relative to the largest number in the states.
_OF_STATE = 1e-5


def own_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the program's individual metrics in a model, without those that Keras itself updates with losses."""
    return interception.own_metrics(interception.metrics_within(model), model)


def needs_call(model: keras.Model) -> bool:
    """Return whether a call of the model may update metrics, so that its output alone is not enough."""
    compiled = interception.compiled_metrics(model)
    return any(all(metric is not known for known in compiled) for metric in own_metrics(model))


@contextlib.contextmanager
def noted(model: keras.Model, records: int) -> Iterator[list[Update]]:
    """Collect the updates of the program's metrics while the `with` statement lasts.

    Args:
        model: a model whose metrics were updated before.
        records: number of records in a batch.
    """
    collected: list[Update] = []

    def on_update(metric: keras.metrics.Metric, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        collected.append(update_of(metric, args, kwargs, records))

    with interception.noted_updates(own_metrics(model), on_update):
        yield collected


@contextlib.contextmanager
def noted_while_traced(model: keras.Model, leaves: Sequence[tf.TensorSpec], batch: int) -> Iterator[None]:
    """Note the kinds of the metrics that are updated inside the `with` statement, which must trace a step.

    Args:
        model: the model of the step.
        leaves: specs of a full shard's leaves.
        batch: number of records in a full step.
    """
    records = leaves[0].shape[0] or 1
    with noted(model, records) as collected:
        yield
    note(model, collected, records, batch, all(leaf.shape.is_fully_defined() for leaf in leaves))


def note(model: keras.Model, collected: Sequence[Update], records: int, batch: int, has_lengths: bool = True) -> None:
    """Determine the kind of each metric of a model, and store it in the model.

    Args:
        model: the model.
        collected: the updates of a batch.
        records: number of records in that batch; with one, every metric is a sum.
        batch: number of records in a step.
        has_lengths: whether all records have the same shape.
    """
    notes = notes_of(model)
    kinds = notes.metrics
    for metric in {id(update.metric): update.metric for update in collected}.values():
        own = [update for update in collected if update.metric is metric]
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
            notes.remarks.append(_LEFT_OUT.format(metric.name, reason))


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
    """Compute no metric from the whole batch, and leave the metrics that need it out of the logs."""
    notes = notes_of(model)
    kinds = notes.metrics
    notes.remarks += [_LEFT_OUT.format(metric.name, why) for metric in kinds.whole]
    kinds.left_out, kinds.whole = [*kinds.left_out, *kinds.whole], []


def results(model: keras.Model) -> dict[str, Any]:
    """Return the results of a model's metrics by name, as Keras does, except for metrics that are left out."""
    left_out = notes_of(model).metrics.left_out
    if not left_out:
        return model.get_metrics_result()
    with interception.replaced_results(left_out, _NOTHING):
        return {name: value for name, value in model.get_metrics_result().items() if value is not _NOTHING}


class Leaf(NamedTuple):
    """The columns of a row that hold an argument of an update.

    Attributes:
        dtype: the argument's type; None for an argument without records, whose value is `constant`.
        shape: the shape of a record.
        mask: the shape of a record's mask, whose columns follow the argument's; None without a mask.
    """

    dtype: tf.DType | None
    shape: tuple[int, ...] = ()
    mask: tuple[int, ...] | None = None
    constant: Any = None

    def columns(self) -> list[int]:
        """Return the number of columns for the argument, and for its mask if it has one."""
        if self.dtype is None:
            return []
        masks = [] if self.mask is None else [_size(self.mask)]
        return [_size(self.shape) * max(1, self.dtype.size // 4), *masks]


class Gathered:
    """Packs the arguments of all updates of whole-batch metrics into rows, and makes the updates with such rows.

    Args:
        model: a model in which `note` has stored the metrics' kinds.
    """

    def __init__(self, model: keras.Model):
        self._metrics = notes_of(model).metrics.whole
        self._calls: list[tuple[keras.metrics.Metric, Any, list[Leaf]]] | None = None

    def __bool__(self) -> bool:
        return bool(self._metrics)

    @property
    def variables(self) -> set[int]:
        """Return the ids of the metrics' variables."""
        return {id(v) for metric in self._metrics for v in metric.variables}

    @contextlib.contextmanager
    def noted(self) -> Iterator[list[tuple[keras.metrics.Metric, tuple[Any, ...], dict[str, Any]]]]:
        """Collect the calls of the metrics' updates inside the `with` statement, which must be traced."""
        calls: list[tuple[Any, ...]] = []
        with interception.noted_updates(self._metrics, lambda *call: calls.append(call)):
            yield calls

    def pack(self, calls: list[tuple[Any, ...]]) -> list[tf.Tensor]:
        """Return a list with the arguments of the calls as rows, [n, width]; empty without calls."""
        if not calls:
            return []
        arguments = [keras.tree.flatten((args, kwargs)) for _, args, kwargs in calls]
        if self._calls is None:
            leaves = [[_leaf(each) for each in one] for one in arguments]
            self._calls = [(call[0], call[1:], each) for call, each in zip(calls, leaves, strict=True)]
        known = [leaf for _, _, leaves in self._calls for leaf in leaves]
        tensors = [each for one in arguments for each in one]
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
        """Return the number of float32 words per record, which is even: two words are sent as one int64."""
        return sum(self._columns) + sum(self._columns) % 2

    def update(self, outputs: Sequence[tf.Tensor]) -> None:
        """Update the metrics with the rows of a whole batch; must be traced.

        Args:
            outputs: a list with the rows, [n, width]; empty if no metric needs them.
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
            f"a metric of the whole batch gets a tensor of shape {tuple(leaf.shape)}. Expected only the first length "
            "to be unknown. Set a fixed shape, for example with keras.ops.reshape."
        )
    return Leaf(leaf.dtype, *shapes)


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _packed(tensor: Any, leaf: Leaf) -> list[tf.Tensor]:
    """Return the columns of an argument and of its mask."""
    parts = [] if leaf.dtype is None else [tensor] if leaf.mask is None else [tensor, _keras.mask_of(tensor)]
    return [_words(each, columns) for each, columns in zip(parts, leaf.columns(), strict=True)]


def _words(tensor: tf.Tensor, columns: int) -> tf.Tensor:
    """Return the bits of numbers as float32 words, [n, columns]."""
    if tensor.dtype in (tf.float16, tf.bfloat16):
        tensor = tf.cast(tensor, tf.float32)
    elif tensor.dtype.size < 4:
        tensor = tf.cast(tensor, tf.int32)
    return tf.reshape(tf.bitcast(tensor, tf.float32), [-1, columns])


def _numbers(words: tf.Tensor, dtype: tf.DType, shape: tuple[int, ...]) -> tf.Tensor:
    """Return the numbers whose bits `_words` has returned."""
    if dtype.size == 8:
        return tf.bitcast(tf.reshape(words, [-1, *shape, 2]), dtype)
    wide = words if dtype.is_floating else tf.bitcast(words, dtype if dtype.size == 4 else tf.int32)
    return tf.reshape(tf.cast(wide, dtype), [-1, *shape])


def _unpacked(leaf: Leaf, columns: Iterator[tf.Tensor]) -> Any:
    if leaf.dtype is None:
        return leaf.constant
    tensor = _numbers(next(columns), leaf.dtype, leaf.shape)
    if leaf.mask is not None:
        interception.set_mask(tensor, _numbers(next(columns), tf.bool, leaf.mask))
    return tensor


# -- kinds of metrics --------------------------------------------------------------------------------------------------
#
# Each update of a metric is tried on a few records: as a whole and in two parts, and from two different states. Most
# metrics add a sum over records to their variables, so the sums of the shards can be added. A function that returns one
# mean for the batch adds that mean, so the shards' numbers are averaged. Every other metric (a maximum, an F1 score of
# each batch) needs the whole batch.


class Kind(enum.IntEnum):
    """The way a metric's value for a batch follows from its shards; if updates differ, the largest kind counts."""

    SUM = 0
    MEAN = 1
    WHOLE = 2


class Argument(NamedTuple):
    """One argument of an update.

    Attributes:
        value: the numbers of a tensor, or the argument itself if it is not a tensor.
        has_records: whether the first dimension counts records.
        mask: the mask that a layer has set on the tensor, or None.
        is_known: whether `value` has the program's numbers. While a step is traced, only shape and type are known.
    """

    value: Any
    has_records: bool
    mask: np.ndarray | None = None
    is_known: bool = True


class Update(NamedTuple):
    """A call of a metric's `update_state`, with its arguments in the order of `keras.tree.flatten`."""

    metric: keras.metrics.Metric
    structure: Any
    arguments: list[Argument]

    def call(self, arguments: Sequence[Argument], rows: slice) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments for some of the records."""
        return keras.tree.pack_sequence_as(self.structure, [_part(argument, rows) for argument in arguments])


def update_of(metric: keras.metrics.Metric, args: tuple[Any, ...], kwargs: dict[str, Any], records: int) -> Update:
    """Return an update with the values of its tensors, or only with their shapes while a step is traced."""
    structure = (args, kwargs)
    return Update(metric, structure, [_argument(leaf, records) for leaf in keras.tree.flatten(structure)])


def kind_of(update: Update, records: int) -> tuple[Kind, list[Kind]]:
    """Return the kind of an update, and the kind of each variable of the metric.

    Args:
        update: the call of the program's metric.
        records: number of records in the call. With one, kinds cannot be distinguished, and every metric is a sum.
    """
    if not any(argument.has_records for argument in update.arguments):
        return _of_numbers(update)
    metric, (cuts, shares) = update.metric, two_parts(records)
    sums, means = np.ones(len(metric.variables), bool), np.ones(len(metric.variables), bool)
    everything = slice(None)
    for arguments, others in _trials(update, records) if records > 1 else ():
        first = _state(metric)
        try:
            whole = _after(update, arguments, first, everything)
            later = _after(update, others, whole, everything)
            again = _after(update, arguments, later, everything)
            parts = [_after(update, arguments, first, rows) for rows in cuts]
        except Exception:  # a metric may refuse numbers that its program never passes
            continue
        for place in range(len(metric.variables)):
            added = whole[place] - first[place]
            one, other = (part[place] - first[place] for part in parts)
            near = _near(added, np.abs(later[place]).max(initial=0))
            is_additive = near(again[place] - later[place])
            sums[place] &= is_additive and near(one + other)
            means[place] &= is_additive and near(shares[0] * one + shares[1] * other)
    kinds = [_kind(a_sum, mean, v) for a_sum, mean, v in zip(sums, means, metric.variables, strict=True)]
    return max(kinds, default=Kind.SUM), kinds


def _of_numbers(update: Update) -> tuple[Kind, list[Kind]]:
    """Return the kinds, as `kind_of` does, for an update with numbers of the whole batch only, such as the loss.

    A metric that counts its updates averages such numbers over the batches. If it does not count them, or if it also
    gets a weight, the number may well be a sum over records.
    """
    metric, numbers = update.metric, [place for place, a in enumerate(update.arguments) if _is_number(a.value)]
    everything, first = slice(None), _state(metric)
    if len(numbers) != 1:
        return Kind.SUM, [Kind.SUM] * len(first)

    def added(number: float, state: list[np.ndarray]) -> list[np.ndarray]:
        arguments = list(update.arguments)
        arguments[numbers[0]] = Argument(np.asarray(number, update.arguments[numbers[0]].value.dtype), False)
        return [new - old for new, old in zip(_after(update, arguments, state, everything), state, strict=True)]

    one, double = added(1.5, first), added(3.0, first)
    later = [old + new for old, new in zip(first, one, strict=True)]
    if not all(_near(a, np.abs(b).max(initial=0))(c) for a, b, c in zip(double, later, added(3.0, later), strict=True)):
        return Kind.WHOLE, [Kind.WHOLE] * len(first)
    is_average = any(a.any() and np.array_equal(a, b) for a, b in zip(one, double, strict=True))
    kinds = [_kind(not is_average, is_average, variable) for variable in metric.variables]
    return max(kinds, default=Kind.SUM), kinds


def _is_number(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0 and np.issubdtype(value.dtype, np.number)


def _kind(is_sum: bool, is_mean: bool, variable: keras.Variable) -> Kind:
    if is_sum:
        return Kind.SUM
    # An integer variable cannot hold an average of integers.
    return Kind.MEAN if is_mean and keras.backend.is_float_dtype(variable.dtype) else Kind.WHOLE


def _near(expected: np.ndarray, state: float) -> Callable[[np.ndarray], bool]:
    allowed = _RELATIVE * np.abs(expected).max(initial=0) + _OF_STATE * state + 1e-12
    return lambda value: bool(np.abs(value - expected).max(initial=0) <= allowed)


def _trials(update: Update, records: int) -> Iterator[tuple[list[Argument], list[Argument]]]:
    """Yield pairs of arguments, the program's as well as random ones, since a model's first predictions may all be
    equal."""
    draw = np.random.default_rng(0)
    invented = [_invented(update.arguments, records, draw, has_classes) for has_classes in (True, False)]
    if all(argument.is_known for argument in update.arguments):
        yield update.arguments, invented[0]
        yield update.arguments, _scaled(update.arguments, draw)
    yield invented[0], invented[1]
    yield invented[1], invented[0]


def _scaled(arguments: Sequence[Argument], draw: np.random.Generator) -> list[Argument]:
    """Return the program's arguments with changed floats, and with other types of numbers shuffled."""

    def scaled(value: np.ndarray) -> np.ndarray:
        if not np.issubdtype(value.dtype, np.floating):
            return draw.permutation(value)
        return (value * draw.uniform(0.5, 1.5, value.shape) + draw.normal(0, 0.1, value.shape)).astype(value.dtype)

    return [a._replace(value=scaled(a.value)) if a.has_records else a for a in arguments]


def _invented(
    arguments: Sequence[Argument], records: int, draw: np.random.Generator, has_classes: bool
) -> list[Argument]:
    """Return random arguments of the same shapes and types. By convention they are labels, predictions, and weights."""
    of_records = [place for place, argument in enumerate(arguments) if argument.has_records]
    widths = [arguments[place].value.shape[-1] if arguments[place].value.ndim > 1 else 1 for place in of_records]
    classes = max([2, *widths])

    def labels(value: np.ndarray) -> np.ndarray:
        is_float = np.issubdtype(value.dtype, np.floating)
        if not has_classes or not np.array_equal(value, np.round(value.astype(np.float64))):
            return draw.normal(0, 1, value.shape) if is_float else draw.permutation(value)
        if value.ndim > 1 and value.shape[-1] == classes > 2:
            return np.eye(classes)[draw.integers(0, classes, value.shape[:-1])]
        return draw.integers(0, classes, value.shape)

    def other(place: int, value: np.ndarray) -> np.ndarray:
        if value.dtype == bool:
            return draw.random(value.shape) < 0.5
        if place == of_records[0] and len(of_records) > 1:
            return labels(value)
        if not np.issubdtype(value.dtype, np.floating):
            return draw.integers(0, classes, value.shape)
        numbers = draw.uniform(0.02, 0.98, value.shape)
        return (
            numbers / numbers.sum(-1, keepdims=True)
            if value.ndim > 1 and value.shape[-1] > 1 and has_classes
            else numbers
        )

    return [
        a._replace(value=other(place, a.value).astype(a.value.dtype)) if a.has_records else a
        for place, a in enumerate(arguments)
    ]


def _argument(leaf: Any, records: int) -> Argument:
    if not keras.ops.is_tensor(leaf) and not isinstance(leaf, np.ndarray):
        return Argument(leaf, False)
    value, mask = _known_numbers(leaf), _keras.mask_of(leaf)
    is_number = np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.name == "bfloat16"
    has_records = is_number and value.ndim > 0 and value.shape[0] == records
    return Argument(value, has_records, None if mask is None else _known_numbers(mask), _is_known(leaf))


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or hasattr(leaf, "numpy")


def _known_numbers(leaf: Any) -> np.ndarray:
    """Return the numbers of a tensor. For a traced tensor, return ones of its shape, with 2 for unknown lengths."""
    if _is_known(leaf):
        return keras.ops.convert_to_numpy(leaf)
    return np.ones([2 if length is None else length for length in leaf.shape], leaf.dtype.as_numpy_dtype)


def _part(argument: Argument, rows: slice) -> Any:
    if not argument.has_records:
        return argument.value
    tensor = keras.ops.convert_to_tensor(argument.value[rows])
    if argument.mask is not None:
        interception.set_mask(tensor, keras.ops.convert_to_tensor(argument.mask[rows]))
    return tensor


def _state(metric: keras.metrics.Metric) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(variable), np.float64) for variable in metric.variables]


def _after(update: Update, arguments: Sequence[Argument], state: Sequence[np.ndarray], rows: slice) -> list[np.ndarray]:
    """Return a metric's state after an update with some of the records."""
    metric = update.metric
    args, kwargs = update.call(arguments, rows)
    before = [keras.ops.cast(value, v.dtype) for value, v in zip(state, metric.variables, strict=True)]
    after = [keras.ops.convert_to_numpy(value) for value in metric.stateless_update_state(before, *args, **kwargs)]
    if not all(np.isfinite(value).all() for value in after):
        raise FloatingPointError("the metric's state is not finite")
    return [np.asarray(value, np.float64) for value in after]
