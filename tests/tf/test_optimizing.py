"""The rate that the optimizer uses is the one that is logged, and a function of the step: constant, scheduled, set by
a callback, scaled by a loss scale."""

from __future__ import annotations

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint import variables
from raytf.checkpoint.variables import seed_states, weights_sha256
from raytf.config.flags import ComputeSection, RateSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.errors import ConfigError
from raytf.training.model.model import build
from raytf.training.step import learning_rate
from raytf.training.step.fused_update import fused
from raytf.training.step.learning_rate import LearningRate, RateLaw
from raytf.training.step.step import StepOptions, TrainStep
from tests.tf.ranks import World

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RNG = np.random.default_rng(0)
SOURCE = ArraySource(RNG.normal(size=(96, 6)).astype("float32"), RNG.normal(size=(96, 1)).astype("float32"))
PLAN = StepPlan(96, 16, 4)
LAW = RateLaw(4.0, 8)
#: Steps after which runs are stopped and resumed.
AT = (3, 7, 10)


def model(optimizer):
    def make():
        made = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="tanh"), layers.Dense(1)])
        made.compile(optimizer(), "mse")
        return made

    return make


def constant():
    return keras.optimizers.AdamW(0.01, weight_decay=0.1)


def cosine():
    return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.01, 12), momentum=0.9)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=8.0)


class Run:
    """A model of one rank and its compiled step."""

    def __init__(self, optimizer, law: RateLaw | None):
        keras.utils.clear_session()  # variables of the next one have the same names
        pipeline = Pipeline(SOURCE, PLAN, range(4), seed=0)
        self.model = build(model(optimizer), pipeline.sample(), [SOURCE], ComputeSection(), seed=0)
        pipeline.prepare(len(seed_states(self.model)), None)
        self.pipeline, self.rates = pipeline, []
        rate = LearningRate(self.model.optimizer, law)
        leaves = pipeline.template, pipeline.leaf_specs
        self.step = TrainStep(self.model, PLAN, range(4), World(1).all_reduce(0), *leaves, StepOptions(), rate)
        self.named = variables.variables(self.model) | self.step.reduction_state()

    def train(self, begin: int, end: int) -> Run:
        while begin < end:
            stop = PLAN.call_end(begin, 3, end)
            outcome = self.step(self.pipeline.submit(begin, stop).result(), np.zeros(1, np.float32))
            self.rates.extend(outcome.learning_rates)
            begin = stop
        return self

    def state(self) -> dict[str, np.ndarray]:
        return {k: keras.ops.convert_to_numpy(v).copy() for k, v in self.named.items()}


@functools.cache
def whole(optimizer) -> tuple[list[float], str]:
    """Rates and weights of a run from begin to end."""
    run = Run(optimizer, LAW).train(0, 14)
    return run.rates, weights_sha256(run.model)


@functools.cache
def stops(optimizer) -> dict[int, tuple[list[float], dict[str, np.ndarray]]]:
    """Steps of one more run, with its rates until then and what a checkpoint would keep."""
    run, found, begin = Run(optimizer, LAW), {}, 0
    for at in AT:
        run.train(begin, at)
        found[at], begin = (list(run.rates), run.state()), at
    return found


@pytest.mark.parametrize("optimizer", [constant, cosine, scaled])
def test_the_logged_rate_is_the_law_times_the_own_one(optimizer):
    own = np.array(Run(optimizer, None).train(0, 14).rates)
    expected = [own[s] * LAW.factor * LAW.share(s) for s in range(14)]
    np.testing.assert_allclose(whole(optimizer)[0], expected, rtol=1e-6)


def test_the_weights_are_those_of_an_optimizer_whose_schedule_is_the_law():
    class Same(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            step = keras.ops.cast(step, "float32")
            share = LAW.begin + (1 - LAW.begin) * keras.ops.minimum(1.0, (step + 1) / LAW.warmup_steps)
            return 0.01 * LAW.factor * share

        def get_config(self):
            return {}

    ours = Run(constant, LAW).train(0, 12).model.get_weights()
    theirs = Run(lambda: keras.optimizers.AdamW(Same(), weight_decay=0.1), None).train(0, 12).model.get_weights()
    plain = Run(constant, None).train(0, 12).model.get_weights()
    for mine, other, without in zip(ours, theirs, plain, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
        assert not np.allclose(mine, without, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [constant, cosine, scaled])
@pytest.mark.parametrize("at", AT)
def test_a_run_that_is_resumed_has_the_same_rates_and_bits(optimizer, at: int):
    rates, state = stops(optimizer)[at]
    second = Run(optimizer, LAW)
    variables.restore(second.named, state)
    second.train(at, 14)
    assert (rates + second.rates, weights_sha256(second.model)) == whole(optimizer)


def test_a_callback_sees_and_sets_the_scaled_rate_without_the_warm_up():
    run = Run(constant, LAW).train(0, 4)
    assert float(run.model.optimizer.learning_rate) == pytest.approx(0.04)
    run.model.optimizer.learning_rate = 0.02  # as ReduceLROnPlateau halves it
    run.train(4, 10)
    np.testing.assert_allclose(run.rates[4:], [0.02 * LAW.share(s) for s in range(4, 10)], rtol=1e-6)


def test_without_a_law_nothing_is_touched():
    run = Run(constant, None)
    assert float(run.model.optimizer.learning_rate) == pytest.approx(0.01)
    run.train(0, 3)
    assert "_get_current_learning_rate" not in vars(run.model.optimizer)


FUSED = {
    "adam": lambda: keras.optimizers.Adam(0.05, clipnorm=0.3),
    "adamw": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, use_ema=True),
    "sgd": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "not fused": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
}


def updated(name: str, around) -> tuple[list[np.ndarray], set[str]]:
    """All variables after five updates, and the operations that made them."""
    variables = [keras.Variable(np.linspace(-1, 1, 21, dtype="float32").reshape(7, 3)) for _ in range(2)]
    made = FUSED[name]()
    made.build(variables)

    @tf.function(autograph=False)
    def step(given):
        with around(made):
            made.apply(given, variables)

    random = np.random.default_rng(1)
    for _ in range(5):
        given = [tf.constant(random.normal(size=(7, 3)).astype("float32")) for _ in variables]
        step(given)
    assert "update_step" not in vars(made)
    operations = {node.op for node in step.get_concrete_function(given).graph.as_graph_def().node}
    return [v.numpy() for v in [*variables, *made.variables]], operations


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_update_is_that_of_keras_but_for_rounding(name):
    plain, _ = updated(name, contextlib.nullcontext)
    quick, operations = updated(name, fused)
    assert any("ResourceApply" in kind for kind in operations) == (name != "not fused")
    for a, b in zip(plain, quick, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # 1 - 0.999 is rounded before or after


def test_one_rate_cannot_be_scaled_where_an_optimizer_has_several():
    several = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1)))
    made = model(lambda: several)()
    assert learning_rate.of_model(RateSection(), made, PLAN).is_unchanged
    with pytest.raises(ConfigError, match="the model's optimizer has several"):
        learning_rate.of_model(RateSection(warmup_epochs=1), made, PLAN)
