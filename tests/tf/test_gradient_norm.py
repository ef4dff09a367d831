"""The norm of a step's gradient, as it is noted: that of the whole batch, whoever computes it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
from keras import layers

from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from tests.tf.ranks import Rank, World

RNG = np.random.default_rng(0)
SHARDS, BATCH = 3, 12
TOKENS, Y = RNG.permutation(48).reshape(12, 4), RNG.integers(0, 3, 12)


def model(**clip: float):
    tokens = keras.Input((4,), dtype="int64")
    x = layers.Flatten()(layers.Embedding(48, 3)(tokens))
    made = keras.Model(tokens, layers.Dense(3)(layers.Dense(8, activation="relu")(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.SGD(1.0, **clip), loss)
    return made


def first_step(world_size: int, **clip: float) -> tuple[float, float]:
    """The norm that is noted of the first step, and that of the update."""
    keras.utils.clear_session()
    world, plan = World(world_size), StepPlan(len(Y), BATCH, SHARDS)
    ranks = [
        Rank(lambda: model(**clip), ArraySource(TOKENS, Y), plan, own, world.all_reduce(rank))
        for rank, own in enumerate(assign(SHARDS, world_size))
    ]
    for rank in ranks:
        rank.step.trace()
    before = [np.array(each) for each in ranks[0].model.trainable_variables]
    with ThreadPoolExecutor(world_size) as pool:
        outcomes = list(pool.map(lambda rank: rank.call(0, 1), ranks))
    (norm,) = {float(outcome.norms[0]) for outcome in outcomes}
    after = [np.array(each) for each in ranks[0].model.trainable_variables]
    moved = sum(float(np.square(a - b, dtype=np.float64).sum()) for a, b in zip(after, before, strict=True))
    return norm, moved**0.5


@pytest.mark.parametrize("world_size", [1, 3])
def test_with_a_rate_of_one_it_is_the_way_of_the_weights(world_size: int):
    norm, moved = first_step(world_size)
    assert norm == pytest.approx(moved, rel=1e-5)
    assert norm > 0.1


def test_it_is_the_norm_before_clipping():
    norm, moved = first_step(1, global_clipnorm=0.05)
    assert norm == pytest.approx(first_step(1)[0], rel=1e-5)
    assert moved == pytest.approx(0.05, rel=1e-4)
