"""A rank is lost in the middle of a call: what is left takes its shards, and learns the same to the last bit."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.data.plan import assign
from raytf.data.sources.arrays import ArraySource
from raytf.data.sources.batches import plan_of
from raytf.distributed.allreduce.reduction import packed
from raytf.distributed.encoding import wire
from tests.tf.ranks import Rank, train

SHARDS, BATCH, STEPS, CALL = 6, 24, 12, 5
RNG = np.random.default_rng(0)
SOURCE = ArraySource(RNG.normal(size=(120, 8)).astype(np.float32), RNG.integers(0, 5, 120))


class Lost(RuntimeError):
    """A rank does not answer."""


class Members:
    """A sum over threads that breaks when one of them leaves, until the others begin again without it."""

    def __init__(self, size: int):
        self._size = size
        self.begin(size)

    def begin(self, size: int) -> None:
        self._barrier, self._parts = threading.Barrier(size, timeout=60), {}

    def leave(self) -> None:
        self._barrier.abort()

    def all_reduce(self, rank: int, leaves_at: int = -1):
        """Sums; the call with number `leaves_at` is not made."""
        calls = 0

        def add(part: np.ndarray) -> np.ndarray:
            nonlocal calls
            calls += 1
            if calls - 1 == leaves_at:
                self.leave()
                raise Lost("this one is gone")
            self._parts[rank] = part
            try:
                self._barrier.wait()
            except threading.BrokenBarrierError:
                raise Lost("another one is gone") from None
            total = sum(self._parts[r] for r in sorted(self._parts))
            with contextlib.suppress(threading.BrokenBarrierError):  # who leaves now has still been added
                self._barrier.wait()
            return total

        def reduce(tensor: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(add, [tensor], tensor.dtype), tensor.shape)

        return packed(reduce)


def dense(optimizer) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(5),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])
    return model


def embedded(optimizer) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Rescaling(2.0, offset=5.0),
            keras.layers.Embedding(20, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Largest(keras.metrics.Metric):
    """Keeps a maximum, so that it needs the whole batch."""

    def __init__(self):
        super().__init__(name="largest")
        self.most = self.add_variable((), initializer="zeros", name="most")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.most.assign(keras.ops.maximum(0.9 * self.most, keras.ops.max(keras.ops.abs(y_pred))))

    def result(self):
        return self.most


def with_maximum(optimizer) -> keras.Model:
    model = embedded(optimizer)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=[Largest()])
    return model


def state(rank: Rank) -> bytes:
    model, reduction = rank.model, rank.step.reduction_state()
    every = [*model.variables, *model.optimizer.variables, *model.metrics_variables, *reduction.values()]
    return b"".join(np.asarray(v).tobytes() for v in every if "seed" not in v.path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: dense(keras.optimizers.AdamW(1e-2, weight_decay=0.1, use_ema=True, global_clipnorm=1.0)),
        lambda: dense(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))),
        lambda: embedded(keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, STEPS))),
        lambda: with_maximum(keras.optimizers.SGD(0.1)),
    ],
    ids=["decay", "loss scale", "slices", "a metric of the whole batch"],
)
@pytest.mark.parametrize("leaves_at", [3, 8])
def test_a_call_that_breaks_has_made_whole_steps_and_nothing_else(make, leaves_at):
    (reference, losses), *_ = train(make, SOURCE, BATCH, SHARDS, STEPS, call_steps=CALL)
    plan, members = plan_of(SOURCE, BATCH, SHARDS), Members(3)
    ranks = [
        Rank(make, SOURCE, plan, own, members.all_reduce(r, leaves_at if r == 1 else -1))
        for r, own in enumerate(assign(SHARDS, 3))
    ]
    for rank in ranks:
        rank.step.trace()
    with ThreadPoolExecutor(3) as pool:
        before = list(pool.map(lambda rank: until_lost(rank, plan), ranks))
    survivors = [ranks[0], ranks[2]]
    assert before[0] == before[2]
    assert state(ranks[0]) == state(ranks[2])
    members.begin(2)
    for rank, own in zip(survivors, assign(SHARDS, 2), strict=True):
        rank.take(own)
    begin = len(before[0])
    with ThreadPoolExecutor(2) as pool:
        after = list(pool.map(lambda rank: list(rank.train(begin, STEPS, CALL)), survivors))
    assert before[0] + after[0] == list(losses)
    for rank in survivors:
        for mine, theirs in zip(rank.model.weights, reference.weights, strict=True):
            if "seed" not in mine.path:
                np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
        assert rank.model.get_metrics_result() == reference.get_metrics_result()


@pytest.mark.parametrize("words", [wire.HOST, wire.DEVICE], ids=["CPU", "GPU"])
def test_who_comes_late_runs_its_graphs_ahead_and_its_state_stays(words):
    """With a step of zeros, since kernels get ready, and memory, when they are first needed."""
    sums = []

    def alone(tensor: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(
            tf.numpy_function(lambda v: (sums.append(1), v)[1], [tensor], tensor.dtype), tensor.shape
        )

    source = ArraySource(RNG.normal(size=(100, 8)).astype(np.float32), RNG.integers(0, 5, 100))
    plan, optimizer = plan_of(source, BATCH, SHARDS), keras.optimizers.AdamW(1e-2, weight_decay=0.1, use_ema=True)
    late = Rank(lambda: dense(optimizer), source, plan, range(2, 4), packed(alone), words=words)
    assert plan.full_steps < plan.steps_per_epoch
    before = state(late)
    late.step.trace(is_late=True)
    assert sums
    assert state(late) == before
    late.train(0, plan.steps_per_epoch, CALL)
    assert state(late) != before
    assert [f.experimental_get_tracing_count() for f in late.step.functions()] == [1, 1]


def until_lost(rank: Rank, plan) -> list[float]:
    """Train until the sum breaks; losses of all steps that were made."""
    losses: list[float] = []
    while True:
        begin = len(losses)
        stop = plan.call_end(begin, CALL, STEPS)
        try:
            losses += list(rank.call(begin, stop).losses)
        except tf.errors.OpError as error:
            if "is gone" not in str(error):
                raise
            return losses + list(rank.step.made().losses)
        if len(losses) % plan.steps_per_epoch == 0:
            rank.model.reset_metrics()
