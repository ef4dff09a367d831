"""What layers add to the loss: the same bits on any number of ranks, smaller last batches, float16, what is refused."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from raytf.config.flags import ComputeSection
from raytf.config.precision import DEFAULT, POLICIES
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.errors import ModelError
from raytf.inference.user_model import set_precision
from tests.tf.ranks import train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RECORDS = 24
RNG = np.random.default_rng(0)
X = RNG.normal(size=(RECORDS, 6)).astype("float32")
Y = RNG.normal(size=(RECORDS, 3)).astype("float32")


class Penalty(layers.Layer):
    """Adds a mean over records, when training one more, and a sum over its weight."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, h, training=False):
        h = ops.cast(h, "float32")  # Keras adds up no losses of float16 and float32
        self.add_loss(ops.mean(ops.square(h)))
        if training:
            self.add_loss([0.1 * ops.mean(ops.abs(h)), 0.01 * ops.sum(ops.cast(self.scale, "float32") ** 2)])
        return h * self.scale


def every_kind() -> keras.Model:
    """Each way in which Keras collects a loss, around a model in a model."""
    all_of_them: Any = {f"{part}_regularizer": "l2" for part in ("kernel", "bias", "activity")}
    all_of_them |= {"dtype": "float32"}
    inner = keras.Sequential([keras.Input((5,)), layers.Dense(5, activation="tanh", **all_of_them), Penalty()])
    stack = [
        layers.Dense(5, activation="tanh"),
        inner,
        layers.ActivityRegularization(l1=0.01, dtype="float32"),
        layers.Dense(3),
    ]
    model = keras.Sequential([keras.Input((6,)), *stack])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


class AddsAgain(keras.Model):
    """Adds what a layer of it has added."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = layers.Dense(5, activity_regularizer="l2"), layers.Dense(3)

    def call(self, x):
        h = self.inner(x)
        self.add_loss([self.of(loss) for loss in self.inner.losses])
        return self.last(h)

    def of(self, loss: Any) -> Any:
        return loss


class AddsAnother(AddsAgain):
    def of(self, loss: Any) -> Any:
        return 1.0 * loss


def compiled(kind: type[keras.Model]) -> keras.Model:
    model = kind()
    model.build((None, 6))
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return model


def differ(ours: Any, theirs: Any) -> float:
    """The largest difference, as a part of the largest number."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def fitted(factory: Any, batch: int, epochs: int) -> tuple[keras.Model, dict[str, list[float]]]:
    """As Keras trains a model."""
    keras.utils.set_random_seed(0)
    model = factory()
    return model, model.fit(X, Y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0).history


def test_the_same_bits_on_one_two_and_three_ranks():
    worlds = [train(every_kind, ArraySource(X, Y), 16, 4, 5, world_size) for world_size in (1, 2, 3)]
    expected, losses = worlds[0][0]
    for model, found in (rank for ranks in worlds for rank in ranks):
        np.testing.assert_array_equal(found, losses)
        for mine, theirs in zip(model.weights, expected.weights, strict=True):
            np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@pytest.mark.parametrize("shards", [1, 4])
def test_a_last_batch_that_is_smaller_and_leaves_shards_empty(shards: int):
    source, steps = ArraySource(X[:18], Y[:18]), 4
    ours, losses = train(every_kind, source, 16, shards, steps, shuffle=False)[0]
    plan = StepPlan(18, 16, shards)
    pipeline = Pipeline(source, plan, range(shards), seed=0, shuffle=False)
    keras.utils.set_random_seed(0)
    model, sizes = every_kind(), []
    for step in range(steps):
        call = pipeline.submit(step, step + 1).result()
        x, y = (
            np.concatenate([part[:n] for part, n in zip(leaf[0], call.counts, strict=True)]) for leaf in call.leaves
        )
        sizes.append(len(x))
        history = model.fit(x, y, batch_size=len(x), verbose=0).history
        assert differ(losses[step], history["loss"][0]) < 1e-6
    pipeline.close()
    assert sizes == [16, 2, 16, 2]
    assert shards == 1 or 0 in plan.counts(1)
    for mine, theirs in zip(ours.trainable_weights, model.trainable_weights, strict=True):
        assert differ(mine.numpy(), theirs.numpy()) < 2e-6, theirs.path


@pytest.mark.parametrize(("shards", "bound"), [(1, 2e-3), (4, 5e-3)])
def test_float16_scales_the_whole_loss(shards: int, bound: float):
    try:
        keras.config.set_dtype_policy(POLICIES["float16"])
        model, history = fitted(every_kind, RECORDS, 3)
        compute = ComputeSection(mixed_precision="float16")
        ours, losses = train(every_kind, ArraySource(X, Y), RECORDS, shards, 3, compute=compute, shuffle=False)[0]
    finally:
        set_precision(DEFAULT)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    np.testing.assert_allclose(losses[0], history["loss"][0], rtol=bound)
    for mine, theirs in zip(ours.trainable_weights, model.trainable_weights, strict=True):
        assert differ(mine.numpy(), theirs.numpy()) < bound, theirs.path


def test_one_tensor_that_two_layers_add_is_refused():
    """In the scope of a micro-batch, Keras would count it four times, and not twice as in its own fit."""
    with pytest.raises(ModelError, match=re.escape("self.add_loss(self.inner.losses)")):
        train(lambda: compiled(AddsAgain), ArraySource(X, Y), RECORDS, 1, 1)


def test_what_the_refusal_advises_is_what_keras_computes():
    _, history = fitted(lambda: compiled(AddsAgain), RECORDS, 3)
    _, losses = train(lambda: compiled(AddsAnother), ArraySource(X, Y), RECORDS, 1, 3, shuffle=False)[0]
    np.testing.assert_allclose(losses, history["loss"], rtol=1e-6)
