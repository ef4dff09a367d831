"""The relation between the loss of a batch and the losses of its shards.

A step cuts its batch into logical shards and averages their losses, which gives Keras's value if a loss is a mean over
records. Other losses are recognized when the model is built: sums over records, losses that are divided by a number
from the data, and losses of the whole batch, such as Dice or a contrastive loss. The user is warned of the last kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras, _tensorflow
from raytf._keras import interception
from raytf.checkpoint import variables
from raytf.data import tree
from raytf.inference import own_run
from raytf.inference.own_run import OwnScope, beginning
from raytf.inference.user_model import takes_training
from raytf.training.model.notes import notes_of

#: Relative differences that rounding explains, for predictions of 32 bits and of 16 bits.
RELATIVE, _OF_HALF = 2e-3, 2e-2
WARNING = (
    "WARNING: the loss looks at the whole batch ({}), but each logical shard computes it from its own records only, so "
    "training differs from Keras's. --logical-shards 1 gives Keras's value."
)
#: Number of seeds with which a step that draws random numbers is tried.
_SEEDS = 4
#: Two averages differ if they are more than this many standard deviations apart.
_DEVIATIONS = 5.0
#: How much a sum over twice as many records may differ from twice the sum: layers may draw random numbers.
_SLACK = 0.2
#: (loss, y_true, y_pred, sample_weight) -> value of the loss.
_Call = Callable[[Any, Any, Any, Any], Any]


def check(model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, is_own: bool, adds: bool) -> str:
    """Compare the loss of a batch with the losses of its parts, and note whether it is a sum over records.

    Args:
        model: a built model, which is not changed.
        batch: tensors (x, y, sample_weight) of a few records.
        predicted: the model's output.
        is_own: whether `compute_loss` is the program's own.
        adds: whether layers add losses.

    Returns:
        A warning; empty if the loss can be cut into shards.
    """
    records = len(tree.flatten(batch[0])[0][1])
    if adds and not _note_added(model, batch[0]):
        return WARNING.format("a layer's add_loss does")
    has_loss = is_own or _keras.compiled_loss(model) is not None
    if records < 2 or not has_loss or notes_of(model).divided:
        return ""
    difference = _differs(model, batch, predicted, not is_own, records)
    return WARNING.format(difference) if difference else ""


def two_parts(records: int) -> tuple[tuple[slice, slice], tuple[float, float]]:
    """Return the rows of two parts of some records, and the share of each part."""
    cut = max(1, records // 3)
    return (slice(cut), slice(cut, None)), (cut / records, 1 - cut / records)


def _differs(model: keras.Model, batch: tuple[Any, Any, Any], predicted: Any, may_sum: bool, records: int) -> str:
    """Return a text with the loss of the whole batch and the loss from its parts; empty if they are equal."""
    cuts, shares = two_parts(records)
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(predicted)]
    is_wide = all(leaf.dtype in (np.float32, np.float64) for leaf in leaves)
    is_sum = may_sum
    for outputs in _trials(predicted, leaves):
        (whole, changed), again = (_value(model, (*batch, outputs), slice(None)) for _ in range(2))
        one, other = (_value(model, (*batch, outputs), rows)[0] for rows in cuts)
        numbers = [whole, one, other]
        if changed or (whole, changed) != again or not np.isfinite(numbers).all():  # it may draw random numbers
            continue
        allowed = (RELATIVE if is_wide else _OF_HALF) * max(map(abs, numbers)) + 1e-6
        average = shares[0] * one + shares[1] * other
        is_mean = abs(whole - average) <= allowed
        is_sum &= not is_mean and abs(whole - one - other) <= allowed
        if not is_mean and not is_sum:
            return f"{whole:.4g} for {records} records, {average:.4g} for two parts of them"
    notes_of(model).is_sum = is_sum
    return ""


def _trials(predicted: Any, leaves: Sequence[np.ndarray]) -> list[Any]:
    """Return the predictions, and changed ones, since a model's first predictions may all be equal."""
    draw = np.random.default_rng(0)

    def other(leaf: np.ndarray) -> np.ndarray:
        return (leaf * draw.uniform(0.7, 1.3, leaf.shape)).astype(leaf.dtype)

    return [predicted, tree.unflatten(predicted, [keras.ops.convert_to_tensor(other(leaf)) for leaf in leaves])]


def _value(model: keras.Model, batch: tuple[Any, ...], rows: slice) -> tuple[float, bool]:
    """Return the loss of some rows of a batch (x, y, sample_weight, predicted), without the part that depends only on
    weights. Also return whether computing it changed the model."""
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
    if loss.ndim:  # with reduction=None, Keras shows the mean
        total /= loss.size
    return total - beside, changed


# -- steps of the model's own ------------------------------------------------------------------------------------------
#
# The step is tried on a few records and on the same records twice, which changes neither a mean nor the statistics of
# BatchNormalization, but adds negatives to a contrastive loss. If a step is a function of its records alone, two parts
# of the records are tried as well.


def check_custom_step(model: keras.Model, batch: tuple[Any, Any, Any]) -> str:
    """Compare the losses that a model's own step returns for a batch, for its parts, and for the batch repeated.

    Args:
        model: a built model, which is not changed.
        batch: (x, y, sample_weight) of a few records.

    Returns:
        A warning; empty if no difference was found that keeps the loss from being cut into shards.
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
    cuts, shares = two_parts(records)
    parts = [float(np.mean(trial([leaf[rows] for leaf in leaves]))) for rows in cuts]
    average = shares[0] * parts[0] + shares[1] * parts[1]
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
        """Return the step's loss for some records, once for each seed."""
        draw = np.random.default_rng(0)
        drawn = [draw.integers(0, 2**31 - 1, self._shape).astype(np.int32) for _ in range(_SEEDS)]
        return [float(self._run([tf.constant(leaf) for leaf in leaves], seeds)) for seeds in drawn]


# -- losses that layers add --------------------------------------------------------------------------------------------
#
# Keras adds up all numbers of a tensor that a layer passes to `add_loss`. A number that is a mean over the batch, or
# that depends on weights alone, is averaged over shards. A sum over records, such as a vector with a loss for each
# record, is the sum of its shards' parts: each shard divides it by its own weight in that average.


class _Added(NamedTuple):
    """The losses that a call of the model added, one entry for each tensor.

    Attributes:
        sums: the sum of a tensor's numbers.
        has_rows: whether a tensor has a row for each record.
        changed: whether the call changed a variable of the model, such as the state of a random generator.
    """

    sums: list[float]
    has_rows: list[bool]
    changed: bool


@contextlib.contextmanager
def added_divided(model: keras.Model, training: bool | None, records: int | None, part: tf.Tensor) -> Iterator[None]:
    """Divide the sums over records that layers add while the `with` statement lasts.

    Args:
        model: the model that is called.
        training: the argument of the call; None for the model's own step, which may call the model either way.
        records: number of records in the shard; None if the graph does not know it.
        part: this shard's share of the step.
    """
    known, count = notes_of(model).added.get(training) if training is not None else None, 0

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
def added() -> Iterator[list[Any]]:
    """Collect what layers add to the loss while the `with` statement lasts."""
    losses: list[Any] = []

    def change(loss: Any) -> Any:
        losses.append(loss)
        return loss

    with interception.changed_losses(change):
        yield losses


def _note_added(model: keras.Model, x: Any) -> bool:
    """Find out which of the added losses are sums over records, and store it in the model.

    Returns:
        False if the losses of two parts of the records do not combine to the losses of all records.
    """
    leaves = [np.asarray(leaf) for _, leaf in tree.flatten(x)]
    records, calm = len(leaves[0]), _measured(model, x, False)
    if not calm.sums:
        return True
    doubled = _with(x, [np.concatenate([leaf, leaf]) for leaf in leaves])
    modes = (False, True) if takes_training(model) else (False,)
    kinds = {training: _kinds(*(_measured(model, data, training) for data in (x, doubled))) for training in modes}
    notes_of(model).added = {**kinds, True: kinds.get(True, kinds[False])}
    if calm.changed or calm != _measured(model, x, False) or records < 2:
        return True  # random numbers differ from one number of records to another
    cuts, shares = two_parts(records)
    parts = [_measured(model, _with(x, [leaf[rows] for leaf in leaves]), False) for rows in cuts]
    for whole, is_sum, *each in zip(calm.sums, kinds[False], *(part.sums for part in parts), strict=True):
        expected = sum(each) if is_sum else shares[0] * each[0] + shares[1] * each[1]
        if abs(whole - expected) > 2e-3 * max(abs(whole), *map(abs, each)) + 1e-6:
            return _draws(model, x)
    return True


def _draws(model: keras.Model, x: Any) -> bool:
    """Return whether a call of the model draws random numbers, even if they depend only on the number of records."""

    def call() -> Any:
        with keras.StatelessScope(collect_losses=True) as scope:
            output = model(x, training=False) if takes_training(model) else model(x)
            return output, scope.losses

    function = tf.function(call, autograph=False).get_concrete_function()
    return any("Random" in op.kind for op in _tensorflow.ops_of(function))


def _kinds(once: _Added, twice: _Added) -> tuple[bool, ...]:
    """Return which losses are sums over records, given the losses of a batch and of the batch repeated."""
    kinds = []
    for one, two, has_rows in zip(once.sums, twice.sums, once.has_rows, strict=True):
        is_sum = abs(two - 2 * one) <= _SLACK * abs(one)
        is_mean = abs(two - one) <= _SLACK * abs(one)
        kinds.append(has_rows if is_sum == is_mean else is_sum)
    return tuple(kinds)


def _measured(model: keras.Model, x: Any, training: bool) -> _Added:
    """Return the losses that a call of the model adds, without changing the model."""
    values = [(variable, variable.value) for variable in model.variables]
    with keras.StatelessScope(values, collect_losses=True) as scope, added() as losses:
        before = [scope.get_current_value(variable) for variable, _ in values]
        model(x, training=training) if takes_training(model) else model(x)
    records = len(tree.flatten(x)[0][1])
    sums = [float(np.sum(keras.ops.convert_to_numpy(loss), dtype=np.float64)) for loss in losses]
    changed = any(scope.get_current_value(v) is not value for (v, _), value in zip(values, before, strict=True))
    return _Added(sums, [bool(loss.shape.rank) and loss.shape[0] == records for loss in losses], changed)


def _with(x: Any, leaves: Sequence[np.ndarray]) -> Any:
    return tree.unflatten(x, [keras.ops.convert_to_tensor(leaf) for leaf in leaves])


# -- losses that are divided by data -----------------------------------------------------------------------------------
#
# Masked losses and losses with reduction="mean_with_sample_weight" are sums over the batch, divided by a number that
# depends on the whole batch: the number of entries that count, or the sum of their weights. Each step first adds up the
# divisors of all shards. It then multiplies each shard's loss by a factor that makes the mean over shards equal the
# loss of the batch.


@contextlib.contextmanager
def measured_divisors(model: keras.Model) -> Iterator[list[tf.Tensor | None]]:
    """Record the divisors of the compiled losses that are called in this context, in their order.

    Yields:
        A list that collects the divisors, with None for a loss whose divisor does not come from the data.
    """
    divisors: list[tf.Tensor | None] = []

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        divisors.append(_divisor(loss, y_true, y_pred, sample_weight))
        return loss(y_true, y_pred, sample_weight)

    with _replaced(model, [call] * count(model)):
        yield divisors


@contextlib.contextmanager
def scaled(model: keras.Model, divided: Sequence[int], factors: tf.Tensor) -> Iterator[None]:
    """Multiply some of the compiled losses by factors in this context.

    Args:
        divided: indices of these losses.
        factors: one factor for each of these losses, [n].
    """
    calls: list[_Call | None] = [None] * count(model)
    for i, place in enumerate(divided):
        calls[place] = _times(factors[i])
    with _replaced(model, calls):
        yield


@contextlib.contextmanager
def divided_by(model: keras.Model, part: tf.Tensor) -> Iterator[list[Any]]:
    """Divide the compiled losses by a number in this context.

    Yields:
        A list that collects the losses that are called: the model's own `compute_loss` may call none.
    """
    called: list[Any] = []

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        called.append(loss)
        value = loss(y_true, y_pred, sample_weight)
        return value / tf.cast(part, value.dtype)

    with _replaced(model, [call] * count(model)):
        yield called


def note_divisors(model: keras.Model, divisors: list[tf.Tensor | None]) -> None:
    """Note which losses `measured_divisors` found to be divided by data, for steps that are built later."""
    divided = tuple(i for i, divisor in enumerate(divisors) if divisor is not None)
    notes_of(model).divided = divided if len(divisors) == count(model) else ()


def factors(own: tf.Tensor, all_of_them: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Return the factors by which the shards' losses are multiplied, [L, n].

    Args:
        own: divisors of these shards, [L, n].
        all_of_them: divisors summed over all shards, [n].
        weights: the weight of each shard in the mean over shards, [L] or a scalar.
    """
    weights = tf.reshape(tf.cast(weights, own.dtype), [-1, 1])
    return tf.math.divide_no_nan(tf.math.divide_no_nan(own, all_of_them[None]), weights)


def _divisor(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor | None:
    """Return the divisor in Keras's `Loss.__call__`, up to a factor that is the same for all shards. None if it does
    not come from the data."""
    if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
        return None
    is_weighted = loss.reduction == "mean_with_sample_weight"
    if not is_weighted and loss.reduction not in ("sum_over_batch_size", "mean"):
        return None

    def converted(y: Any) -> Any:  # a loss may have the targets of several outputs
        return keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf, loss.dtype), y)

    masks = _keras.mask_of(y_pred), _keras.mask_of(loss.call(converted(y_true), converted(y_pred)))
    known = [mask for mask in masks if mask is not None]
    mask = known[0] & known[1] if len(known) == 2 else known[0] if known else None
    if not is_weighted:
        return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
    weight = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, loss.dtype)
    weight = _keras.masked_weight(weight, mask, loss.dtype, loss.reduction)
    if weight is None:  # still a divisor from the data: another source of the same run may have weights
        return tf.cast(tf.shape(keras.tree.flatten(y_pred)[0])[0], tf.float32)
    return tf.cast(tf.reduce_sum(weight), tf.float32)


def _times(factor: tf.Tensor) -> _Call:
    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        value = loss(y_true, y_pred, sample_weight)
        return value * tf.cast(factor, value.dtype)

    return call


def count(model: keras.Model) -> int:
    """Return the number of compiled losses, once Keras has built its list of them."""
    return len(_keras.losses_of(_keras.compiled_loss(model)))


@contextlib.contextmanager
def _replaced(model: keras.Model, calls: Sequence[_Call | None]) -> Iterator[None]:
    """Replace the compiled losses with these calls in this context; None leaves a loss unchanged."""
    compiled = _keras.compiled_loss(model)
    if not calls or compiled is None:
        yield
        return

    def through(entry: Any, call: _Call | None) -> Any:
        if call is None:
            return entry
        return entry._replace(loss=lambda y, p, w=None, loss=entry.loss: call(loss, y, p, w))

    own = _keras.losses_of(compiled)
    with _keras.with_losses(compiled, [through(entry, call) for entry, call in zip(own, calls, strict=True)]):
        yield
