"""What a model function gets wrong is one line that names it, before anything trains. test_bad_input.py runs jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from raytf.config.flags import ComputeSection
from raytf.data import ArraySource
from raytf.errors import DataError, ModelError
from raytf.parameter_server.step import AsyncStep
from raytf.training.model.model import build

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(inputs: int = 8, **how: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((inputs,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
    model.compile(**{"optimizer": "sgd", "loss": LOSS, **how})
    return model


def uncompiled() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(3)])


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def own_step() -> keras.Model:
    model = OwnStep([keras.Input((8,)), layers.Dense(3)])
    model.compile("sgd", LOSS)
    return model


def frozen() -> keras.Model:
    model = compiled()
    model.trainable = False
    return model


@pytest.mark.parametrize(
    ("factory", "kind", "words"),
    [
        (lambda: [layers.Dense(3)], ModelError, ("returned list", "compiled keras.Model")),
        (uncompiled, ModelError, ("not compiled", "model.compile")),
        (lambda: compiled(optimizer=None), ModelError, ("without an optimizer", "model.compile(optimizer=...)")),
        (lambda: compiled(loss=None), ModelError, ("without a loss", "self.add_loss(...)")),
        (lambda: compiled(5), DataError, ("does not accept the data", "(8,)", "(None, 5)")),
        (lambda: compiled(loss="mse", metrics=[keras.metrics.F1Score()]), DataError, ("does not accept the labels",)),
    ],
)
def test_a_model_that_cannot_be_trained(factory: Callable[[], Any], kind: type[Exception], words: tuple[str, ...]):
    with pytest.raises(kind) as caught:
        built(factory, np.arange(64) % 3)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (
            lambda: compiled(optimizer=keras.optimizers.SGD(gradient_accumulation_steps=2)),
            "gradient_accumulation_steps",
        ),
        (own_step, "OwnStep overrides train_step"),
    ],
)
def test_what_parameter_servers_cannot_do_is_refused(factory: Callable[[], keras.Model], words: str):
    with pytest.raises(ModelError, match=f"{words}.* --strategy parameter-server"):
        AsyncStep(None, 0, factory(), None, (None, None, None), [], False, workers=2)


def test_labels_that_the_model_has_no_class_for():
    with pytest.raises(DataError) as caught:
        built(compiled, np.arange(64) % 3 + 1)
    for word in ("labels go from 1 to 3", "3 outputs", "number the classes from 0"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("factory", "words"),
    [(frozen, "no trainable weights"), (lambda: compiled(run_eagerly=True), "workers trace its step")],
)
def test_what_is_said_of_a_model_that_trains_in_another_way(factory: Callable[[], Any], words: str):
    said: list[str] = []
    x, labels = np.zeros((64, 8), np.float32), np.arange(64) % 3
    build(factory, (x[:4], labels[:4], None), [ArraySource(x, labels)], ComputeSection(), 0, said.append)
    (line,) = said
    assert words in line


def stateful() -> keras.Model:
    model = keras.Sequential([keras.Input(batch_shape=(16, 4, 2)), layers.LSTM(3, stateful=True), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def test_a_stateful_rnn_is_refused():
    x, y = np.zeros((64, 4, 2), np.float32), np.zeros((64, 1), np.float32)
    with pytest.raises(ModelError, match=r"lstm.* is a stateful RNN .*Remove stateful=True"):
        build(stateful, (x[:2], y[:2], None), [ArraySource(x, y)], ComputeSection(), 0)


def test_a_model_that_can_be_trained_has_all_its_variables():
    model = built(compiled, np.arange(64) % 3)
    assert [v.shape for v in model.trainable_variables] == [(8, 16), (16,), (16, 3), (3,)]
    assert model.optimizer.built


def built(factory: Callable[[], Any], labels: np.ndarray) -> keras.Model:
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    return build(factory, (x[:4], labels[:4], None), [ArraySource(x, labels)], ComputeSection(), seed=0)
