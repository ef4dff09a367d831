"""Several ranks as threads of one process, with a sum over them: the arithmetic of workers without their start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint.variables import seed_states
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import Source
from raytf.data.sources.batches import plan_of
from raytf.distributed.allreduce.reduction import Overlap, packed
from raytf.distributed.devices import Devices
from raytf.distributed.encoding.wire import AllReduce, WireWords
from raytf.training.model.model import build
from raytf.training.step.step import StepOptions, StepOutcome, TrainStep


class Alone:
    """A group of one rank."""

    rank, world_size = 0, 1

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays

    def share(self, data: bytes, giver: int = 0) -> bytes:
        return data


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
    words: WireWords | None = None,
    overlap: Overlap | None = None,
    **pipeline_options: Any,
) -> list[tuple[Any, np.ndarray]]:
    """(model, losses [steps]) of every rank after training."""
    compute, devices = compute or ComputeSection(), devices or Devices()
    plan, world = plan_of(source, batch, shards), World(world_size, order)
    ranks = []
    for rank in range(world_size):
        own, all_reduce = assign(shards, world_size)[rank], world.all_reduce(rank) if world_size > 1 else None
        options = {"exact": exact, "compress": compress, "words": words, "overlap": overlap}
        options |= {"shuffle": shuffle, **pipeline_options}
        ranks.append(Rank(factory, source, plan, own, all_reduce, compute, devices, **options))
    for rank in ranks:  # one after the other: TensorFlow and Keras are not made for threads that trace at the same time
        rank.step.trace()
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(lambda rank: (rank.model, rank.train(0, steps, call_steps)), ranks))


class Rank:
    """One rank's model, input and step.

    Attributes:
        model: built from seed 0.
        step: of training.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        source: Source,
        plan: StepPlan,
        own: range,
        all_reduce: AllReduce,
        compute: ComputeSection | None = None,
        devices: Devices | None = None,
        exact: bool = True,
        compress: bool = False,
        words: WireWords | None = None,
        overlap: Overlap | None = None,
        audits: bool = False,
        has_old_digests: bool = False,
        **pipeline_options: Any,
    ):
        compute, devices, self._plan = compute or ComputeSection(), devices or Devices(), plan
        self._pipeline = Pipeline(source, plan, own, seed=0, **pipeline_options)
        with devices.at_home():
            self.model = build(factory, self._pipeline.sample(), [source], compute, seed=0)
        self._pipeline.prepare(len(seed_states(self.model)), None)
        leaves = self._pipeline.template, self._pipeline.leaf_specs
        how = {"fixed_point": exact, "compress": compress, "words": words, "overlap": overlap, "audits": audits}
        options = StepOptions(jit=compute.jit, devices=devices, has_old_digests=has_old_digests, **how)
        self.step = TrainStep(self.model, plan, own, all_reduce, *leaves, options)

    def call(self, begin: int, stop: int) -> StepOutcome:
        """Some steps, in one call."""
        return self.step(self._pipeline.submit(begin, stop).result(), np.zeros(1, np.float32))

    def take(self, own: range) -> None:
        """Have other shards from now on."""
        self._pipeline = self._pipeline.of(own)
        self.step.take(own)

    def train(self, begin: int, end: int, call_steps: int = 3) -> np.ndarray:
        """Losses of the steps from one to another; the last that this rank does."""
        losses: list[float] = []
        while begin < end:
            stop = self._plan.call_end(begin, call_steps, end)
            outcome = self.call(begin, stop)
            assert outcome.finite.all()
            losses.extend(outcome.losses)
            begin = stop
            if begin % self._plan.steps_per_epoch == 0 and begin < end:
                self.model.reset_metrics()
        self._pipeline.close()
        return np.array(losses)
