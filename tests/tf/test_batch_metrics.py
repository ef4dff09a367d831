"""Metrics of the whole batch have Keras's values for every number of shards and ranks; sums keep their cheap path."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed.devices import Devices
from raytf.training.evaluation import Evaluator
from raytf.training.model import model as models
from raytf.training.model.notes import notes_of
from raytf.training.user.callbacks import Callbacks
from tests.tf.ranks import Alone, World, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RECORDS = 22
RNG = np.random.default_rng(0)
X = RNG.normal(size=(RECORDS, 6)).astype("float32")
BITS = (RNG.random((RECORDS, 3)) < 0.4).astype("float32")
WEIGHT = RNG.uniform(0.2, 2, RECORDS).astype("float32")
TOKENS = np.where(np.arange(5) < RNG.integers(1, 6, RECORDS)[:, None], RNG.integers(1, 9, (RECORDS, 5)), 0)
EACH = RNG.normal(size=(RECORDS, 5, 1)).astype("float32")


class Largest(keras.metrics.Metric):
    """Keeps a maximum, and counts its updates in an integer."""

    def __init__(self, name="largest", **options):
        super().__init__(name=name, **options)
        self.most = self.add_variable((), initializer="zeros", name="most")
        self.updates = self.add_variable((), initializer="zeros", dtype="int32", name="updates")

    def update_state(self, y, p, sample_weight=None):
        difference = ops.abs(ops.cast(y, "float32") - p)
        if sample_weight is not None:
            difference = difference * sample_weight[:, None]
        self.most.assign(ops.maximum(self.most, ops.max(difference)))
        self.updates.assign_add(1)

    def result(self):
        return self.most + ops.cast(self.updates, "float32")


def f1(y: Any, p: Any) -> Any:
    p = ops.cast(p > 0.5, "float32")
    return 2 * ops.sum(y * p) / (ops.sum(y) + ops.sum(p) + 1e-7)


def mean_error(y: Any, p: Any) -> Any:
    return ops.mean(ops.abs(y - p))


def root(y: Any, p: Any) -> Any:
    return ops.sqrt(ops.mean((y - p) ** 2))


def plain(**compiled: Any) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="sigmoid")])
        made = {name: [one() if isinstance(one, type) else one for one in given] for name, given in compiled.items()}
        model.compile(keras.optimizers.SGD(0.5), "mse", **made)
        return model

    return make


def two_outputs() -> keras.Model:
    x = keras.Input((6,))
    model = keras.Model(x, {"a": layers.Dense(3, name="a")(x), "b": layers.Dense(1, name="b")(x)})
    kinds = {"a": [Largest(), "mae"], "b": [root]}
    model.compile(keras.optimizers.SGD(0.1), {"a": "mse", "b": "mae"}, metrics=kinds)
    return model


def masked() -> keras.Model:
    model = keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(9, 4, mask_zero=True), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Largest(), "mae"])
    return model


class InCall(layers.Layer):
    """Updates a metric in its call."""

    def __init__(self):
        super().__init__()
        self.seen = Largest(name="seen")

    def call(self, x):
        self.seen.update_state(0.0 * x, x)
        return x


class OwnMetrics(keras.Model):
    """Has a `compute_metrics` of its own, which looks at the inputs."""

    def __init__(self):
        super().__init__()
        self.dense, self.of_inputs = layers.Dense(3), Largest(name="of_inputs")
        self.hidden = InCall()

    def call(self, x):
        return self.dense(self.hidden(x))

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.of_inputs.update_state(x[:, :3], y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


class OwnStep(keras.Model):
    """Has steps of its own, with a tracker of the loss and metrics of the whole batch."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)
        self.tracker, self.largest = keras.metrics.Mean(name="loss"), Largest()
        self.error = keras.metrics.MeanAbsoluteError(name="error")

    def call(self, x):
        return self.dense(x)

    @property
    def metrics(self):
        return [self.tracker, self.largest, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = ops.mean((y - predicted) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return self.told(y, predicted, loss)

    def test_step(self, data):
        x, y = data
        predicted = self(x, training=False)
        return self.told(y, predicted, ops.mean((y - predicted) ** 2))

    def told(self, y, predicted, loss):
        self.tracker.update_state(loss)
        self.largest.update_state(y, predicted)
        self.error.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


def subclass(kind: type[keras.Model]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = kind()
        model.build((None, 6))
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[root] if kind is OwnMetrics else None)
        return model

    return make


CASES: dict[str, tuple[Callable[[], keras.Model], tuple[Any, ...]]] = {
    "a maximum": (plain(metrics=[Largest]), (X, BITS)),
    "functions": (plain(metrics=[f1, mean_error, root, "mae"]), (X, BITS)),
    "weighted": (plain(metrics=[root, "mae"], weighted_metrics=[Largest, "mse"]), (X, BITS, WEIGHT)),
    "two outputs": (two_outputs, (X, {"a": BITS, "b": X[:, :1]})),
    "masks": (masked, (TOKENS, EACH)),
    "own metrics, and in a layer": (subclass(OwnMetrics), (X, BITS)),
    "own steps": (subclass(OwnStep), (X, BITS)),
    "integers as labels": (plain(metrics=[Largest]), (X, BITS.astype("int64"))),
}


class Group(Alone):
    """A rank of a group of threads."""

    devices = Devices()

    def __init__(self, world: World, rank: int):
        self._add = world.all_reduce(rank)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return self._add([tf.constant(values)])[0].numpy()


def shown(results: Mapping[str, Any]) -> dict[str, float]:
    """The metrics without the losses of outputs, which Keras weights otherwise when it knows a batch's size."""
    return {name: float(value) for name, value in results.items() if not name.endswith("_loss")}


def keras_in_steps(make: Callable[[], keras.Model], data: tuple[Any, ...], plan: StepPlan, steps: int):
    """Train as plain Keras does on the batches of a plan, and evaluate."""
    source = ArraySource(*data)
    pipeline = Pipeline(source, plan, range(plan.shards), seed=0, shuffle=False)
    keras.utils.set_random_seed(0)
    model = make()

    def batches(first: int, stop: int) -> list[Any]:
        found = []
        for step in range(first, stop):
            call = pipeline.submit(step, step + 1).result()
            leaves = [
                np.concatenate([part[:n] for part, n in zip(leaf[0], call.counts, strict=True)]) for leaf in call.leaves
            ]
            found.append(tuple(part for part in keras.tree.pack_sequence_as(data, leaves)))
        return found

    own = model.train_step, model.test_step
    trains, tests = (tf.function(step, autograph=False, reduce_retracing=True) for step in own)
    for step, batch in enumerate(batches(0, steps)):
        if step and step % plan.steps_per_epoch == 0:
            model.reset_metrics()
        trains(batch)
    trained = shown(model.get_metrics_result())
    model.reset_metrics()
    for batch in batches(0, plan.steps_per_epoch):
        tests(batch)
    pipeline.close()
    return trained, shown(model.get_metrics_result())


@pytest.mark.parametrize("name", CASES)
def test_metrics_are_those_of_keras_for_any_shards_and_ranks(name: str):
    make, data = CASES[name]
    steps, source, evaluated = 5, ArraySource(*data), {}
    for shards, world_size in ((1, 1), (4, 3)):
        plan = StepPlan(RECORDS, 9, shards)  # shards differ in size, and the last batch is smaller
        trained, tested = keras_in_steps(make, data, plan, steps)
        ranks = train(make, source, 9, shards, steps, world_size, shuffle=False)
        world = World(world_size)
        evaluators = []
        for rank, (model, _) in enumerate(ranks):
            assert shown(models.results(model)) == pytest.approx(trained, rel=2e-5)  # weights are rounded otherwise
            group = Group(world, rank) if world_size > 1 else Alone()
            pipeline = Pipeline(source, plan, assign(shards, world_size)[rank], seed=0, shuffle=False)
            hooks = Callbacks([], model, Alone(), print, ".", {}, None)
            evaluators.append(Evaluator(model, pipeline, group, hooks))
        if world_size == 1:
            found = [evaluators[0].run()]
        else:
            for evaluator in evaluators:  # one after the other: tracing is not made for threads
                evaluator.step.trace()
            with ThreadPoolExecutor(world_size) as pool:
                found = list(pool.map(lambda evaluator: evaluator.run(), evaluators))
        for mine in found:
            assert shown(mine) == pytest.approx(tested, rel=2e-5)
            assert evaluated.setdefault(shards, mine) == mine
        bits = [[v.numpy().tobytes() for v in model.variables] for model, _ in ranks]
        assert all(one == bits[0] for one in bits)


def built(make: Callable[[], keras.Model], data: tuple[Any, ...], batch: int = 12) -> keras.Model:
    """A model as a worker builds it, for 4 shards."""
    source = ArraySource(*data)
    pipeline = Pipeline(source, StepPlan(RECORDS, batch, 4), range(4), seed=0)
    pipeline.close()
    return models.build(make, pipeline.sample(8), [source], ComputeSection(), 0, records=(-(-batch // 4), batch))


def test_a_metric_whose_batch_is_too_large_is_named_and_left_out():
    model = built(plain(metrics=[Largest, "mae"]), (X, BITS), batch=12_000_000)
    (line,) = notes_of(model).take_remarks()
    assert line.startswith("WARNING: the metric largest needs the predictions of the whole batch, which take 274 MB")
    assert sorted(models.results(model)) == ["loss", "mae"]
    assert not notes_of(model).metrics.whole


def test_sums_need_no_records_of_other_shards():
    model = built(plain(metrics=["mae", "accuracy", keras.metrics.AUC]), (X, BITS))
    kinds = notes_of(model).metrics
    assert (kinds.whole, kinds.left_out, kinds.means, notes_of(model).take_remarks()) == ([], [], set(), [])


class OwnContrastive(OwnStep):
    """Its loss has negatives from the batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            logits = ops.matmul(self(x, training=True), ops.transpose(y))
            labels = ops.arange(ops.shape(logits)[0])
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class OwnNoisy(OwnStep):
    """Its layers look at the batch and draw random numbers."""

    def __init__(self):
        super().__init__()
        self.dense = keras.Sequential(
            [layers.Dense(5), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)]
        )


def test_an_own_step_with_a_loss_of_the_whole_batch_is_named():
    (line,) = notes_of(built(subclass(OwnContrastive), (X, BITS))).take_remarks()
    assert "looks at the whole batch" in line
    for kind in (OwnStep, OwnNoisy):
        assert not notes_of(built(subclass(kind), (X, BITS))).take_remarks()
