"""Gradients in buckets that are added over workers while others are still computed: when, and with which bits."""

from __future__ import annotations

import threading
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.distributed.allreduce.reduction import Overlap, cut, of_kinds
from raytf.distributed.encoding.wire import DEVICE, HOST, WireWords
from tests.tf.ranks import Rank, train
from tests.tf.wire_ranks import build

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

SIZES = st.lists(st.integers(0, 50), max_size=12)


@given(SIZES, st.integers(0, 60))
def test_buckets_are_neighbours_that_fit_and_the_first_one_is_what_is_left(sizes, most):
    found = cut(sizes, most)
    assert [i for part in found for i in part] == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in part) for part in found]
    assert all(held <= most or len(part) == 1 for held, part in zip(filled, found, strict=True))
    # None of them had room for the tensor before it.
    assert all(held + sizes[before[-1]] > most for before, held in zip(found, filled[1:], strict=False))


@given(SIZES, st.integers(0, 12), st.none() | st.integers(0, 60))
def test_no_bucket_has_compressed_tensors_and_others(sizes, compressed, most):
    compressed = min(compressed, len(sizes))
    found = of_kinds(sizes, compressed, most)
    assert [i for part in found for i in part] == list(range(len(sizes)))
    assert all(part.stop <= compressed or part.start >= compressed for part in found)
    if most is None:
        assert len(found) == len({i < compressed for i in range(len(sizes))})
    assert all(a.stop == b.start for a, b in pairwise(found))


RANDOM = np.random.default_rng(0)
# 70 records in batches of 24: the third step of an epoch has shards of fewer records.
SOURCE = ArraySource(RANDOM.normal(size=(70, 7)).astype("float32"), RANDOM.integers(0, 3, 70))
SHARDS, BATCH, STEPS = 4, 24, 7


def ends(world_size: int, overlap: Overlap | None, **options) -> set[str]:
    """What the ranks end with."""
    found = train(build, SOURCE, BATCH, SHARDS, STEPS, world_size, overlap=overlap, **options)
    return {f"{weights_sha256(model)} {losses.tobytes().hex()}" for model, losses in found}


@pytest.mark.parametrize(
    ("compress", "words"),
    [
        pytest.param(False, HOST, id="whole-host"),
        pytest.param(True, DEVICE, id="compressed-device"),
        pytest.param(False, DEVICE, id="whole-device", marks=pytest.mark.slow),
        pytest.param(True, HOST, id="compressed-host", marks=pytest.mark.slow),
    ],
)
def test_buckets_have_the_bits_of_one_sum(compress: bool, words: WireWords):
    ordinary = ends(1, None, compress=compress)
    assert len(ordinary) == 1
    for world_size, bucket in [(2, 100), (3, 40)] if compress else [(1, 100), (3, 40), (4, 1)]:
        overlap = Overlap(bucket, -(-SHARDS // world_size))
        assert ends(world_size, overlap, compress=compress, words=words) == ordinary


@pytest.mark.parametrize("world_size", [3, 4])
def test_replicas_agree_with_float_too_and_learn_what_one_sum_teaches(world_size: int):
    overlap = Overlap(40, -(-SHARDS // world_size))
    ranks = train(build, SOURCE, BATCH, SHARDS, STEPS, world_size, overlap=overlap, exact=False)
    (found,) = {losses.tobytes() for _, losses in ranks}
    assert len({weights_sha256(model) for model, _ in ranks}) == 1
    ((_, alone),) = train(build, SOURCE, BATCH, SHARDS, STEPS, 1, exact=False)
    np.testing.assert_allclose(np.frombuffer(found, alone.dtype), alone, rtol=1e-4)


class Watch:
    """Whether a sum over workers was begun when the gradient of a shard was known, for each shard.

    Args:
        seconds: that the gradient of the last shard waits for a sum.
    """

    def __init__(self, shards: int, seconds: float):
        self._shards, self._seconds, self._begun = shards, seconds, threading.Event()
        self.told: list[bool] = []

    def gradient(self, value: np.ndarray) -> np.ndarray:
        is_last = len(self.told) + 1 == self._shards
        self.told.append(self._begun.wait(self._seconds if is_last else 0))
        return value

    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The sum over the only worker, which looks like one over several."""

        def begin(*values: np.ndarray) -> list[np.ndarray]:
            self._begun.set()
            return list(values)

        found = tf.numpy_function(begin, tensors, [t.dtype for t in tensors])
        return [tf.ensure_shape(f, t.shape) for f, t in zip(found, tensors, strict=True)]


class Watched(layers.Layer):
    """The identity, whose gradient is told to a watch."""

    def __init__(self, watch: Watch):
        super().__init__()
        self._watch = watch

    def call(self, x):
        def backward(g: tf.Tensor) -> tf.Tensor:
            # What has a state would be run in the order in which it was traced, so before any sum.
            told = tf.numpy_function(self._watch.gradient, [g], g.dtype, stateful=False)
            return tf.ensure_shape(told, g.shape)

        @tf.custom_gradient
        def same(value):
            return tf.identity(value), backward

        return same(x)


@pytest.mark.parametrize("exact", [True, False], ids=["fixed", "float"])
@pytest.mark.parametrize(("has_overlap", "seconds"), [(True, 60.0), (False, 1.0)], ids=["overlap", "without"])
def test_sums_of_the_last_layers_start_before_gradients_of_the_first_exist(has_overlap, seconds, exact):
    watch = Watch(2, seconds)

    def model() -> keras.Model:
        made = keras.Sequential([keras.Input((7,)), layers.Dense(40), Watched(watch), layers.Dense(30)])
        made.compile(keras.optimizers.SGD(0.1), "mse")
        return made

    x, y = RANDOM.normal(size=(16, 7)).astype("float32"), np.zeros((16, 30), "float32")
    overlap = Overlap(1000, 2) if has_overlap else None
    rank = Rank(model, ArraySource(x, y), StepPlan(16, 8, 4), range(2), watch.add, exact=exact, overlap=overlap)
    assert watch.told == []
    rank.train(0, 1, 1)
    # Of the first shard nothing is added yet; in fixed point a step may be repeated, which comes after.
    assert watch.told[:2] == [False, has_overlap]
