"""Decide, by what a metric does, how its value for a batch follows from its values for the shards of the batch.

Each update of a metric is tried on a few records: as a whole and in two parts, and from two different states. Most
metrics add a sum over records to their variables, so the sums of the shards can be added. A function that returns one
mean for the batch adds that mean, so the shards' numbers are averaged. Every other metric (a maximum, an F1 score of
each batch) needs the whole batch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from raytf import _keras
from raytf._keras import updates

#: How much a sum over records may differ from the sum of its parts, relative to the largest number in it.
_RELATIVE = 1e-4
#: The same for the difference of two states, relative to the largest number in the states.
_OF_STATE = 1e-5


class Kind(enum.IntEnum):
    """How a metric's value for a batch follows from its shards; if its updates differ, the largest kind counts."""

    SUM = 0
    MEAN = 1
    WHOLE = 2


class Argument(NamedTuple):
    """One argument of an update.

    Attributes:
        value: a number for each record and place, or the argument itself where it is not a tensor.
        has_records: whether its first dimension is that of the records.
        mask: the mask that a layer has put on it, or None.
        is_known: whether these are the program's numbers; while a step is traced only shape and type are known.
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
        update: what the program's metric was called with.
        records: how many records it was called with; of one, nothing can be said, and every metric is a sum.
    """
    if not any(argument.has_records for argument in update.arguments):
        return _of_numbers(update)
    metric, cut = update.metric, max(1, records // 3)
    shares = cut / records, 1 - cut / records
    sums, means = np.ones(len(metric.variables), bool), np.ones(len(metric.variables), bool)
    everything = slice(None)
    for arguments, others in _trials(update, records) if records > 1 else ():
        first = _state(metric)
        try:
            whole = _after(update, arguments, first, everything)
            later = _after(update, others, whole, everything)
            again = _after(update, arguments, later, everything)
            parts = [_after(update, arguments, first, rows) for rows in (slice(0, cut), slice(cut, None))]
        except Exception:  # a metric need not take numbers that its program does not have
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
    """As `kind_of`, for an update with numbers of the batch alone, such as the loss.

    A metric that counts its updates averages such numbers over the batches. If it does not count them, or if it also
    gets a weight, the number may well be a sum over records.
    """
    metric, given = update.metric, [place for place, a in enumerate(update.arguments) if _is_number(a.value)]
    everything, first = slice(None), _state(metric)
    if len(given) != 1:
        return Kind.SUM, [Kind.SUM] * len(first)

    def added(number: float, state: list[np.ndarray]) -> list[np.ndarray]:
        arguments = list(update.arguments)
        arguments[given[0]] = Argument(np.asarray(number, update.arguments[given[0]].value.dtype), False)
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
    # An average of whole numbers cannot be kept in an integer.
    return Kind.MEAN if is_mean and keras.backend.is_float_dtype(variable.dtype) else Kind.WHOLE


def _near(expected: np.ndarray, state: float) -> Callable[[np.ndarray], bool]:
    allowed = _RELATIVE * np.abs(expected).max(initial=0) + _OF_STATE * state + 1e-12
    return lambda found: bool(np.abs(found - expected).max(initial=0) <= allowed)


def _trials(update: Update, records: int) -> Iterator[tuple[list[Argument], list[Argument]]]:
    """Return pairs of arguments: those of the program, and others of their kind, since a model's first predictions may
    be all alike."""
    draw = np.random.default_rng(0)
    invented = [_invented(update.arguments, records, draw, has_classes) for has_classes in (True, False)]
    if all(argument.is_known for argument in update.arguments):
        yield update.arguments, invented[0]
        yield update.arguments, _scaled(update.arguments, draw)
    yield invented[0], invented[1]
    yield invented[1], invented[0]


def _scaled(arguments: Sequence[Argument], draw: np.random.Generator) -> list[Argument]:
    """Return the program's arguments with other numbers in place of its floats."""

    def scaled(value: np.ndarray) -> np.ndarray:
        if not np.issubdtype(value.dtype, np.floating):
            return draw.permutation(value)
        return (value * draw.uniform(0.5, 1.5, value.shape) + draw.normal(0, 0.1, value.shape)).astype(value.dtype)

    return [a._replace(value=scaled(a.value)) if a.has_records else a for a in arguments]


def _invented(
    arguments: Sequence[Argument], records: int, draw: np.random.Generator, has_classes: bool
) -> list[Argument]:
    """Return random arguments: by convention labels, predictions, and weights.

    Args:
        arguments: whose shapes and types they have.
        records: how many.
        draw: the generator.
        has_classes: whether labels are classes, where they may be.
    """
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
        found = draw.uniform(0.02, 0.98, value.shape)
        return found / found.sum(-1, keepdims=True) if value.ndim > 1 and value.shape[-1] > 1 and has_classes else found

    return [
        a._replace(value=other(place, a.value).astype(a.value.dtype)) if a.has_records else a
        for place, a in enumerate(arguments)
    ]


def _argument(leaf: Any, records: int) -> Argument:
    if not keras.ops.is_tensor(leaf) and not isinstance(leaf, np.ndarray):
        return Argument(leaf, False)
    value, mask = _numbers(leaf), _keras.mask_of(leaf)
    is_number = np.issubdtype(value.dtype, np.number) or value.dtype == bool or value.dtype.name == "bfloat16"
    has_records = is_number and value.ndim > 0 and value.shape[0] == records
    return Argument(value, has_records, None if mask is None else _numbers(mask), _is_known(leaf))


def _is_known(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or hasattr(leaf, "numpy")


def _numbers(leaf: Any) -> np.ndarray:
    """Return the numbers of a tensor; of a traced one, as many, with 2 for lengths that are not known."""
    if _is_known(leaf):
        return keras.ops.convert_to_numpy(leaf)
    return np.ones([2 if length is None else length for length in leaf.shape], leaf.dtype.as_numpy_dtype)


def _part(argument: Argument, rows: slice) -> Any:
    if not argument.has_records:
        return argument.value
    tensor = keras.ops.convert_to_tensor(argument.value[rows])
    if argument.mask is not None:
        updates.set_mask(tensor, keras.ops.convert_to_tensor(argument.mask[rows]))
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
