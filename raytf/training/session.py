"""One rank's session of a run: its place in the group, what it trains, and what it needs while it trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import keras
import numpy as np
import ray
import tensorflow as tf

from raytf._ray import raylets
from raytf.checkpoint import variables
from raytf.checkpoint.invalidated_states import VoidStates
from raytf.checkpoint.memory import MemoryTier, place_on_node
from raytf.checkpoint.replicas import Digest
from raytf.checkpoint.training_state import TrainingState
from raytf.cluster.preemption import watcher
from raytf.config import precision
from raytf.config.objective import flat
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import DEPTH, Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import Source, fingerprint
from raytf.distributed import memory_needs, ranks, worker_table
from raytf.distributed.devices import computes_on_gpu
from raytf.errors import ConfigError
from raytf.inference.user_model import run_user_code, set_log_levels, set_warning_filters
from raytf.runs.restart_phases import Phases
from raytf.runs.run_log import new_attempt
from raytf.runs.status import Status, number_text
from raytf.storage.storage import Storage
from raytf.training import run_identity
from raytf.training.evaluation import Evaluators
from raytf.training.executor import CompiledStep, Executor
from raytf.training.job import Sources, TrainingJob
from raytf.training.model import model as models
from raytf.training.model import program_variables, remarks
from raytf.training.process import gpu_probe
from raytf.training.process.heartbeat import Activity, Heartbeat, WatchedGroup
from raytf.training.process.reporter import Reporter
from raytf.training.saving.checkpointer import Checkpointer
from raytf.training.saving.live_state import LiveState
from raytf.training.step.evaluation_step import EvalStep
from raytf.training.user.callbacks import Callbacks

#: Share of a node's memory from which what the state needs is worth a line.
_LARGE_SHARE = 0.02
#: Number of latest epochs whose metrics a status has: as many as may end between two statuses.
_HISTORY_EPOCHS = 50
#: Device memory, in bytes, for the batches that wait or are being computed.
UPLOAD_BYTES = 512 << 20


@dataclass(frozen=True)
class Attempt:
    """This rank in one attempt; the defaults hold until its ranks have met.

    Attributes:
        job: the run to train.
        pulse: this rank's heartbeat.
        phases: phases of the restart; each is marked when it ends.
        group: this rank's collectives with all ranks.
        workers: number of processes that compute gradients.
        storage: the run's folder.
        reporter: sends this rank's messages, events and metrics.
        name: name of the attempt.
        earlier: names of the attempts before it.
        known_step: step of the newest checkpoint on storage; None if the driver does not know it.
        is_saving: whether a later one may be on storage.
        place: (this rank's index on its node, number of ranks on the node).
        lost: how many workers were lost since the last step that was trained, of a group that continues without them.
        void: states that count no more.
        standings: by Ray's id of a node, the step since which it trains, and that of its latest audit that agreed.
    """

    job: TrainingJob
    pulse: Heartbeat
    phases: Phases
    group: WatchedGroup
    workers: int
    storage: Storage
    reporter: Reporter
    name: str = ""
    earlier: tuple[str, ...] = ()
    known_step: int | None = None
    is_saving: bool = False
    place: tuple[int, int] = (0, 1)
    lost: int = 0
    void: VoidStates = field(default_factory=VoidStates)
    standings: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        return self.job.config


def join(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Attempt:
    """Join the other ranks of the newest attempt; every rank must call it.

    Raises:
        GpuError, WorkerLostError: a rank does not have the GPU that it was assigned, or the GPU miscalculates.
        ClusterError: the devices of the strategy do not exist.
    """
    group = WatchedGroup(executor.join(), pulse)
    attempt = _alone(job, pulse, phases, executor, group, group.rank)
    attempt = begin(attempt, executor, pulse.group)
    phases.mark("rendezvous")
    introduce(attempt)
    return attempt


def prepare(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Attempt:
    """Prepare this rank before it meets the others, where that comes after the model is built: see `begin`.

    Raises:
        GpuError: it does not have the GPU that it was assigned, or that miscalculates.
    """
    group = WatchedGroup(executor.join(), pulse)
    ranks.take(executor.seat)  # for the model function
    return _alone(job, pulse, phases, executor, group, 0 if executor.speaks_alone else None)


def begin(before: Attempt, executor: Executor, number: int) -> Attempt:
    """Start the attempt of ranks that have met; every rank must call it.

    Args:
        before: this rank.
        executor: will train the steps.
        number: of the generation, or of the worker group where ranks do not meet again. It orders the attempts of a
            driver, also those of a rank that was suspended and takes its next step late.
    """
    job, group = before.job, before.group
    name, earlier, known_step, is_saving, void, standings = _begin(job, group, number)
    place = place_on_node(group)
    ranks.take(ranks.RankInfo(group.rank, group.world_size, *place))
    before.reporter.take_place(group.rank, executor.workers, name)
    return replace(
        before,
        name=name,
        earlier=tuple(earlier),
        known_step=known_step,
        is_saving=is_saving,
        place=place,
        workers=executor.workers,
        void=VoidStates.of(void),
        standings=standings,
    )


def introduce(attempt: Attempt, is_late: bool = False) -> None:
    """Show where the ranks are, and watch for preemption notices.

    Args:
        attempt: the attempt that begins.
        is_late: the others have done so before.
    """
    group, strategy, reporter = attempt.group, attempt.config.strategy, attempt.reporter
    if group.route is not None and group.route.why:
        reporter.say(str(group.route))
    # With parameter servers, the driver shows the cluster.
    if strategy.show_cluster and not strategy.has_servers and not is_late:
        worker_table.show(group, strategy.strategy, attempt.place[0], reporter.say)
    watcher.start_in_worker(attempt.config.notices, attempt.job.run_uri, reporter.say_here, reporter.event)


def _alone(
    job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor, group: WatchedGroup, rank: int | None
) -> Attempt:
    if not job.config.strategy.has_servers:  # the coordinator has no GPU
        gpu_probe.check()
    storage = Storage(job.run_uri)
    reporter = Reporter(job, storage, rank, executor.workers)
    return Attempt(job, pulse, phases, group, executor.workers, storage, reporter)


def _begin(job: TrainingJob, group: WatchedGroup, number: int) -> tuple[str, list[str], int | None, bool, Any, Any]:
    """Name the attempt and announce it to the driver.

    Returns:
        Its name, the names of the attempts before it, the step of the newest checkpoint on storage, None if the
        driver does not know that step; whether a later one may be on storage; states that are void, and standings of
        nodes.
    """
    begun = b""
    if group.rank == 0:
        name = new_attempt(number=(job.term, number))
        before = job.monitor.begin(name)
        begun = json.dumps((name, *before, job.monitor.is_saving(), *job.monitor.past())).encode()
    # Ray's own broadcast would wait for an actor that starts with the group.
    return json.loads(group.share(begun))


@dataclass(frozen=True)
class Program:
    """The model, data and step that one rank trains.

    Attributes:
        sources: the run's data.
        pipeline: this rank's shards of the training data.
        model: built and compiled.
        named: all variables of the state, by name.
        step: the training step, which may not be traced yet.
        identity: what must be the same when the run is resumed.
        digests: the hashes of the weights that were made ready, by whether they are of the optimizer, too.
        evaluations: evaluation steps that were made, by the name of their data.
    """

    sources: Sources
    pipeline: Pipeline
    model: keras.Model
    named: dict[str, keras.Variable]
    step: CompiledStep
    identity: dict[str, str]
    digests: dict[bool, Digest] = field(default_factory=dict)
    evaluations: dict[str, EvalStep] = field(default_factory=dict)

    def digest(self, with_optimizer: bool) -> Digest:
        """Return the hash of the weights."""
        if with_optimizer not in self.digests:
            hashed = ("model/", "optimizer/") if with_optimizer else ("model/",)
            values = [v.value for name, v in self.named.items() if name.startswith(hashed)]
            self.digests[with_optimizer] = Digest(values)
        return self.digests[with_optimizer]


def build_program(attempt: Attempt, executor: Executor) -> Program:
    """Build the model and its step.

    Raises:
        ConfigError: the node does not have the memory that the state needs, or settings do not fit the model.
        ModelError: the model function does not return a model that can be trained.
        ExactnessError: the run is in exact mode, and the machines do not compute the same bits.
    """
    job = attempt.job
    sources: Sources = ray.get(job.sources)
    if job.settings is not None:
        job.settings.apply()
    with attempt.group.devices.at_home():  # a model in it gets its variables now
        code = run_user_code("unpacking the job", job.code.get)
    set_warning_filters(code.warning_filters)
    set_log_levels(code.log_levels)
    pipeline = open_pipeline(attempt, sources.train, job.plan, training=True)
    with attempt.group.devices.at_home():
        model = _build_model(attempt, sources, pipeline)
    if job.config.strategy.has_servers:
        precision.check_for_servers(models.scaled_policy(model))
    pipeline.prepare(len(variables.seed_states(model)), models.sparse_classes(model))
    identity = _identity(job, sources, model)
    step = executor.make_step(attempt, model, pipeline)
    if not job.config.strategy.has_servers:
        known = [*model.variables, *variables.variables(model).values(), *step.reduction_state().values()]
        known += variables.seed_states(model)
        variables.keep_program(model, program_variables.find(step.probe_function, known))
    named = variables.variables(model)
    if not attempt.earlier:
        for line in remarks.take(model):
            attempt.reporter.say(line)
    identity |= executor.admit(attempt, pipeline)
    if not (job.config.strategy.has_servers or executor.meets_again):  # the place on the node is not known yet
        check_needs(attempt, named)
    return Program(sources, pipeline, model, named, step, identity)


def with_own_shards(attempt: Attempt, program: Program, executor: Executor) -> Program:
    """Return the program with the shards that this rank has now."""
    plan, group = attempt.job.plan, attempt.group
    pipeline = program.pipeline.of(assign(plan.shards, group.world_size)[group.rank])
    executor.take_shards(pipeline)
    return replace(program, pipeline=pipeline)


def open_pipeline(attempt: Attempt, source: Source, plan: StepPlan, training: bool) -> Pipeline:
    """Open this rank's shards of a source; only those for training are shuffled and augmented."""
    job, group = attempt.job, attempt.group
    made = Pipeline(
        source,
        plan,
        assign(plan.shards, group.world_size)[group.rank],
        job.config.batch.seed,
        shuffle=training and job.shuffle,
        class_weight=job.class_weight if training else None,
        augment=job.augment if training else None,
    )
    made.send = _upload(attempt)
    return made


def _upload(attempt: Attempt) -> Callable[[list[np.ndarray]], list[Any]]:
    """Return the function that sends a gathered batch to the GPU ahead of its step, if that is the only device."""
    devices = attempt.group.devices
    if attempt.config.strategy.has_servers or len(devices.names) > 1 or not computes_on_gpu(devices):
        return list
    return Upload(devices.names[0] or "GPU:0", DEPTH + 1)


def _build_model(attempt: Attempt, sources: Sources, pipeline: Pipeline) -> keras.Model:
    job, all_sources = attempt.job, (sources.train, sources.validation, sources.test)
    return models.build(
        job.model,
        pipeline.sample(models.SAMPLE),
        [source for source in all_sources if source is not None],
        job.config.compute,
        job.config.batch.seed,
        attempt.reporter.say,
        job.precision,
        (job.plan.micro_batch_size, job.plan.global_batch_size),
    )


def _identity(job: TrainingJob, sources: Sources, model: keras.Model) -> dict[str, str]:
    identity = run_identity.of_model(models.describe(model), models.code(model, (job.augment,)))
    # Taken from the driver, which has read the data once for all ranks. Only the fingerprint of the training data is
    # computed here, since training reads the records that this node sees.
    known = job.identity or run_identity.of_run(job, sources)
    return identity | known | {"training data": fingerprint(sources.train)}


def check_needs(attempt: Attempt, named: dict[str, keras.Variable]) -> None:
    """Refuse a node that does not have the memory that the state needs; in the first attempt, print what it needs if
    that is much, or if the user wants to know everything."""
    checkpoints = attempt.config.checkpoints
    own = {name: variables.size_of({name: v}) for name, v in named.items()}
    total, largest = sum(own.values()), max(own.values(), default=0)
    weights = sum(size for name, size in own.items() if name.startswith("model/"))
    needs = memory_needs.MemoryNeeds(
        weights,
        total - weights,
        max(largest, -(-total // attempt.group.world_size)),
        largest,
        attempt.place[1],
        variables.is_on_host(named),
        checkpoints.snapshot_every_steps != 0,
        checkpoints.keep_best is not None,
    )
    node_bytes = raylets.all_bytes()
    refused = memory_needs.refusal(needs, node_bytes, bool(checkpoints.snapshot_every_steps))
    if refused is not None:
        raise ConfigError(refused)
    is_large = needs.total >= _LARGE_SHARE * node_bytes
    if not attempt.earlier and (is_large or attempt.config.run.verbose):
        attempt.reporter.say(needs.text())


class Upload:
    """Sends the leaves of a call to a device; to be called from the thread that gathers them.

    Args:
        device: TensorFlow's name of the device.
        calls: how many calls may be on the device at a time, including the one that runs.
        most: bytes of all of these calls. A call that is larger than its part is not sent ahead, but when it runs.
    """

    def __init__(self, device: str, calls: int, most: int = UPLOAD_BYTES):
        self._device = device
        #: Bytes of a call that may be sent ahead.
        self._part = most // calls

    def __call__(self, leaves: Sequence[np.ndarray]) -> list[Any]:
        sent = [_belongs_on_device(leaf) for leaf in leaves]
        if sum(leaf.nbytes for leaf, goes in zip(leaves, sent, strict=True) if goes) > self._part:
            return list(leaves)
        with tf.device(self._device):
            return [tf.constant(leaf) if goes else leaf for leaf, goes in zip(leaves, sent, strict=True)]


def _belongs_on_device(leaf: np.ndarray) -> bool:
    # TensorFlow functions take int32 and strings from host memory, even on a GPU.
    return leaf.dtype.kind in "biuf" and leaf.dtype != np.int32


class BatchEnd(NamedTuple):
    """The end of a call's last batch.

    Attributes:
        start: step at which the call began.
        batch: number of the batch within its epoch.
    """

    start: int
    batch: int


@dataclass
class Context:
    """One rank of a run that is training.

    Attributes:
        attempt: this rank's place in the attempt.
        program: the model, its data and its step.
        state: the progress of the run; the same on every rank.
        callbacks: the user's callbacks.
        memory: the tier of copies in memory.
        live: the state that checkpoints are made from.
        saving: makes the checkpoints.
        evaluators: evaluators of the validation and test data.
        imbalance_seconds: average time that a worker waits in each step because shards do not divide evenly.
        origin: the step at which this attempt began, and the tier of its state: `new`, `memory`, `durable` or `held`.
        ended: step after which the end of an epoch was last completed, or at which this attempt found the run.
        ending: the end of an epoch that was begun last.
        batch_end: the batch whose end callbacks have not seen yet, as far as this rank knows.
        saves_again: whether a save was under way when the ranks met again.
        seconds_per_step: seconds of a step in the newest call; 0 before the first call.
    """

    attempt: Attempt
    program: Program
    state: TrainingState
    callbacks: Callbacks
    memory: MemoryTier
    live: LiveState
    saving: Checkpointer
    evaluators: Evaluators
    imbalance_seconds: float
    origin: tuple[int, str]
    ended: int
    ending: EpochEnd | None = None
    batch_end: BatchEnd | None = None
    saves_again: bool = False
    seconds_per_step: float = 0.0

    @property
    def job(self) -> TrainingJob:
        return self.attempt.job

    @property
    def config(self) -> TrainConfig:
        return self.attempt.job.config

    @property
    def plan(self) -> StepPlan:
        return self.attempt.job.plan

    @property
    def pulse(self) -> Heartbeat:
        return self.attempt.pulse

    @property
    def reporter(self) -> Reporter:
        return self.attempt.reporter

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is rank 0, the only one that writes logs and talks to the driver."""
        return self.attempt.group.rank == 0

    @property
    def has_trained(self) -> bool:
        """Return whether this attempt has trained a step."""
        return self.seconds_per_step > 0

    @property
    def is_at_epoch_end(self) -> bool:
        """Return whether the run is between two epochs, or at the beginning of the first."""
        return self.plan.is_epoch_end(self.state.step)

    def logs(self) -> dict[str, Any]:
        """Return loss and metrics of the current epoch so far."""
        return models.logs(self.program.model)

    def sum(self, values: Sequence[float]) -> np.ndarray:
        """Sum values over all ranks, as float32; every rank must call it."""
        return self.attempt.group.sum(np.asarray(values, np.float32))

    def show(self, phase: str, metrics: dict[str, float] | None = None) -> None:
        """Report the run's status to the driver, from rank 0.

        Args:
            phase: the phase of the run.
            metrics: the epoch's metrics; by default the model's own, while it trains.
        """
        if not self.is_first_rank:
            return
        if metrics is None and phase == "training" and self.has_trained:
            metrics = models.numbers(self.program.model)
        job, step = self.job, self.state.step
        latest = step if phase == "training" and step < job.total_steps else max(0, step - 1)
        status = Status(
            step=step,
            total=job.total_steps,
            epoch=job.epoch_of(latest) + 1,
            epochs=job.epochs,
            workers=self.attempt.workers,
            metrics=metrics or {},
            checkpoint=self.state.durable_step,
            snapshot=self.memory.step,
            snapshot_bytes=self.memory.bytes,
            stall_seconds=self.saving.stall_seconds,
            trace_seconds=self.pulse.trace_seconds,
            phase=phase,
            trouble=self.saving.trouble(),
            history=[flat(epoch) for epoch in self.state.history[-_HISTORY_EPOCHS:]],
        )
        self.reporter.show(status)


class EpochEnd:
    """The end of one epoch. If a worker is lost in it, it is run again, and what is done of it is not done twice.

    Args:
        context: the rank's context, after the epoch's last step.

    Attributes:
        step: that step.
    """

    def __init__(self, context: Context):
        self.step = context.state.step
        self._epoch = context.job.epoch_of(self.step - 1)
        self._logs = context.logs()
        self._validated: dict[str, Any] | None = None
        self._is_noted = self._is_reported = False

    def run(self, context: Context) -> None:
        """Validate, run the callbacks' `on_epoch_end`, log, report to Ray Train, keep the state if it is the best."""
        state, reporter = context.state, context.reporter
        if context.sum([float(self._validated is None)])[0]:
            self._validated = _validate(context, self._epoch, self._logs)
        logs = context.callbacks.end_epoch(self._epoch, self._logs | (self._validated or {}))
        state.stopped_early = context.callbacks.stopped
        if not self._is_noted:
            self._note(context, logs)
        is_best = False
        if context.is_at_epoch_end:
            context.saving.policy.check_goal(logs)
            is_best = context.saving.is_best()
        # Only rank 0 knows the answers; the sum gives them to every rank.
        is_report_due, is_best_somewhere = context.sum([float(reporter.is_report_due()), float(is_best)])
        if is_report_due and not self._is_reported:
            self._is_reported = True
            with context.pulse.doing(Activity.REPORT):
                reporter.report({**flat(logs), "epoch": self._epoch, "step": state.step})
        if is_best_somewhere:
            context.saving.keep_best()

    def _note(self, context: Context, logs: dict[str, Any]) -> None:
        self._is_noted = True
        context.state.history.append({"epoch": self._epoch, "step": self.step, **logs})
        context.program.model.reset_metrics()
        if context.is_first_rank:
            numbers = flat(logs)
            context.reporter.scalars({f"epoch_{name}": value for name, value in numbers.items()}, self.step)
            text = ", ".join(f"{name} {number_text(value)}" for name, value in numbers.items())
            context.reporter.note(f"epoch {self._epoch + 1}: {text}")


def _validate(context: Context, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
    """Compute loss and metrics over the validation data; empty if this epoch is not validated."""
    source = context.program.sources.validation
    if source is None or not context.job.validates_after(epoch):
        return {}
    context.show("validating")
    with context.pulse.doing(Activity.VALIDATION):
        results = context.evaluators.evaluate("validation", source, context.pulse.progress)
    context.show("training", flat(logs))  # from here on, the time is that of steps again
    return {f"val_{name}": value for name, value in results.items()}
