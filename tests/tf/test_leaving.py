"""A model that cannot be exported or made again is found before training, and its weights are of use all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

from raytf.checkpoint.variables import weights_sha256
from raytf.config import precision
from raytf.config.precision import Precision
from raytf.driver.result import load_weights
from raytf.errors import JobError, ModelError
from raytf.inference import architecture, export, trained_model, user_model
from raytf.inference.user_model import run_user_code
from raytf.storage.storage import Storage
from tests.tf.test_export import Own, Secretive, Unregistered, checkpoint, sequential, trained, two_inputs

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")


class Nested(keras.Model):
    """Whose outputs no signature of a SavedModel can hold."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        h = self.dense(x)
        return {"first": {"a": h, "b": [h + 1, h * 2]}}


class Converted(layers.Layer):
    """Is itself, but not from its configuration."""

    def __init__(self, by: int):
        super().__init__()
        self.by = by

    def call(self, x):
        return x * self.by

    def get_config(self):
        return {**super().get_config(), "times": self.by}


class Counts(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x["a"]) + ops.cast(x["n"], self.compute_dtype)


def lambda_layer() -> keras.Model:
    return sequential(layers.Lambda(lambda x: x * 2))


def secretive() -> keras.Model:
    return sequential(Secretive(object()))


def nested() -> keras.Model:
    return Nested()


TWO = {"a": X, "b": X + 1}
COUNTED = {"a": X, "n": np.ones((8, 1), "int32")}
#: A model, its inputs, whether it can be exported, and what is wrong with making it again.
MODELS: dict[str, tuple[Callable[[], keras.Model], object, bool, str]] = {
    "plain": (sequential, X, True, ""),
    "inputs and outputs by name": (two_inputs, TWO, True, ""),
    "registered": (Own, X, True, ""),
    "a class of a script": (lambda: sequential(Unregistered()), X, True, ""),
    "Lambda": (lambda_layer, X, True, "is a Lambda"),
    "no get_config": (secretive, X, True, "In its classes, define get_config"),
    "another get_config": (lambda: sequential(Converted(3)), X, True, "In its classes, define get_config"),
    "nested outputs": (nested, X, False, "In its classes, define get_config"),
    "whole numbers beside": (Counts, COUNTED, True, "In its classes, define get_config"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_told_before_training_is_what_its_end_would_meet(tmp_path: Path, name: str):
    make, x, is_exported, again = MODELS[name]
    keras.utils.set_random_seed(0)
    model = make()
    model(x)
    before = weights_sha256(model)
    found = export.obstacles(model)
    assert weights_sha256(model) == before
    try:
        run_user_code("model.export", lambda: model.export(str(tmp_path / "saved"), verbose=False))
        was_exported = True
    except JobError:
        was_exported = False
    assert was_exported == is_exported
    assert was_exported == (not any("exported for serving" in problem for problem in found)), found
    others = [problem for problem in found if "exported for serving" not in problem]
    assert bool(others) == bool(again), found
    assert all(again in problem for problem in others)
    assert all("\n" not in problem for problem in found)


def ended(tmp_path: Path, model: keras.Model, x: object = X) -> tuple[Storage, list[str]]:
    """The folder of a run that has ended, and what it said."""
    run, said = Storage(str(tmp_path / "run")), []
    run.put(architecture.FILE, architecture.describe(model, x))
    written = export.export(model, run, 3, say=said.append)
    run.put("result.json", b'{"steps": 3, "metrics": {}, "weights_sha256": "%s"}' % weights_sha256(model).encode())
    assert all(run.exists(place.rpartition("/run/")[2]) or "export/" in place for place in written.values())
    return run, said


@pytest.mark.parametrize("make", [lambda_layer, secretive, nested, sequential])
def test_the_weights_of_the_end_come_back_in_the_models_own_function(tmp_path: Path, make: Callable[[], keras.Model]):
    model = make()
    model(X)
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    run, said = ended(tmp_path, model)
    assert bool(said) == (make in (secretive, nested))
    assert weights_sha256(trained_model.load(run, make)) == weights_sha256(model)
    assert weights_sha256(load_weights(run.locate(""), make)) == weights_sha256(model)
    own = make()
    assert load_weights(run.locate(""), own) is own
    np.testing.assert_array_equal(np.asarray(ops.convert_to_numpy(own.weights[0])), model.weights[0].numpy())


def test_without_the_function_it_is_said_what_to_give(tmp_path: Path):
    run, _ = ended(tmp_path, trained(lambda_layer()))
    with pytest.raises(ModelError, match=r"Result.load_model\(model\), or raytf.load_weights\(run, model\)"):
        trained_model.load(run)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    run, _ = ended(tmp_path, trained(secretive()))
    with pytest.raises(ModelError, match="to another model"):
        load_weights(run.locate(""), lambda: sequential(layers.Dense(7)))
    with pytest.raises(ModelError, match=r"Expected a keras\.Model"):
        load_weights(run.locate(""), lambda: None)


def test_until_its_end_a_run_has_the_weights_of_its_newest_checkpoint(tmp_path: Path):
    model, run = trained(lambda_layer()), Storage(str(tmp_path / "run"))
    with pytest.raises(ModelError, match="neither ended nor saved a whole checkpoint"):
        load_weights(run.locate(""), sequential)
    run.put(architecture.FILE, architecture.describe(model, X))
    checkpoint(run, model, 3)
    assert weights_sha256(load_weights(run.locate(""), lambda_layer)) == weights_sha256(model)


def test_a_model_comes_back_with_the_dtypes_of_its_run(tmp_path: Path):
    with user_model.with_precision(Precision("mixed_bfloat16")):
        model = trained(Own())
        run, _ = ended(tmp_path, model)
    assert precision.of_process() == precision.DEFAULT
    for loaded in (trained_model.load(run), load_weights(run.locate(""), Own), architecture.rebuild(run)[0]):
        assert {layer.compute_dtype for layer in loaded._flatten_layers()} == {"bfloat16"}
    assert precision.of_process() == precision.DEFAULT
