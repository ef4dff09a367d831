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
import tensorflow as tf

from raytf import _keras
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.inference import own_run
from raytf.inference.own_run import OwnScope, beginning
from raytf.training.model import added_losses, loss_division

_NOTED = "_raytf_sums"
#: Relative differences that rounding explains, of predictions of 32 bits and of 16.
RELATIVE, _OF_HALF = 2e-3, 2e-2
WARNING = (
    "WARNING: the loss looks at the whole batch ({}), and each logical shard computes it of its own records alone, so "
    "training differs from Keras's. --logical-shards 1 gives Keras's value."
)
#: With how many seeds a step that draws random numbers is tried.
_SEEDS = 4
#: By how many standard deviations two averages must differ.
_DEVIATIONS = 5.0


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


def _value(model: keras.Model, batch: tuple[Any, ...], rows: slice) -> Values:
    """Return the loss of some records of (x, y, sample_weight, predicted)."""
    x, y, weight, predicted = tree.map_leaves(lambda leaf: leaf[rows], batch)
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


# -- steps of the model's own ------------------------------------------------------------------------------------------
#
# The step is tried on a few records and on the same records twice, which changes neither a mean nor the statistics of
# BatchNormalization, but adds negatives to a contrastive loss. Where a step is a function of its records alone, two
# parts of them are tried as well.


def check_custom_step(model: keras.Model, batch: tuple[Any, Any, Any]) -> str:
    """Compare what a model's own step returns as its loss for a batch, for its parts, and for the batch twice.

    Args:
        model: built; it stays as it is.
        batch: (x, y, sample_weight) of a few records.

    Returns:
        A warning; empty if nothing speaks against cutting the loss into shards.
    """
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(batch)]
    records = len(leaves[0])
    if records < 2 or len({len(leaf) for leaf in leaves}) > 1:
        return ""
    trial = _Trial(model, batch, leaves)
    once, twice = trial(leaves), trial([np.concatenate([leaf, leaf]) for leaf in leaves])
    spread = max(np.std(once), np.std(twice))
    allowed = RELATIVE * max(abs(np.mean(once)), abs(np.mean(twice))) + 1e-6
    if not np.isfinite([spread, allowed]).all():
        return ""
    if abs(np.mean(twice) - np.mean(once)) > allowed + _DEVIATIONS * spread:
        text = f"{np.mean(once):.4g} for {records} records, {np.mean(twice):.4g} for the same records twice"
        return WARNING.format(text)
    if trial.changes or spread:
        return ""
    cut = max(1, records // 3)
    parts = [float(np.mean(trial([leaf[rows] for leaf in leaves]))) for rows in (slice(cut), slice(cut, None))]
    average = (cut * parts[0] + (records - cut) * parts[1]) / records
    if abs(once[0] - average) <= RELATIVE * max(abs(once[0]), *map(abs, parts)) + 1e-6:
        return ""
    return WARNING.format(f"{once[0]:.4g} for {records} records, {average:.4g} for two parts of them")


class _Trial:
    """A model's own step as a function of its records, without its updates.

    Attributes:
        changes: whether the step changes states of the model, such as the statistics of BatchNormalization.
    """

    def __init__(self, model: keras.Model, batch: tuple[Any, Any, Any], leaves: Sequence[np.ndarray]):
        self.changes = False
        parts = own_run.parts_of(model, variables.seed_states(model))
        metrics = [keras.ops.convert_to_numpy(variable) for variable in parts.metrics]
        self._shape = (len(parts.seeds), 2)

        def run(records: list[tf.Tensor], seeds: tf.Tensor) -> tf.Tensor:
            scope = OwnScope(beginning(parts.seeds, seeds, parts.metrics, metrics))
            data = own_run.data_of(tree.unflatten(batch, records))
            arguments = model.train_step, data, seeds[-1], scope, parts.trainable
            logs = own_run.run(*arguments, lambda *update: None)
            states = {id(variable) for variable in parts.states}
            self.changes = any(place in states for place in scope.changed)
            return own_run.loss_of(logs)

        specs = [tf.TensorSpec([None, *leaf.shape[1:]], tf.as_dtype(leaf.dtype)) for leaf in leaves]
        seeds = tf.TensorSpec(self._shape, tf.int32)
        self._run = tf.function(run, autograph=False, input_signature=[specs, seeds])

    def __call__(self, leaves: Sequence[np.ndarray]) -> list[float]:
        """Return the step's loss for some records, with each seed."""
        draw = np.random.default_rng(0)
        drawn = [draw.integers(0, 2**31 - 1, self._shape).astype(np.int32) for _ in range(_SEEDS)]
        return [float(self._run([tf.constant(leaf) for leaf in leaves], seeds)) for seeds in drawn]
