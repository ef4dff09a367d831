"""An evaluation is traced once, whatever shards a worker has later, and says the same to the last bit."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.config.flags import ComputeSection
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import Pipeline, Prefetch
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.data.sources.batches import BatchedSource
from raytf.distributed.allreduce.reduction import packed
from raytf.distributed.devices import Devices
from raytf.training.evaluation import Evaluator
from raytf.training.model import model as models
from raytf.training.session import RankSession
from raytf.training.step.evaluation_step import EvalStep
from raytf.training.user.callbacks import Callbacks
from tests.tf.ranks import Alone, Rank

SHARDS = 4


class One(Alone):
    devices = Devices()


def model(loss: str) -> keras.Model:
    keras.utils.set_random_seed(1)
    outputs = [layers.Dense(16, activation="relu"), layers.BatchNormalization(), layers.Dense(5)]
    made = keras.Sequential([keras.Input((8,)), *outputs])
    divided = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=3)
    whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile("sgd", divided if loss == "divided" else whole, metrics=["accuracy"])
    x, y = data(2)
    return models.build(lambda: made, (x, y, None), [], ComputeSection(), seed=1)


def opened(plan: StepPlan, shards: range) -> Pipeline:
    source = ArraySource(*data(plan.records))
    pipeline = Pipeline(source, plan, shards, seed=0, shuffle=False)
    pipeline.prepare(1, None)  # what Keras draws from by default
    return pipeline


def a_session(made: keras.Model, hooks: Callbacks, plan: StepPlan) -> RankSession:
    """A rank that is alone and ready to train."""
    job = SimpleNamespace(config=TrainConfig(), plan=plan, shuffle=False, class_weight=None, augment=None)
    session = RankSession(job, None, None, None, One(), None, None)  # type: ignore[arg-type]
    session.model, session.callbacks, session.is_ready = made, hooks, True
    return session


def data(records: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(records)
    return draw.normal(size=(records, 8)).astype(np.float32), draw.integers(0, 5, records)


def rows(step: EvalStep, plan: StepPlan, shards: range, totals: dict[int, np.ndarray]) -> np.ndarray:
    """What a worker with these shards finds."""
    pipeline = opened(plan, shards)
    calls, found = Prefetch(pipeline, 0, lambda at, end: plan.call_end(at, 3, end)), []
    while calls.fill(plan.steps_per_epoch):
        call = calls.take()
        totals.setdefault(call.start, step.divisors(call).sum(1))
        found.append(step(call, totals[call.start])[0])
    pipeline.close()
    return np.sum(found, 0, dtype=np.float32)


@pytest.mark.parametrize("loss", ["whole", "divided"])
@pytest.mark.parametrize(("records", "batch"), [(100, 16), (96, 16), (100, 18), (7, 16)])
def test_a_step_that_was_made_for_some_shards_computes_any(loss: str, records: int, batch: int):
    plan, made = StepPlan(records, batch, SHARDS), model(loss)
    pipeline = opened(plan, range(SHARDS))
    step = EvalStep(made, plan, range(1, 2), pipeline.template, pipeline.leaf_specs)
    assert step.is_general
    weights = [weight.numpy() for weight in made.weights]
    step.trace()
    traced = [f.experimental_get_tracing_count() for f in (step._full, step._partial)]
    totals: dict[int, np.ndarray] = {}
    step.take(range(SHARDS))
    whole = rows(step, plan, range(SHARDS), totals)
    for cut in (1, 2, 3):
        parts = []
        for shards in (range(cut), range(cut, SHARDS)):
            step.take(shards)
            parts.append(rows(step, plan, shards, totals))
        assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert [f.experimental_get_tracing_count() for f in (step._full, step._partial)] == traced
    assert all((mine == weight.numpy()).all() for mine, weight in zip(weights, made.weights, strict=True))


class Refusing(layers.Layer):
    """Takes no zeros."""

    def call(self, x):
        tf.debugging.assert_positive(tf.reduce_max(tf.abs(x)))
        return x


def test_a_model_that_refuses_zeros_is_traced_ahead_all_the_same():
    plan, made = StepPlan(96, 16, SHARDS), keras.Sequential([keras.Input((8,)), Refusing(), layers.Dense(5)])
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    pipeline = opened(plan, range(SHARDS))
    step = EvalStep(made, plan, range(SHARDS), pipeline.template, pipeline.leaf_specs)
    step.trace()
    assert step._full.experimental_get_tracing_count() == 1
    assert rows(step, plan, range(SHARDS), {}).all()
    late = Rank(lambda: made, ArraySource(*data(96)), plan, range(2, 4), packed(lambda tensor: tf.identity(tensor)))
    weights = [weight.numpy() for weight in made.weights]
    with pytest.raises(tf.errors.InvalidArgumentError):
        late.step.rehearse(True, 1)
    late.step.trace(is_late=True)
    assert all((mine == weight.numpy()).all() for mine, weight in zip(weights, made.weights, strict=True))
    assert np.isfinite(late.train(0, 2, 2)).all()


def test_a_later_group_evaluates_with_the_graphs_of_the_one_before():
    plan, made = StepPlan(100, 16, SHARDS), model("whole")
    hooks = Callbacks([], made, Alone(), print, ".", {}, None)

    source, expected = ArraySource(*data(100)), made.evaluate(*data(100), batch_size=16, verbose=0, return_dict=True)
    first = a_session(made, hooks, plan)
    step = first.evaluator("validation", source).step
    step.trace()
    found = [first.renewed().evaluator("validation", source).run() for _ in range(2)]
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-5)
    assert step._full.experimental_get_tracing_count() == 1
    lone = Evaluator(made, opened(plan, range(SHARDS)), Alone(), hooks)
    assert lone.run() == found[0]


class Batches(keras.callbacks.Callback):
    """Notes what it is told of the batches of a test."""

    def __init__(self):
        super().__init__()
        self.told = []

    def on_test_batch_begin(self, batch, logs=None):
        self.told.append(batch)

    def on_test_batch_end(self, batch, logs=None):
        self.told.append((batch, *(pytest.approx(float(logs[name]), rel=1e-5) for name in sorted(logs))))


def test_a_hook_of_each_batch_is_told_what_keras_tells_it():
    plan, made = StepPlan(100, 16, 1), model("whole")
    theirs, ours = Batches(), Batches()
    made.evaluate(*data(100), batch_size=16, verbose=0, callbacks=[theirs])
    hooks = Callbacks([ours], made, Alone(), print, ".", {}, None)
    Evaluator(made, opened(plan, range(1)), Alone(), hooks).run()
    assert len(ours.told) == 2 * plan.steps_per_epoch
    assert ours.told == theirs.told


@pytest.mark.parametrize("rows", [[16, 16, 8], [10, 3, 20, 7]])
def test_a_data_set_of_batches_keeps_its_batches(rows: list[int]):
    made, (x, y), theirs, ours = model("whole"), data(sum(rows)), Batches(), Batches()
    cuts = np.cumsum([0, *rows])
    batches = tf.data.Dataset.from_generator(
        lambda: ((x[i:j], y[i:j]) for i, j in itertools.pairwise(cuts)),
        output_signature=(tf.TensorSpec([None, 8]), tf.TensorSpec([None], tf.int64)),
    )
    made.evaluate(batches, steps=len(rows), verbose=0, callbacks=[theirs])
    arrays = ArraySource(x, y)
    source = BatchedSource(arrays, arrays.spec, rows)

    hooks = Callbacks([ours], made, Alone(), print, ".", {}, None)
    a_session(made, hooks, StepPlan(1000, 64, SHARDS)).evaluator("validation", source).run()
    assert len(ours.told) == 2 * len(rows)
    assert ours.told == theirs.told
