"""Prepares one rank for training: it joins the others, builds the model, and restores the newest state."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable

import numpy as np

from raytf.checkpoint import variables
from raytf.checkpoint.digest import Digest
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.training_state import TrainingState
from raytf.data.sources import Source
from raytf.distributed import memory_needs, worker_table
from raytf.distributed.devices import DeviceRoom, free_bytes
from raytf.errors import StorageError
from raytf.inference import architecture, export
from raytf.runs.restart_phases import Phases
from raytf.runs.run_log import StepLog, write_attempt
from raytf.training import attempt as attempts
from raytf.training import model as models
from raytf.training import program as programs
from raytf.training import tiers as tiers_of_run
from raytf.training.attempt import Attempt
from raytf.training.callbacks import Callbacks
from raytf.training.checkpointer import Checkpointer, Listener
from raytf.training.context import Context
from raytf.training.evaluation import Evaluators
from raytf.training.executor import Executor
from raytf.training.heartbeat import Activity, Heartbeat
from raytf.training.job import TrainingJob
from raytf.training.live_state import LiveState
from raytf.training.program import Program
from raytf.training.tiers import Tiers


def start(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Context:
    """Join the other ranks, build the model and restore the newest state; all ranks must call it.

    Args:
        job: the run to train.
        pulse: this rank's heartbeat.
        phases: phases of the restart; each is marked when it ends.
        executor: will train the steps.

    Raises:
        RaytfError: any error of `attempt.join`, `program.build` and `tiers.newest`.
    """
    attempt = attempts.join(job, pulse, phases, executor)
    tiers = tiers_of_run.open_tiers(attempt)
    program = programs.build(attempt, executor)
    phases.mark("build")
    program.step.trace()
    phases.mark("trace")
    chosen = tiers_of_run.newest(attempt, program, tiers)
    program.named.update(program.step.reduction_state())
    state = TrainingState.of(chosen, attempt.known_step)
    if chosen is not None:
        attempt.reporter.resume(chosen.step, chosen.files)
    callbacks = _make_callbacks(attempt, program, chosen)
    imbalance = executor.imbalance_seconds(attempt, program.pipeline)
    _begin(attempt, program, callbacks, chosen)
    phases.mark("restore")
    live = _live_state(attempt, program, state, callbacks, chosen)
    # Only after the restore: the keeper drops copies that are no longer needed.
    tiers.memory.reserve(variables.sizes(program.named), live.make)
    pulse.also(tiers.memory.look)
    saving = _checkpointer(attempt, program, tiers, live)
    saving.start()
    evaluators = Evaluators(
        program.model, attempt.group, callbacks, functools.partial(programs.open_pipeline, attempt), job.plan
    )
    tier = "new" if chosen is None else "memory" if chosen.is_in_memory else "durable"
    origin = (state.step, tier)
    context = Context(attempt, program, state, callbacks, tiers.memory, live, saving, evaluators, imbalance, origin)
    executor.begin(context)
    return context


def _make_callbacks(attempt: Attempt, program: Program, chosen: Checkpoint | None) -> Callbacks:
    job = attempt.job
    steps = job.plan.steps_per_epoch
    return Callbacks(
        job.callbacks,
        program.model,
        attempt.group,
        attempt.reporter.say,
        attempt.reporter.files,
        {"epochs": job.epochs, "steps": steps},
        epoch=None if chosen is None else job.epoch_of(chosen.step),
        watch=lambda: attempt.pulse.doing(Activity.CALLBACK),
    )


def _begin(attempt: Attempt, program: Program, callbacks: Callbacks, chosen: Checkpoint | None) -> None:
    """Give the model and the callbacks the state of a checkpoint, or the initial state of a new run."""
    callbacks.run("on_train_begin")
    reporter, plan = attempt.reporter, attempt.job.plan
    if chosen is None:
        _share_weights(attempt, program)
        if attempt.group.rank == 0:
            for problem in export.obstacles(program.model):
                reporter.say(f"WARNING: {problem}")
        return
    if chosen.step % plan.steps_per_epoch:
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
    attempt: Attempt, program: Program, state: TrainingState, callbacks: Callbacks, chosen: Checkpoint | None
) -> LiveState:
    """Create the state that checkpoints are made from; its log starts with the rows that only memory has."""
    log = StepLog(attempt.storage, attempt.name)
    if chosen is not None and chosen.rows is not None:
        log.restore(chosen.rows)
    note = _make_note(attempt, program, state.step)
    if attempt.group.rank == 0:
        # In a thread, so that slow or unavailable storage does not delay a restart. Each save does it again.
        threading.Thread(target=_call_ignoring_storage, args=[note], daemon=True, name="raytf-note").start()
    most = memory_needs.held(
        variables.size_of(program.named), attempt.group.world_size, attempt.config.checkpoints.keep_best is not None
    )
    room = DeviceRoom(most, free_bytes, attempt.reporter.say)
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
        _told(program.sources.train),
    )


def _told(source: Source) -> Callable[[int], None]:
    """What a source of batches that are made while the run trains must know of saves: which it need not keep."""
    return getattr(getattr(source, "fetch", None), "saved", lambda step: None)


def _make_note(attempt: Attempt, program: Program, step: int) -> Callable[[], None]:
    """Make a function that stores that this attempt has begun, and the description of the model that an export needs;
    rank 0 calls it."""
    began, lock = time.time(), threading.Lock()
    described = b""
    if attempt.group.rank == 0:
        x, *others = program.pipeline.sample()
        records = attempt.job.plan.micro_batch_size
        described = architecture.describe(program.model, x, tuple(others), records)
    is_kept = False

    def write() -> None:
        nonlocal is_kept
        with lock:
            write_attempt(attempt.storage, attempt.name, attempt.workers, step, began)
            if not is_kept:  # written once only, since the description of a large model is large
                attempt.storage.put(architecture.FILE, described)
                is_kept = True

    return write


def _call_ignoring_storage(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


def _checkpointer(attempt: Attempt, program: Program, tiers: Tiers, live: LiveState) -> Checkpointer:
    listener = Listener(attempt.reporter, attempt.pulse, lambda: models.logs(program.model))
    replicas = _replicas(attempt, program)
    return Checkpointer(live, tiers.memory, tiers.durable, attempt.group, tiers.policy, listener, replicas)


def _replicas(attempt: Attempt, program: Program) -> Replicas | None:
    """Create what compares the ranks' weights.

    Returns:
        None if there is one rank, or if the weights are on parameter servers.
    """
    is_exact, reporter = attempt.config.compute.exact, attempt.reporter
    if attempt.group.world_size == 1 or attempt.config.strategy.has_servers:
        return None
    # A wrong variable of the optimizer shows in the weights only after a later update, which exact mode cannot allow.
    hashed = ("model/", "optimizer/") if is_exact else ("model/",)
    return Replicas(
        attempt.group,
        program.named,
        Digest([v.value for name, v in program.named.items() if name.startswith(hashed)]).value,
        is_exact,
        reporter.say,
        reporter.event,
        worker_table.whereabouts,
    )
