"""Ways to distribute a step over the devices of one process: the same bits, on the devices that were asked for."""

from __future__ import annotations

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import seed_states, weights_sha256
from raytf.config.flags import ComputeSection, StrategySection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.distributed import group as distributed_group
from raytf.distributed.devices import LocalDevices
from raytf.distributed.group import Group
from raytf.errors import ClusterError
from raytf.training.evaluation import Evaluator
from raytf.training.model.model import build
from raytf.training.step.device_placement import collected
from raytf.training.step.step import StepOptions, TrainStep
from raytf.training.user.callbacks import Callbacks
from tests.tf.ranks import World, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RNG = np.random.default_rng(0)
X = RNG.normal(size=(205, 12)).astype("float32")
Y = RNG.integers(0, 4, 205)
SOURCE = ArraySource(X, Y)
NAMES = ("mirrored", "central-storage", "one-device")


class Noise(layers.Layer):
    """Draws from Keras's generator, which all layers share."""

    def call(self, inputs, training=False):
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs)) if training else inputs


def model() -> keras.Model:
    frozen = layers.Dense(12, name="frozen")
    made = keras.Sequential(
        [
            keras.Input((12,)),
            frozen,
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.Dropout(0.3),
            Noise(),
            layers.Dense(4, kernel_regularizer=keras.regularizers.L2(1e-3)),
        ]
    )
    frozen.trainable = False
    made.compile(
        keras.optimizers.AdamW(1e-2, global_clipnorm=1.0, use_ema=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return made


@pytest.fixture(scope="module")
def alone():
    """Weights and losses of one rank with one device, which no strategy knows of."""
    trained, losses = train(model, SOURCE, 48, 4, 12)[0]
    return weights_sha256(trained), losses.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_each_strategy_computes_the_bits_of_one_device(name: str, alone):
    # Three devices have 1, 1 and 2 of the four shards; the last step of an epoch has fewer records than the others.
    group = distributed_group.make(StrategySection(strategy=name))
    assert len(group.devices.names) == (1 if name == "one-device" else 3)
    trained, losses = train(model, SOURCE, 48, 4, 12, devices=group.devices)[0]
    assert (weights_sha256(trained), losses.tobytes()) == alone


def test_a_model_in_float64_is_learned_alike():
    def double():
        made = keras.Sequential([keras.Input((12,)), layers.Dense(4, dtype="float64")])
        made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    devices = distributed_group.make(StrategySection(strategy="mirrored")).devices
    several, one = (train(double, SOURCE, 48, 4, 8, devices=d)[0][1] for d in (devices, None))
    np.testing.assert_allclose(several, one, rtol=1e-6)


def test_metrics_of_an_evaluation_are_those_of_one_device():
    def evaluate(group: Group | None) -> dict[str, float]:
        group = group or distributed_group.make(StrategySection(strategy="one-device"))
        plan = StepPlan(SOURCE.records, 48, 4)
        pipeline = Pipeline(SOURCE, plan, range(4), seed=0, shuffle=False)
        keras.utils.set_random_seed(0)
        made = model()
        hooks = Callbacks(None, made, group, print, "", {}, None)
        logs = Evaluator(made, pipeline, group, hooks, group.devices).run()
        pipeline.close()
        return logs

    assert evaluate(distributed_group.make(StrategySection(strategy="mirrored"))) == evaluate(None)


@pytest.mark.parametrize(("name", "updates"), [("mirrored", "CPU:0"), ("central-storage", "CPU:0")])
def test_every_device_computes_its_shards_and_one_makes_the_update(name: str, updates: str):
    group = distributed_group.make(StrategySection(strategy=name))

    def plain():
        made = keras.Sequential([keras.Input((12,)), layers.Dense(16, activation="tanh"), layers.Dense(4)])
        made.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return made

    with collected() as ops:
        train(plain, SOURCE, 48, 4, 3, devices=group.devices)
    # Two products of the forward pass and three of the backward pass. How many graphs building a model takes besides
    # depends on the processor, for which TensorFlow chooses between two libraries of kernels.
    products = [op for op in ops if "MatMul" in op.kind]
    steps = [op for op in products if "while/" in op.name]
    assert Counter(op.device for op in steps) == {"CPU:0": 5, "CPU:1": 5, "CPU:2": 5}
    assert {op.device for op in products if op not in steps} == {"CPU:0"}
    assert {op.device for op in ops if "ResourceApply" in op.kind} == {updates}


def test_what_no_step_changes_is_known_before_the_steps():
    plan = StepPlan(SOURCE.records, 48, 4)
    pipeline = Pipeline(SOURCE, plan, range(4), seed=0)
    made = build(model, pipeline.sample(), [SOURCE], ComputeSection(), seed=0)
    pipeline.prepare(len(seed_states(made)), None)
    template, specs = pipeline.template, pipeline.leaf_specs
    step = TrainStep(made, plan, range(4), World(1).all_reduce(0), template, specs, StepOptions())
    pipeline.close()
    fixed = step.micro.fixed()
    assert [value is None for value in fixed.weights] == [True] * len(made.trainable_variables)
    # The moving statistics of the normalization change; the frozen layer's kernel and bias do not.
    named = zip(step.micro.states, fixed.states, strict=True)
    assert {v.path.split("/")[-2] for v, value in named if value is not None} == {"frozen"}
    read = step.micro.values(fixed)
    assert all(value is not None for value in [*read.weights, *read.states])
    assert [a is b for a, b in zip(read.states, fixed.states, strict=True)].count(True) == 2


def test_without_a_tpu_there_is_one_clear_line():
    with pytest.raises(
        ClusterError, match=r"--strategy tpu: TensorFlow finds no TPU on this worker's machine"
    ) as error:
        distributed_group.make(StrategySection(strategy="tpu"))
    assert "\n" not in str(error.value)


def test_a_home_of_another_kind_is_known():
    gpus = ["/job:localhost/replica:0/task:0/device:GPU:0", "/job:localhost/replica:0/task:0/device:GPU:1"]
    home = "/job:localhost/replica:0/task:0/device:CPU:0"
    assert LocalDevices(gpus, home, lambda parts, at: parts[0]).is_home_apart
    assert not LocalDevices(gpus, gpus[0], lambda parts, at: parts[0]).is_home_apart
    assert not distributed_group.make(StrategySection(strategy="central-storage")).devices.is_home_apart


def test_shards_are_spread_evenly_and_no_device_is_given_none():
    devices = distributed_group.make(StrategySection(strategy="mirrored")).devices
    assert devices.spread(8) == [range(0, 2), range(2, 5), range(5, 8)]
    assert devices.spread(3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert devices.spread(2) == [range(0, 1), range(1, 2)]
    assert devices.spread(1) == [range(0, 1)]


def test_logical_devices_are_there():
    assert len(tf.config.list_logical_devices("CPU")) == 3
