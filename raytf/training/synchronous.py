"""Synchronous training: every rank computes its shards of each batch, and gradients are added over the ranks.

Calls of several steps are gathered ahead of the one that runs, also over the end of an epoch.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import ray

from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import CallBatch, Pipeline
from raytf.data.plan import imbalance
from raytf.data.prefetch import Prefetch
from raytf.distributed import buckets, factory
from raytf.distributed.group import Group
from raytf.distributed.step_flags import LENGTH, StepFlag, vector
from raytf.training import exact, learning_rate
from raytf.training.accounts import after_call, check_finite, write_histograms
from raytf.training.attempt import Attempt
from raytf.training.context import Context
from raytf.training.device_placement import Placement
from raytf.training.heartbeat import Activity
from raytf.training.parking import park
from raytf.training.step import StepOptions, StepOutcome, TrainStep

#: How long a call should take: long enough that its overhead does not count, short enough to save and stop soon.
_CALL_SECONDS = 0.1
_MAX_CALL_STEPS = 32
#: Seconds for which a shard alone is measured, now and then.
_PROBE_SECONDS = 0.05


class SynchronousExecutor:
    """A `raytf.training.executor.Executor` that trains with all ranks at once.

    Args:
        config: of the run.
    """

    #: Since `make_step`.
    _step: TrainStep
    #: Since `begin`: this rank, its calls gathered ahead, and the devices of its operations.
    _context: Context
    _calls: Prefetch
    _placement: Placement

    def __init__(self, config: TrainConfig):
        self._config = config
        self._world_size = 0
        #: Steps of a call; rank 0 decides them for all ranks.
        self._call_steps = config.compute.steps_per_call or 1
        #: Kinds of call that TensorFlow has compiled: those that are full, or not.
        self._traced: set[bool] = set()
        #: Of the newest call, added over the ranks.
        self._flags = vector({})

    # -- before training -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        return self._world_size

    def join(self) -> Group:
        given = ray.get_runtime_context().get_assigned_resources()
        group = factory.make(self._config.strategy, float(given.get("GPU", 0.0)))
        self._world_size = group.world_size
        return group

    def make_step(self, attempt: Attempt, model: keras.Model, pipeline: Pipeline) -> TrainStep:
        compute, group, plan = self._config.compute, attempt.group, pipeline.plan
        most_shards = -(-plan.shards // group.world_size)  # of a worker
        options = StepOptions(
            flags=LENGTH,
            jit=compute.jit,
            fixed_point=compute.reduction == "fixed",
            compress=compute.compress_gradients,
            devices=group.devices,
            keeps_gradients=self._config.run.histograms_every > 0,
            overlap=buckets.Overlap(buckets.BYTES, most_shards) if compute.overlap else None,
        )
        self._step = TrainStep(
            model,
            plan,
            pipeline.shards,
            group.all_reduce if group.world_size > 1 else None,
            pipeline.template,
            pipeline.leaf_specs,
            options,
            learning_rate.of_model(self._config.rate, model, plan),
        )
        return self._step

    def admit(self, attempt: Attempt, pipeline: Pipeline) -> dict[str, str]:
        if not self._config.compute.exact:
            return {}
        identity = exact.admit(self._step, pipeline, self._config.batch.seed, attempt.group, attempt.job.augment)
        if attempt.group.devices.is_home_apart:  # a CPU's update of a GPU's gradients has other last bits than a GPU's
            identity["updates"] = "made on the host's CPU"
        return identity

    def imbalance_seconds(self, attempt: Attempt, pipeline: Pipeline) -> float:
        group, shards = attempt.group, pipeline.plan.shards
        uneven = imbalance(shards, min(shards, group.world_size * len(group.devices.names)))
        if not uneven:
            return 0.0
        own = np.asarray([self._step.shard_seconds()], np.float32)
        return uneven * float(group.sum(own)[0]) / group.world_size

    def begin(self, context: Context) -> None:
        self._context, attempt = context, context.attempt
        self._calls = Prefetch(context.program.pipeline, context.state.step, self._call_end)
        self._placement = Placement(attempt.storage, attempt.name, attempt.group.rank, attempt.reporter.say_here)

    # -- the steps -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        self._calls.fill(self._context.job.total_steps)
        self._context.callbacks.run("on_epoch_begin", epoch)
        self._context.saving.callbacks_ran()

    def train_until(self, stop: int) -> None:
        while True:
            self._train_call()
            if self._context.state.step >= stop or self._context.state.stopped_early:
                return
            self.rest()

    def rest(self) -> None:
        context, flags = self._context, self._flags
        if flags[StepFlag.PROBE]:
            context.pulse.probed(*self._step.sample_shard(_PROBE_SECONDS))
        context.saving.act(flags)
        if flags[StepFlag.PARK]:
            park(context)

    def settle(self) -> None:
        """The model holds the state of the last step after every call."""

    def result(self) -> dict[str, Any]:
        return {}

    def _train_call(self) -> None:
        context = self._context
        self._calls.fill(context.job.total_steps)
        with context.pulse.doing(Activity.INPUT):
            call = self._calls.take()
        context.callbacks.run_batch("on_train_batch_begin", context.plan.locate(call.start)[1])
        began = time.perf_counter()
        outcome = self._compute(call)
        context.state.train_seconds += time.perf_counter() - began
        check_finite(context, call, outcome)
        after_call(context, call, outcome, time.perf_counter() - began)
        write_histograms(context, outcome)
        context.pulse.advance(call.stop, call.stop - call.start, len(context.program.pipeline.shards))
        self._flags = outcome.flags
        if not self._config.compute.steps_per_call and outcome.flags[StepFlag.CALL_STEPS]:
            self._call_steps = int(outcome.flags[StepFlag.CALL_STEPS])

    def _compute(self, call: CallBatch) -> StepOutcome:
        context = self._context
        activity = Activity.STEP if call.full in self._traced else Activity.TRACE
        is_placement_wanted = self._config.strategy.log_device_placement and not context.has_trained
        with context.pulse.doing(activity), self._placement.read(is_placement_wanted):
            outcome = self._step(call, self._votes(call.stop))
        self._traced.add(call.full)
        return outcome

    def _call_end(self, step: int, stop: int) -> int:
        """Where a call that begins at a step ends: nothing that is due by the step lies within it."""
        due = self._context.saving.cadence.every_steps, self._config.run.histograms_every
        return min(self._context.plan.call_end(step, self._call_steps, stop, boundary) for boundary in due)

    def _votes(self, stop: int) -> np.ndarray:
        """This rank's flags for the call that ends at step `stop`."""
        context = self._context
        ends_epoch = stop % context.plan.steps_per_epoch == 0
        given: dict[StepFlag, float] = context.saving.votes(stop, context.seconds_per_step, ends_epoch)
        if context.is_first_rank:
            given[StepFlag.PARK] = context.reporter.is_parking_wanted()
            given[StepFlag.PROBE] = self._world_size > 1 and context.pulse.is_probe_due()
            if not self._config.compute.steps_per_call and context.has_trained:
                given[StepFlag.CALL_STEPS] = call_steps(_CALL_SECONDS, context.seconds_per_step)
        return vector(given, context.saving.tell())


def call_steps(seconds: float, seconds_per_step: float) -> int:
    """The steps of a call that should take so many seconds: a power of two, so that few kinds of calls are compiled."""
    return 2 ** int(np.log2(max(1.0, min(seconds / seconds_per_step, _MAX_CALL_STEPS))))
