"""Losses that layers add: which of them are sums over records, and their share in a shard.

Keras adds up all numbers of a tensor that a layer hands to `add_loss`. A number that is a mean over the batch, or that
depends on weights alone, is averaged over shards. A sum over records, such as a vector with a loss for each record, is
the sum of its shards' parts: each shard divides it by its own weight in that average.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf._keras import interception
from raytf.data import tree
from raytf.inference.user_model import takes_training
from raytf.training.model.traced_ops import ops_of

_NOTED = "_raytf_added"
#: How much a sum over twice as many records may differ from twice the sum: layers may draw random numbers.
_SLACK = 0.2


class Added(NamedTuple):
    """The losses that a call of the model added, one entry for each tensor.

    Attributes:
        sums: the sum of its numbers.
        has_rows: whether it has a row for each record.
        changed: whether the call changed a variable of the model, such as the state of a random generator.
    """

    sums: list[float]
    has_rows: list[bool]
    changed: bool


@contextlib.contextmanager
def divided(model: keras.Model, training: bool | None, records: int | None, part: tf.Tensor) -> Iterator[None]:
    """Divide the sums over records that layers add while the `with` statement lasts.

    Args:
        model: is called.
        training: as it is called; None where `note` cannot know.
        records: number of records in the shard; None where the graph does not know it.
        part: this shard's share in the step.
    """
    known, count = vars(model).get(_NOTED, {}).get(training), 0

    def change(loss: Any) -> Any:
        nonlocal count
        place, count = count, count + 1
        # A model that is called twice adds its losses twice.
        if not (known[place % len(known)] if known else loss.shape.rank and loss.shape[0] == records):
            return loss
        loss = loss if loss.dtype.is_floating else tf.cast(loss, keras.config.floatx())
        return loss / tf.cast(part, loss.dtype)

    with interception.changed_losses(change):
        yield


@contextlib.contextmanager
def collected() -> Iterator[list[Any]]:
    """Collect what layers add to the loss while the `with` statement lasts."""
    losses: list[Any] = []

    def change(loss: Any) -> Any:
        losses.append(loss)
        return loss

    with interception.changed_losses(change):
        yield losses


def note(model: keras.Model, x: Any) -> bool:
    """Find out which of the added losses are sums over records, and store it in the model.

    Args:
        model: built; it stays as it is.
        x: a few records.

    Returns:
        Whether the sums and means of two parts of these records make those of the whole.
    """
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(x)]
    records, calm = len(leaves[0]), measured(model, x, False)
    if not calm.sums:
        return True
    doubled = _with(x, [np.concatenate([leaf, leaf]) for leaf in leaves])
    modes = (False, True) if takes_training(model) else (False,)
    kinds = {training: _kinds(*(measured(model, data, training) for data in (x, doubled))) for training in modes}
    vars(model)[_NOTED] = {**kinds, True: kinds.get(True, kinds[False])}
    if calm.changed or calm != measured(model, x, False) or records < 2:
        return True  # random numbers differ from one number of records to another
    cut = max(1, records // 3)
    parts = [
        measured(model, _with(x, [leaf[rows] for leaf in leaves]), False) for rows in (slice(cut), slice(cut, None))
    ]
    shares = cut / records, 1 - cut / records
    for whole, is_sum, *each in zip(calm.sums, kinds[False], *(part.sums for part in parts), strict=True):
        expected = sum(each) if is_sum else shares[0] * each[0] + shares[1] * each[1]
        if abs(whole - expected) > 2e-3 * max(abs(whole), *map(abs, each)) + 1e-6:
            return _draws(model, x)
    return True


def _draws(model: keras.Model, x: Any) -> bool:
    """Return whether a call of the model draws random numbers, perhaps always the same ones for a number of records."""

    def call() -> Any:
        with keras.StatelessScope(collect_losses=True) as scope:
            output = model(x, training=False) if takes_training(model) else model(x)
            return output, scope.losses

    function = tf.function(call, autograph=False).get_concrete_function()
    return any("Random" in op.kind for op in ops_of(function))


def _kinds(once: Added, twice: Added) -> tuple[bool, ...]:
    """Return which losses are sums over records, from those of a batch and of the batch with each record twice."""
    kinds = []
    for one, two, has_rows in zip(once.sums, twice.sums, once.has_rows, strict=True):
        is_sum = abs(two - 2 * one) <= _SLACK * abs(one)
        is_mean = abs(two - one) <= _SLACK * abs(one)
        kinds.append(has_rows if is_sum == is_mean else is_sum)
    return tuple(kinds)


def measured(model: keras.Model, x: Any, training: bool) -> Added:
    """Return what a call of the model adds to the loss; the model stays as it is."""
    values = [(variable, variable.value) for variable in model.variables]
    with keras.StatelessScope(values, collect_losses=True) as scope, collected() as losses:
        before = [scope.get_current_value(variable) for variable, _ in values]
        model(x, training=training) if takes_training(model) else model(x)
    records = len(tree.flatten(x)[0][1])
    sums = [float(np.sum(keras.ops.convert_to_numpy(loss), dtype=np.float64)) for loss in losses]
    changed = any(scope.get_current_value(v) is not value for (v, _), value in zip(values, before, strict=True))
    return Added(sums, [bool(loss.shape.rank) and loss.shape[0] == records for loss in losses], changed)


def _with(x: Any, leaves: Sequence[np.ndarray]) -> Any:
    return tree.unflatten(x, [keras.ops.convert_to_tensor(leaf) for leaf in leaves])
