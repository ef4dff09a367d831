"""Three wrong implementations, kept to show that the laws' checks find them: the real one passes, each mutant fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.data.order import EpochOrder, step_seeds
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed.allreduce.reduction import FixedPointReduction, FloatReduction, Reduction
from raytf.distributed.encoding.wire import DEVICE, WireLayout, WorkerPart
from tests.laws import checks
from tests.tf.ranks import World, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

RNG = np.random.default_rng(0)
SOURCE = ArraySource(RNG.normal(size=(90, 12)).astype("float32"), RNG.integers(0, 4, 90))

# The order of records.

PLAN = StepPlan(records=103, global_batch_size=24, shards=4)
BLOCKS = np.array([40, 1, 30, 32])


class SkipsTheBoundary(EpochOrder):
    """Takes a shard's range without its last record."""

    def records(self, shard: int, start: int, stop: int) -> np.ndarray:
        length = int(self.plan.bounds[shard + 1] - self.plan.bounds[shard])
        return super().records(shard, start, min(stop, length - 1))


class OverlapsTheBoundary(EpochOrder):
    """Begins each shard's range with the last record of the one before, and ends it one earlier."""

    def records(self, shard: int, start: int, stop: int) -> np.ndarray:
        own = super().records(shard, start, stop)
        if shard and start == 0:
            own[0] = super().records(shard - 1, 0, PLAN.records)[-1]
        return own


def real_order(world_size: int, epoch: int, kind: type[EpochOrder] = EpochOrder) -> EpochOrder:
    return kind(PLAN, BLOCKS, seed=1, epoch=epoch, window=10)


def order_by_world(world_size: int, epoch: int) -> EpochOrder:
    """Every record once with any number of workers, but not the same ones."""
    return EpochOrder(PLAN, BLOCKS, seed=world_size, epoch=epoch, window=10)


ORDER_MUTANTS = {
    "skips the boundary": partial(real_order, kind=SkipsTheBoundary),
    "overlaps the boundary": partial(real_order, kind=OverlapsTheBoundary),
    "depends on the world": order_by_world,
}


def test_the_order_of_records():
    checks.check_worlds_agree(PLAN, checks.orders(PLAN, real_order))


@pytest.mark.parametrize("mutant", ORDER_MUTANTS)
def test_a_wrong_order_is_found(mutant: str):
    with pytest.raises(AssertionError):
        checks.check_worlds_agree(PLAN, checks.orders(PLAN, ORDER_MUTANTS[mutant]))


# Seeds.

Seeds = Callable[[int, np.ndarray, np.ndarray, int], np.ndarray]


def seeds_by_place(seed: int, steps: np.ndarray, shards: np.ndarray, count: int) -> np.ndarray:
    """From a shard's place among those of its worker."""
    return step_seeds(seed, steps, np.arange(len(shards)), count)


def seeds_by_rank(seed: int, steps: np.ndarray, shards: np.ndarray, count: int) -> np.ndarray:
    """From the worker's first shard as well, as one would have it from its rank."""
    return step_seeds(seed + int(shards[0]), steps, shards, count)


def dropout() -> keras.Model:
    model = keras.Sequential([keras.Input((12,)), layers.Dense(16), layers.Dropout(0.5), layers.Dense(4)])
    model.compile(
        keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def check_training(worlds: Sequence[int], shards: int = 4, **options: object) -> None:
    """Training ends with the same weights and losses, to the bit, on every rank of every number of ranks."""
    ended = set()
    for world_size in worlds:
        for model, losses in train(dropout, SOURCE, 6 * shards, shards, 12, world_size, **options):
            ended.add((weights_sha256(model), losses.tobytes()))
    assert len(ended) == 1


@pytest.mark.parametrize("mutant", [seeds_by_place, seeds_by_rank])
def test_wrong_seeds_are_found(mutant: Seeds):
    with pytest.raises(AssertionError):
        checks.check_seeds(mutant, 4)


def test_training_is_the_same_for_every_number_of_ranks():
    check_training((1, 2, 3), seeds=step_seeds)


@pytest.mark.parametrize("mutant", [seeds_by_place, seeds_by_rank])
def test_wrong_seeds_are_found_by_training(mutant: Seeds):
    with pytest.raises(AssertionError):
        check_training((1, 2), seeds=mutant)


# Reduction.


class LocalRounding(FixedPointReduction):
    """Keeps 16 bits of what a worker sends, counted from that worker's own largest value."""

    def reduce(self, part, compute, *more):
        def local(tensor: tf.Tensor) -> tf.Tensor:
            magnitude = tf.cast(tf.maximum(tf.reduce_max(tf.abs(tensor)), 1), tf.float64)
            unit = tf.cast(2 ** tf.maximum(tf.math.floor(tf.math.log(magnitude) / np.log(2)) - 15, 0), tensor.dtype)
            return tensor // unit * unit

        def rounded(scales: tf.Tensor, early: None):
            summed, rows, slices = compute(scales, early)
            return tf.nest.map_structure(local, summed), rows, slices

        return super().reduce(part, rounded, *more)


def backward(parts: list[np.ndarray]) -> list[np.ndarray]:
    return parts[::-1]


def add_over_ranks(
    reduction: Callable[[WireLayout, int], Reduction], values: np.ndarray, world_size: int, order
) -> bytes:
    """The bits of the sum of shards' values [V, D], equal on all ranks of a world that adds in some order."""
    shards, world = len(values), World(world_size, order)
    layout = WireLayout([values.shape[1:]], [tf.float32])

    def rank(r: int) -> bytes:
        own, made = assign(shards, world_size)[r], reduction(layout, shards)

        def compute(scales: tf.Tensor, early: None):
            parts = [made.encode([tf.constant(values[v])], tf.constant(1 / shards, tf.float32), scales) for v in own]
            summed = [tf.add_n(list(tensors)) for tensors in zip(*(tensors for tensors, _ in parts), strict=True)]
            return summed, tf.stack([tf.concat([tf.ones([1]), extra], 0) for _, extra in parts]), []

        reduced = made.reduce(WorkerPart(world.all_reduce(r), own, shards), compute, tf.zeros([1]))
        return b"".join(tensor.numpy().tobytes() for tensor in reduced.tensors)

    with ThreadPoolExecutor(world_size) as pool:
        (bits,) = set(pool.map(rank, range(world_size)))
    return bits


def check_reduction(reduction: Callable[[WireLayout, int], Reduction]) -> None:
    """Neither the number of ranks nor the order in which they are added changes a bit of a sum."""
    rng = np.random.default_rng(0)
    values = (rng.normal(size=(8, 50)) * 2.0 ** rng.integers(-12, 12, (8, 50))).astype(np.float32)
    found = {add_over_ranks(reduction, values, w, order) for w in (1, 2, 3, 5, 8) for order in (list, backward)}
    assert len(found) == 1


def float_sum(layout: WireLayout, shards: int) -> Reduction:
    return FloatReduction(layout)


def test_the_reduction():
    check_reduction(FixedPointReduction)


def test_the_reduction_of_gpus():
    check_reduction(partial(FixedPointReduction, words=DEVICE))


@pytest.mark.parametrize("mutant", [float_sum, LocalRounding])
def test_a_wrong_reduction_is_found(mutant: Callable[[WireLayout, int], Reduction]):
    with pytest.raises(AssertionError):
        check_reduction(mutant)


def test_a_wrong_reduction_is_found_by_training():
    # Three ranks add (1) + (2) + (3 + 4); one adds from left to right.
    with pytest.raises(AssertionError):
        check_training((1, 3), exact=False)
