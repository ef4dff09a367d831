"""Synchronous training: every rank computes its shards of each batch, and gradients are summed over the ranks.

A call runs several steps. The input of the next calls is gathered meanwhile, even across the end of an epoch.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import keras
import numpy as np
import ray
import ray.train
import tensorflow as tf

from raytf import _keras
from raytf.audit.shard_audit import Standing
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import CallBatch, Pipeline, Prefetch
from raytf.data.plan import imbalance
from raytf.distributed import group, ranks, step_digest
from raytf.distributed.allreduce.reduction import BUCKET_BYTES, Overlap
from raytf.distributed.group import Group
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink, worker_name
from raytf.distributed.membership.generations import Generation
from raytf.distributed.membership.member import LeftBehindError, RunOverError
from raytf.distributed.ranks import RankInfo
from raytf.distributed.step_agreement import LENGTH, StepFlag, vector
from raytf.errors import NonFiniteLossError, WorkerLostError
from raytf.runs.status import PARKED
from raytf.training import exact
from raytf.training.auditing import Audits, steps_between
from raytf.training.executor import Executor
from raytf.training.process import process, warm_pool
from raytf.training.process.heartbeat import Activity
from raytf.training.regroup import RegroupError
from raytf.training.session import BatchEnd, RankSession
from raytf.training.step import device_placement, learning_rate
from raytf.training.step.step import StepOptions, StepOutcome, TrainStep
from raytf.training.step_dump import StepDump

#: Target seconds of a call: long enough that its overhead is negligible, short enough to save and stop quickly.
_CALL_SECONDS = 0.1
_MAX_CALL_STEPS = 32
#: Seconds for which the duration of a shard is measured.
_PROBE_SECONDS = 0.05
#: Seconds between two checks of parked ranks whether they are released.
_PARKED_POLL_SECONDS = 0.1
Traced = TypeVar("Traced")
#: The usual norm is the median of at most, and of at least, this many norms.
_NORMS, _LEAST_NORMS = 50, 10
#: If a tensor's largest value has fewer bits than this, the measured error of random values is above about 10 %.
_BITS = 5.7


class SynchronousExecutor(Executor):
    """All ranks train each step together.

    Args:
        config: the run's configuration.
        arbiter: address of the arbiter that decides who belongs to the group; None if ranks cannot meet again.
        waits: called repeatedly while this rank waits to meet other ranks.
    """

    #: Set by `join`.
    _group: Any

    #: Set by `make_step`.
    _step: TrainStep
    #: Set by `begin`: this rank's session, its prefetched calls, and its audits.
    _session: RankSession
    _calls: Prefetch
    _audits: Audits

    def __init__(
        self, config: TrainConfig, arbiter: ArbiterAddress | None = None, waits: Callable[[], None] = lambda: None
    ):
        self._config, self._arbiter, self._waits = config, arbiter, waits
        self._link: ArbiterLink | None = None
        #: Measured seconds of a shard on this machine; None before the measurement.
        self._shard_seconds: float | None = None
        #: Steps per call; rank 0 decides for all ranks.
        self._call_steps = config.compute.steps_per_call or 1
        #: Kinds of calls that TensorFlow has traced: True for full calls, False for partial ones.
        self._traced: set[bool] = set()
        #: The trace of partial steps that a thread makes during the first steps.
        self._rehearsal: Future[bool] | None = None
        self._standing = Standing()
        #: With `--compress-gradients`.
        self._spikes: SpikeWatch | None = None
        #: Flags of the newest call, summed over the ranks.
        self._flags = vector({})

    # -- the ranks -----------------------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        return self._group.world_size

    @property
    def meets_again(self) -> bool:
        return self._arbiter is not None

    @property
    def is_late(self) -> bool:
        return self._link is not None and self._link.found_running

    @property
    def first_rank(self) -> int | None:
        if self._arbiter is None:
            return int(self._group.rank)
        # A worker that joins a training group would only repeat earlier reports.
        return 0 if not self.is_late and _train_rank().rank == 0 else None

    def join(self) -> Group:
        gpus = float(ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0))
        if self._arbiter is None:
            self._group = group.make(self._config.strategy, gpus)
        else:
            name = worker_name(ray.get_runtime_context().get_node_id(), os.getpid())
            self._link = ArbiterLink.connect(self._arbiter, name, self._waits, process.end_unheard)
            if self._link.found_over is not None:
                raise RunOverError(self._link.found_over)
            self._group = group.make_again(self._config.strategy, gpus)
            ranks.take(_train_rank())  # for the model function
        return self._group

    def meet(self, step: int) -> Generation:
        assert self._link is not None
        while True:
            address, is_member = rendezvous.listen(ray.util.get_node_ip_address()), self._link.member.has_joined
            self._group.leave()
            if is_member:
                generation, place = self._link.leave(address, step)
            else:
                seat = _train_rank()
                generation, place = self._link.join(address, seat.size, seat.rank)
            try:
                self._group.meet_again(place)
            except WorkerLostError as error:  # a rank is lost while the ranks meet
                self._link.member.not_met(generation, error.unreached)
                continue
            except tf.errors.OpError:  # a rank is lost in the first sum
                self._link.member.not_met(generation, (), are_connected=True)
                continue
            self._link.member.met()
            return generation

    def want(self, workers: int) -> None:
        """Request a group with another number of workers, even before the ranks have met."""
        if self._link is not None:
            self._link.want(workers)

    def take_shards(self, pipeline: Pipeline) -> None:
        self._step.take(pipeline.shards)
        if not self._step.can_go_on:
            self._traced.clear()  # the step has new graphs now

    def ended(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        if self._link is None:
            return result
        shared: dict[str, Any] = json.loads(self._group.share(json.dumps(result).encode()))
        self._link.tell_over(shared)
        self._link.close()
        return shared

    # -- before training -----------------------------------------------------------------------------------------------

    def make_step(self, session: RankSession) -> TrainStep:
        compute, group, plan, pipeline = self._config.compute, session.group, session.plan, session.pipeline
        most_shards = -(-plan.shards // group.world_size)  # largest number of shards of any worker
        options = StepOptions(
            flags=LENGTH,
            jit=compute.jit,
            fixed_point=compute.reduction == "fixed",
            compress=compute.compress_gradients,
            devices=group.devices,
            keeps_gradients=self._config.run.histograms_every > 0 or bool(session.job.dump),
            digests=compute.digests,
            has_old_digests=session.job.has_old_digests,
            audits=steps_between(compute) > 0,
            overlap=Overlap(BUCKET_BYTES, most_shards) if compute.overlap else None,
        )
        self._spikes = SpikeWatch(plan.shards) if compute.compress_gradients else None
        self._step = TrainStep(
            session.model,
            plan,
            pipeline.shards,
            group.all_reduce if group.world_size > 1 or self.meets_again else None,
            pipeline.template,
            pipeline.leaf_specs,
            options,
            learning_rate.of_model(self._config.rate, session.model, plan),
        )
        return self._step

    def admit(self, session: RankSession) -> dict[str, str]:
        if not self._config.compute.exact:
            return {}
        identity = exact.admit(
            self._step, session.pipeline, self._config.batch.seed, session.group, session.job.augment
        )
        if session.group.devices.is_home_apart:  # an update has different last bits on a CPU than on a GPU
            identity["updates"] = "made on the host's CPU"
        return identity

    def imbalance_seconds(self, session: RankSession) -> float:
        group, shards = session.group, session.plan.shards
        uneven = imbalance(shards, min(shards, group.world_size * len(group.devices.names)))
        if not uneven:
            return 0.0
        if self._shard_seconds is None:
            self._shard_seconds = self._step.timer.seconds()
        return uneven * float(group.sum(np.asarray([self._shard_seconds], np.float32))[0]) / group.world_size

    def begin(self, session: RankSession) -> None:
        self._session = session
        # New ranks start with these values, and the calls of all ranks must have the same steps.
        self._flags, self._call_steps = vector({}), self._config.compute.steps_per_call or 1
        node = ray.get_runtime_context().get_node_id()
        self._audits = Audits(session, self._step, steps_between(self._config.compute), self._standing, node)
        self._audits.compare_machines()
        self._audits.begin()
        self._calls = Prefetch(session.pipeline, session.state.step, self._call_end, self._audits.beside)

    # -- the steps -----------------------------------------------------------------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        self._calls.fill(self._session.job.end_step)
        self._session.callbacks.begin("epoch", self._session.state.step)
        self._session.callbacks.run("on_epoch_begin", epoch)
        self._session.saving.callbacks_ran()

    def train_until(self, stop: int) -> None:
        try:
            while True:
                self._train_call()
                if self._session.state.step >= stop or self._session.state.stopped_early:
                    return
                self.rest()
        finally:
            self._end_rehearsal()

    def _end_rehearsal(self) -> None:
        """Wait for the graph of partial steps, because callbacks or evaluations may trace the model next."""
        rehearsal, self._rehearsal = self._rehearsal, None
        if rehearsal is not None:
            with self._session.heartbeat.doing(Activity.TRACE):
                if rehearsal.result():
                    self._traced.add(False)

    def rest(self) -> None:
        session, flags = self._session, self._flags
        if flags[StepFlag.PROBE]:
            session.heartbeat.probed(*self._step.timer.sample(_PROBE_SECONDS))
        session.saving.act(flags)
        if flags[StepFlag.PARK]:
            park(session)
        if flags[StepFlag.REGROUP] and session.saving.let_go():
            raise RegroupError("a rank waits to join")

    def _train_call(self) -> None:
        session = self._session
        self._calls.fill(session.job.end_step)
        with session.heartbeat.doing(Activity.INPUT):
            call = self._calls.take()
        session.callbacks.begin("call", call.start)
        session.callbacks.run_batch("on_train_batch_begin", session.plan.locate(call.start)[1])
        if self._link is not None and self._link.member.is_lost:
            raise LeftBehindError("the connection with the driver's arbiter is lost")
        began, is_first = time.perf_counter(), not self._traced
        try:
            outcome = self._compute(call)
        except tf.errors.OpError:
            differing = None if self._step.audit is None else self._step.audit.take()
            if differing is not None:
                self._audits.settle(call, differing)
            if not session.group.loss:
                raise
            if not self._step.can_go_on:
                raise WorkerLostError(f"{session.group.loss}, in the middle of a step") from None
            outcome = self._step.made()
            if len(outcome.losses):  # the steps before the one that failed
                made = dataclasses.replace(call, stop=call.start + len(outcome.losses), full=True)
                self._note(made, outcome, time.perf_counter() - began)
            raise RegroupError(session.group.loss) from None
        self._audits.agreed(call)
        self._note(call, outcome, time.perf_counter() - began)
        self._flags = outcome.flags
        if is_first and self.meets_again and False not in self._traced:
            # Tracing at an epoch's end would prolong the pause after a death, by seconds on a busy machine.
            self._rehearsal = trace_beside(lambda: self._step.rehearse(full=False))
        if session.callbacks.has_batch_hooks or session.job.dump:
            self._end_rehearsal()
        if not self._config.compute.steps_per_call and outcome.flags[StepFlag.CALL_STEPS]:
            self._call_steps = int(outcome.flags[StepFlag.CALL_STEPS])

    def _note(self, call: CallBatch, outcome: StepOutcome, seconds: float) -> None:
        session = self._session
        session.state.train_seconds += seconds
        check_finite(session, call, outcome)
        for line in self._spikes.inspect(call.start + 1, outcome.norms) if self._spikes is not None else []:
            session.reporter.say(line)
        after_call(session, call, outcome, seconds)
        write_histograms(session, outcome)
        session.heartbeat.advance(call.stop, call.stop - call.start, len(session.pipeline.shards))

    def _compute(self, call: CallBatch) -> StepOutcome:
        session = self._session
        if not call.full:
            self._end_rehearsal()
        activity = Activity.STEP if call.full in self._traced else Activity.TRACE
        with session.heartbeat.doing(activity), self._placement_report():
            dump = StepDump(session.job.dump) if session.job.dump and call.stop == session.job.end_step else None
            if dump is not None:
                dump.before(session, call)
            choice = self._audits.choice(call.start) if call.stop == call.start + 1 else None
            audited = () if choice is None else (choice.shard, choice.auditor == self._group.rank)
            outcome = self._step(call, self._votes(call.stop), *audited)
            if dump is not None:
                dump.after(session, call, outcome)
        self._traced.add(call.full)
        return outcome

    def _placement_report(self) -> AbstractContextManager[None]:
        """Return a context manager that reports the placement of the next call's operations, if that is requested."""
        session = self._session
        if not self._config.strategy.log_device_placement or session.has_trained:
            return nullcontext()
        return device_placement.reported(
            session.storage, session.place.attempt, session.group.rank, session.reporter.say_here
        )

    def _call_end(self, step: int, stop: int) -> int:
        """Return the end of a call that begins at `step`, so that no save or histogram is due inside the call."""
        if self._session.job.dump and step < self._session.job.end_step - 1:
            stop = min(stop, self._session.job.end_step - 1)  # the dumped step gets its own call
        stop = self._audits.call_end(step, stop)
        due = self._session.saving.policy.cadence.every_steps, self._config.run.histograms_every
        steps = self._call_steps
        if self._session.callbacks.batches.each and not self._config.compute.steps_per_call:
            steps = self._session.model.steps_per_execution  # Keras runs the hooks this often
        return min(self._session.plan.call_end(step, steps, stop, boundary) for boundary in due)

    def _votes(self, stop: int) -> np.ndarray:
        """Return this rank's flags for the call that ends at step `stop`."""
        session = self._session
        ends_epoch = session.plan.is_epoch_end(stop)
        votes: dict[StepFlag, float] = session.saving.votes(stop, session.seconds_per_step, ends_epoch)
        if session.is_first_rank:
            votes[StepFlag.PARK] = session.reporter.is_parking_wanted()
            votes[StepFlag.PROBE] = self._group.world_size > 1 and session.heartbeat.is_probe_due()
            is_awaited = self._link is not None and self._link.member.is_pause_wanted
            votes[StepFlag.REGROUP] = is_awaited and session.saving.may_regroup
            if not self._config.compute.steps_per_call and session.has_trained:
                votes[StepFlag.CALL_STEPS] = call_steps(_CALL_SECONDS, session.seconds_per_step)
        return vector(votes, session.saving.tell())


def _train_rank() -> RankInfo:
    train = ray.train.get_context()
    rank, size = train.get_world_rank(), train.get_world_size()
    return RankInfo(rank, size, train.get_local_rank(), train.get_local_world_size())


def call_steps(seconds: float, seconds_per_step: float) -> int:
    """Return the number of steps for calls of about `seconds`; a power of two, so that only few sizes occur."""
    return 2 ** int(np.log2(max(1.0, min(seconds / seconds_per_step, _MAX_CALL_STEPS))))


def check_finite(session: RankSession, call: CallBatch, outcome: StepOutcome) -> None:
    """Stop the run if a loss or a gradient of the call is NaN or infinite, and no callback handles that.

    Raises:
        NonFiniteLossError: for the first such step of the call.
    """
    bad = np.flatnonzero(~(np.isfinite(outcome.losses) & outcome.finite))
    if not len(bad) or session.callbacks.batches.take_nan:
        return
    step, loss = call.start + int(bad[0]), outcome.losses[bad[0]]
    what = "a gradient became NaN or infinite" if np.isfinite(loss) else f"the loss became {loss}"
    epoch, inside = session.job.epoch_of(step), session.plan.locate(step)[1]
    durable = session.state.durable_step
    kept = "no checkpoint was written yet" if durable is None else f"the checkpoint of step {durable} is kept"
    raise NonFiniteLossError(
        f"{what} at step {step + 1} (epoch {epoch + 1}, batch {inside + 1}); {kept}. "
        "Lower the learning rate, clip gradients (global_clipnorm), or inspect that batch.",
        step + 1,
    )


def after_call(session: RankSession, call: CallBatch, outcome: StepOutcome, seconds: float) -> None:
    """Record a trained call, and advance the run to the call's last step.

    Args:
        seconds: duration of the call, more than 0.
    """
    state, callbacks = session.state, session.callbacks
    epoch = session.job.epoch_of(call.start)
    state.step = call.stop
    state.imbalance_seconds += (call.stop - call.start) * session.imbalance_seconds
    columns = outcome.losses, outcome.learning_rates, outcome.digests, outcome.norms
    session.live.log.add(call.start + 1, epoch, *columns)
    digests = [each.tobytes() for each in outcome.digests]
    values = list(zip(outcome.losses.tolist(), outcome.learning_rates.tolist(), strict=True))
    if state.chain:  # runs of early versions have no chain
        state.chain = step_digest.chained(state.chain, call.start + 1, values, digests)
    session.batch_end = BatchEnd(call.start, session.plan.locate(call.stop - 1)[1])
    end_batch(session)
    state.stopped_early = callbacks.stopped
    is_first = not session.has_trained
    session.seconds_per_step = seconds / (call.stop - call.start)
    if is_first:
        _after_first_call(session)
    if session.reporter.is_status_due():
        loss, rate = float(outcome.losses[-1]), float(outcome.learning_rates[-1])
        session.reporter.scalars({"batch_loss": loss, "learning_rate": rate}, call.stop)
        session.show("training")


def end_batch(session: RankSession) -> None:
    """Run the callbacks' `on_train_batch_end` unless it has already run; every rank must call it."""
    callbacks, batch_end = session.callbacks, session.batch_end
    if batch_end is None:
        return
    callbacks.begin("call", batch_end.start)
    # Reading metrics from TensorFlow waits for the step, so they are read only if a callback wants them.
    callbacks.run_batch("on_train_batch_end", batch_end.batch, *([session.logs()] if callbacks.has_batch_hooks else []))
    session.batch_end = None


def _after_first_call(session: RankSession) -> None:
    if session.is_first_rank and session.config.run.histograms_every:
        session.reporter.graph(session.step.probe_function.graph)
    warm_pool.trains()
    session.phases.mark("first step")
    if session.is_first_rank:
        step, tier = session.origin
        session.reporter.event(
            "attempt",
            attempt=session.place.attempt,
            world_size=session.executor.workers,
            from_step=step,
            tier=tier,
            lost=session.place.lost,
            machine=exact.machine(),
            node=ray.get_runtime_context().get_node_id(),
            phases=session.phases.seconds,
        )
    session.show("training")


def are_histograms_due(session: RankSession) -> bool:
    """Return whether histograms of weights and gradients are due after the latest step."""
    every = session.config.run.histograms_every
    return session.is_first_rank and bool(every) and session.state.step % every == 0


def write_histograms(session: RankSession, outcome: StepOutcome) -> None:
    """Write histograms of the weights and of the last call's gradients, on rank 0, if they are due."""
    if not are_histograms_due(session):
        return
    with session.heartbeat.doing(Activity.CALLBACK):
        model, step = session.model, session.step
        values: dict[str, Any] = {f"weights/{w.path}": w.value for w in model.trainable_variables}
        values |= {f"gradients/{path}": gradient for path, gradient in step.named_gradients(outcome).items()}
        session.reporter.histograms(values, session.state.step)


def park(session: RankSession) -> None:
    """Save the current step because the run stops or the number of workers is about to change, and wait until this rank
    is stopped, replaced or released."""
    reporter = session.reporter
    session.show(PARKED)
    saved = session.saving.save_now()
    # Show the save before the reply: the next group resumes from the newest checkpoint that the driver knows, or later.
    session.show(PARKED)
    reporter.answer(saved)
    with session.heartbeat.doing(Activity.PARK):
        while not session.sum([float(reporter.is_released())])[0]:
            time.sleep(_PARKED_POLL_SECONDS)
    session.show("training")


def trace_beside(trace: Callable[[], Traced]) -> Future[Traced]:
    """Call a function in a new thread with this thread's global dtype policy, because Keras keeps one per thread.

    A model can only be traced in one thread at a time, because tracing changes the state of its layers. Wait for the
    result before anything else traces the model.
    """
    policy = _keras.own_dtype_policy()

    def call() -> Traced:
        if policy is not None:
            keras.config.set_dtype_policy(policy)
        return trace()

    pool = ThreadPoolExecutor(1, "raytf-trace")
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)


def imprecise_steps(ratio: float, shards: int) -> int:
    """Return the number of steps until compressed gradients have an error below 10 % again, after a step whose
    gradients were `ratio` times as large as usual."""
    bits = 15 - math.ceil(math.log2(max(2, shards)))
    return max(0, round(math.log2(max(1.0, ratio)) - bits + _BITS))


class SpikeWatch:
    """Watches the gradient norms of a run with compressed gradients, and warns if they become imprecise.

    A tensor's exponent rises at once with its largest value, but falls by only one per step. Until it has fallen, much
    smaller values are rounded to few bits. A faster fall would change the bits of runs whose gradients are sometimes
    zero, such as those of embeddings.
    """

    def __init__(self, shards: int):
        self._shards = shards
        self._norms: deque[float] = deque(maxlen=_NORMS)
        #: The last step whose gradients are known to be imprecise.
        self._imprecise = 0

    def inspect(self, first: int, norms: np.ndarray) -> list[str]:
        """Return a line for the user about each step whose gradients are so large that later ones are imprecise.

        Args:
            first: the first of the consecutive steps, counted from 1.
            norms: [K], their global norms; NaN if unknown.
        """
        lines = []
        for step, norm in enumerate(norms.tolist(), first):
            if not math.isfinite(norm):
                continue
            usual = float(np.median(self._norms)) if len(self._norms) >= _LEAST_NORMS else 0.0
            count = imprecise_steps(norm / usual, self._shards) if usual else 0
            if count and step > self._imprecise:
                lines.append(
                    f"the gradients of step {step} are {norm / usual:,.0f} times as large as usual. With "
                    f"--compress-gradients, the gradients of about {count} later steps have errors of 10 % or more"
                )
            self._imprecise = max(self._imprecise, step + count if count else 0)
            self._norms.append(norm)
        return lines
