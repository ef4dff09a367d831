"""Synchronous training: every rank computes its shards of each batch, and gradients are summed over the ranks.

A call has several steps. The input of the next calls is gathered while a call runs, even across the end of an epoch.
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
from raytf.training.step import StepOptions, TrainStep
from raytf.training.step_journal import StepOutcome

#: Target duration of a call: long enough that its overhead is negligible, short enough to save and stop soon.
_CALL_SECONDS = 0.1
_MAX_CALL_STEPS = 32
#: Seconds of a measurement of a single shard.
_PROBE_SECONDS = 0.05


class SynchronousExecutor:
    """A `raytf.training.executor.Executor` in which all ranks train each step together.

    Args:
        config: the run's configuration.
    """

    #: Set by `make_step`.
    _step: TrainStep
    #: Set by `begin`: this rank, its prefetched calls, and the placement of its operations.
    _context: Context
    _calls: Prefetch
    _placement: Placement

    def __init__(self, config: TrainConfig):
        self._config = config
        self._world_size = 0
        #: Steps per call; rank 0 decides for all ranks.
        self._call_steps = config.compute.steps_per_call or 1
        #: Kinds of calls that TensorFlow has traced: True for full calls, False for partial ones.
        self._traced: set[bool] = set()
        #: Flags of the newest call, summed over the ranks.
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
        most_shards = -(-plan.shards // group.world_size)  # largest number of shards of any worker
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
        if attempt.group.devices.is_home_apart:  # an update on a CPU has other last bits than one on a GPU
            identity["updates"] = "made on the host's CPU"
        return identity

    def imbalance_seconds(self, attempt: Attempt, pipeline: Pipeline) -> float:
        group, shards = attempt.group, pipeline.plan.shards
        uneven = imbalance(shards, min(shards, group.world_size * len(group.devices.names)))
        if not uneven:
            return 0.0
        own = np.asarray([self._step.timer.seconds()], np.float32)
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
            context.pulse.probed(*self._step.timer.sample(_PROBE_SECONDS))
        context.saving.act(flags)
        if flags[StepFlag.PARK]:
            park(context)

    def settle(self) -> None:
        """Nothing to do: after every call the model holds the state of its last step."""

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
        """The step at which a call that begins at `step` ends, so that no save or histogram is due inside a call."""
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
    """The number of steps per call for calls of about `seconds`: a power of two, so that few sizes of calls occur."""
    return 2 ** int(np.log2(max(1.0, min(seconds / seconds_per_step, _MAX_CALL_STEPS))))
