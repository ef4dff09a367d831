"""Prepares one rank for training: it joins the others, builds the model, and restores the newest state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
import tensorflow as tf

from raytf._ray import raylets
from raytf.checkpoint import variables
from raytf.checkpoint.invalidated_states import VoidStates
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.memory import place_on_node
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.cluster.preemption import watcher
from raytf.config import precision
from raytf.data.sources import fingerprint
from raytf.data.sources.batches import LiveBatches
from raytf.distributed import memory_needs, ranks, worker_table
from raytf.distributed.devices import DeviceRoom, free_bytes
from raytf.distributed.group import Ranks
from raytf.distributed.membership.generations import Generation
from raytf.distributed.membership.member import step_after_broken_transfer
from raytf.errors import ConfigError, RunMismatchError, StorageError, WorkerLostError
from raytf.inference import architecture, export
from raytf.inference.user_model import run_user_code, set_log_levels, set_warning_filters
from raytf.runs.events import HELD
from raytf.runs.run_log import StepLog, new_attempt, write_attempt
from raytf.runs.timeline import Phases
from raytf.storage.storage import Storage
from raytf.training import exact, regroup, run_identity
from raytf.training.executor import Executor
from raytf.training.job import TrainingJob
from raytf.training.model import model as models
from raytf.training.model import program_variables
from raytf.training.model.notes import notes_of
from raytf.training.process import gpu
from raytf.training.process.heartbeat import Activity, Heartbeat, WatchedGroup
from raytf.training.process.reporter import Reporter
from raytf.training.saving import checkpointer
from raytf.training.saving.checkpointer import Checkpointer, Listener, Tiers
from raytf.training.saving.live_state import LiveState
from raytf.training.session import Place, RankSession
from raytf.training.synchronous import end_batch
from raytf.training.user import later_files
from raytf.training.user.callbacks import Callbacks
from raytf.training.user.failover_callbacks import MovingCallbacks
from raytf.training.user.feed_client import FeedClient

#: Share of a node's memory from which the memory that the state needs is printed.
_LARGE_SHARE = 0.02


def start(job: TrainingJob, heartbeat: Heartbeat, phases: Phases, executor: Executor) -> RankSession:
    """Join the other ranks, build the model and restore the newest state; all ranks must call it.

    Raises:
        GpuError: this rank's assigned GPU is missing or miscalculates.
        WorkerLostError: another rank is lost.
        RaytfError: any other error of the model, the data, the settings or the checkpoints.
    """
    session = _join(job, heartbeat, phases, executor)
    if executor.meets_again:  # a replacement builds its model while the other ranks train
        _build(session)
        session.named.update(session.step.reduction_state())
        return _meet(session)
    _begin_attempt(session, heartbeat.group)
    phases.mark("rendezvous")
    _introduce(session)
    tiers = _open_tiers(session)
    _build(session)
    return _restored(session, tiers)


def meet_again(session: RankSession) -> RankSession:
    """Meet the surviving and the new ranks, after the last complete step."""
    session.phases = Phases()
    with session.heartbeat.doing(Activity.TRANSFER):
        return _meet(session)


# -- the ranks ---------------------------------------------------------------------------------------------------------


def _join(job: TrainingJob, heartbeat: Heartbeat, phases: Phases, executor: Executor) -> RankSession:
    """Join the other ranks; if ranks can meet again, only prepare to meet them."""
    group = WatchedGroup(executor.join(), heartbeat)
    if not job.config.strategy.has_servers:  # the coordinator has no GPU
        gpu.check_product()
    storage = Storage(job.run_uri)
    reporter = Reporter(job, storage, executor.first_rank, executor.workers)
    return RankSession(job, heartbeat, phases, executor, group, storage, reporter)


def _begin_attempt(session: RankSession, number: int, lost: int = 0) -> None:
    """Begin the attempt of ranks that have met; every rank must call it.

    Args:
        number: number of the generation, or of the worker group if ranks cannot meet again. It orders a driver's
            attempts, even if a suspended rank makes its next step late.
        lost: number of workers that a group which continues without them has lost since the last step.
    """
    group, workers = session.group, session.executor.workers
    attempt, earlier, known_step, is_saving, void, standings = _announce(session.job, group, number)
    on_node = place_on_node(group)
    ranks.take(ranks.RankInfo(group.rank, group.world_size, *on_node))
    session.reporter.take_place(group.rank, workers, attempt)
    states = VoidStates.of(void)
    session.place = Place(attempt, tuple(earlier), known_step, is_saving, on_node, lost, states, standings)


def _announce(job: TrainingJob, group: Ranks, number: int) -> list[Any]:
    """Name an attempt and announce it to the driver; every rank must call it.

    Returns:
        The fields of `Place`: the attempt's name, the names of earlier attempts, the step of the newest checkpoint on
        storage (None if the driver does not know it), whether a later one may be on storage, the invalid states, and
        the standings of nodes.
    """
    begun = b""
    if group.rank == 0:
        attempt = new_attempt(number=(job.term, number))
        begun = json.dumps((attempt, *job.monitor.begin(attempt))).encode()
    # Ray's own broadcast would wait for an actor that only starts with the group.
    values: list[Any] = json.loads(group.share(begun))
    return values


def _introduce(session: RankSession, is_late: bool = False) -> None:
    """Print the ranks' machines unless the other ranks did so before (`is_late`), and watch for preemption notices."""
    group, strategy, reporter = session.group, session.config.strategy, session.reporter
    if group.route is not None and group.route.why:
        reporter.say(str(group.route))
    # With parameter servers, the driver shows the cluster.
    if strategy.show_cluster and not strategy.has_servers and not is_late:
        worker_table.show(group, strategy.strategy, session.place.on_node[0], reporter.say)
    watcher.start_in_worker(session.config.notices, session.job.run_uri, reporter.say_here, reporter.event)


def _meet(session: RankSession) -> RankSession:
    """Meet the other ranks, and repeat this if one is lost in the meantime."""
    executor, step = session.executor, -1
    room: Mapping[str, np.ndarray] = {}
    if session.is_ready:
        step = session.state.step
    else:
        session.reporter.stage("meeting the other workers")
        if executor.is_late:  # prepare what other ranks would wait for
            room = regroup.room_for(session.named)
            if session.sources.validation is not None:  # a graph for any shards can be traced before they are known
                evaluation = session.evaluator("validation", session.sources.validation).step
                if evaluation.is_general:
                    evaluation.trace()
    while True:
        generation = executor.meet(step)
        try:
            return _enter(session, generation, room)
        except tf.errors.OpError:
            if not session.group.loss:
                raise
            step = step_after_broken_transfer(step, generation.steps)


def _enter(before: RankSession, generation: Generation, room: Mapping[str, np.ndarray]) -> RankSession:
    """Begin a generation's attempt in a copy of this rank's session; the next generation may need the original."""
    session = before.renewed()
    _begin_attempt(session, generation.number, generation.lost)
    is_late = max(generation.steps) >= 0
    if before.is_ready and not is_late:
        raise WorkerLostError("no remaining rank has the complete state")
    if not before.is_ready:
        _introduce(session, is_late)
        _check_needs(session)
    bits = session.identity.get(run_identity.FIRST_GRADIENTS) or session.identity.get(run_identity.FIRST_STEP)
    if bits:
        exact.compare(session.group, bits)
    session.take_shards()
    session.phases.mark("rendezvous")
    if is_late:
        return _handed_over(session, before, generation.steps, room)
    return _restored(session, _open_tiers(session))


# -- the model ---------------------------------------------------------------------------------------------------------


def _build(session: RankSession) -> None:
    """Build the model and its step, and trace it.

    Raises:
        ConfigError: the node has too little memory for the state, or settings do not fit the model.
        ModelError: the model function does not return a model that can be trained.
        ExactnessError: the run is in exact mode, but the machines compute different bits.
    """
    job, executor, reporter = session.job, session.executor, session.reporter
    has_servers = job.config.strategy.has_servers
    reporter.stage("building the model")
    session.sources = ray.get(job.sources)
    if job.settings is not None:
        job.settings.apply()
    with session.group.devices.at_home():  # unpickling a model creates its variables
        code = run_user_code("unpacking the job", job.code.get)
    set_warning_filters(code.warning_filters)
    set_log_levels(code.log_levels)
    session.pipeline = session.open_pipeline(session.sources.train, job.plan, training=True)
    with session.group.devices.at_home():
        session.model = model = _build_model(session)
    if has_servers:
        precision.check_for_servers(models.scaled_policy(model))
    session.pipeline.prepare(len(variables.seed_states(model)), models.sparse_classes(model))
    session.identity = _identity(session)
    session.step = step = executor.make_step(session)
    if not has_servers:
        known = [*model.variables, *variables.variables(model).values(), *step.reduction_state().values()]
        known += variables.seed_states(model)
        variables.keep_program(model, program_variables.find(step.probe_function, known))
    session.named = variables.variables(model)
    if not session.place.earlier:
        for line in notes_of(model).take_remarks():
            reporter.say(line)
    session.identity |= executor.admit(session)
    if not (has_servers or executor.meets_again):  # otherwise the place on the node is not known yet
        _check_needs(session)
    session.phases.mark("build")
    reporter.stage("tracing a step")
    step.trace(executor.is_late)
    session.phases.mark("trace")


def _build_model(session: RankSession) -> Any:
    job, sources = session.job, session.sources
    return models.build(
        job.model,
        session.pipeline.sample(models.SAMPLE),
        [source for source in (sources.train, sources.validation, sources.test) if source is not None],
        job.config.compute,
        job.config.batch.seed,
        session.reporter.say,
        job.precision,
        (job.plan.micro_batch_size, job.plan.global_batch_size),
    )


def _identity(session: RankSession) -> dict[str, str]:
    job, model = session.job, session.model
    identity = run_identity.of_model(models.describe(model), models.code(model, (job.augment,)))
    # The driver has read the data once for all ranks. Only the fingerprint of the training data is computed here,
    # because training reads the files that this node sees.
    known = job.identity or run_identity.of_run(job, session.sources)
    return identity | known | {"training data": fingerprint(session.sources.train)}


def _check_needs(session: RankSession) -> None:
    """Refuse a node with too little memory for the state. In the first attempt, print the state's needs if they are
    large or --verbose is set."""
    checkpoints = session.config.checkpoints
    sizes = {name: variables.size_of({name: v}) for name, v in session.named.items()}
    total, largest = sum(sizes.values()), max(sizes.values(), default=0)
    weights = sum(size for name, size in sizes.items() if name.startswith("model/"))
    needs = memory_needs.MemoryNeeds(
        weights,
        total - weights,
        max(largest, -(-total // session.group.world_size)),
        largest,
        session.place.on_node[1],
        variables.is_on_host(session.named),
        checkpoints.snapshot_every_steps != 0,
        checkpoints.keep_best is not None,
    )
    node_bytes = raylets.all_bytes()
    refused = memory_needs.refusal(needs, node_bytes, bool(checkpoints.snapshot_every_steps))
    if refused is not None:
        raise ConfigError(refused)
    is_large = needs.total >= _LARGE_SHARE * node_bytes
    if not session.place.earlier and (is_large or session.config.run.verbose):
        session.reporter.say(needs.text())


# -- the state ---------------------------------------------------------------------------------------------------------


def _open_tiers(session: RankSession) -> Tiers:
    tiers = checkpointer.open_tiers(session)
    tiers.restorer.begin(session.place.known_step, session.place.is_saving)
    return tiers


def _handed_over(
    session: RankSession, before: RankSession, steps: Sequence[int], room: Mapping[str, np.ndarray]
) -> RankSession:
    """Continue with the state of the most advanced ranks.

    Args:
        session: this rank's session in its new place.
        before: this rank's session before the ranks met.
        steps: the last step that each rank completed, by rank.
        room: memory for the state, from `regroup.room_for`.
    """
    tiers, own = checkpointer.open_tiers(session), _held(before) if before.is_ready else None
    held, is_taken = regroup.hand_over(session.group, steps, own, session.named, room)
    difference = run_identity.resume_mismatch(dict(held.identity), session.identity)
    if difference:
        raise RunMismatchError(f"a joining worker has other settings than the rest: {difference}")
    if not before.is_ready:
        session.callbacks = _make_callbacks(session, held.progress.step, held)
    callbacks = session.callbacks
    assert isinstance(callbacks, MovingCallbacks), "ranks that meet again have them"
    if is_taken and held.callbacks is not None:
        callbacks.known = held.callbacks
    session.state, rows, epochs = held.progress, held.rows, held
    if own is not None and not is_taken:  # this rank knows itself which epochs have ended
        rows = before.live.log.since(held.progress.durable_step or 0)
        session.state = dataclasses.replace(
            before.state, durable_step=held.progress.durable_step, best=held.progress.best
        )
        epochs = own
    session.reporter.met_again()
    session.imbalance_seconds = session.executor.imbalance_seconds(session)
    session.phases.mark("restore")
    is_described = before.is_ready and before.live.rank == 0 and before.live.note.is_described
    _make_ready(session, tiers, HELD, rows, is_described)
    session.ended, session.ending, session.batch_end = epochs.ended, epochs.ending, held.batch_end
    step = session.state.step
    if session.sum([float(session.ended != step)])[0]:  # some ranks have not completed the epoch end, if there is one
        session.ended = -1
    if before.is_ready:
        session.saving.follow(before.saving)
    callbacks.agree_on_known()
    if session.is_first_rank and callbacks.lacks_hooks:  # this rank runs the callbacks from now on
        session.reporter.resume(callbacks.packed_files)
        has_end = session.ended == step or not session.is_at_epoch_end
        epoch = session.job.epoch_of(step)
        callbacks.take_over(session.reporter.files, epoch, not session.is_at_epoch_end, has_end)
    callbacks.resume()
    end_batch(session)
    session.state.stopped_early = session.state.stopped_early or callbacks.stopped
    session.saves_again = held.is_saving
    if before.is_ready:
        before.memory.close()  # the keeper retains its copies
    return session


def _held(session: RankSession) -> regroup.HeldState:
    assert isinstance(session.callbacks, MovingCallbacks), "ranks that meet again have them"
    return regroup.HeldState(
        session.state,
        session.live.log.since(session.state.durable_step or 0),
        session.identity,
        session.ended,
        session.ending,
        session.callbacks.batches,
        session.callbacks.known,
        session.saving.is_saving or session.saves_again,
        session.batch_end,
    )


def _restored(session: RankSession, tiers: Tiers) -> RankSession:
    session.reporter.stage("looking for the newest state")
    chosen = checkpointer.newest(session, tiers)
    session.named.update(session.step.reduction_state())
    try:
        _begin_run(session, tiers, chosen)
    except tf.errors.OpError:
        if not session.group.loss:
            raise
        # Changes that callbacks made to the model before its first step cannot be undone here.
        raise WorkerLostError(f"{session.group.loss}, while the run began") from None
    return session


def _begin_run(session: RankSession, tiers: Tiers, chosen: Checkpoint | None) -> None:
    session.state = TrainingState.of(chosen, tiers.restorer.known_step)
    if chosen is not None:
        session.reporter.resume(chosen.files)
    session.callbacks = _make_callbacks(session, None if chosen is None else chosen.step)
    session.imbalance_seconds = session.executor.imbalance_seconds(session)
    _set_state(session, chosen)
    if isinstance(session.callbacks, MovingCallbacks):
        session.callbacks.resume()  # with what was restored
    session.phases.mark("restore")
    tier = "new" if chosen is None else "memory" if chosen.is_in_memory else "durable"
    _make_ready(session, tiers, tier, None if chosen is None else chosen.rows)
    session.saving.start()


def _set_state(session: RankSession, chosen: Checkpoint | None) -> None:
    """Restore the model and the callbacks from a checkpoint, or share the initial weights of a new run."""
    callbacks, reporter = session.callbacks, session.reporter
    callbacks.run("on_train_begin")
    if chosen is None:
        _share_weights(session)
        if session.is_first_rank:
            for problem in export.obstacles(session.model):
                reporter.say(problem.as_warning())
        return
    if not session.plan.is_epoch_end(chosen.step):
        callbacks.run("on_epoch_begin", session.job.epoch_of(chosen.step))
    checkpointer.restore(session, chosen)
    callbacks.load_state(chosen.document.callbacks, chosen.tensors)
    place = chosen.name if chosen.is_in_memory else f"checkpoint {chosen.name}"
    reporter.say(f"restored step {chosen.step} from {place}")


def _share_weights(session: RankSession) -> None:
    """Send rank 0's initial weights to all ranks, because equal seeds give equal weights only on equal machines."""
    named = session.named.values()
    values = [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in named]
    for variable, value in zip(named, session.group.broadcast(values), strict=True):
        if not session.is_first_rank:
            variable.assign(value)


def _make_callbacks(session: RankSession, step: int | None, held: regroup.HeldState | None = None) -> Callbacks:
    """Create the user's callbacks.

    Args:
        session: this rank's session.
        step: the step from which the run continues; None for a new run.
        held: the state of the ranks that already train, if this rank joins them.
    """
    job, reporter = session.job, session.reporter
    later_files.take_default(*job.code.get().writer)
    options: dict[str, Any] = {
        "make": job.callbacks,
        "model": session.model,
        "group": session.group,
        "say": reporter.say,
        "files": reporter.files,
        "params": job.params,
        "epoch": None if step is None else job.epoch_of(step),
        "watch": functools.partial(session.heartbeat.doing, Activity.CALLBACK),
    }
    if job.arbiter is None:
        return Callbacks(**options)
    known: dict[str, Any] = {} if held is None else {"batches": held.batches, "known": held.callbacks}
    return MovingCallbacks(**options, pack=reporter.pack_files, **known)


# -- what a rank needs while it trains ---------------------------------------------------------------------------------


def _make_ready(
    session: RankSession, tiers: Tiers, tier: str, rows: StepRows | None, is_described: bool = False
) -> None:
    """Create the objects that the rank needs to train, after the model has the state of the run.

    Args:
        tier: the tier of the state.
        rows: rows of the step log that exist only in memory.
        is_described: whether this process has already stored the description of the model.
    """
    session.origin, session.memory = (session.state.step, tier), tiers.memory
    session.live = _live_state(session, rows, is_described)
    # Only after the restore: the keeper drops copies that are no longer needed.
    tiers.memory.reserve(variables.sizes(session.named), session.live.make)
    session.heartbeat.also(tiers.memory.poll)
    session.saving = _checkpointer(session, tiers)
    session.ended, session.ending, session.batch_end = session.state.step, None, None
    session.saves_again, session.seconds_per_step = False, 0.0
    session.is_ready = True
    session.executor.begin(session)


def _live_state(session: RankSession, rows: StepRows | None, is_described: bool) -> LiveState:
    """Create the state that checkpoints save; its step log starts with the rows that exist only in memory."""
    group, named, reporter = session.group, session.named, session.reporter
    log = StepLog(session.storage, session.place.attempt, session.step.digests)
    if rows is not None:
        log.restore(rows)
    note = AttemptNote(session, is_described)
    if group.rank == 0:
        # A thread, because slow or unavailable storage must not delay a restart. Each save tries again.
        threading.Thread(target=_call_ignoring_storage, args=[note], daemon=True, name="raytf-note").start()
    keeps_best = session.config.checkpoints.keep_best is not None
    most = memory_needs.held(variables.size_of(named), group.world_size, keeps_best)
    # A source of live batches need not keep the batches before a checkpoint.
    source = session.sources.train
    fetch = source.fetch if isinstance(source, LiveBatches) else None
    on_saved = fetch.saved if isinstance(fetch, FeedClient) else (lambda step: None)
    room = DeviceRoom(most, free_bytes, (lambda line: None) if session.origin[1] == HELD else reporter.say)
    return LiveState(
        group.rank,
        session.state,
        session.identity,
        session.model,
        named,
        functools.partial(variables.Variables, named, may_hold=room),
        session.callbacks,
        log,
        reporter,
        note,
        on_saved,
    )


def _call_ignoring_storage(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


def _checkpointer(session: RankSession, tiers: Tiers) -> Checkpointer:
    is_exact, reporter, replicas = session.config.compute.exact, session.reporter, None
    if not session.config.strategy.has_servers:
        replicas = Replicas(
            session.group,
            session.named,
            # A wrong optimizer variable shows in the weights only after a later update, too late for exact mode.
            session.digest(with_optimizer=is_exact).value,
            is_exact,
            reporter.say,
            reporter.event,
            worker_table.whereabouts,
        )
    listener = Listener(reporter, session.heartbeat, functools.partial(models.numbers, session.model))
    return Checkpointer(session.live, tiers.memory, tiers.durable, session.group, tiers.policy, listener, replicas)


class AttemptNote:
    """Writes an attempt's record, and the description of the model that an export needs; only rank 0 calls it.

    Args:
        session: this rank's session, whose attempt has begun.
        is_described: whether this process has already stored the description.

    Attributes:
        is_described: whether the description, which may be large, has been stored.
    """

    def __init__(self, session: RankSession, is_described: bool):
        self._storage, self._began = session.storage, time.time()
        self._about = session.place.attempt, session.executor.workers, session.origin
        self._lock, self.is_described = threading.Lock(), is_described
        self._described = b""
        if session.is_first_rank and not is_described:
            x, *others = session.pipeline.sample()
            records = session.plan.micro_batch_size
            self._described = architecture.describe(session.model, x, tuple(others), records)

    def __call__(self) -> None:
        with self._lock:
            write_attempt(self._storage, *self._about, self._began)
            if not self.is_described:
                self._storage.put(architecture.FILE, self._described)
                self.is_described = True
