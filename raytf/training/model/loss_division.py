"""Losses that are divided by a number from the data: masked losses, and reduction="mean_with_sample_weight".

Such a loss is a sum over the batch divided by a number that depends on the whole batch: how many of its entries count,
or the sum of their weights. A shard knows only its own part of that divisor. So if a model has such losses, each step
first adds up the divisors of all shards, and multiplies each shard's loss by a factor with which the mean over shards
equals the loss of the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from raytf import _keras

#: (loss, y_true, y_pred, sample_weight) -> value of the loss.
_Call = Callable[[Any, Any, Any, Any], Any]


@contextlib.contextmanager
def measured(model: keras.Model) -> Iterator[list[tf.Tensor | None]]:
    """Record the divisors of the compiled losses that are called in this context, in their order.

    Returns:
        A list that is filled with them; None for a loss whose divisor does not come from the data.
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
        factors: [n] one for each of them.
    """
    calls: list[_Call | None] = [None] * count(model)
    for i, place in enumerate(divided):
        calls[place] = _times(factors[i])
    with _replaced(model, calls):
        yield


@contextlib.contextmanager
def divided_by(model: keras.Model, part: tf.Tensor) -> Iterator[list[Any]]:
    """Have the compiled losses be divided by a number.

    Returns:
        The losses that have been called: a `compute_loss` of the model's own need not call any.
    """
    called: list[Any] = []

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        called.append(loss)
        value = loss(y_true, y_pred, sample_weight)
        return value / tf.cast(part, value.dtype)

    with _replaced(model, [call] * count(model)):
        yield called


def places(model: keras.Model) -> tuple[int, ...]:
    """Return the indices of the compiled losses that are divided by data, as `note` has stored them."""
    return vars(model).get("_raytf_divided", ())


def note(model: keras.Model, divisors: list[tf.Tensor | None]) -> None:
    """Store in the model which losses `measured` found to be divided by data, for the steps that are made later."""
    divided = tuple(i for i, divisor in enumerate(divisors) if divisor is not None)
    vars(model)["_raytf_divided"] = divided if len(divisors) == count(model) else ()


def factors(own: tf.Tensor, all_of_them: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Return [L, n] the factors by which the shards' losses are multiplied.

    Args:
        own: [L, n] divisors of these shards.
        all_of_them: [n] divisors summed over all shards.
        weights: [L] or a scalar, the weight of each shard in the mean over shards.
    """
    weights = tf.reshape(tf.cast(weights, own.dtype), [-1, 1])
    return tf.math.divide_no_nan(tf.math.divide_no_nan(own, all_of_them[None]), weights)


def _divisor(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor | None:
    """Return the divisor in Keras's `Loss.__call__`, up to a factor that is the same for all shards.

    Returns:
        None if it does not come from the data.
    """
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
    """Number of compiled losses, once Keras has built its list of them."""
    return len(_keras.losses_of(_keras.compiled_loss(model)))


@contextlib.contextmanager
def _replaced(model: keras.Model, calls: Sequence[_Call | None]) -> Iterator[None]:
    """Replace the compiled losses by these calls in this context; None leaves a loss unchanged."""
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
