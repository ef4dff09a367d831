"""Several ranks as threads of one process, with a sum over them: the arithmetic of workers without their start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.data.order import StepPlan, assign
from raytf.data.pipeline import Pipeline
from raytf.data.sources import Source
from raytf.devices import Devices, OneDevice
from raytf.model import build, seed_states
from raytf.reduce import packed
from raytf.sections import ComputeSection
from raytf.step import TrainStep


class Alone:
    """A group of one rank."""

    rank, world_size = 0, 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


class World:
    """A sum over `size` threads; each calls `all_reduce` at the same places."""

    def __init__(self, size: int, order: Callable[[list[np.ndarray]], list[np.ndarray]] = list):
        self.size, self._order = size, order
        self._barrier = threading.Barrier(size, timeout=120)
        self._parts: list[Any] = [None] * size

    def all_reduce(self, rank: int) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
        def add(part: np.ndarray) -> np.ndarray:
            self._parts[rank] = part
            self._barrier.wait()
            total = self._order(list(self._parts))[0].copy()
            for other in self._order(list(self._parts))[1:]:
                total += other
            self._barrier.wait()
            return total

        def reduce(tensor: tf.Tensor) -> tf.Tensor:
            total = tf.numpy_function(add, [tensor], tensor.dtype)
            return tf.ensure_shape(total, tensor.shape)

        return packed(reduce)


def train(
    factory: Callable[[], Any],
    source: Source,
    batch: int,
    shards: int,
    steps: int,
    world_size: int = 1,
    exact: bool = True,
    compute: ComputeSection | None = None,
    order: Callable[[list[np.ndarray]], list[np.ndarray]] = list,
    shuffle: bool = True,
    call_steps: int = 3,
    compress: bool = False,
    devices: Devices | None = None,
    **pipeline_options: Any,
) -> list[tuple[Any, np.ndarray]]:
    """(model, losses [steps]) of every rank after training."""
    world = World(world_size, order)
    ranks = [
        Rank(
            factory,
            source,
            StepPlan(source.records, batch, shards),
            assign(shards, world_size)[rank],
            world.all_reduce(rank) if world_size > 1 else None,
            exact,
            compute,
            shuffle,
            compress,
            devices,
            **pipeline_options,
        )
        for rank in range(world_size)
    ]
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: (rank.model, rank.train(0, steps, call_steps)), ranks))


class Rank:
    """One of the ranks: its model, and how it is trained on some of the shards."""

    def __init__(
        self,
        factory: Callable[[], Any],
        source: Source,
        plan: StepPlan,
        shards: range,
        all_reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]] | None,
        exact: bool = True,
        compute: ComputeSection | None = None,
        shuffle: bool = True,
        compress: bool = False,
        devices: Devices | None = None,
        **pipeline_options: Any,
    ):
        compute, devices = compute or ComputeSection(), devices or OneDevice()
        self._plan = plan
        self._pipeline = pipeline = Pipeline(source, plan, shards, seed=0, shuffle=shuffle, **pipeline_options)
        with devices.at_home():
            self.model = build(factory, pipeline.sample(), [source], compute, seed=0)
        pipeline.prepare(len(seed_states(self.model)), None)
        self._step = TrainStep(
            self.model,
            plan,
            shards,
            all_reduce,
            pipeline.template,
            pipeline.leaf_specs,
            1,
            compute.jit,
            exact,
            compress,
            devices,
        )

    def train(self, begin: int, end: int, call_steps: int = 3) -> np.ndarray:
        """Losses of the steps from one to another; the last that this rank does."""
        losses: list[float] = []
        while begin < end:
            stop = self._plan.call_end(begin, call_steps, end)
            outcome = self._step(self._pipeline.submit(begin, stop).result(), np.zeros(1, np.float32))
            assert outcome.finite.all()
            losses.extend(outcome.losses)
            begin = stop
            if begin % self._plan.steps_per_epoch == 0 and begin < end:
                self.model.reset_metrics()
        self._pipeline.close()
        return np.array(losses)
