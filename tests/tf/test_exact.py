"""Exact mode refuses by name what it cannot keep, and lets the rest pass."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import seed_states, variables
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed.encoding import wire
from raytf.errors import ExactnessError, WorkerLostError
from raytf.training import exact
from raytf.training.model.model import build
from raytf.training.step.step import StepOptions, TrainStep
from tests.tf.ranks import World

RNG = np.random.default_rng(0)
SOURCE = ArraySource(RNG.normal(size=(40, 6)).astype("float32"), RNG.integers(0, 3, 40))


class Rank:
    """What `exact.admit` asks of a group of ranks, over threads."""

    def __init__(self, world: World, rank: int):
        self.rank, self.world_size = rank, world.size
        self._all_reduce = world.all_reduce(rank)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self._all_reduce([tf.constant(values)])[0].numpy()

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return [self.sum((a if self.rank == 0 else a * 0).astype(np.int32)).astype(a.dtype) for a in arrays]


def admit(*extra, world_size: int = 1, augment=None, disturb=None, words=None) -> list:
    """What each rank gets from `admit`, an error or the identity."""

    def factory():
        model = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8), *(make() for make in extra), layers.Dense(3, activation="softmax")]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    world, plan = World(world_size), StepPlan(SOURCE.records, 16, 4)
    ranks = []
    for rank in range(world_size):
        pipeline = Pipeline(SOURCE, plan, assign(4, world_size)[rank], 0, augment=augment)
        model = build(factory, pipeline.sample(), [SOURCE], ComputeSection(), 0)
        pipeline.prepare(len(seed_states(model)), None)
        if disturb == rank:
            kernel = model.trainable_variables[0]
            kernel.assign(kernel * np.float32(1 + 2**-22))
        own = assign(4, world_size)[rank]
        template, specs = pipeline.template, pipeline.leaf_specs
        step = TrainStep(model, plan, own, world.all_reduce(rank), template, specs, StepOptions(words=words))
        ranks.append((step, pipeline, 0, Rank(world, rank), augment))

    def run(arguments):
        try:
            return exact.admit(*arguments)
        except (ExactnessError, WorkerLostError) as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, ranks))


class Noise(layers.Layer):
    @tf.function
    def noisy(self, x):
        return x + tf.random.uniform(tf.shape(x))

    def call(self, x):
        return self.noisy(x)


class Python(layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda a: a, [x], tf.float32), x.shape)


class Counter(layers.Layer):
    def build(self, shape):
        self.seen = tf.Variable(0.0, trainable=False)
        self.built = True

    def call(self, x):
        self.seen.assign_add(1.0)
        return x * 1.0


class Compiled(layers.Layer):
    def call(self, x):
        return tf.function(lambda a: a * 2.0 + 1.0, jit_compile=True)(x)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Noise, ("RandomUniform", "keras.random")),
        (Python, ("PyFunc", "python", "keras.ops")),
        (Counter, ("AssignAddVariableOp", "add_weight")),
        (Compiled, ("XLA", "jit_compile")),
    ],
)
def test_operations_that_are_no_function_of_their_inputs_are_named(layer, words):
    (error,) = admit(layer)
    assert isinstance(error, ExactnessError)
    for word in words:
        assert word in str(error), error
    assert "\n" not in str(error)


def test_float64_is_refused_since_its_sums_are_floats():
    (error,) = admit(lambda: layers.Dense(4, dtype="float64"), lambda: layers.Dense(4))
    assert isinstance(error, ExactnessError)
    assert "float64" in str(error)


def test_an_augmentation_that_keeps_a_state_is_named():
    def flip(batch, seed):
        x, y, weight = batch
        return tf.random.shuffle(x), y, weight

    (error,) = admit(augment=flip)
    assert "augment" in str(error)
    assert "RandomShuffle" in str(error)


def shift(batch, seed):
    x, y, weight = batch
    return x + tf.random.stateless_normal(tf.shape(x), seed), y, weight


@pytest.mark.parametrize("augment", [None, shift])
def test_the_usual_layers_pass_with_one_identity_on_any_number_of_ranks(augment):
    usual = (layers.BatchNormalization, lambda: layers.Dropout(0.3), lambda: layers.GaussianNoise(0.1))
    found = [admit(*usual, world_size=w, augment=augment) for w in (1, 3)]
    assert found[1] == [found[0][0]] * 3
    assert len(found[0][0]) == 1


def test_on_gpus_a_whole_step_is_compared_and_what_else_decides_is_told(monkeypatch):
    monkeypatch.setenv("TF_CUDNN_WORKSPACE_LIMIT_IN_MB", "512")
    usual = (layers.BatchNormalization, lambda: layers.Dropout(0.3))
    (alone,), others = (admit(*usual, world_size=w, words=wire.DEVICE) for w in (1, 3))
    assert others == [alone] * 3
    assert list(alone) == ["arithmetic (a hash of the first step on this kind of GPU)", "TF32", "cuDNN's workspace"]
    assert (alone["TF32"], alone["cuDNN's workspace"]) == ("on", "512 MiB")
    found = admit(world_size=3, disturb=1, words=wire.DEVICE)
    assert isinstance(found[1], ExactnessError)
    assert all(isinstance(found[r], WorkerLostError) for r in (0, 2))


def test_on_gpus_xla_is_allowed_but_not_random_numbers_inside_of_it():
    assert isinstance(admit(Compiled, words=wire.DEVICE)[0], dict)

    class Drawing(layers.Layer):
        def call(self, x):
            return tf.function(lambda a: a + tf.random.uniform(tf.shape(a)), jit_compile=True)(x)

    (error,) = admit(Drawing, words=wire.DEVICE)
    assert "RandomUniform" in str(error)


def test_a_step_that_was_tried_leaves_nothing_behind():
    def factory():
        model = keras.Sequential([keras.Input((6,)), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        return model

    plan = StepPlan(SOURCE.records, 16, 4)
    pipeline = Pipeline(SOURCE, plan, range(4), 0)
    model = build(factory, pipeline.sample(), [SOURCE], ComputeSection(), 0)
    pipeline.prepare(len(seed_states(model)), None)
    step = TrainStep(model, plan, range(4), None, pipeline.template, pipeline.leaf_specs, StepOptions())
    changing = {**variables(model), **step.reduction_state()}

    def state() -> dict[str, bytes]:
        return {name: np.asarray(v.value).tobytes() for name, v in changing.items()}

    before, call = state(), pipeline.submit(0, 1).result()
    leaves, seeds = [leaf[0, 0] for leaf in call.leaves], call.seeds[0, 0]
    told = step.probe_update(leaves, seeds)
    assert state() == before
    assert step.probe_update(leaves, seeds) == told
    assert step.probe_update([leaves[0] + np.float32(1e-6), *leaves[1:]], seeds) != told
    step(call, np.zeros(1, np.float32))
    assert all(value != before[name] for name, value in state().items() if "kernel" in name or "exponents" in name)
    assert step.probe_update(leaves, seeds) != told
    pipeline.close()


def test_a_rank_whose_arithmetic_differs_in_the_last_bits_is_found():
    found = admit(world_size=3, disturb=1)
    assert isinstance(found[1], ExactnessError)
    assert "worker 1" in str(found[1])
    assert "TensorFlow" in str(found[1])
    assert all(isinstance(found[r], WorkerLostError) for r in (0, 2))
    assert admit(world_size=1, disturb=0) != admit(world_size=1)


def test_what_tensorflow_refuses_is_explained():
    refusal = (
        "import tensorflow as tf\n"
        "from raytf.training.exact import explain\n"
        "tf.config.experimental.enable_op_determinism()\n"
        "try:\n"
        "    tf.random.uniform([1])\n"
        "except Exception as error:\n"
        "    print(explain(error))\n"
    )
    run = subprocess.run([sys.executable, "-c", refusal], capture_output=True, text=True, timeout=300)
    assert run.stdout.startswith("--exact: TensorFlow cannot compute this model deterministically: "), run.stderr
    assert "Random ops require a seed" in run.stdout
    assert exact.explain(ValueError("something else")) is None
