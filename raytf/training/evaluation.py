"""Loss and metrics over a source; the same on every rank and for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np

from raytf.checkpoint import variables
from raytf.data.pipeline import CallBatch, Pipeline
from raytf.data.plan import StepPlan
from raytf.data.prefetch import Prefetch
from raytf.data.sources import Source
from raytf.distributed.devices import Devices
from raytf.distributed.group import Group, Ranks
from raytf.training import model as models
from raytf.training.callbacks import Callbacks
from raytf.training.evaluation_step import EvalStep
from raytf.training.own_test import OwnTest

#: Steps per call into TensorFlow; fixed, so that the order of sums does not depend on the machine's speed.
_CALL_STEPS = 16

#: (source, its plan, whether it is for training) -> pipeline of this rank's shards of it.
OpenPipeline = Callable[[Source, StepPlan, bool], Pipeline]


class Evaluators:
    """The evaluators of a run's sources, each created when it is first needed.

    Args:
        model: built and compiled.
        group: all ranks; each must make the same calls.
        callbacks: their `on_test_begin` and `on_test_end` are run.
        open_pipeline: opens this rank's shards of a source.
        plan: plan of the training; sources are divided into batches and shards in the same way.
    """

    def __init__(
        self,
        model: keras.Model,
        group: Group,
        callbacks: Callbacks,
        open_pipeline: OpenPipeline,
        plan: StepPlan,
    ):
        self._model, self._group, self._callbacks = model, group, callbacks
        self._open_pipeline, self._plan = open_pipeline, plan
        self._made: dict[str, Evaluator] = {}

    def evaluate(self, name: str, source: Source, progress: Callable[[], None]) -> dict[str, float]:
        """Loss and metrics over a source.

        Args:
            name: identifies the evaluator, which is used again.
            source: the data.
            progress: called after each call into TensorFlow.
        """
        if name not in self._made:
            plan = StepPlan(source.records, self._plan.global_batch_size, self._plan.shards)
            pipeline = self._open_pipeline(source, plan, False)
            self._made[name] = Evaluator(self._model, pipeline, self._group, self._callbacks, self._group.devices)
        return self._made[name].run(progress)


class Evaluator:
    """Evaluates a model on one source; traced once and used again.

    Args:
        model: built and compiled.
        pipeline: this rank's shards of the source, not shuffled.
        group: all ranks; each must construct this object and make the same calls.
        callbacks: their `on_test_begin` and `on_test_end` are run.
        devices: this process's devices; by default one.
    """

    def __init__(
        self,
        model: keras.Model,
        pipeline: Pipeline,
        group: Ranks,
        callbacks: Callbacks,
        devices: Devices | None = None,
    ):
        self._model, self._pipeline, self._group, self._callbacks = model, pipeline, group, callbacks
        pipeline.prepare(len(variables.seed_states(model)), models.sparse_classes(model))
        self._plan: StepPlan = pipeline.plan
        self._step = EvalStep(model, self._plan, pipeline.shards, pipeline.template, pipeline.leaf_specs, devices)

    def _totals(self, call: CallBatch) -> np.ndarray:
        """[K, n] the divisors of the losses that are divided by data, summed over all shards."""
        own, shards = self._step.divisors(call), self._pipeline.shards
        steps, _, count = own.shape
        if not count:
            return np.zeros((steps, 0), np.float32)
        every = np.zeros((steps, self._plan.shards, count), np.float32)
        every[:, shards.start : shards.stop] = own
        return self._group.sum(every.ravel()).reshape(every.shape).sum(1)

    def run(self, progress: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Loss and metrics by name; the model's metrics are reset before and after.

        Args:
            progress: called after each call into TensorFlow.
        """
        self._callbacks.run("on_test_begin")
        shards, plan = self._pipeline.shards, self._plan
        rows = np.zeros((len(shards), self._step.micro.row_width), np.float32)
        calls = Prefetch(self._pipeline, 0, lambda at, end: plan.call_end(at, _CALL_STEPS, end))
        while calls.fill(plan.steps_per_epoch):
            call = calls.take()
            rows += self._step(call, self._totals(call))
            progress()
        everyones = np.zeros((plan.shards, rows.shape[1]), np.float32)
        everyones[shards.start : shards.stop] = rows
        # Each row is zero on all ranks but one, so this sum is exact, and all ranks then add rows in the same order.
        everyones = self._group.sum(everyones.ravel()).reshape(everyones.shape)
        self._model.reset_metrics()
        row = everyones.sum(0)[1:]
        self._step.micro.add_metrics(row)
        logs, micro = models.results(self._model), self._step.micro
        if isinstance(micro, OwnTest) and not models.shows_metrics(self._model, micro.names):
            logs = micro.logs(row, plan.steps_per_epoch)
        self._model.reset_metrics()
        self._callbacks.run("on_test_end", dict(logs))
        return logs
