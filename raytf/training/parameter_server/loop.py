"""The training loop with parameter servers: one process hands batches out, and workers change the servers' weights.

The coordinator is a worker group of one rank: it restores, logs, validates, saves and exports as rank 0 of any other
strategy. Only what is between is different. Batches lie under way with several workers at once; the state is that of a
step only in a quiet moment, when none is. There are quiet moments at the end of each epoch, before each checkpoint, and
when the run is told to save. In a quiet moment step s means: each of the first s batches has been applied.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from raytf.checkpoint.manifest import Checkpoint
from raytf.data.pipeline import CallBatch
from raytf.data.prefetch import Prefetch
from raytf.distributed.devices import OneDevice
from raytf.distributed.group import SingleWorkerGroup
from raytf.distributed.step_flags import StepFlag, vector
from raytf.errors import HangError
from raytf.runs.restart_phases import Phases
from raytf.training.heartbeat import Activity, Heartbeat
from raytf.training.job import TrainingJob
from raytf.training.loop import Worker
from raytf.training.parameter_server import state
from raytf.training.parameter_server.step import AsyncStep, ResultLostError, Servers, ServerStepOutcome, SyncStep
from raytf.training.step import StepOutcome
from raytf.training.worker import explained

#: How long a call should take on its worker: long enough that handing it out does not count, short enough to save soon.
_CALL_SECONDS = 0.2
_MAX_CALL_STEPS = 32
#: Seconds between two looks at what the driver wants while calls are under way.
_LOOK_SECONDS = 0.1
#: The first calls are compiled on each worker, which takes this many times as long as a usual call may.
_COMPILE_FACTOR = 20.0


def run(job: TrainingJob, pulse: Heartbeat, phases: Phases, cluster: dict[str, list[str]]) -> dict[str, Any] | None:
    """Train, and return the run's result.

    Args:
        cluster: HOST:PORT of each of `chief` (this process), `ps` and `worker`.

    Raises:
        WorkerLostError: a parameter server is gone; the group has to start again, and this process must end.
        RaytfError: any other is one that another attempt would meet again.
    """
    return explained(job, lambda: CoordinatorLoop(job, pulse, phases, cluster))


class CoordinatorLoop(Worker):
    """The one rank of an attempt.

    Args:
        job: to be done.
        pulse: of this process.
        phases: of the restart; marked as they end.
        cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
    """

    def __init__(self, job: TrainingJob, pulse: Heartbeat, phases: Phases, cluster: dict[str, list[str]]):
        self._cluster = cluster
        #: Updates that the servers had seen when this attempt began, less the steps.
        self._extra = 0
        super().__init__(job, pulse, phases)
        self._places = self.train_step.state.places()
        self._is_stale = False
        self._under_way: dict[Future[ServerStepOutcome], CallBatch] = {}
        #: Losses of calls that came before those of earlier steps.
        self._early: dict[int, tuple[CallBatch, ServerStepOutcome]] = {}
        self._told_at = self._accounted_at = time.monotonic()
        #: Seconds that a worker takes for a step, about; 0 as long as that is not known.
        self._mean_seconds = 0.0
        self._latest: StepOutcome | None = None

    def _join(self) -> Any:
        self._strategy, self._coordinator = state.connect(self._cluster)
        return SingleWorkerGroup(OneDevice())

    @property
    def workers(self) -> int:
        """That compute gradients, when all of them are there."""
        return len(self._cluster["worker"])

    def _make_step(self) -> Any:
        self._rate = self._make_rate()
        strategy, servers = self.config.strategy, len(self._cluster["ps"])
        args = (
            Servers(self._strategy, self._coordinator, servers),
            self.model,
            self.plan,
            self.pipeline.template,
            self.pipeline.leaf_specs,
            self.config.compute.jit,
            self._rate,
        )
        if strategy.sync_replicas:
            return SyncStep(*args, parts=self.config.parts, workers=self.workers)
        return AsyncStep(*args, workers=self.workers)

    def _begin(self, chosen: Checkpoint | None) -> None:
        super()._begin(chosen)
        self._send()
        self._extra = int(self.model.optimizer.iterations) - self.state.step

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any] | None:
        """Train to the end of the run; its result."""
        total, plan = self.job.total_steps, self.plan
        self.pulse.settle(Activity.LOOP, self.state.step)
        self.show("starting")
        while self.state.step < total and not self.state.stopped_early:
            epoch, inside = plan.locate(self.state.step)
            if inside == 0:
                self._run_hook("on_epoch_begin", epoch)
            self._train_until(min(total, (epoch + 1) * plan.steps_per_epoch), epoch)
            self._take()
            if self.state.step % plan.steps_per_epoch == 0:
                self._end_epoch(epoch)
                self._send_what_callbacks_changed()
                self._rest(self._flags_of())
        self._take()
        self.show("saving")
        self.saving.finish()
        if self.state.step % plan.steps_per_epoch:
            self._end_epoch(plan.locate(self.state.step)[0])
        result = self._finish()
        assert result is not None
        updates = self._updates()
        return result | {
            "updates": updates,
            "repeated_updates": max(0, updates - self.state.step),
            "parameter_servers": len(self._cluster["ps"]),
            "placement": [{"weight": w, "device": d, "bytes": b} for w, d, b in self._places],
        }

    def _train_until(self, stop: int, epoch: int) -> None:
        """Train an epoch's steps up to `stop`, or until a callback ends the run; nothing is under way afterwards."""
        ahead = Prefetch(self.pipeline, self.state.step, lambda at, end: self.plan.call_end(at, self.call_steps, end))
        began = time.monotonic()
        until, is_quiet_wanted = self._next_quiet(ahead.asked, stop), False
        while self.state.step < stop and not (self.state.stopped_early and not self._under_way):
            if not is_quiet_wanted:
                ahead.fill(until)
            while ahead and len(self._under_way) < self.train_step.window:
                self._hand_out(ahead)
            self._collect(epoch)
            flags = self._flags_of()
            is_quiet_wanted |= bool(flags[StepFlag.WANT_SAVE] or flags[StepFlag.PARK] or self.state.stopped_early)
            if self._under_way or ahead:
                flags[StepFlag.WANT_SAVE] = 0
                self.saving.act(flags)
                continue
            self._count_time(began)
            self._show_kept_histograms()
            if self.state.step % self.plan.steps_per_epoch:
                self._rest(flags)
            # Else the epoch ends first: what is saved at its last step knows its validation and its callbacks.
            until, is_quiet_wanted, began = self._next_quiet(ahead.asked, stop), False, time.monotonic()
        self._count_time(began)

    def _rest(self, flags: np.ndarray) -> None:
        """Do in a quiet moment what the flags say."""
        if flags[StepFlag.WANT_SAVE] or flags[StepFlag.PARK]:
            self._take()
        self.saving.act(flags)
        if flags[StepFlag.PARK]:
            self._park()

    def _next_quiet(self, step: int, stop: int) -> int:
        """The step up to which calls are handed out: then something is due by the step, or it is `stop`."""
        due = (self.saving.cadence.every_steps, self.config.run.histograms_every)
        return min([stop, *((step // every + 1) * every for every in due if every)])

    def _show_histograms(self, outcome: StepOutcome) -> None:
        """Kept for the quiet moment: until then the mirror's weights are those of an earlier one."""
        self._latest = outcome

    def _show_kept_histograms(self) -> None:
        every = self.config.run.histograms_every
        if every and self.state.step % every == 0 and self._latest is not None:
            self._take()
            super()._show_histograms(self._latest)
        self._latest = None

    def _count_time(self, began: float) -> None:
        self.state.train_seconds += time.monotonic() - began

    def _hand_out(self, calls: Prefetch) -> None:
        with self.pulse.doing(Activity.INPUT):
            call = calls.take()
        self.callbacks.run_batch("on_train_batch_begin", self.plan.locate(call.start)[1])
        self._send_rate()
        if not self._under_way:
            self._told_at = time.monotonic()
        self._under_way[self.train_step.submit(call)] = call
        self._is_stale = True

    def _collect(self, epoch: int) -> None:
        """Take in the calls that are done, in the order of their steps."""
        if not self._under_way:
            return
        done, _ = wait(self._under_way, _LOOK_SECONDS, FIRST_COMPLETED)
        for future in done:
            call = self._under_way.pop(future)
            told = self._result_of(future)
            if told is None:
                self._under_way[self.train_step.submit(call)] = call
            else:
                self._early[call.start] = (call, told)
        if done:
            self._told_at = time.monotonic()
        elif time.monotonic() - self._told_at > self._patience():
            raise HangError(
                f"no worker has finished a call for {self._patience():.0f} s at step {self.state.step}. "
                "--hang-seconds gives more time."
            )
        while self.state.step in self._early:
            call, told = self._early.pop(self.state.step)
            self._account(call, told, epoch)

    def _result_of(self, future: Future[ServerStepOutcome]) -> ServerStepOutcome | None:
        """What a call tells.

        Returns:
            None where that was lost with its worker.
        """
        try:
            return future.result()
        except ResultLostError:
            return None
        except Exception:
            # TensorFlow cancels all others when one fails, and tells why where it is asked for the end.
            self._coordinator.join()
            raise

    def _patience(self) -> float:
        seconds = self.config.cluster.hang_seconds
        if not seconds:
            return float("inf")
        return max(seconds * (1.0 if self._trained else _COMPILE_FACTOR), 20 * self._seconds_per_step * self.call_steps)

    def _account(self, call: CallBatch, told: ServerStepOutcome, epoch: int) -> None:
        now = time.monotonic()
        self.train_step.micro.add_metrics(told.rows[:, 1:].sum(0))
        steps = call.stop - call.start
        losses = told.rows[:, 0]
        # Of the call's last step; those before it differ by little.
        self.model.optimizer.iterations.assign(call.stop - 1 + self._extra)
        rates = np.full(steps, float(self._rate.value()), np.float32)
        self.model.optimizer.iterations.assign(call.stop + self._extra)
        outcome = StepOutcome(losses, rates, told.finite, vector({}), list(told.gradients))
        self._check_finite(call, outcome)
        seconds = (now - self._accounted_at) if self._trained else 0.0
        self._accounted_at = now
        self._after_call(call, outcome, epoch, max(seconds, 1e-6))
        self._send_rate()
        self.pulse.advance(call.stop, steps, len(self.shards))
        if self._trained and not self.config.compute.steps_per_call and self.train_step.window > 1:
            # What passes between two results is a worker's time divided by the workers.
            wanted = max(1.0, min(_CALL_SECONDS / (self._mean_step_seconds(seconds / steps) or 1.0), _MAX_CALL_STEPS))
            self.call_steps = 2 ** int(np.log2(wanted))

    def _mean_step_seconds(self, latest: float) -> float:
        """Of a worker, about."""
        latest *= self.workers
        self._mean_seconds = latest if not self._mean_seconds else 0.9 * self._mean_seconds + 0.1 * latest
        return self._mean_seconds

    def _flags_of(self) -> np.ndarray:
        ends_epoch = self.state.step % self.plan.steps_per_epoch == 0
        given = self.saving.votes(self.state.step, self._seconds_per_step, ends_epoch)
        given[StepFlag.COPY] = 0.0
        given[StepFlag.PARK] = self.reporter.is_parking_wanted()
        return vector(given)

    # -- quiet moments -------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Have the mirror hold what the servers hold; nothing is under way."""
        assert not self._under_way
        if self._is_stale:
            with self.pulse.doing(Activity.TRANSFER):
                self._extra = self.train_step.state.pull() - self.state.step
            self._is_stale = False

    def _send(self) -> None:
        """Have the servers hold what the mirror holds."""
        with self.pulse.doing(Activity.TRANSFER):
            self.train_step.state.push()

    def _send_rate(self) -> None:
        """What a callback on batches says of the rate holds for the batches that come next."""
        if self.callbacks.has_batch_hooks:
            self.train_step.state.push_rate()

    def _updates(self) -> int:
        """That the servers have seen."""
        return self.state.step + self._extra

    def _run_hook(self, hook: str, *args: Any) -> None:
        self._take()
        self.callbacks.run(hook, *args)
        self.saving.callbacks_ran()
        self._send_what_callbacks_changed()

    def _send_what_callbacks_changed(self) -> None:
        if self.callbacks.active:
            self._send()  # they may have changed anything
