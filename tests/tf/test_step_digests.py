"""Digests of steps: the same whoever computes a step, and another one wherever a number differs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed import step_digest
from raytf.distributed.encoding.wire import DEVICE, HOST, WireWords
from raytf.distributed.step_digest import Difference, DigestKind, DigestLayout
from tests.tf.ranks import Rank, World

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(70, 12)).astype("float32"), RNG.integers(0, 4, 70)
SHARDS, BATCH, STEPS = 4, 16, 9


@dataclass
class Digested:
    """Digests of steps, one a row, and what they stand for."""

    layout: DigestLayout
    rows: list[bytes]


class Scaled(layers.Layer):
    """Multiplies by a weight, whose gradient, and no other one, is wrong by a little where a record is wanted."""

    def __init__(self, wanted: np.ndarray | None = None):
        super().__init__(name="scaled")
        self._wanted = wanted

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, inputs):
        wanted = self._wanted

        @tf.custom_gradient
        def product(x, scale):
            def gradient(g):
                wrong = 0.0 if wanted is None else tf.reduce_sum(tf.cast(tf.reduce_all(x == wanted, 1), g.dtype)) * 1e-3
                return g * scale, tf.reduce_sum(g * x, 0) + wrong

            return x * scale, gradient

        return product(inputs, tf.convert_to_tensor(self.scale))


def model(wanted: np.ndarray | None = None):
    parts = [Scaled(wanted), layers.BatchNormalization(name="norm"), layers.Dense(4, name="second")]
    made = keras.Sequential([keras.Input((12,)), *parts], name="model")
    made.compile(
        keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return made


def digested(
    source: ArraySource,
    world_size: int = 1,
    factory: Callable = model,
    words: WireWords = HOST,
    call_steps: int = 3,
    compress: bool = False,
    has_old_digests: bool = False,
) -> Digested:
    """The digests that every rank has, after training."""
    keras.utils.clear_session()
    world, plan = World(world_size), StepPlan(source.records, BATCH, SHARDS)
    how = {"words": words, "compress": compress, "has_old_digests": has_old_digests}
    ranks = [
        Rank(factory, source, plan, own, world.all_reduce(rank), **how)
        for rank, own in enumerate(assign(SHARDS, world_size))
    ]
    for rank in ranks:
        rank.step.trace()

    def train(rank: Rank) -> list[bytes]:
        rows, begin = [], 0
        while begin < STEPS:
            stop = plan.call_end(begin, call_steps, STEPS)
            rows += [each.tobytes() for each in rank.call(begin, stop).digests]
            begin = stop
        return rows

    with ThreadPoolExecutor(world_size) as pool:
        first, *others = pool.map(train, ranks)
    assert all(other == first for other in others)
    layout = ranks[0].step.digests
    assert layout is not None
    assert {len(row) for row in first} == {layout.bytes}
    return Digested(layout, first)


@pytest.mark.parametrize("words", [HOST, DEVICE], ids=["cpu", "device"])
def test_digests_are_a_function_of_the_step(words: WireWords):
    source = ArraySource(X, Y)
    alone = digested(source, words=words)
    assert len(set(alone.rows)) == STEPS
    for world_size, call_steps in ((2, 1), (3, 4)):
        assert digested(source, world_size, words=words, call_steps=call_steps).rows == alone.rows


def test_compressed_gradients_have_digests_of_what_travels():
    source = ArraySource(X, Y)
    alone = digested(source, compress=True)
    assert digested(source, 3, compress=True).rows == alone.rows != digested(source).rows


def wide():
    """With a kernel that is folded."""
    made = keras.Sequential([keras.Input((12,)), layers.Dense(1500, name="first"), layers.Dense(4)], name="model")
    made.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return made


def test_a_run_goes_on_with_the_digests_that_it_has_begun_with():
    source = ArraySource(X, Y)
    new, old = digested(source, 2, wide), digested(source, 3, wide, has_old_digests=True)
    assert (new.layout.kind, old.layout.kind) == (DigestKind.FOLDED, DigestKind.WHOLE)
    assert digested(source, 1, wide).rows == new.rows
    for one, other in zip(new.rows, old.rows, strict=True):  # what is not folded is as it was
        found = step_digest.difference(new.layout, one, other)
        assert found is not None
        assert (found.tensors, found.is_everywhere) == (("model/first/kernel",), True)


def with_other(value: np.float32) -> ArraySource:
    """The records, of which one has another value."""
    changed = X.copy()
    changed[7, 3] = value
    return ArraySource(changed, Y)


def test_a_record_that_differs_is_seen_at_its_step_in_its_shard():
    before, after = digested(ArraySource(X, Y)), digested(with_other(np.nextafter(X[7, 3], np.float32(9))), 2)
    first = next(i for i, (a, b) in enumerate(zip(before.rows, after.rows, strict=True)) if a != b)
    found = step_digest.difference(before.layout, before.rows[first], after.rows[first])
    assert found is not None
    assert len(found.shards) == 1
    assert before.rows[:first] == after.rows[:first]
    assert step_digest.number(before.rows[first]) != step_digest.number(after.rows[first])
    # Rounding may make the weights equal after so small a change, and not after a larger one.
    larger = digested(with_other(X[7, 3] + np.float32(0.1)), 2)
    later = step_digest.difference(before.layout, before.rows[-1], larger.rows[-1])
    assert later is not None
    assert later.shards == tuple(range(SHARDS))


def test_tensors_have_names_and_the_one_that_differs_is_named():
    before = digested(ArraySource(X, Y))
    layout = before.layout
    assert (layout.shards, layout.kind) == (SHARDS, DigestKind.FOLDED)
    assert layout.tensors == (
        *("model/scaled/scale", "model/norm/gamma", "model/norm/beta", "model/second/kernel", "model/second/bias"),
        *("model/norm/moving_mean", "model/norm/moving_variance", "loss and metrics"),
    )
    after = digested(ArraySource(X, Y), 2, functools.partial(model, X[7]))
    first = next(i for i, (a, b) in enumerate(zip(before.rows, after.rows, strict=True)) if a != b)
    found = step_digest.difference(layout, before.rows[first], after.rows[first])
    assert found is not None
    assert (len(found.shards), found.tensors) == (1, ("model/scaled/scale",))


@pytest.mark.parametrize("place", range(5))
def test_what_differs_is_named(place: int):
    layout = DigestLayout(2, ("a", "b"))
    one = bytes(range(layout.bytes))
    assert step_digest.difference(layout, one, one) is None
    at = (8, 12, 16, 17, 0)[place]
    other = one[:at] + bytes([one[at] ^ 1]) + one[at + 1 :]
    expected = [((0,), ()), ((1,), ()), ((), ("a",)), ((), ("b",)), ((), ())][place]
    assert step_digest.difference(layout, one, other) == Difference(*expected, 2)


def test_a_chain_tells_every_step_from_every_other():
    losses, told = [(0.5, 1.0), (0.25, 1.0), (0.125, 1.0)], [b"a" * 21, b"b" * 21, b"c" * 21]
    whole = step_digest.chained(step_digest.GENESIS, 1, losses, told)
    begin = step_digest.chained(step_digest.GENESIS, 1, losses[:1], told[:1])
    assert step_digest.chained(begin, 2, losses[1:], told[1:]) == whole
    others = {
        step_digest.chained(step_digest.GENESIS, 2, losses, told),
        step_digest.chained(step_digest.GENESIS, 1, losses[::-1], told),
        step_digest.chained(step_digest.GENESIS, 1, losses, told[::-1]),
        step_digest.chained(step_digest.GENESIS, 1, losses[:2], told[:2]),
        step_digest.chained(step_digest.GENESIS, 1, losses, []),
        step_digest.chained(step_digest.GENESIS, 1, [*losses[:2], (0.125, 2.0)], told),
    }
    assert len(others | {whole}) == 7
