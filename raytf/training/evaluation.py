"""Computes loss and metrics over a source, with the same result on every rank and for every number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from raytf.checkpoint import variables
from raytf.data.pipeline import CallBatch, Pipeline, Prefetch
from raytf.data.plan import StepPlan
from raytf.distributed.devices import Devices
from raytf.distributed.group import Ranks
from raytf.training.model import batch_metrics
from raytf.training.model import model as models
from raytf.training.step.evaluation_step import EvalStep, OwnTest
from raytf.training.user.callbacks import Callbacks

#: Steps per call into TensorFlow. The number is fixed so that the order of sums does not depend on speed.
_CALL_STEPS = 16


class Evaluator:
    """Evaluates a model on one source. The step is traced once and can be reused.

    Args:
        model: the model, built and compiled.
        pipeline: this rank's shards of the source, not shuffled.
        group: all ranks; each must construct this object and make the same calls.
        callbacks: callbacks whose test hooks are run; None for an evaluator that is only traced.
        devices: this process's devices; by default one.
        step: the step of an earlier group's evaluator, which is reused if it works for any shards.

    Attributes:
        step: the evaluation step, which TensorFlow traces.
    """

    def __init__(
        self,
        model: keras.Model,
        pipeline: Pipeline,
        group: Ranks,
        callbacks: Callbacks | None,
        devices: Devices | None = None,
        step: EvalStep | None = None,
    ):
        self._model, self._pipeline, self._group, self._callbacks = model, pipeline, group, callbacks
        pipeline.prepare(len(variables.seed_states(model)), models.sparse_classes(model))
        self._plan: StepPlan = pipeline.plan
        if step is not None and step.is_general:
            step.take(pipeline.shards)
            self.step = step
        else:
            self.step = EvalStep(model, self._plan, pipeline.shards, pipeline.template, pipeline.leaf_specs, devices)

    def _totals(self, call: CallBatch) -> np.ndarray:
        """Return the divisors of the losses that are divided by data, summed over all shards, as [K, n]."""
        own, shards = self.step.divisors(call), self._pipeline.shards
        steps, _, count = own.shape
        if not count:
            return np.zeros((steps, 0), np.float32)
        every = np.zeros((steps, self._plan.shards, count), np.float32)
        every[:, shards.start : shards.stop] = own
        return self._group.sum(every.ravel()).reshape(every.shape).sum(1)

    def _update(self, call: CallBatch, outputs: np.ndarray) -> None:
        """Update the metrics of the whole batch; `outputs` [K, n, width] are this rank's rows in K steps."""
        shards, sizes = self._pipeline.shards, self._plan.sizes
        if not call.full:
            own = np.zeros(self._plan.shards, np.int64)
            own[shards.start : shards.stop] = call.counts
            sizes = self._group.sum(own)
        begin, total = int(sizes[: shards.start].sum()), int(sizes.sum())
        bits = outputs.view(np.int64)
        every = np.zeros((len(bits), total, bits.shape[2]), np.int64)
        every[:, begin : begin + bits.shape[1]] = bits
        for rows in self._group.sum(every.ravel()).reshape(every.shape).view(np.float32):
            self.step.update(rows)

    def run(self, progress: Callable[[], None] = lambda: None) -> dict[str, Any]:
        """Compute loss and metrics by name. The model's metrics are reset before and after.

        Args:
            progress: called after each call into TensorFlow.
        """
        assert self._callbacks is not None
        self._callbacks.run("on_test_begin")
        shards, plan = self._pipeline.shards, self._plan
        rows = np.zeros((len(shards), self.step.micro.row_width), np.float32)
        callbacks, is_hooked = self._callbacks, self._callbacks.batches.test
        width, steps = self.step.output_width, 1 if is_hooked else _CALL_STEPS
        if width:
            steps = max(1, min(steps, batch_metrics.MOST_BYTES // (4 * width * plan.global_batch_size)))
            self._model.reset_metrics()
        calls = Prefetch(self._pipeline, 0, lambda at, end: plan.call_end(at, steps, end))
        while calls.fill(plan.steps_per_epoch):
            call = calls.take()
            if is_hooked:
                callbacks.run("on_test_batch_begin", call.start)
            more, outputs = self.step(call, self._totals(call))
            rows += more
            if outputs is not None:
                self._update(call, outputs)
            if is_hooked:
                callbacks.run("on_test_batch_end", call.start, self._logs(rows, call.stop))
            progress()
        logs = self._logs(rows, plan.steps_per_epoch)
        self._model.reset_metrics()
        callbacks.run("on_test_end", dict(logs))
        return logs

    def _logs(self, rows: np.ndarray, steps: int) -> dict[str, Any]:
        """Return loss and metrics of the first `steps` steps, from the sums [L, 1 + M] of this rank's shards. The
        model's metrics stay unchanged."""
        shards = self._pipeline.shards
        everyones = np.zeros((self._plan.shards, rows.shape[1]), np.float32)
        everyones[shards.start : shards.stop] = rows
        # Only one rank has a row other than zero, so this sum is exact. All ranks then add rows in the same order.
        row = self._group.sum(everyones.ravel()).reshape(everyones.shape).sum(0)[1:]
        with variables.unchanged(self._model.metrics_variables):
            if not self.step.output_width:
                self._model.reset_metrics()
            self.step.micro.add_metrics(row)
            logs, micro = models.results(self._model), self.step.micro
        if isinstance(micro, OwnTest) and not models.shows_metrics(self._model, micro.names):
            return micro.logs(row, steps)
        return logs
