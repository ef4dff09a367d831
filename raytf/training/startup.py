"""How one rank gets ready to train: it joins the others, builds the model, and takes the newest state."""

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
    """Join the other ranks, build the model and take the newest state; all ranks go through it in step.

    Args:
        pulse: this rank's.
        phases: of the restart; marked as they end.
        executor: that is to train.

    Raises:
        RaytfError: any of those of `attempt.join`, `program.build` and `tiers.newest`.
    """
    attempt = attempts.join(job, pulse, phases, executor)
    tiers = tiers_of_run.open_tiers(attempt)
    program = programs.build(attempt, executor)
    phases.mark("build")
    program.step.trace()
    phases.mark("trace")
    chosen = tiers_of_run.newest(attempt, program, tiers)
    program.named.update(program.step.reduction.state())
    state = TrainingState.of(chosen, attempt.known_step)
    if chosen is not None:
        attempt.reporter.resume(chosen.step, chosen.files)
    callbacks = _make_callbacks(attempt, program, chosen)
    imbalance = executor.imbalance_seconds(attempt, program.pipeline)
    _begin(attempt, program, callbacks, chosen)
    phases.mark("restore")
    live = _live_state(attempt, program, state, callbacks, chosen)
    # Not sooner: the keeper drops what is no longer needed.
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
        {"epochs": -(-job.total_steps // steps), "steps": steps},
        epoch=None if chosen is None else job.plan.locate(chosen.step)[0],
        watch=lambda: attempt.pulse.doing(Activity.CALLBACK),
    )


def _begin(attempt: Attempt, program: Program, callbacks: Callbacks, chosen: Checkpoint | None) -> None:
    """Give the model and the callbacks the state of a checkpoint, or of a new run."""
    callbacks.run("on_train_begin")
    reporter, plan = attempt.reporter, attempt.job.plan
    if chosen is None:
        _share_weights(attempt, program)
        if attempt.group.rank == 0:
            for problem in export.obstacles(program.model):
                reporter.say(f"WARNING: {problem}")
        return
    if chosen.step % plan.steps_per_epoch:
        callbacks.run("on_epoch_begin", plan.locate(chosen.step)[0])
    tiers_of_run.restore(program, chosen)
    callbacks.load_state(chosen.document.callbacks, chosen.tensors)
    place = chosen.name if chosen.is_in_memory else f"checkpoint {chosen.name}"
    reporter.say(f"restored step {chosen.step} from {place}")


def _share_weights(attempt: Attempt, program: Program) -> None:
    """Equal seeds give equal weights on equal machines; rank 0's go to all ranks, whatever the machines are."""
    named = program.named.values()
    values = [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in named]
    for variable, value in zip(named, attempt.group.broadcast(values), strict=True):
        if attempt.group.rank != 0:
            variable.assign(value)


def _live_state(
    attempt: Attempt, program: Program, state: TrainingState, callbacks: Callbacks, chosen: Checkpoint | None
) -> LiveState:
    """What checkpoints are made from; the log begins with the rows that only memory has."""
    log = StepLog(attempt.storage, attempt.name)
    if chosen is not None and chosen.rows is not None:
        log.restore(chosen.rows)
    note = _note(attempt, program, state.step)
    if attempt.group.rank == 0:
        # Beside training: storage that is slow or away does not hold up a restart. It comes again with a save.
        threading.Thread(target=_try, args=[note], daemon=True, name="raytf-note").start()
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
    )


def _note(attempt: Attempt, program: Program, step: int) -> Callable[[], None]:
    """What writes down that this attempt has begun, and what of the model any export needs; rank 0 calls it."""
    began, turn = time.time(), threading.Lock()
    described = b""
    if attempt.group.rank == 0:
        described = architecture.describe(program.model, program.pipeline.sample()[0])
    is_kept = False

    def write() -> None:
        nonlocal is_kept
        with turn:
            write_attempt(attempt.storage, attempt.name, attempt.workers, step, began)
            if not is_kept:  # a large model's is not worth writing again with each save
                attempt.storage.put(architecture.FILE, described)
                is_kept = True

    return write


def _try(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


def _checkpointer(attempt: Attempt, program: Program, tiers: Tiers, live: LiveState) -> Checkpointer:
    listener = Listener(attempt.reporter, attempt.pulse, lambda: models.logs(program.model))
    replicas = _replicas(attempt, program)
    return Checkpointer(live, tiers.memory, tiers.durable, attempt.group, tiers.policy, listener, replicas)


def _replicas(attempt: Attempt, program: Program) -> Replicas | None:
    """What compares the ranks' weights.

    Returns:
        None where they have none of their own.
    """
    is_exact, reporter = attempt.config.compute.exact, attempt.reporter
    if attempt.group.world_size == 1 or attempt.config.strategy.has_servers:
        return None
    # Another slot of the optimizer shows in the weights, but later: too late for who promises each bit.
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
