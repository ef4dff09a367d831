"""Training with parameter servers: the coordinator hands out batches, and workers update the servers' weights.

The coordinator is a worker group of one rank: it restores, logs, validates, saves and exports as rank 0 does with any
other strategy. Only the training of steps is different: several workers have batches under way at once. The state
belongs to a definite step only in a quiet moment, when no batch is under way: at the end of each epoch, before each
checkpoint, and when the driver requests a save. In a quiet moment, step s means that each of the first s batches has
been applied.
"""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import CallBatch, Prefetch
from raytf.distributed.devices import Devices
from raytf.distributed.group import Group, SingleWorkerGroup
from raytf.distributed.step_agreement import StepFlag, vector
from raytf.errors import HangError
from raytf.parameter_server import state
from raytf.parameter_server.step import AsyncStep, ResultLostError, ServerStepOutcome, SyncStep
from raytf.training.executor import Executor
from raytf.training.process.heartbeat import Activity
from raytf.training.session import RankSession
from raytf.training.step import learning_rate
from raytf.training.step.learning_rate import LearningRate
from raytf.training.step.step import StepOutcome
from raytf.training.synchronous import after_call, are_histograms_due, call_steps, check_finite, park, write_histograms

#: Target seconds of a call on its worker: long enough to make its overhead negligible, short enough to save soon.
_CALL_SECONDS = 0.2
#: Seconds between two checks for the driver's requests while calls are under way.
_POLL_SECONDS = 0.1
#: How many times as long as usual the first calls may take, since each worker compiles them.
_COMPILE_FACTOR = 20.0


class ParameterServerExecutor(Executor):
    """The coordinator, the only rank of an attempt, which hands out batches.

    Args:
        config: the run's configuration.
        cluster: HOST:PORT of each process, by kind: `chief` (this process), `ps` and `worker`.
    """

    #: Set by `join`: TensorFlow's coordinator, which schedules calls on workers.
    _coordinator: Any
    #: Set by `make_step`.
    _step: AsyncStep | SyncStep
    _rate: LearningRate
    #: Set by `begin`.
    _session: RankSession

    def __init__(self, config: TrainConfig, cluster: dict[str, list[str]]):
        self._config, self._cluster = config, cluster
        self._call_steps = config.compute.steps_per_call or 1
        #: Updates that the servers have applied minus the steps of the run, when the mirror was last equal to the
        #: servers.
        self._extra = 0
        #: Whether the servers may have newer weights than the mirror.
        self._is_stale = False
        self._under_way: dict[Future[ServerStepOutcome], CallBatch] = {}
        #: Outcomes that arrived before those of earlier steps, by the first step of the call.
        self._early: dict[int, tuple[CallBatch, ServerStepOutcome]] = {}
        #: The time from which a hang is measured: when a call last ended, or was handed out while none was under way.
        self._progress_at = 0.0
        #: The time at which a call was last recorded, for the duration of the next.
        self._accounted_at = 0.0
        #: Approximate seconds that a worker takes for a step; 0 while they are not known.
        self._mean_seconds = 0.0
        #: Outcome of the last recorded call, for histograms in the next quiet moment.
        self._latest: StepOutcome | None = None

    # -- before training -----------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        """Number of workers that compute gradients, including missing ones."""
        return len(self._cluster["worker"])

    def join(self) -> Group:
        """Connect to the servers and workers.

        Raises:
            WorkerLostError: a parameter server disappeared. The group has to restart, and this process must exit.
        """
        self._coordinator = state.connect(self._cluster)
        return SingleWorkerGroup(Devices())

    def make_step(self, session: RankSession) -> AsyncStep | SyncStep:
        model, pipeline, section = session.model, session.pipeline, self._config.strategy
        self._rate = learning_rate.of_model(self._config.rate, model, session.plan)
        args = (
            self._coordinator,
            len(self._cluster["ps"]),
            model,
            session.plan,
            pipeline.template,
            pipeline.leaf_specs,
            self._config.compute.jit,
            self._rate,
        )
        if section.sync_replicas:
            self._step = SyncStep(*args, parts=self._config.parts, workers=self.workers)
        else:
            self._step = AsyncStep(*args, workers=self.workers)
        return self._step

    def begin(self, session: RankSession) -> None:
        self._session = session
        self._progress_at = self._accounted_at = time.monotonic()
        self._send()
        self._extra = int(session.model.optimizer.iterations) - session.state.step

    # -- the steps -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        self._session.callbacks.run("on_epoch_begin", epoch)
        self._session.saving.callbacks_ran()
        self._send_what_callbacks_changed()

    def train_until(self, stop: int) -> None:
        """Train up to step `stop`. No call is under way afterwards."""
        session, progress = self._session, self._session.state
        ahead = Prefetch(session.pipeline, progress.step, self._call_end)
        began = time.monotonic()
        until, is_quiet_wanted = self._next_quiet(ahead.asked, stop), False
        while progress.step < stop and not (progress.stopped_early and not self._under_way):
            if not is_quiet_wanted:
                ahead.fill(until)
            while ahead and len(self._under_way) < self._step.window:
                self._hand_out(ahead)
            self._collect()
            flags = self._votes()
            is_quiet_wanted |= bool(flags[StepFlag.WANT_SAVE] or flags[StepFlag.PARK] or progress.stopped_early)
            if self._under_way or ahead:
                flags[StepFlag.WANT_SAVE] = 0
                session.saving.act(flags)
                continue
            self._count_time(began)
            self._write_kept_histograms()
            if progress.step < stop and not progress.stopped_early:
                # At its last step, the epoch ends before a save, so that the saved state includes its validation and
                # the effects of its callbacks.
                self._rest(flags)
            until, is_quiet_wanted, began = self._next_quiet(ahead.asked, stop), False, time.monotonic()
        self._count_time(began)
        self._take()

    def rest(self) -> None:
        self._send_what_callbacks_changed()
        self._rest(self._votes())

    def settle(self) -> None:
        self._take()

    def result(self) -> dict[str, Any]:
        updates, steps = self._session.state.step + self._extra, self._session.state.step
        return {
            "updates": updates,
            "repeated_updates": max(0, updates - steps),
            "parameter_servers": len(self._cluster["ps"]),
            "placement": [{"weight": w, "device": d, "bytes": b} for w, d, b in self._step.state.places()],
        }

    def _rest(self, flags: np.ndarray) -> None:
        """Act on the flags, in a quiet moment."""
        if flags[StepFlag.WANT_SAVE] or flags[StepFlag.PARK]:
            self._take()
        self._session.saving.act(flags)
        if flags[StepFlag.PARK]:
            park(self._session)

    def _votes(self) -> np.ndarray:
        session = self._session
        votes = session.saving.votes(session.state.step, session.seconds_per_step, session.is_at_epoch_end)
        votes[StepFlag.COPY] = 0.0
        votes[StepFlag.PARK] = session.reporter.is_parking_wanted()
        return vector(votes)

    def _call_end(self, step: int, stop: int) -> int:
        steps = self._call_steps
        if self._session.callbacks.batches.each and not self._config.compute.steps_per_call:
            steps = self._session.model.steps_per_execution
        return self._session.plan.call_end(step, steps, stop)

    def _next_quiet(self, step: int, stop: int) -> int:
        """Return the step up to which calls are handed out: that of the next save or histograms, or `stop`."""
        due = (self._session.saving.policy.cadence.every_steps, self._config.run.histograms_every)
        return min([stop, *((step // every + 1) * every for every in due if every)])

    def _count_time(self, began: float) -> None:
        self._session.state.train_seconds += time.monotonic() - began

    def _write_kept_histograms(self) -> None:
        """Write histograms if they are due.
        Call this only in a quiet moment, when the mirror can copy the servers' weights."""
        if self._latest is not None and are_histograms_due(self._session):
            self._take()
            write_histograms(self._session, self._latest)
        self._latest = None

    # -- calls under way -----------------------------------------------------------------------------------------------

    def _hand_out(self, calls: Prefetch) -> None:
        session = self._session
        with session.heartbeat.doing(Activity.INPUT):
            call = calls.take()
        session.callbacks.run_batch("on_train_batch_begin", session.plan.locate(call.start)[1])
        self._send_rate()
        if not self._under_way:
            self._progress_at = time.monotonic()
        self._under_way[self._step.submit(call)] = call
        self._is_stale = True

    def _collect(self) -> None:
        if not self._under_way:
            return
        done, _ = wait(self._under_way, _POLL_SECONDS, FIRST_COMPLETED)
        for future in done:
            call = self._under_way.pop(future)
            result = self._result_of(future)
            if result is None:
                self._under_way[self._step.submit(call)] = call
            else:
                self._early[call.start] = (call, result)
        if done:
            self._progress_at = time.monotonic()
        elif time.monotonic() - self._progress_at > self._patience():
            raise HangError(
                f"no worker has finished a call for {self._patience():.0f} s at step {self._session.state.step}. "
                "Raise --hang-seconds to allow more time."
            )
        while self._session.state.step in self._early:
            self._account(*self._early.pop(self._session.state.step))

    def _result_of(self, future: Future[ServerStepOutcome]) -> ServerStepOutcome | None:
        """Return the outcome of a call; None if it was lost with its worker."""
        try:
            return future.result()
        except ResultLostError:
            return None
        except Exception:
            # When one call fails, TensorFlow cancels all others; `join` raises the original error.
            self._coordinator.join()
            raise

    def _patience(self) -> float:
        seconds, session = self._config.cluster.hang_seconds, self._session
        if not seconds:
            return float("inf")
        usual = 20 * session.seconds_per_step * self._call_steps
        return max(seconds * (1.0 if session.has_trained else _COMPILE_FACTOR), usual)

    def _account(self, call: CallBatch, result: ServerStepOutcome) -> None:
        session, now, steps = self._session, time.monotonic(), call.stop - call.start
        self._step.micro.add_metrics(result.rows[:, 1:].sum(0))
        nothing = np.empty((len(result.rows), 0), np.uint8)
        rates, gradients = self._rates(call), list(result.gradients)
        norms = np.full(len(result.rows), np.nan)  # no global norm: each worker's gradient is applied by itself
        outcome = StepOutcome(result.rows[:, 0], rates, result.finite, vector({}), gradients, nothing, norms)
        check_finite(session, call, outcome)
        seconds = (now - self._accounted_at) if session.has_trained else 0.0
        self._accounted_at = now
        after_call(session, call, outcome, max(seconds, 1e-6))
        self._latest = outcome
        self._send_rate()
        session.heartbeat.advance(call.stop, steps, len(session.pipeline.shards))
        if not self._config.compute.steps_per_call and self._step.window > 1:
            # Between two results passes a worker's time for a call, divided by the number of workers.
            self._call_steps = call_steps(_CALL_SECONDS, self._mean_step_seconds(seconds / steps) or 1.0)

    def _rates(self, call: CallBatch) -> np.ndarray:
        """Return the rate of a call's last step for all of its steps, since rates within a call differ little."""
        iterations = self._session.model.optimizer.iterations
        iterations.assign(call.stop - 1 + self._extra)
        rate = float(self._rate.value())
        iterations.assign(call.stop + self._extra)
        return np.full(call.stop - call.start, rate, np.float32)

    def _mean_step_seconds(self, latest: float) -> float:
        """Update and return a worker's approximate seconds per step, from the time between the last two results."""
        latest *= self.workers
        self._mean_seconds = latest if not self._mean_seconds else 0.9 * self._mean_seconds + 0.1 * latest
        return self._mean_seconds

    # -- the mirror ----------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        """Copy the servers' values to the mirror; no call may be under way."""
        assert not self._under_way
        if self._is_stale:
            with self._session.heartbeat.doing(Activity.TRANSFER):
                self._extra = self._step.state.pull() - self._session.state.step
            self._is_stale = False

    def _send(self) -> None:
        with self._session.heartbeat.doing(Activity.TRANSFER):
            self._step.state.push()

    def _send_rate(self) -> None:
        """Send the learning rate to the servers if callbacks may change it after each batch."""
        if self._session.callbacks.has_batch_hooks:
            self._step.state.push_rate()

    def _send_what_callbacks_changed(self) -> None:
        if self._session.callbacks.active:
            self._send()  # they may have changed anything
