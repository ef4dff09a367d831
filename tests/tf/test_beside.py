"""Partial steps are traced in a thread while full ones are made, which changes nothing in these."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.training import synchronous
from tests.tf.ranks import Rank, World

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RNG = np.random.default_rng(0)
PLAN = StepPlan(205, 16, 4)
SOURCE = ArraySource(RNG.normal(size=(205, 12)).astype("float32"), RNG.integers(0, 4, 205))


def model():
    made = keras.Sequential([keras.Input((12,)), layers.Dense(16, "relu"), layers.Dropout(0.3), layers.Dense(4)])
    made.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return made


def rank() -> Rank:
    return Rank(model, SOURCE, PLAN, range(4), World(1).all_reduce(0))


def test_steps_beside_a_rehearsal_are_as_without_one():
    alone, others = rank(), rank()
    alone.call(0, 1)
    others.call(0, 1)
    rehearsal = synchronous.trace_beside(lambda: others.step.rehearse(full=False))
    at = 1
    while at < PLAN.full_steps and not (rehearsal.done() and at > 3):
        mine, beside_it = alone.call(at, at + 1), others.call(at, at + 1)
        assert beside_it.losses.tobytes() == mine.losses.tobytes()
        assert len(others.step.made().losses) == 1  # the rehearsal has left the journal alone
        at += 1
    assert rehearsal.result()
    traced = others.step.functions()[1].experimental_get_tracing_count()
    for each in (alone, others):
        each.train(at, PLAN.steps_per_epoch)
    assert others.step.functions()[1].experimental_get_tracing_count() == traced == 1
    assert weights_sha256(others.model) == weights_sha256(alone.model)


@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
def test_a_thread_has_the_dtype_policy_of_the_one_that_started_it(policy: str | None):
    if policy is not None:
        keras.config.set_dtype_policy(policy)
    try:
        found = synchronous.trace_beside(
            lambda: (keras.config.dtype_policy().name, layers.Dense(1).compute_dtype)
        ).result()
    finally:
        keras.config.set_dtype_policy("float32")
    assert found == ((policy, "bfloat16") if policy else ("float32", "float32"))


def test_what_a_trace_raises_is_raised_where_its_result_is_wanted():
    def fail():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        synchronous.trace_beside(fail).result()
