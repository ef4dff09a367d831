"""A finished run gives its weights back variable by variable, whatever the layers do when they save themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.errors import ModelError
from raytf.inference import export, trained_model
from raytf.inference.architecture import KERAS_FILE, WEIGHTS_FILE
from raytf.runs import run_log
from raytf.storage.storage import Storage
from tests.tf.test_export import X, Y, a_run, checkpoint

pytestmark = pytest.mark.gate


@keras.saving.register_keras_serializable("raytf-tests")
class Halved(layers.Layer):
    """Saves another value than its variable holds, and reads it as it is."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, store):
        store["half"] = self.scale.numpy() / 2

    def load_own_variables(self, store):
        self.scale.assign(store["half"])


@keras.saving.register_keras_serializable("raytf-tests")
class Unsaved(Halved):
    def save_own_variables(self, store):
        raise RuntimeError("not today")


def lora() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, "relu"), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    return model


def quantized() -> keras.Model:
    """With the matrix in 8-bit integers, of which only the LoRA parts are trained."""
    model = lora()
    model.quantize("int8")
    return model


def plain() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile("adam", "mse")
    return model


def scaled() -> keras.Model:
    """With an optimizer that makes its variables again whenever it is built."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse", metrics=["mae"])
    return model


def mirrored() -> keras.Model:
    with tf.distribute.MirroredStrategy().scope():
        return plain()


def saving(layer: layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((4,)), layer, layers.Dense(2)])


MODELS: dict[str, Callable[[], keras.Model]] = {
    "lora": lora,
    "quantized": quantized,
    "mirrored": mirrored,
    "scaled loss": scaled,
    "saves something else": lambda: saving(Halved()),
    "does not save": lambda: saving(Unsaved()),
}


def made(kind: str, is_worker: bool = False) -> keras.Model:
    """A model as the program makes it; a worker is never in a strategy's scope of the program."""
    keras.utils.set_random_seed(3)
    model = plain() if kind == "mirrored" and is_worker else MODELS[kind]()
    if not model.compiled:
        model.compile("adam", "mse")
    return model


def finished(tmp_path: Path, kind: str) -> tuple[Storage, keras.Model]:
    """A run that has ended, as rank 0 leaves it, and its model."""
    model = made(kind, is_worker=True)
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0)
    run = a_run(tmp_path, model)
    checkpoint(run, model, 6)
    export.export(model, run, 6, say=lambda line: None)
    run.put(run_log.RESULT, json.dumps({"steps": 6, "weights_sha256": weights_sha256(model)}).encode())
    return run, model


@pytest.mark.parametrize("kind", MODELS)
def test_weights_and_optimizer_come_back(tmp_path: Path, kind: str):
    run, model = finished(tmp_path, kind)
    program = made(kind)
    assert weights_sha256(program) != weights_sha256(model)
    for _ in range(2):  # and once more, after a second `fit`
        assert trained_model.give_back(run, program) is program
    for mine, theirs in zip(program.variables, model.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    for mine, theirs in zip(program.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    np.testing.assert_allclose(program.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("kind", ["lora", "mirrored", "saves something else"])
def test_a_run_that_an_older_raytf_ended_gives_them_back_too(tmp_path: Path, kind: str):
    run, model = finished(tmp_path, kind)
    run.delete(WEIGHTS_FILE)
    program = made(kind)
    trained_model.give_back(run, program)
    assert weights_sha256(program) == weights_sha256(model)


def test_weights_of_another_model_are_refused(tmp_path: Path):
    run, _ = finished(tmp_path, "lora")
    other = keras.Sequential([keras.Input((4,)), layers.Dense(3)])
    other.compile("adam", "mse")
    with pytest.raises(ModelError, match="belong to another model"):
        trained_model.load_weights(run, other)
    run.delete(WEIGHTS_FILE)
    run.delete(KERAS_FILE)
    run.delete("checkpoints")
    with pytest.raises(ModelError, match="holds no weights"):
        trained_model.load_weights(run, made("lora"))


@pytest.mark.parametrize("kind", ["lora", "quantized", "mirrored"])
def test_a_checkpoint_of_it_is_exported_with_the_same_predictions(tmp_path: Path, kind: str):
    run, model = finished(tmp_path, kind)
    run.delete(run_log.RESULT)
    done = export.export_run(run.root, to=str(tmp_path / "out"))
    served = tf.saved_model.load(done.place).signatures["serving_default"]
    name = next(iter(served.structured_input_signature[1]))
    given = next(iter(served(**{name: tf.constant(X)}).values())).numpy()
    np.testing.assert_allclose(given, model.predict(X, verbose=0), rtol=1e-5)
