"""Prepares one rank for training: it joins the others, builds the model, and restores the newest state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint import variables
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.data.sources.batches import LiveBatches
from raytf.distributed import memory_needs, worker_table
from raytf.distributed.devices import DeviceRoom, free_bytes
from raytf.distributed.membership.generations import Generation
from raytf.distributed.membership.member import step_after_broken_transfer
from raytf.errors import RunMismatchError, StorageError, WorkerLostError
from raytf.inference import architecture, export
from raytf.runs.events import HELD
from raytf.runs.restart_phases import Phases
from raytf.runs.run_log import StepLog, write_attempt
from raytf.training import exact, regroup, run_identity, session
from raytf.training.evaluation import Evaluators
from raytf.training.executor import Executor
from raytf.training.job import TrainingJob
from raytf.training.model import model as models
from raytf.training.process.heartbeat import Activity, Heartbeat
from raytf.training.saving import tiers as tiers_of_run
from raytf.training.saving.checkpointer import Checkpointer, Listener
from raytf.training.saving.live_state import LiveState
from raytf.training.saving.tiers import Tiers
from raytf.training.session import Attempt, Context, Program
from raytf.training.synchronous import end_batch
from raytf.training.user import later_files
from raytf.training.user.callbacks import Callbacks
from raytf.training.user.failover_callbacks import MovingCallbacks
from raytf.training.user.feed_client import FeedClient


def start(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Context:
    """Join the other ranks, build the model and restore the newest state; all ranks must call it.

    Raises:
        RaytfError: any error of `session.join`, `session.build_program` and `tiers.newest`.
    """
    if executor.meets_again:
        attempt = session.prepare(job, pulse, phases, executor)
        attempt.reporter.stage("building the model")
        program = session.build_program(attempt, executor)
        phases.mark("build")
        attempt.reporter.stage("tracing a step")
        program.step.trace(executor.is_late)
        phases.mark("trace")
        program.named.update(program.step.reduction_state())
        return _meet(attempt, program, executor, None)
    attempt = session.join(job, pulse, phases, executor)
    tiers = tiers_of_run.open_tiers(attempt)
    tiers.restorer.begin(attempt.known_step, attempt.is_saving)
    attempt.reporter.stage("building the model")
    program = session.build_program(attempt, executor)
    phases.mark("build")
    attempt.reporter.stage("tracing a step")
    program.step.trace()
    phases.mark("trace")
    return _restored(attempt, program, executor, tiers)


def meet_again(before: Context, executor: Executor) -> Context:
    """Meet the surviving and the new ranks, after the last whole step."""
    attempt = before.attempt
    phases = Phases()
    with attempt.pulse.doing(Activity.TRANSFER):
        return _meet(dataclasses.replace(attempt, phases=phases), before.program, executor, before)


def _meet(attempt: Attempt, program: Program, executor: Executor, before: Context | None) -> Context:
    """Meet the others, again if one is lost meanwhile."""
    step, room = -1 if before is None else before.state.step, {}
    if before is None:
        attempt.reporter.stage("meeting the other workers")
    if executor.is_late and before is None:  # others will wait for this rank
        room = regroup.room_for(program.named)
        if program.sources.validation is not None:
            _evaluators(attempt, program, None).trace("validation", program.sources.validation)
    while True:
        generation = executor.meet(step)
        try:
            return _enter(attempt, program, executor, generation, before, room)
        except tf.errors.OpError:
            if not attempt.group.loss:
                raise
            step = step_after_broken_transfer(step, generation.steps)


def _enter(
    attempt: Attempt,
    program: Program,
    executor: Executor,
    generation: Generation,
    before: Context | None,
    room: Mapping[str, np.ndarray],
) -> Context:
    """Begin the attempt of a generation."""
    attempt = dataclasses.replace(session.begin(attempt, executor, generation.number), lost=generation.lost)
    is_late = max(generation.steps) >= 0
    if before is not None and not is_late:
        raise WorkerLostError("no rank is left that has the whole state")
    if before is None:
        session.introduce(attempt, is_late)
        session.check_needs(attempt, program.named)
    bits = program.identity.get(run_identity.FIRST_GRADIENTS) or program.identity.get(run_identity.FIRST_STEP)
    if bits:
        exact.compare(attempt.group, bits)
    program = session.with_own_shards(attempt, program, executor)
    attempt.phases.mark("rendezvous")
    tiers = tiers_of_run.open_tiers(attempt)
    if is_late:
        return _handed_over(attempt, program, executor, tiers, generation, before, room)
    tiers.restorer.begin(attempt.known_step, attempt.is_saving)
    return _restored(attempt, program, executor, tiers)


def _handed_over(
    attempt: Attempt,
    program: Program,
    executor: Executor,
    tiers: Tiers,
    generation: Generation,
    before: Context | None,
    room: Mapping[str, np.ndarray],
) -> Context:
    """Continue with the state that some of the ranks have."""
    held, is_taken = regroup.hand_over(
        attempt.group, generation.steps, None if before is None else _held(before), program.named, room
    )
    difference = run_identity.not_going_on(dict(held.identity), program.identity)
    if difference:
        raise RunMismatchError(f"a worker that joins has other settings than the others: {difference}")
    if before is None:
        callbacks = _make_callbacks(attempt, program, held.progress.step, held)
    else:
        callbacks = before.callbacks
    if isinstance(callbacks, MovingCallbacks) and is_taken and held.callbacks is not None:
        callbacks.known = held.callbacks
    rows = held.rows if before is None or is_taken else before.live.log.since(held.progress.durable_step or 0)
    state = held.progress
    if before is not None and not is_taken:  # of the epochs that have ended each rank knows itself
        state = dataclasses.replace(before.state, durable_step=state.durable_step, best=state.best)
    attempt.reporter.met_again()
    is_described = before is not None and before.live.rank == 0 and before.live.note.is_described
    live = _live_state(attempt, program, state, callbacks, rows, HELD, is_described)
    imbalance = executor.imbalance_seconds(attempt, program.pipeline)
    attempt.phases.mark("restore")
    context = _ready(attempt, program, executor, tiers, live, callbacks, imbalance, (state.step, HELD))
    source = held if before is None or is_taken else before
    context.ended, context.ending = source.ended, source.ending
    context.batch_end = held.batch_end
    if context.sum([float(context.ended != state.step)])[0]:  # not all have ended the epoch, if it is at its end
        context.ended = -1
    if before is not None:
        context.saving.follow(before.saving)
    if isinstance(callbacks, MovingCallbacks):
        callbacks.agree_on_known()
        if context.is_first_rank and callbacks.lacks_hooks:
            _take_over(context, callbacks)
        callbacks.resume()
        end_batch(context)
        state.stopped_early = state.stopped_early or callbacks.stopped
    context.saves_again = held.is_saving
    if before is not None:
        before.memory.close()  # what it holds stays with the keeper
    return context


def _take_over(context: Context, callbacks: MovingCallbacks) -> None:
    """Have this rank, which is rank 0 from now on, run the callbacks."""
    step, reporter = context.state.step, context.reporter
    reporter.resume(callbacks.packed_files)
    has_end = context.ended == step or not context.is_at_epoch_end
    callbacks.take_over(reporter.files, context.job.epoch_of(step), not context.is_at_epoch_end, has_end)


def _held(context: Context) -> regroup.HeldState:
    state = context.state
    return regroup.HeldState(
        state,
        context.live.log.since(state.durable_step or 0),
        context.program.identity,
        context.ended,
        context.ending,
        context.callbacks.batches,
        context.callbacks.known if isinstance(context.callbacks, MovingCallbacks) else None,
        context.saving.is_saving or context.saves_again,
        context.batch_end,
    )


def _restored(attempt: Attempt, program: Program, executor: Executor, tiers: Tiers) -> Context:
    """Continue from the newest checkpoint, or begin a new run."""
    attempt.reporter.stage("looking for the newest state")
    chosen = tiers_of_run.newest(attempt, program, tiers)
    program.named.update(program.step.reduction_state())
    try:
        return _begun(attempt, program, executor, tiers, chosen)
    except tf.errors.OpError:
        if not attempt.group.loss:
            raise
        # What callbacks have done to the model before its first step cannot be undone here.
        raise WorkerLostError(f"{attempt.group.loss}, while the run began") from None


def _begun(attempt: Attempt, program: Program, executor: Executor, tiers: Tiers, chosen: Checkpoint | None) -> Context:
    """Begin with a checkpoint, or a new run."""
    state = TrainingState.of(chosen, tiers.restorer.known_step)
    if chosen is not None:
        attempt.reporter.resume(chosen.files)
    callbacks = _make_callbacks(attempt, program, None if chosen is None else chosen.step)
    imbalance = executor.imbalance_seconds(attempt, program.pipeline)
    _begin(attempt, program, callbacks, chosen)
    if isinstance(callbacks, MovingCallbacks):
        callbacks.resume()  # with what was restored
    attempt.phases.mark("restore")
    rows = None if chosen is None else chosen.rows
    tier = "new" if chosen is None else "memory" if chosen.is_in_memory else "durable"
    live = _live_state(attempt, program, state, callbacks, rows, tier)
    context = _ready(attempt, program, executor, tiers, live, callbacks, imbalance, (state.step, tier))
    context.saving.start()
    return context


def _ready(
    attempt: Attempt,
    program: Program,
    executor: Executor,
    tiers: Tiers,
    live: LiveState,
    callbacks: Callbacks,
    imbalance: float,
    origin: tuple[int, str],
) -> Context:
    # Only after the restore: the keeper drops copies that are no longer needed.
    tiers.memory.reserve(variables.sizes(program.named), live.make)
    attempt.pulse.also(tiers.memory.poll)
    saving = _checkpointer(attempt, program, tiers, live)
    evaluators, state = _evaluators(attempt, program, callbacks), live.progress
    context = Context(
        attempt, program, state, callbacks, tiers.memory, live, saving, evaluators, imbalance, origin, ended=state.step
    )
    executor.begin(context)
    return context


def _evaluators(attempt: Attempt, program: Program, callbacks: Callbacks | None) -> Evaluators:
    opened = functools.partial(session.open_pipeline, attempt)
    return Evaluators(program.model, attempt.group, callbacks, opened, attempt.job.plan, program.evaluations)


def _make_callbacks(
    attempt: Attempt, program: Program, step: int | None, held: regroup.HeldState | None = None
) -> Callbacks:
    """Make the user's callbacks.

    Args:
        attempt, program: of this rank.
        step: the step from which the run continues; None for a new run.
        held: the state of the ranks that train already, if this one joins later.
    """
    job, reporter = attempt.job, attempt.reporter
    later_files.take_default(*job.code.get().writer)
    options: dict[str, Any] = {
        "make": job.callbacks,
        "model": program.model,
        "group": attempt.group,
        "say": reporter.say,
        "files": reporter.files,
        "params": job.params,
        "epoch": None if step is None else job.epoch_of(step),
        "watch": lambda: attempt.pulse.doing(Activity.CALLBACK),
    }
    if job.arbiter is None:
        return Callbacks(**options)
    known: dict[str, Any] = {} if held is None else {"batches": held.batches, "known": held.callbacks}
    return MovingCallbacks(**options, pack=reporter.pack_files, **known)


def _begin(attempt: Attempt, program: Program, callbacks: Callbacks, chosen: Checkpoint | None) -> None:
    """Give the model and the callbacks the state of a checkpoint, or the initial state of a new run."""
    callbacks.run("on_train_begin")
    reporter, plan = attempt.reporter, attempt.job.plan
    if chosen is None:
        _share_weights(attempt, program)
        if attempt.group.rank == 0:
            for problem in export.obstacles(program.model):
                reporter.say(problem.as_warning())
        return
    if not plan.is_epoch_end(chosen.step):
        callbacks.run("on_epoch_begin", attempt.job.epoch_of(chosen.step))
    tiers_of_run.restore(program, chosen)
    callbacks.load_state(chosen.document.callbacks, chosen.tensors)
    place = chosen.name if chosen.is_in_memory else f"checkpoint {chosen.name}"
    reporter.say(f"restored step {chosen.step} from {place}")


def _share_weights(attempt: Attempt, program: Program) -> None:
    """Send rank 0's initial weights to all ranks: equal seeds give equal weights only on equal machines."""
    named = program.named.values()
    values = [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in named]
    for variable, value in zip(named, attempt.group.broadcast(values), strict=True):
        if attempt.group.rank != 0:
            variable.assign(value)


def _live_state(
    attempt: Attempt,
    program: Program,
    state: TrainingState,
    callbacks: Callbacks,
    rows: StepRows | None,
    tier: str,
    is_described: bool = False,
) -> LiveState:
    """Create the state that checkpoints are made from; its log starts with the rows that only memory has."""
    log = StepLog(attempt.storage, attempt.name, program.step.digests)
    if rows is not None:
        log.restore(rows)
    note = AttemptNote(attempt, program, (state.step, tier), is_described)
    if attempt.group.rank == 0:
        # In a thread, so that slow or unavailable storage does not delay a restart. Each save does it again.
        threading.Thread(target=_call_ignoring_storage, args=[note], daemon=True, name="raytf-note").start()
    most = memory_needs.held(
        variables.size_of(program.named), attempt.group.world_size, attempt.config.checkpoints.keep_best is not None
    )
    # A source of batches that are made while the run trains need not keep those before a checkpoint.
    source = program.sources.train
    fetch = source.fetch if isinstance(source, LiveBatches) else None
    on_saved = fetch.saved if isinstance(fetch, FeedClient) else (lambda step: None)
    room = DeviceRoom(most, free_bytes, (lambda line: None) if tier == HELD else attempt.reporter.say)
    return LiveState(
        attempt.group.rank,
        state,
        program.identity,
        program.model,
        program.named,
        functools.partial(variables.Variables, program.named, may_hold=room),
        callbacks,
        log,
        attempt.reporter,
        note,
        on_saved,
    )


def _call_ignoring_storage(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


def _checkpointer(attempt: Attempt, program: Program, tiers: Tiers, live: LiveState) -> Checkpointer:
    is_exact, reporter, replicas = attempt.config.compute.exact, attempt.reporter, None
    if not attempt.config.strategy.has_servers:
        replicas = Replicas(
            attempt.group,
            program.named,
            # A wrong variable of the optimizer shows in the weights only after a later update, too late for exact mode.
            program.digest(with_optimizer=is_exact).value,
            is_exact,
            reporter.say,
            reporter.event,
            worker_table.whereabouts,
        )
    listener = Listener(reporter, attempt.pulse, lambda: models.numbers(program.model))
    return Checkpointer(live, tiers.memory, tiers.durable, attempt.group, tiers.policy, listener, replicas)


class AttemptNote:
    """Stores that an attempt has begun, and the description of the model that an export needs; rank 0 calls it.

    Args:
        attempt: the attempt that has begun.
        program: the program that is trained.
        origin: the step at which it began, and the tier of its state.
        is_described: whether this process has stored the description before.

    Attributes:
        is_described: whether the description, which may be large, is stored.
    """

    def __init__(self, attempt: Attempt, program: Program, origin: tuple[int, str], is_described: bool):
        self._attempt, self._origin, self._began = attempt, origin, time.time()
        self._lock, self.is_described = threading.Lock(), is_described
        self._described = b""
        if attempt.group.rank == 0 and not is_described:
            x, *others = program.pipeline.sample()
            records = attempt.job.plan.micro_batch_size
            self._described = architecture.describe(program.model, x, tuple(others), records)

    def __call__(self) -> None:
        with self._lock:
            attempt = self._attempt
            write_attempt(attempt.storage, attempt.name, attempt.workers, self._origin, self._began)
            if not self.is_described:
                attempt.storage.put(architecture.FILE, self._described)
                self.is_described = True
