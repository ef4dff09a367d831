"""A `train_step` of the model's own does what it does in plain Keras, for every number of shards and ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf._keras.interception import optimizers_within
from raytf.checkpoint.variables import seed_states, weights_sha256
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.data.sources.batches import recorded
from raytf.data.streams import from_tf_dataset
from raytf.errors import RaytfError, WholeBatchError
from raytf.storage.storage import Storage
from raytf.training.evaluation import Evaluator
from raytf.training.model import model as models
from raytf.training.step.learning_rate import LearningRate, RateLaw
from raytf.training.step.step import StepOptions, TrainStep
from raytf.training.user.callbacks import Callbacks
from tests.tf import own_steps
from tests.tf.ranks import Alone, Rank, train

RNG = np.random.default_rng(0)
RECORDS, BATCH, EPOCHS, STEPS = 44, 16, 2, 6  # the last step of an epoch is a part of a batch
X = RNG.normal(size=(RECORDS, own_steps.WIDTH)).astype(np.float32)
Y = RNG.normal(size=(RECORDS, 1)).astype(np.float32)


def dataset(has_labels: bool) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y) if has_labels else X).batch(BATCH)


def alone(name: str) -> tuple[keras.Model, list[float], dict[str, float]]:
    """Plain Keras: the model, the number that stands for each step, and what History shows of the last epoch."""
    factory, has_labels = own_steps.PROGRAMS[name]
    keras.utils.set_random_seed(0)
    model, losses = factory(), []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"] if "loss" in logs else logs[min(logs)])

    shown = model.fit(dataset(has_labels), epochs=EPOCHS, verbose=0, callbacks=[Losses()])
    return model, losses, {key: values[-1] for key, values in shown.history.items()}


def run(name: str, shards: int, ranks: int, **options: Any) -> list[tuple[Any, np.ndarray]]:
    factory, has_labels = own_steps.PROGRAMS[name]
    source = recorded(from_tf_dataset(dataset(has_labels), "train", None, 0), Storage(tempfile.mkdtemp()), print)
    return train(factory, source, BATCH, shards, STEPS, ranks, **options)


def values(model: keras.Model) -> list[np.ndarray]:
    """Weights, states, and what the optimizers that were used keep."""
    used = [each for each in optimizers_within(model) if int(each.iterations)]
    return [np.asarray(v) for v in [*model.weights, *(v for each in used for v in each.variables)]]


#: What shows the mean over the epoch so far for a step, as Keras's metrics do, and not the step's own number.
RUNNING = {"autoencoder", "GAN", "WGAN-GP", "averaged weights", "contrastive with a probe", "as Keras"}
#: Without BatchNorm, which sees its own shard alone.
ALIKE = {"autoencoder", "contrastive with a probe", "by hand", "as Keras", "apart"}


#: Programs of which another one has all parts: the GAN's second update, the distiller's losses and averages.
TWINS = {"contrastive with a probe", "as Keras", "apart", "autoencoder", "averaged weights"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TWINS)) for name in own_steps.PROGRAMS]
)
def test_a_step_of_the_model_s_own_is_what_it_is_in_keras(name: str):
    reference, losses, shown = alone(name)
    ends = set()
    for shards, ranks in ((1, 1), (4, 1), (4, 2)) if name in ("GAN", "averaged weights") else ((1, 1), (4, 2)):
        for model, own in run(name, shards, ranks):
            if shards == 4:
                ends.add((weights_sha256(model), own.tobytes(), str(models.logs(model))))
            if shards == 4 and name not in ALIKE:
                continue
            for mine, theirs in zip(values(model), values(reference), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
            if name in RUNNING:
                own = [own[e : e + k + 1].mean() for e in (0, 3) for k in range(3)]
            if shards == 1 or name not in RUNNING:
                np.testing.assert_allclose(own, losses, rtol=1e-5, atol=1e-6)
                assert models.logs(model) == pytest.approx(shown, rel=1e-5)
    assert len(ends) == 1, "the bits depend on the number of ranks"


def refusal(train_step: Callable[[Any, Any], Any], shards: int = 1, **attributes: Any) -> str:
    """What is said of a model whose one layer is `dense`, with this `train_step`."""

    def factory() -> keras.Model:
        kind = type("Own", (keras.Model,), {"train_step": train_step, **attributes})
        model = kind()
        model.dense = own_steps.mlp(own_steps.WIDTH, 1)
        model.mean = keras.metrics.Mean(name="loss")
        model.slow = model.add_weight(shape=(), trainable=False, name="slow")
        model.compile()
        return model

    source = recorded(from_tf_dataset(dataset(True), "train", None, 0), Storage(tempfile.mkdtemp()), print)
    with pytest.raises(RaytfError) as caught:
        train(factory, source, BATCH, shards, 1)
    return str(caught.value)


def update(model: Any, data: Any, optimizer: Any = None) -> Any:
    x, y = data
    with tf.GradientTape() as tape:
        loss = keras.ops.mean((model.dense(x) - y) ** 2)
    weights = model.dense.trainable_variables
    (optimizer or model.optimizer).apply(tape.gradient(loss, weights), weights)
    return loss


OUTSIDE: dict[str, Any] = {"optimizer": keras.optimizers.SGD(), "variable": None, "raw": None}


def with_a_strange_optimizer(model: Any, data: Any) -> Any:
    return {"loss": update(model, data, OUTSIDE["optimizer"])}


def with_a_strange_variable(model: Any, data: Any) -> Any:
    if OUTSIDE["variable"] is None:
        OUTSIDE["variable"] = keras.Variable(0.0, name="stray")
    OUTSIDE["variable"].assign_add(1.0)
    return {"loss": update(model, data)}


def with_a_variable_of_tensorflow(model: Any, data: Any) -> Any:
    if OUTSIDE["raw"] is None:
        OUTSIDE["raw"] = tf.Variable(0.0)
    OUTSIDE["raw"].assign_add(1.0)
    return {"loss": update(model, data)}


def with_a_late_prediction(model: Any, data: Any) -> Any:
    update(model, data)
    model.mean.update_state(keras.ops.mean(model.dense(data[0])))
    return {"loss": model.mean.result()}


def with_a_state_of_both(model: Any, data: Any) -> Any:
    loss = update(model, data)
    model.slow.assign(keras.ops.mean(model.dense(data[0])))
    return {"loss": loss}


def with_a_number_of_both(model: Any, data: Any) -> Any:
    return {"loss": update(model, data), "after": keras.ops.mean(model.dense(data[0]))}


def without_gradients(model: Any, data: Any) -> Any:
    loss = keras.ops.mean(model.dense(data[0]))
    with tf.GradientTape() as tape:
        pass
    weights = model.dense.trainable_variables
    model.optimizer.apply(tape.gradient(loss, weights), weights)
    return {"loss": loss}


def with_an_assignment_before(model: Any, data: Any) -> Any:
    kernel = model.dense.trainable_variables[0]
    kernel.assign(kernel / keras.ops.norm(kernel))
    return {"loss": update(model, data)}


def with_a_condition(model: Any, data: Any) -> Any:
    loss = keras.ops.mean(model.dense(data[0]))
    weights = model.dense.trainable_variables
    tf.cond(model.slow.value > 1.0, lambda: model.optimizer.apply([0.0 * w for w in weights], weights), lambda: None)
    return {"loss": loss}


@tf.function
def with_a_condition_by_autograph(model: Any, data: Any) -> Any:
    if model.slow.value > 1.0:
        update(model, data)
    return {"loss": model.slow}


def with_a_loop(model: Any, data: Any) -> Any:
    def body(count: Any) -> Any:
        update(model, data)
        return count + 1

    tf.while_loop(lambda count: count < 2, body, [0])
    return {"loss": model.slow}


def with_a_number(model: Any, data: Any) -> Any:
    return update(model, data)


def that_raises(model: Any, data: Any) -> Any:
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("train_step", "words"),
    [
        (with_a_strange_optimizer, ("not an attribute of the model", "self.optimizer_of_mine")),
        (with_a_strange_variable, ("stray", "an attribute of the model")),
        (with_a_variable_of_tensorflow, ("tf.Variable", "self.add_weight")),
        (with_a_late_prediction, ("after the last update", "Predict before optimizer.apply")),
        (with_a_state_of_both, ("slow", "Use the batch before optimizer.apply")),
        (with_a_number_of_both, ("'after'", "Use the batch before optimizer.apply")),
        (without_gradients, ("all None", "GradientTape")),
        (with_a_condition, ("under a condition (tf.cond) at ", "test_own_step.py", "gradient_accumulation_steps=N")),
        (with_a_loop, ("in a loop (tf.while_loop) at ", "test_own_step.py")),
        (with_a_condition_by_autograph, ("under a condition (tf.cond)", "gradient_accumulation_steps=N")),
        (with_a_number, ("Expected a dict",)),
        (that_raises, ("train_step raised KeyError", "test_own_step.py")),
    ],
)
def test_a_step_that_cannot_be_run_for_each_shard_is_refused_with_what_to_do(train_step: Any, words: tuple[str, ...]):
    said = refusal(train_step)
    for word in words:
        assert word in said


def test_a_weight_assigned_before_its_update_is_as_in_keras_with_one_shard():
    def factory() -> keras.Model:
        model = type("Own", (keras.Model,), {"train_step": with_an_assignment_before})()
        model.dense = own_steps.mlp(own_steps.WIDTH, 1)
        model.compile("sgd")
        return model

    keras.utils.set_random_seed(0)
    reference = factory()
    reference.fit(dataset(True), epochs=EPOCHS, verbose=0)
    source = recorded(from_tf_dataset(dataset(True), "train", None, 0), Storage(tempfile.mkdtemp()), print)
    ((model, _),) = train(factory, source, BATCH, 1, STEPS)
    for mine, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)
    said = refusal(with_an_assignment_before, shards=4)
    for word in ("kernel", "SAM and SpectralNormalization", "--logical-shards 1 --workers 1"):
        assert word in said


class Decorated(keras.Model):
    """Two updates, and a Python condition on a tensor, which AutoGraph converts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = own_steps.mlp(own_steps.WIDTH, 1), own_steps.mlp(own_steps.WIDTH, 1)
        self.other = keras.optimizers.SGD(0.02)
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False, name="count")

    @tf.function
    def train_step(self, data: Any) -> dict[str, Any]:
        factor = tf.constant(1.0)
        if self.count.value > 2.0:
            factor = tf.constant(0.5)
        loss = 0.0
        for model, optimizer in ((self.first, self.optimizer), (self.second, self.other)):
            with tf.GradientTape() as tape:
                loss = factor * keras.ops.mean(keras.ops.square(data[1] - model(data[0])))
            weights = model.trainable_variables
            optimizer.apply(tape.gradient(loss, weights), weights)
        self.count.assign_add(1.0)
        return {"loss": loss}


def test_a_decorated_step_with_a_condition_is_what_it_is_in_keras():
    def factory() -> keras.Model:
        model = Decorated()
        model.compile(keras.optimizers.SGD(0.1))
        return model

    keras.utils.set_random_seed(0)
    reference = factory()
    reference.fit(dataset(True), epochs=EPOCHS, verbose=0)
    source = recorded(from_tf_dataset(dataset(True), "train", None, 0), Storage(tempfile.mkdtemp()), print)
    for shards in (1, 4):
        ((model, _),) = train(factory, source, BATCH, shards, STEPS)
        for mine, theirs in zip(model.get_weights(), reference.get_weights(), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


class WithNoise(keras.Model):
    """Draws as much noise as its batches are long, as diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = own_steps.mlp(own_steps.WIDTH, 1)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        return {"loss": update(self, (x + keras.random.normal((BATCH, own_steps.WIDTH)), y))}


def test_a_step_for_whole_batches_alone_is_known_by_its_error():
    def factory() -> keras.Model:
        model = WithNoise()
        model.compile()
        return model

    sample = X[:2], Y[:2], None
    models.build(factory, sample, [], ComputeSection(), 0, records=(BATCH, BATCH))
    with pytest.raises(
        WholeBatchError, match=r"It failed with the 4 records of a logical shard, but accepts a whole batch of 16\."
    ):
        models.build(factory, sample, [], ComputeSection(), 0, records=(BATCH // 4, BATCH))


def test_a_batch_of_zipped_data_sets_comes_as_it_was():
    seen = []

    def train_step(model: Any, data: Any) -> Any:
        (first, of_first), (second, of_second) = data
        seen.append([part.shape[0] for part in (first, of_first, second, of_second)])
        loss = update(model, (first, of_first))
        return {"loss": loss, "second": update(model, (second, of_second))}

    def factory() -> keras.Model:
        model = type("Own", (keras.Model,), {"train_step": train_step})()
        model.dense = own_steps.mlp(own_steps.WIDTH, 1)
        model.compile()
        return model

    def zipped() -> tf.data.Dataset:
        parts = [tf.data.Dataset.from_tensor_slices((X[:n], Y[:n])).batch(b) for n, b in ((40, 8), (20, 4))]
        return tf.data.Dataset.zip(tuple(parts))

    keras.utils.set_random_seed(0)
    reference = factory()
    reference.fit(zipped(), epochs=1, verbose=0)
    ends = set()
    for shards, ranks in ((1, 1), (4, 1), (4, 2)):
        source = recorded(from_tf_dataset(zipped(), "train", None, 0), Storage(tempfile.mkdtemp()), print)
        for model, _ in train(factory, source, 4, shards, 5, ranks):
            for mine, theirs in zip(model.weights, reference.weights, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
            ends.add((shards, weights_sha256(model)))
    assert len(ends) == 2, "the bits depend on the number of ranks"
    assert {tuple(sizes) for sizes in seen} >= {(8, 8, 4, 4), (2, 2, 1, 1)}


def test_a_test_step_of_the_model_s_own_says_what_it_says_in_keras():
    reference, _, _ = alone("distiller")
    # Keras logs the last batch; with one batch that is the mean over the batches, which raytf logs.
    expected = reference.evaluate(X, Y, batch_size=RECORDS, verbose=0, return_dict=True)
    pipeline = Pipeline(ArraySource(X, Y), StepPlan(RECORDS, RECORDS, 1), range(1), 0, shuffle=False)
    found = Evaluator(reference, pipeline, Alone(), Callbacks([], reference, Alone(), print, ".", {}, None)).run()
    assert found == pytest.approx(expected, rel=1e-5)
    assert list(found) == ["student_loss"]


def test_a_model_that_cannot_be_evaluated_is_refused_before_the_first_step():
    source = ArraySource(X)
    with pytest.raises(RaytfError, match=r"Gan has neither a test_step nor a call.*leave out the validation"):
        models.build(own_steps.gan, (X[:2], None, None), [source, source], ComputeSection(), 0)


@pytest.mark.parametrize("draw", [keras.random.normal, tf.random.normal])
def test_numbers_that_a_shard_draws_are_its_own_and_not_computed_once(draw: Callable[..., Any]):
    class Drawing(own_steps.Gan):
        def train_step(self, data: Any) -> dict[str, Any]:
            latent = draw((16, 3))  # a number that is not of the batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(self.generator(latent))
            weights = self.generator.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            self.g_tracker.update_state(loss)
            return {"loss": loss, "tracked": self.g_tracker.result()}

    def factory() -> keras.Model:
        model = Drawing()
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        return model

    source = ArraySource(X)
    rank = Rank(factory, source, StepPlan(RECORDS, BATCH, 1), range(1), None)
    assert rank.step.micro.findings.late_names == {"tracked"}


def test_rate_flags_are_refused_with_optimizers_that_they_do_not_change():
    pipeline = Pipeline(ArraySource(X), StepPlan(RECORDS, BATCH, 1), range(1), 0)
    model = models.build(own_steps.gan, pipeline.sample(), [ArraySource(X)], ComputeSection(), 0)
    pipeline.prepare(len(seed_states(model)), None)
    rate = LearningRate(model.optimizer, RateLaw(1.0, 10))
    leaves = pipeline.template, pipeline.leaf_specs
    with pytest.raises(RaytfError, match="--warmup-epochs"):
        TrainStep(model, pipeline.plan, range(1), None, *leaves, StepOptions(), rate)
