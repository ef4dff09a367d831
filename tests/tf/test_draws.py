"""What a model draws with `tf.random` is a function of the run's seed, the step and the shard."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf._tensorflow.tracing import seeded
from raytf.checkpoint.variables import weights_sha256
from raytf.data.sources import ArraySource
from tests.tf.ranks import train

DRAWS = {
    "normal": lambda: tf.random.normal([1000], 1.0, 2.0),
    "truncated normal": lambda: tf.random.truncated_normal([1000]),
    "uniform": lambda: tf.random.uniform([1000], -1.0, 3.0),
    "whole numbers": lambda: tf.cast(tf.random.uniform([1000], 0, 9, tf.int32), tf.float32),
    "shuffle": lambda: tf.random.shuffle(tf.range(1000.0)),
    "categorical": lambda: tf.cast(tf.random.categorical(tf.math.log([[0.2, 0.8]]), 1000)[0], tf.float32),
    "gamma": lambda: tf.random.gamma([500], [1.0, 4.0], 2.0),
    "Poisson": lambda: tf.random.poisson([500], [1.0, 4.0]),
    "dropout": lambda: tf.nn.dropout(tf.ones([1000]), 0.4),
}


@pytest.mark.parametrize("name", DRAWS)
def test_each_kind_of_draw_is_one_of_the_seed_with_the_same_distribution(name: str):
    @tf.function(autograph=False)
    def drawn(seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with seeded(seed):
            return DRAWS[name](), DRAWS[name]()

    first, second = drawn(tf.constant([1, 2]))
    again, _ = drawn(tf.constant([1, 2]))
    other, _ = drawn(tf.constant([1, 3]))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != second)
    assert np.any(first != other)
    free = DRAWS[name]()  # by TensorFlow's own generator
    assert free.shape == first.shape
    assert free.dtype == first.dtype
    for figure in (np.mean, np.std):
        assert abs(figure(first) - figure(free)) < 0.25 * np.std(free) + 1e-6


def test_each_round_of_a_loop_draws_anew():
    @tf.function(autograph=False)
    def drawn() -> tf.Tensor:
        with seeded(tf.constant([1, 2])):
            return tf.map_fn(lambda x: tf.map_fn(lambda y: y + tf.random.uniform([]), x), tf.zeros([4, 3]))

    found = drawn().numpy().ravel()
    assert len(set(found)) == 12
    np.testing.assert_array_equal(found, drawn().numpy().ravel())


class Noise(layers.Layer):
    def call(self, x, training=False):
        if not training:
            return x
        kept = tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.random.normal(tf.shape(x)), lambda: tf.zeros_like(x))
        return x + 0.1 * kept


class Own(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.Sequential([keras.Input((4,)), layers.Dense(3)])

    def train_step(self, data):
        latent = tf.random.normal([tf.shape(data)[0], 4])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.dense(latent) - data[:, :3]) ** 2)
        weights = self.dense.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def with_a_layer() -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), Noise(), layers.Dense(4)])
    model.compile("sgd", "mse")
    return model


def with_a_step() -> keras.Model:
    model = Own()
    model.compile("sgd")
    return model


@pytest.mark.parametrize(("factory", "has_labels"), [(with_a_layer, True), (with_a_step, False)])
def test_draws_are_the_same_for_every_number_of_ranks_and_new_in_each_step(factory, has_labels):
    x = np.tile(np.random.default_rng(0).normal(size=(1, 4)).astype(np.float32), (16, 1))
    source = ArraySource(x, x if has_labels else None)
    ends = [train(factory, source, 8, 4, 6, ranks) for ranks in (1, 3)]
    assert len({weights_sha256(model) for found in ends for model, _ in found}) == 1
    losses = ends[0][0][1]
    assert len(set(losses)) == len(losses)
