"""Losses that are divided by what is in the data: masked ones, and reduction="mean_with_sample_weight".

Such a loss is the sum over a batch by a number that only the whole batch tells: how many of its entries count, or what
they weigh. A shard knows its own part of that alone. So where a model has such losses, a step adds up the parts first,
and each shard's loss is multiplied by what makes the mean over shards that of the global batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from raytf import _keras

#: (loss, y_true, y_pred, sample_weight): its value.
_Call = Callable[[Any, Any, Any, Any], Any]


@contextlib.contextmanager
def measured(model: keras.Model) -> Iterator[list[tf.Tensor | None]]:
    """Have the compiled losses tell by what they are divided, in their order.

    Returns:
        None for a number that is not data.
    """
    found: list[tf.Tensor | None] = []

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        found.append(_divisor(loss, y_true, y_pred, sample_weight))
        return loss(y_true, y_pred, sample_weight)

    with _replaced(model, [call] * count(model)):
        yield found


@contextlib.contextmanager
def scaled(model: keras.Model, divided: Sequence[int], factors: tf.Tensor) -> Iterator[None]:
    """Have some of the compiled losses be multiplied.

    Args:
        divided: their places.
        factors: one for each.
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
        Those that have been called, which a `compute_loss` of the model's own need not do.
    """
    called: list[Any] = []

    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        called.append(loss)
        value = loss(y_true, y_pred, sample_weight)
        return value / tf.cast(part, value.dtype)

    with _replaced(model, [call] * count(model)):
        yield called


def places(model: keras.Model) -> tuple[int, ...]:
    """Which of the compiled losses are divided by data, as `note` has found them."""
    return vars(model).get("_raytf_divided", ())


def note(model: keras.Model, found: list[tf.Tensor | None]) -> None:
    """Keep what `measured` told, for steps that are to be made."""
    divided = tuple(i for i, divisor in enumerate(found) if divisor is not None)
    vars(model)["_raytf_divided"] = divided if len(found) == count(model) else ()


def factors(own: tf.Tensor, all_of_them: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """[L, n] by what shards' losses are multiplied.

    Args:
        own: [L, n] divisors of these shards.
        all_of_them: [n] added over all shards.
        weights: [L] or a scalar, of each shard in the mean over shards.
    """
    weights = tf.reshape(tf.cast(weights, own.dtype), [-1, 1])
    return tf.math.divide_no_nan(tf.math.divide_no_nan(own, all_of_them[None]), weights)


def _divisor(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> tf.Tensor | None:
    """By what Keras's `Loss.__call__` divides the sum, but for a factor that is equal for all shards."""
    if not isinstance(loss, keras.losses.Loss) or type(loss).__call__ is not keras.losses.Loss.__call__:
        return None
    is_weighted = loss.reduction == "mean_with_sample_weight"
    if not is_weighted and loss.reduction not in ("sum_over_batch_size", "mean"):
        return None
    converted = [keras.ops.convert_to_tensor(y, loss.dtype) for y in (y_true, y_pred)]
    masks = _keras.mask_of(y_pred), _keras.mask_of(loss.call(*converted))
    known = [mask for mask in masks if mask is not None]
    mask = known[0] & known[1] if len(known) == 2 else known[0] if known else None
    if not is_weighted:
        return None if mask is None else tf.reduce_sum(tf.cast(mask, tf.float32))
    weight = None if sample_weight is None else keras.ops.convert_to_tensor(sample_weight, loss.dtype)
    weight = _keras.masked_weight(weight, mask, loss.dtype, loss.reduction)
    if weight is None:  # another source of the same run may have weights
        return tf.cast(tf.shape(y_pred)[0], tf.float32)
    return tf.cast(tf.reduce_sum(weight), tf.float32)


def _times(factor: tf.Tensor) -> _Call:
    def call(loss: Any, y_true: Any, y_pred: Any, sample_weight: Any) -> Any:
        value = loss(y_true, y_pred, sample_weight)
        return value * tf.cast(factor, value.dtype)

    return call


def count(model: keras.Model) -> int:
    """How many compiled losses there are, once Keras has made their list."""
    return len(_keras.losses_of(_keras.compiled_loss(model)))


@contextlib.contextmanager
def _replaced(model: keras.Model, calls: Sequence[_Call | None]) -> Iterator[None]:
    """Call the compiled losses through these, in what is traced meanwhile."""
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
