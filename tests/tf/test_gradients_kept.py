"""Gradients for histograms: those that the update used, and nothing that is learned changes by telling them."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import seed_states, weights_sha256
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.training.model.model import build
from raytf.training.step.step import StepOptions, TrainStep
from tests.tf.ranks import World, train

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 8, 8, 1)).astype("float32"), RNG.integers(0, 3, 70)
SOURCE = ArraySource(X, Y)
PLAN = StepPlan(70, 16, 4)


def model(optimizer=lambda: keras.optimizers.Adam(1e-2)):
    def make():
        made = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(4, 3, activation="relu"),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dropout(0.2),
                layers.Dense(3),
            ]
        )
        made.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    return make


def steps(factory, keeps_gradients: bool, end: int, exact: bool = True, shuffle: bool = True):
    """(model, step, outcome of the last call) after `end` steps of one rank."""
    keras.utils.clear_session()
    pipeline = Pipeline(SOURCE, PLAN, assign(4, 1)[0], seed=0, shuffle=shuffle)
    made = build(factory, pipeline.sample(), [SOURCE], ComputeSection(), seed=0)
    pipeline.prepare(len(seed_states(made)), None)
    leaves = pipeline.template, pipeline.leaf_specs
    step = TrainStep(
        made,
        PLAN,
        range(4),
        World(1).all_reduce(0),
        *leaves,
        StepOptions(fixed_point=exact, keeps_gradients=keeps_gradients),
    )
    done = 0
    while done < end:
        stop = PLAN.call_end(done, 3, end)
        outcome = step(pipeline.submit(done, stop).result(), np.zeros(1, np.float32))
        done = stop
    return made, step, outcome


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "float"])
def test_telling_gradients_changes_no_bit_of_what_is_learned(exact: bool):
    ((alone, _),) = train(model(), SOURCE, 16, 4, 13, exact=exact)
    told, step, outcome = steps(model(), True, 13, exact=exact)
    assert weights_sha256(told) == weights_sha256(alone)
    assert len(step.named_gradients(outcome)) == len(told.trainable_variables)


@pytest.mark.parametrize("optimizer", ["plain", "loss scale"])
def test_they_are_the_gradients_of_the_global_batch(optimizer: str):
    def plain():
        made = keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(3)])
        sgd = keras.optimizers.SGD(1e-3)
        chosen = keras.optimizers.LossScaleOptimizer(sgd, initial_scale=16.0) if optimizer == "loss scale" else sgd
        made.compile(chosen, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    without = steps(plain, False, 1)[0]
    told, step, outcome = steps(plain, True, 1)
    assert weights_sha256(told) == weights_sha256(without)
    batch = Pipeline(SOURCE, PLAN, range(4), seed=0).submit(0, 1).result().leaves[0].reshape(-1, 8, 8, 1)
    taken = [int(np.flatnonzero((record == X).all((1, 2, 3)))[0]) for record in batch]
    made = build(plain, (X[:16], Y[:16], None), [SOURCE], ComputeSection(), seed=0)
    with tf.GradientTape() as tape:
        loss = made.compute_loss(X[taken], Y[taken], made(X[taken]))
    expected = tape.gradient(loss, [v.value for v in made.trainable_variables])
    for mine, theirs in zip(step.named_gradients(outcome).values(), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def test_without_histograms_a_call_tells_none():
    _, step, outcome = steps(model(), False, 5)
    assert outcome.gradients == []
    assert step.named_gradients(outcome) == {}
