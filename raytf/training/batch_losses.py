"""Find losses of the whole batch before the first step, such as Dice, or a contrastive loss with negatives of it.

A step cuts its batch into logical shards and combines their losses. The result is Keras's where the loss is a mean or a
sum over records. Here the loss of some records is compared with those of two parts of them, given the model's
predictions, so layers that look at the batch themselves, such as BatchNormalization, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from raytf import _keras
from raytf.data import tree
from raytf.training import added_losses, loss_division

_NOTED = "_raytf_sums"
#: Relative differences that rounding explains, of predictions of 32 bits and of 16.
RELATIVE, _OF_HALF = 2e-3, 2e-2
WARNING = (
    "WARNING: the loss looks at the whole batch ({}), and each logical shard computes it of its own records alone, so "
    "training differs from Keras's. --logical-shards 1 gives Keras's value."
)


class Values(NamedTuple):
    """A loss of some records.

    Attributes:
        loss: what `compute_loss` returned, without `beside`.
        beside: the part of it that depends on weights alone.
        changed: whether computing it changed the model.
    """

    loss: float
    beside: float
    changed: bool


def sums(model: keras.Model) -> bool:
    """Return whether `check` has found the model's loss to be a sum over records."""
    return vars(model).get(_NOTED, False)


def check(model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, is_own: bool, adds: bool) -> str:
    """Compare the loss of a batch with the losses of its parts, and note whether it is a sum over records.

    Args:
        model: built; it stays as it is.
        batch: (x, y, sample_weight) of a few records, tensors.
        predicted: the model's output.
        is_own: whether `compute_loss` is the program's own.
        adds: whether layers add losses.

    Returns:
        A warning; empty if the loss can be cut into shards.
    """
    records = len(tree.flatten(batch[0])[0][1])
    if adds and not added_losses.note(model, batch[0]):
        return WARNING.format("a layer's add_loss does")
    has_loss = is_own or _keras.compiled_loss(model) is not None
    if records < 2 or not has_loss or loss_division.places(model):
        return ""
    difference = _differs(model, batch, predicted, not is_own, records)
    return WARNING.format(difference) if difference else ""


def _differs(model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, may_sum: bool, records: int) -> str:
    """Return the loss of the whole batch and what its parts make, as a text; empty if they are equal."""
    cut = max(1, records // 3)
    shares = cut / records, 1 - cut / records
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(predicted)]
    is_wide = all(leaf.dtype in (np.float32, np.float64) for leaf in leaves)
    is_sum = may_sum
    for outputs in _trials(predicted, leaves):
        whole, again = (_value(model, (*batch, outputs), slice(None)) for _ in range(2))
        parts = [_value(model, (*batch, outputs), rows) for rows in (slice(cut), slice(cut, None))]
        numbers = [whole.loss, *(part.loss for part in parts)]
        if whole.changed or whole != again or not np.isfinite(numbers).all():  # it draws random numbers, for example
            continue
        allowed = (RELATIVE if is_wide else _OF_HALF) * max(map(abs, numbers)) + 1e-6
        average = shares[0] * parts[0].loss + shares[1] * parts[1].loss
        is_mean = abs(whole.loss - average) <= allowed
        is_sum &= not is_mean and abs(whole.loss - parts[0].loss - parts[1].loss) <= allowed
        if not is_mean and not is_sum:
            return f"{whole.loss:.4g} for {records} records, {average:.4g} for two parts of them"
    vars(model)[_NOTED] = is_sum
    return ""


def _trials(predicted: Any, leaves: Sequence[np.ndarray]) -> list[Any]:
    """Return the predictions, and others: a model's first ones may be all alike."""
    draw = np.random.default_rng(0)

    def other(leaf: np.ndarray) -> np.ndarray:
        return (leaf * draw.uniform(0.7, 1.3, leaf.shape)).astype(leaf.dtype)

    return [predicted, tree.unflatten(predicted, [keras.ops.convert_to_tensor(other(leaf)) for leaf in leaves])]


def _value(model: keras.Model, given: tuple[Any, ...], rows: slice) -> Values:
    """Return the loss of some records of (x, y, sample_weight, predicted)."""
    x, y, weight, predicted = tree.map_leaves(lambda leaf: leaf[rows], given)
    variables = [(variable, variable.value) for variable in model.variables]
    with keras.StatelessScope(variables, collect_losses=True) as scope:
        before = [scope.get_current_value(variable) for variable, _ in variables]
        beside = sum((float(keras.ops.sum(loss)) for loss in model.losses), 0.0)
        loss = np.asarray(keras.ops.convert_to_numpy(_keras.compute_loss(model, x, y, predicted, weight, True)))
    ignored = {id(v) for v in model.metrics_variables}
    pairs = [(v, value) for (v, _), value in zip(variables, before, strict=True) if id(v) not in ignored]
    changed = any(scope.get_current_value(v) is not value for v, value in pairs)
    total = float(np.sum(loss, dtype=np.float64))
    if loss.ndim:  # of reduction=None, of which the mean is shown
        total /= loss.size
    return Values(total - beside, beside, changed)
