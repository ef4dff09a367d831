"""The laws of the data order, as functions of an implementation: the tests also show that wrong ones break them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass

import numpy as np

from raytf.data.order import EpochOrder
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign

#: (step, shard) -> the records that the shard had at that step.
Batches = dict[tuple[int, int], list[int]]
#: One rank: batches of its shards in global steps [start, stop).
Reader = Callable[[int, int], Batches]
#: The ranks of a group of this many workers, started afresh.
World = Callable[[int], AbstractContextManager[list[Reader]]]


@dataclass(frozen=True)
class Stretch:
    """What one group of workers does before it is replaced.

    Attributes:
        world_size: how many they are.
        lost: steps that the group before did in vain: its last checkpoint is this many steps old.
        steps: how far they come.
        limits: lengths of their calls, again and again.
    """

    world_size: int
    lost: int
    steps: int
    limits: Sequence[int]


def orders(plan: StepPlan, order_of: Callable[[int, int], EpochOrder]) -> World:
    """Ranks that ask `order_of(world_size, epoch)`."""

    @contextmanager
    def world(world_size: int) -> Iterator[list[Reader]]:
        def reader(own: range) -> Reader:
            known: dict[int, EpochOrder] = {}

            def read(start: int, stop: int) -> Batches:
                epoch, inside = plan.locate(start)
                order = known.setdefault(epoch, order_of(world_size, epoch))
                steps, out = stop - start, {}
                for shard in own:
                    b = int(plan.sizes[shard])
                    ids = order.records(shard, inside * b, (inside + steps) * b).tolist()
                    out |= {(start + k, shard): ids[k * b : (k + 1) * b] for k in range(steps)}
                return out

            return read

        yield [reader(own) for own in assign(plan.shards, world_size)]

    return world


def pipelines(plan: StepPlan, make: Callable[[range], Pipeline]) -> World:
    """Ranks that gather through pipelines; the records' x is their number."""

    @contextmanager
    def world(world_size: int) -> Iterator[list[Reader]]:
        with ExitStack() as stack:

            def reader(own: range) -> Reader:
                pipeline = stack.enter_context(closing(make(own)))
                pipeline.prepare(seeds_per_shard=1, classes=None)

                def read(start: int, stop: int) -> Batches:
                    call = pipeline.submit(start, stop).result()
                    return {
                        (start + k, shard): call.leaves[0][k, i, : call.counts[i]].ravel().tolist()
                        for k in range(stop - start)
                        for i, shard in enumerate(own)
                    }

                return read

            yield [reader(own) for own in assign(plan.shards, world_size)]

    return world


def check_run(plan: StepPlan, world: World, stretches: Sequence[Stretch], epochs: int, boundary: int | None) -> Batches:
    """Read some epochs by one group of workers after another; what was read.

    Every epoch has every record exactly once, a step that is done again has the records that it had, and the steps have
    the sizes that the remainder rule says.
    """
    total, step, seen = epochs * plan.steps_per_epoch, 0, Batches()
    for stretch in [*stretches, Stretch(1, 0, total, [total])]:
        step = max(0, step - stretch.lost)
        stop, limits = min(total, step + stretch.steps), itertools.cycle(stretch.limits)
        with world(stretch.world_size) as ranks:
            while step < stop:
                end = plan.call_end(step, next(limits), stop, boundary)
                for read in ranks:
                    for key, records in read(step, end).items():
                        assert seen.setdefault(key, records) == records, f"(step, shard) {key} changed"
                step = end
    assert seen.keys() == set(itertools.product(range(total), range(plan.shards)))
    for epoch in range(epochs):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        sizes = [[len(seen[s, v]) for v in range(plan.shards)] for s in steps]
        assert sizes[:-1] == [plan.sizes.tolist()] * (len(steps) - 1)
        assert max(sizes[-1]) - min(sizes[-1]) <= (1 if plan.is_even else 2)
        records = sorted(r for s in steps for v in range(plan.shards) for r in seen[s, v])
        assert records == list(range(plan.records)), f"epoch {epoch} has not every record exactly once"
    return seen


def check_worlds_agree(plan: StepPlan, world: World) -> None:
    """Groups of every size read the same, each from the first step to the last of two epochs."""
    whole = plan.steps_per_epoch * 2
    worlds = range(1, plan.shards + 1)
    seen = [check_run(plan, world, [Stretch(w, 0, whole, [3])], 2, None) for w in worlds]
    assert all(other == seen[0] for other in seen)


def check_seeds(seeds: Callable[[int, np.ndarray, np.ndarray, int], np.ndarray], shards: int) -> None:
    """A micro-batch has seeds of its own, and the same ones whoever computes it in whatever call."""
    steps, count = np.arange(5, 9), 2
    whole = seeds(1, steps, np.arange(shards), count)
    assert len({tuple(pair) for pair in whole.reshape(-1, 2).tolist()}) == len(steps) * shards * count
    for world_size in range(1, shards + 1):
        for own in assign(shards, world_size):
            for k in range(len(steps)):
                alone = seeds(1, steps[k : k + 1], np.array(own), count)
                assert alone.tolist() == whole[k : k + 1, own.start : own.stop].tolist(), f"shards {own}"
