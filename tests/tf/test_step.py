"""The step learns what Keras's own fit learns, and the same for every number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import keras
import numpy as np
import pytest
from keras import layers

from raytf.checkpoint.variables import seed_states, weights_sha256
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.training.model.model import build
from raytf.training.step.step import StepOptions, TrainStep
from tests.tf.ranks import World, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RNG = np.random.default_rng(0)
X = RNG.normal(size=(205, 12)).astype("float32")
Y = RNG.integers(0, 4, 205)
WEIGHT = RNG.uniform(0.5, 2, 205).astype("float32")


def dense(*hidden, **compile_arguments):
    def make():
        model = keras.Sequential(
            [keras.Input((12,)), layers.Dense(16, activation="relu"), *(h() for h in hidden), layers.Dense(4)]
        )
        arguments = {"optimizer": "sgd", "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
        model.compile(**{**arguments, "metrics": ["accuracy"], **{k: v() for k, v in compile_arguments.items()}})
        return model

    return make


def two_outputs():
    x = keras.Input((12,))
    hidden = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-2))(x)
    model = keras.Model(x, {"a": layers.Dense(4, name="a")(hidden), "b": layers.Dense(1, name="b")(hidden)})
    losses = {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"}
    model.compile("adam", losses, loss_weights={"a": 1.0, "b": 0.3}, metrics={"a": ["accuracy"], "b": ["mae"]})
    return model


class Pair(NamedTuple):
    first: object
    second: object


def losses_of_several_outputs():
    """One loss gets both outputs, as Keras hands them on: in the structure of the model's."""

    def both(targets, predicted):
        pairs = zip(keras.tree.flatten(targets), keras.tree.flatten(predicted), strict=True)
        return sum(keras.losses.mean_absolute_error(*pair) for pair in pairs)

    x = keras.Input((12,))
    model = keras.Model(x, Pair(layers.Dense(1, name="one")(x), layers.Dense(1, name="two")(x)))
    model.compile(keras.optimizers.SGD(0.1), [both, Pair(both, "mse")])
    return model


def embedding():
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(30, 6), layers.Flatten(), layers.Dense(4)]
    )
    # Not Adam: Keras squares sparse gradients before it adds those of one row, which a dense gradient rightly does not.
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def several_rates():
    chosen = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {"bias": keras.optimizers.Adam(1e-2)})
    return keras.optimizers.MultiOptimizer(chosen)


def positions():
    x = keras.Input((5,), dtype="int32")
    embedded = layers.Embedding(30, 6, mask_zero=True)(x)
    model = keras.Model(x, layers.Dense(4)(layers.Dense(8, activation="tanh")(embedded)))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def optimizer(name, **arguments):
    return lambda: getattr(keras.optimizers, name)(**arguments)


def summed():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")


def schedule():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(1e-2, 12))


PLAIN = (X, Y)
#: Targets of each position, of which padding is masked.
POSITIONS = (
    np.sort(RNG.integers(0, 30, (205, 5)) * RNG.integers(0, 2, (205, 5)))[:, ::-1],
    RNG.integers(0, 4, (205, 5)),
)
CASES = {
    "sgd": (dense(optimizer=optimizer("SGD", learning_rate=0.1, momentum=0.9)), PLAIN),
    "adam": (dense(optimizer=optimizer("Adam", learning_rate=1e-2)), PLAIN),
    "schedule": (dense(optimizer=schedule), PLAIN),
    "clipping and decay": (dense(optimizer=optimizer("AdamW", learning_rate=1e-2, global_clipnorm=0.5)), PLAIN),
    "ema": (dense(optimizer=optimizer("SGD", learning_rate=0.1, use_ema=True, ema_overwrite_frequency=3)), PLAIN),
    "sum over the batch": (dense(loss=summed, optimizer=optimizer("SGD", learning_rate=1e-3)), PLAIN),
    "sample weights": (dense(), (X, Y, WEIGHT)),
    "two outputs": (two_outputs, (X, {"a": Y, "b": X[:, :1] * 2})),
    "embedding": (embedding, (RNG.integers(0, 30, (205, 5)), Y)),
    "positions": (positions, POSITIONS),
    "several rates": (dense(optimizer=several_rates), PLAIN),
}

OF_OUTPUTS = {"losses of several outputs": (losses_of_several_outputs, (X, Pair(X[:, :1] * 2, X[:, 1:2])))}


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        # The two ways to add differ in nothing that depends on the model.
        pytest.param(name, exact, marks=[pytest.mark.slow] * (not exact and name not in ("adam", "two outputs")))
        for name in CASES
        for exact in (True, False)
    ],
)
def test_three_epochs_end_as_keras_fit_does(name: str, exact: bool):
    factory, data = CASES[name]
    keras.utils.set_random_seed(0)
    reference = factory()
    if not reference.built:
        reference.build(data[0].shape)
    weights = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    # One shard, no shuffling: the batches of Model.fit, the smaller last one included (205 = 3 * 64 + 13).
    history = reference.fit(**weights, batch_size=64, epochs=3, shuffle=False, verbose=0).history
    ((model, losses),) = train(factory, ArraySource(*data), 64, 1, 12, exact=exact, shuffle=False)
    assert len(losses) == 12
    model.optimizer.finalize_variable_values(model.trainable_variables)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-5, err_msg=ours.path)
    logs = {k: float(v) for k, v in model.get_metrics_result().items()}
    if "a_loss" in logs:
        # Keras averages an output's loss over batches, however small the last; raytf over records, as the loss itself.
        regularization = logs["loss"] - logs.pop("a_loss") - 0.3 * logs.pop("b_loss")
        assert 0 < regularization < 0.2
        history = {k: v for k, v in history.items() if k in logs}
    for key, values in history.items():
        assert logs[key] == pytest.approx(values[-1], rel=2e-4, abs=1e-5), key


@pytest.mark.parametrize("name", CASES)
def test_shards_are_summed_to_the_same_step(name: str):
    factory, data = CASES[name]
    # Shards are ranges of the data, so batches of another number of shards hold other records, but for one of them all.
    parts = train(factory, ArraySource(*data), 208, 4, 1, shuffle=False)[0][0]
    one = train(factory, ArraySource(*data), 208, 1, 1, shuffle=False)[0][0]
    for a, b in zip(parts.weights, one.weights, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=a.path)


@pytest.mark.parametrize("name", ["sgd", "sum over the batch", "two outputs", "positions", "losses of several outputs"])
def test_a_batch_that_shards_do_not_divide_is_summed_to_the_same_step(name: str):
    factory, data = (CASES | OF_OUTPUTS)[name]
    one = train(factory, ArraySource(*data), 205, 1, 1, shuffle=False)[0]
    for shards, world_size in ((7, 3), (256, 1)):
        for model, losses in train(factory, ArraySource(*data), 205, shards, 1, world_size, shuffle=False):
            np.testing.assert_allclose(losses, one[1], rtol=1e-5)
            for a, b in zip(model.weights, one[0].weights, strict=True):
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-5, err_msg=a.path)


def test_a_batch_that_shards_do_not_divide_has_equal_bits_on_any_world_size():
    source, found = ArraySource(X, Y, WEIGHT), set()
    for world_size in (1, 2, 3):
        for model, losses in train(everything, source, 50, 4, 9, world_size, call_steps=1 + world_size):
            found.add((weights_sha256(model), losses.tobytes()))
    assert len(found) == 1


def everything():
    model = keras.Sequential(
        [
            keras.Input((12,)),
            layers.Dense(16),
            layers.BatchNormalization(momentum=0.9),
            layers.Activation("relu"),
            layers.Dropout(0.3),
            layers.GaussianNoise(0.1),
            layers.Dense(4),
        ]
    )
    model.compile(
        keras.optimizers.AdamW(1e-2, global_clipnorm=1.0, use_ema=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def reverse(parts):
    return parts[::-1]


#: float16 has a loss scale beside it. That floats would give other bits is in test_mutants.py.
@pytest.mark.parametrize("precision", ["off", pytest.param("bfloat16", marks=pytest.mark.slow), "float16"])
def test_any_number_of_ranks_and_any_order_of_addition_gives_the_same_bits(precision: str):
    source, compute = ArraySource(X, Y, WEIGHT), ComputeSection(mixed_precision=precision)
    hashes, losses = set(), []
    for world_size, order in ((1, list), (2, list), (3, reverse), (4, reverse)):
        ranks = train(
            everything, source, 48, 4, 20, world_size, order=order, call_steps=1 + world_size, compute=compute
        )
        hashes |= {weights_sha256(model) for model, _ in ranks}
        losses.extend(loss.tobytes() for _, loss in ranks)
        values = {tuple(float(v) for v in model.get_metrics_result().values()) for model, _ in ranks}
        assert len(values) == 1
    keras.config.set_dtype_policy("float32")
    assert len(hashes) == 1
    assert len(set(losses)) == 1


def test_16_bit_gradients_halve_bytes_learn_as_well_and_agree_on_all_ranks():
    source, sent = ArraySource(X, Y, WEIGHT), []

    def counted(parts):
        sent.append(parts[0].nbytes)
        return list(parts)

    runs = [train(everything, source, 48, 4, 12, w, compress=True, order=counted)[0] for w in (1, 3)]
    assert len({weights_sha256(model) for model, _ in runs}) == 1
    assert len({losses.tobytes() for _, losses in runs}) == 1
    small = set(sent)
    model, losses = train(everything, source, 48, 4, 12, 2, order=counted)[0]
    weights = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert {size - saved for size in set(sent) - small for saved in small} == {2 * weights}
    np.testing.assert_allclose(runs[0][1], losses, rtol=0.02)
    assert weights_sha256(model) != weights_sha256(runs[0][0])


def test_batch_norm_averages_over_shards_and_is_equal_on_all_ranks():
    ranks = train(everything, ArraySource(X * 5 + 3, Y), 48, 4, 4, 2)
    means = [model.layers[1].moving_mean.numpy() for model, _ in ranks]
    np.testing.assert_array_equal(means[0], means[1])
    assert np.abs(means[0]).max() > 0.1


def test_dropout_differs_between_shards_and_steps():
    def make():
        x = keras.Input((8,))
        model = keras.Model(x, layers.Dropout(0.5)(layers.Dense(8, kernel_initializer="identity", use_bias=False)(x)))
        model.compile(keras.optimizers.SGD(0.0), "mae")
        return model

    ones = np.ones((64, 8), "float32")
    ((_, losses),) = train(make, ArraySource(ones, ones * 0), 16, 4, 12)
    assert len(np.unique(losses)) > 6


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision(precision: str):
    model, losses = train(
        dense(optimizer=optimizer("Adam", learning_rate=1e-2)),
        ArraySource(X, Y),
        64,
        4,
        40,
        2,
        compute=ComputeSection(mixed_precision=precision),
    )[0]
    assert losses[-4:].mean() < losses[:4].mean()
    assert model.compute_dtype == precision
    assert (type(model.optimizer).__name__ == "LossScaleOptimizer") == (precision == "float16")
    keras.config.set_dtype_policy("float32")


def test_jit_learns_the_same():
    # XLA draws other random numbers from the same seed, so there is no dropout here.
    normalized = dense(layers.BatchNormalization)
    plain = train(normalized, ArraySource(X, Y), 64, 4, 10)[0][1]
    jitted = train(normalized, ArraySource(X, Y), 64, 4, 10, compute=ComputeSection(jit=True))[0][1]
    np.testing.assert_allclose(jitted, plain, rtol=1e-3)


def test_class_weights_are_sample_weights():
    table = {0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0}
    factors = np.array([table[int(label)] for label in Y], "float32")
    by_class = train(dense(), ArraySource(X, Y), 64, 4, 6, class_weight=table)[0][0]
    by_sample = train(dense(), ArraySource(X, Y, factors), 64, 4, 6)[0][0]
    assert weights_sha256(by_class) == weights_sha256(by_sample)


def test_augmentation_is_a_function_of_step_and_shard():
    def shift(batch, seed):
        import tensorflow as tf

        x, y, weight = batch
        return x + tf.random.stateless_normal(tf.shape(x), seed), y, weight

    runs = [train(dense(), ArraySource(X, Y), 48, 4, 8, w, augment=shift)[0][0] for w in (1, 3)]
    assert weights_sha256(runs[0]) == weights_sha256(runs[1])
    assert weights_sha256(runs[0]) != weights_sha256(train(dense(), ArraySource(X, Y), 48, 4, 8)[0][0])


def test_the_probe_tells_bits_and_changes_nothing():
    source = ArraySource(X, Y)
    plan, own = StepPlan(source.records, 48, 4), range(4)
    pipeline = Pipeline(source, plan, own, seed=0)
    model = build(everything, pipeline.sample(), [source], ComputeSection(), seed=0)
    pipeline.prepare(len(seed_states(model)), None)
    step = TrainStep(model, plan, own, World(1).all_reduce(0), pipeline.template, pipeline.leaf_specs, StepOptions())
    call, before = pipeline.submit(0, 1).result(), weights_sha256(model)
    pipeline.close()

    def bits(shard: int, seed: int = 0) -> bytes:
        return step.probe([leaf[0, shard] for leaf in call.leaves], call.seeds[0, shard] + seed)

    assert bits(0) == bits(0)
    assert len({bits(0), bits(1), bits(0, seed=1)}) == 3
    assert weights_sha256(model) == before
    assert len(bits(0)) == 4 * (sum(step.reductions[0].layout.sizes) + step.micro.row_width)
    assert "MatMul" in {op.type for op in step.probe_function.graph.get_operations()}
