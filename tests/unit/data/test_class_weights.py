"""Weights of classes: the same weights as those of Keras's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytf.data import class_weights
from raytf.data.sources.base import Spec
from raytf.errors import DataError

RNG = np.random.default_rng(0)
WEIGHTS = {0: 0.5, 1: 2.0, 3: 7.0}
TARGETS = {
    "integers": RNG.integers(0, 4, 20),
    "a column": RNG.integers(0, 4, (20, 1)),
    "smoothed": np.where(RNG.random(20) > 0.5, 0.95, 0.05).astype(np.float32),
    "a smoothed column": np.where(RNG.random((20, 1)) > 0.5, 0.95, 0.05),
    "halves": np.arange(7) / 2,
    "one-hot": np.eye(4)[RNG.integers(0, 4, 20)],
    "smoothed one-hot": np.eye(4)[RNG.integers(0, 4, 20)] * 0.9 + 0.025,
    "truth values": RNG.random((20, 1)) > 0.5,
    "classes of positions": RNG.integers(0, 4, (20, 3)),
    "no records": np.zeros((0, 1)),
}
POSITIONS = {
    "one-hot positions": RNG.random((5, 3, 4)),
    "columns of positions": RNG.integers(0, 4, (5, 3, 1)),
    "one position": RNG.integers(0, 4, (20, 1, 1)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_weights_of_arrays_are_those_of_keras(name: str):
    from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

    y = TARGETS[name]
    expected = class_weight_to_sample_weights(y, WEIGHTS)
    assert class_weights.weights_of(y, WEIGHTS).ravel().tolist() == expected.tolist()


@pytest.mark.parametrize("name", [*TARGETS, *POSITIONS])
def test_weights_of_a_dataset_are_those_of_keras(name: str):
    import tensorflow as tf
    from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn

    y = (TARGETS | POSITIONS)[name]
    if y.dtype == bool:
        y = y.astype(np.float32)  # TensorFlow does not round truth values
    _, _, expected = make_class_weight_map_fn(WEIGHTS)(tf.zeros(len(y)), tf.convert_to_tensor(y))
    found = class_weights.weights_of(y, WEIGHTS)
    assert found.shape == expected.shape
    assert found.tolist() == expected.numpy().tolist()
    assert found.shape[1:] == class_weights.weight_spec((Spec.of(y), Spec.of(y), None), "train").shape


def test_labels_without_a_weight_have_the_weight_1():
    assert class_weights.weights_of(np.array([-1, 0, 2, 90]), WEIGHTS).tolist() == [1.0, 0.5, 1.0, 1.0]
    assert class_weights.weights_of(np.array([-1, 0]), {-1: 0.0}).tolist() == [0.0, 1.0]


def test_numbers_of_numpy_become_plain():
    found = class_weights.checked({np.int64(0): np.float32(0.5), 1.0: 2})
    assert found == {0: 0.5, 1: 2.0}
    assert {type(number) for pair in found.items() for number in pair} == {int, float}
    assert class_weights.checked(None) is None
    assert class_weights.checked({}) == {}


@pytest.mark.parametrize("given", [[1.0, 2.0], np.ones(2), {"a": 1.0}, {0.5: 1.0}, {0: None}, "balanced", {"0": 1.0}])
def test_other_class_weights_are_refused(given: Any):
    with pytest.raises(DataError, match=r"class_weight is .* Expected a dict"):
        class_weights.checked(given)


X, ONE, HOT, SEQUENCES, WEIGHT = Spec((6,), "float32"), Spec((), "int64"), Spec((3,), "f4"), Spec((5, 3), "f4"), "f4"


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ((X, None, None), {}, "needs one target, and train data has no target"),
        ((X, {"a": ONE, "b": ONE}, None), {}, "needs one target, and train data has several targets"),
        ((X, ONE, Spec((), WEIGHT)), {}, "class_weight and sample_weight cannot be used together"),
        ((X, SEQUENCES, None), {}, r"class_weight needs one class .* shape \(records, 5\)"),
    ],
)
def test_data_with_which_keras_refuses_class_weights_is_refused(spec: Any, kind: dict[str, bool], words: str):
    with pytest.raises(DataError, match=words):
        class_weights.refuse(spec, "train", **{"has_positions": False, "is_weighted": False} | kind)


@pytest.mark.parametrize(
    ("spec", "has_positions", "is_weighted"),
    [
        ((X, ONE, None), False, False),
        ((X, HOT, None), False, False),
        ((X, SEQUENCES, None), True, False),
        ((X, ONE, Spec((), WEIGHT)), True, True),
    ],
)
def test_other_data_is_accepted(spec: Any, has_positions: bool, is_weighted: bool):
    class_weights.refuse(spec, "train", has_positions, is_weighted)
