"""Converts weights of classes to weights of records, by the rules of `keras.Model.fit`."""

from __future__ import annotations

from typing import Any

import numpy as np

from raytf.data.sources.base import Spec
from raytf.errors import DataError


def checked(class_weight: Any) -> dict[int, float] | None:
    """Return the argument `class_weight` of `fit` as a dict of plain numbers.

    Raises:
        DataError: it does not map integers to numbers.
    """
    if class_weight is None:
        return None
    try:
        plain = {int(label): float(weight) for label, weight in class_weight.items()}
        if all(label in plain for label in class_weight):  # allows 0.0, but not 0.5 or "0"
            return plain
    except (AttributeError, TypeError, ValueError):
        pass
    raise DataError(
        f"class_weight is {str(class_weight)[:200]!r}. Expected a dict from class numbers to weights, such as "
        "{0: 1.0, 1: 5.0}; for a list of weights pass dict(enumerate(weights))."
    )


def weight_spec(spec: tuple[Any, Any, Any], name: str) -> Spec:
    """Return the spec of one record's weights: one number, or one for each position of its target.

    Args:
        spec: specs (x, y, sample_weight) of the data.
        name: name of the data, for the message.

    Raises:
        DataError: there is not exactly one target.
    """
    y = spec[1]
    if not isinstance(y, Spec):
        has = "has no target" if y is None else "has several targets"
        raise DataError(f"class_weight needs one target, and {name} data {has}. Pass sample_weight instead.")
    return Spec(y.shape[:-1], "float32")


def refuse(spec: tuple[Any, Any, Any], name: str, has_positions: bool, is_weighted: bool) -> None:
    """Raise if Keras refuses `class_weight` with such data.

    Args:
        spec: specs (x, y, sample_weight) of the data.
        name: name of the data, for messages.
        has_positions: whether targets may have a class for each of several positions, as in a `tf.data.Dataset`.
        is_weighted: whether the data may also have sample weights.

    Raises:
        DataError: class_weight cannot be used with the data.
    """
    positions = weight_spec(spec, name).shape
    if spec[2] is not None and not is_weighted:
        raise DataError(
            f"class_weight and sample_weight cannot be used together, as in Keras, and {name} data has both. Multiply "
            "the weights of the classes into sample_weight, and leave out class_weight."
        )
    if positions and not has_positions:
        raise DataError(
            f"class_weight needs one class for each record, and a target of {name} data has the shape "
            f"{spec[1].shape}. Pass sample_weight with the shape (records, {', '.join(map(str, positions))}) instead, "
            "or put the data in a tf.data.Dataset, where class_weight weighs each position."
        )


def weights_of(y: np.ndarray, class_weight: dict[int, float]) -> np.ndarray:
    """Return the weight of each target's class, as in Keras. A class without a weight has the weight 1.

    The class of a vector, such as a one-hot target, is the place of its largest number. Single numbers are rounded.

    Args:
        y: [records, ...] targets.
        class_weight: weight of each class.

    Returns:
        float32 of the shape of y, without the last dimension if there are more than one.
    """
    if y.ndim > 1:
        y = y.argmax(-1) if y.shape[-1] != 1 else y[..., 0]
    classes, places = np.unique(np.round(y).astype(np.int32), return_inverse=True)
    weights = np.array([class_weight.get(label, 1.0) for label in classes.tolist()], np.float32)
    return weights[places].reshape(y.shape)
