"""One rank's session of a run: its place in the group, and the objects that it needs to train."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from raytf.checkpoint.invalidated_states import VoidStates
from raytf.checkpoint.memory import MemoryTier
from raytf.checkpoint.replicas import Digest
from raytf.checkpoint.training_state import TrainingState
from raytf.config.objective import flat
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import DEPTH, Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import Source
from raytf.data.sources.batches import plan_of
from raytf.distributed.devices import computes_on_gpu
from raytf.runs.status import Status, number_text
from raytf.runs.timeline import Phases
from raytf.storage.storage import Storage
from raytf.training.evaluation import Evaluator
from raytf.training.executor import CompiledStep, Executor
from raytf.training.job import Sources, TrainingJob
from raytf.training.model import model as models
from raytf.training.process.heartbeat import Activity, Heartbeat, WatchedGroup
from raytf.training.process.reporter import Reporter
from raytf.training.saving.checkpointer import Checkpointer
from raytf.training.saving.live_state import LiveState
from raytf.training.step.evaluation_step import EvalStep
from raytf.training.user.callbacks import Callbacks

#: Number of latest epochs whose metrics a status contains; no more epochs should end between two statuses.
_HISTORY_EPOCHS = 50
#: Device memory, in bytes, for the batches that wait or are in use.
UPLOAD_BYTES = 512 << 20


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks of an attempt; the defaults hold until the ranks have met.

    Attributes:
        attempt: name of the attempt.
        earlier: names of the attempts before it.
        known_step: step of the newest checkpoint on storage; None if the driver does not know it.
        is_saving: whether a later checkpoint may be on storage.
        on_node: (this rank's index on its node, number of ranks on the node).
        lost: number of workers that a group which continues without them has lost since the last trained step.
        void: states that are invalid.
        standings: by Ray's id of a node, the step since which the node trains, and the step of its latest audit that
            found no difference.
    """

    attempt: str = ""
    earlier: tuple[str, ...] = ()
    known_step: int | None = None
    is_saving: bool = False
    on_node: tuple[int, int] = (0, 1)
    lost: int = 0
    void: VoidStates = field(default_factory=VoidStates)
    standings: Mapping[str, Sequence[int]] = field(default_factory=dict)


class BatchEnd(NamedTuple):
    """The end of a call's last batch.

    Attributes:
        start: step at which the call began.
        batch: number of the batch within its epoch.
    """

    start: int
    batch: int


class RankSession:
    """One rank's session of a run.

    `raytf.training.startup` builds the model and restores the state. When ranks meet again, each continues in a copy.

    Args:
        job: the run to train.
        heartbeat: this rank's heartbeat.
        phases: phases of the restart; each is marked when it ends.
        executor: trains the steps.
        group: this rank's collectives with all ranks.
        storage: the run's folder.
        reporter: sends this rank's messages, events and metrics.

    Attributes:
        place: this rank's place in the current attempt.
        is_ready: whether this rank has the state of the run.
    """

    #: Set when the model is built: the run's data, this rank's shards of the training data, the compiled model, all
    #: variables of the state by name, the training step, and the run's identity.
    sources: Sources
    pipeline: Pipeline
    model: keras.Model
    named: dict[str, keras.Variable]
    step: CompiledStep
    identity: dict[str, str]

    #: Set when the state is restored: the progress of the run, which is the same on every rank, the user's callbacks,
    #: the copies in memory, the state to save, and the object that saves it.
    state: TrainingState
    callbacks: Callbacks
    memory: MemoryTier
    live: LiveState
    saving: Checkpointer
    #: Average seconds that a worker waits in each step because shards do not divide evenly.
    imbalance_seconds: float
    #: The step at which this attempt began, and the tier of its state: `new`, `memory`, `durable` or `held`.
    origin: tuple[int, str]
    #: Step after which an epoch end was last completed, or at which this attempt started.
    ended: int
    #: The epoch end that was started last.
    ending: EpochEnd | None
    #: The batch after which `on_train_batch_end` has not run yet, as far as this rank knows.
    batch_end: BatchEnd | None
    #: Whether a save was in progress when the ranks met again.
    saves_again: bool
    #: Seconds of a step in the newest call; 0 before the first call.
    seconds_per_step: float

    def __init__(
        self,
        job: TrainingJob,
        heartbeat: Heartbeat,
        phases: Phases,
        executor: Executor,
        group: WatchedGroup,
        storage: Storage,
        reporter: Reporter,
    ):
        self.job, self.heartbeat, self.phases, self.executor = job, heartbeat, phases, executor
        self.group, self.storage, self.reporter = group, storage, reporter
        self.place, self.is_ready = Place(), False
        #: The hashes of the weights, by whether they include the optimizer.
        self._digests: dict[bool, Digest] = {}
        #: The traced evaluation steps, by the name of their data; all copies of this session share them.
        self._evaluation_steps: dict[str, EvalStep] = {}
        self._evaluators: dict[str, Evaluator] = {}

    def renewed(self) -> RankSession:
        """Return a copy for the next attempt, which starts in another group of ranks."""
        session = copy.copy(self)
        session._evaluators = {}
        return session

    @property
    def config(self) -> TrainConfig:
        return self.job.config

    @property
    def plan(self) -> StepPlan:
        return self.job.plan

    @property
    def is_first_rank(self) -> bool:
        """Return whether this is rank 0, the only rank that writes logs and reports to the driver."""
        return self.group.rank == 0

    @property
    def has_trained(self) -> bool:
        return self.seconds_per_step > 0

    @property
    def is_at_epoch_end(self) -> bool:
        """Return whether the run is between two epochs, or before the first or after the last."""
        return self.plan.is_epoch_end(self.state.step)

    def open_pipeline(self, source: Source, plan: StepPlan, training: bool) -> Pipeline:
        """Open this rank's shards of a source; only training shuffles and augments them."""
        job, group, devices = self.job, self.group, self.group.devices
        pipeline = Pipeline(
            source,
            plan,
            assign(plan.shards, group.world_size)[group.rank],
            job.config.batch.seed,
            shuffle=training and job.shuffle,
            class_weight=job.class_weight if training else None,
            augment=job.augment if training else None,
        )
        # If a GPU is the only device, batches are sent to it ahead of their steps.
        if not job.config.strategy.has_servers and len(devices.names) == 1 and computes_on_gpu(devices):
            pipeline.send = Upload(devices.names[0] or "GPU:0", DEPTH + 1)
        return pipeline

    def take_shards(self) -> None:
        """Compute the shards that this rank has in its current group."""
        group = self.group
        self.pipeline = self.pipeline.of(assign(self.plan.shards, group.world_size)[group.rank])
        self.executor.take_shards(self.pipeline)

    def evaluator(self, name: str, source: Source) -> Evaluator:
        """Return the evaluator of a source, which is created at the first call.

        Args:
            name: identifies the evaluator.
            source: the data; unless it has its own batches, it is divided like the training data.
        """
        if name not in self._evaluators:
            plan = plan_of(source, self.plan.global_batch_size, self.plan.shards)
            pipeline, callbacks = self.open_pipeline(source, plan, False), self.callbacks if self.is_ready else None
            step = self._evaluation_steps.get(name)
            evaluator = Evaluator(self.model, pipeline, self.group, callbacks, self.group.devices, step)
            self._evaluators[name], self._evaluation_steps[name] = evaluator, evaluator.step
        return self._evaluators[name]

    def digest(self, with_optimizer: bool) -> Digest:
        """Return the object that hashes the weights, and on request the optimizer's variables, too."""
        if with_optimizer not in self._digests:
            hashed = ("model/", "optimizer/") if with_optimizer else ("model/",)
            values = [v.value for name, v in self.named.items() if name.startswith(hashed)]
            self._digests[with_optimizer] = Digest(values)
        return self._digests[with_optimizer]

    def logs(self) -> dict[str, Any]:
        """Return loss and metrics of the current epoch so far."""
        return models.logs(self.model)

    def sum(self, values: Sequence[float]) -> np.ndarray:
        """Sum values over all ranks, as float32; every rank must call it."""
        return self.group.sum(np.asarray(values, np.float32))

    def show(self, phase: str, metrics: dict[str, float] | None = None) -> None:
        """Report the run's status to the driver, from rank 0.

        Args:
            phase: the phase of the run.
            metrics: the epoch's metrics; by default the model's own, while it trains.
        """
        if not self.is_first_rank:
            return
        if metrics is None and phase == "training" and self.has_trained:
            metrics = models.numbers(self.model)
        job, step = self.job, self.state.step
        latest = step if phase == "training" and step < job.total_steps else max(0, step - 1)
        status = Status(
            step=step,
            total=job.total_steps,
            epoch=job.epoch_of(latest) + 1,
            epochs=job.epochs,
            workers=self.executor.workers,
            metrics=metrics or {},
            checkpoint=self.state.durable_step,
            snapshot=self.memory.step,
            snapshot_bytes=self.memory.bytes,
            stall_seconds=self.saving.stall_seconds,
            trace_seconds=self.heartbeat.trace_seconds,
            phase=phase,
            trouble=self.saving.trouble(),
            history=[flat(epoch) for epoch in self.state.history[-_HISTORY_EPOCHS:]],
        )
        self.reporter.show(status)


class Upload:
    """Sends the leaves of a call to a device; call it from the thread that gathers them.

    Args:
        device: TensorFlow's name of the device.
        calls: number of calls that may be on the device at the same time, including the running one.
        most: bytes for all of these calls. A call that is larger than its share is not sent before it runs.
    """

    def __init__(self, device: str, calls: int, most: int = UPLOAD_BYTES):
        self._device = device
        #: The largest size of a call that is sent ahead, in bytes.
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


class EpochEnd:
    """The end of one epoch. If a worker is lost during it, `run` is called again, and skips the completed parts.

    Args:
        session: this rank's session after the epoch's last step.

    Attributes:
        step: the epoch's last step.
    """

    def __init__(self, session: RankSession):
        self.step = session.state.step
        self._epoch = session.job.epoch_of(self.step - 1)
        self._logs = session.logs()
        self._validated: dict[str, Any] | None = None
        self._is_noted = self._is_reported = False

    def run(self, session: RankSession) -> None:
        """Validate, run `on_epoch_end`, log, report to Ray Train, and keep the state if it is the best so far."""
        state, reporter = session.state, session.reporter
        if session.sum([float(self._validated is None)])[0]:
            self._validated = _validate(session, self._epoch, self._logs)
        logs = session.callbacks.end_epoch(self._epoch, self._logs | (self._validated or {}))
        state.stopped_early = session.callbacks.stopped
        if not self._is_noted:
            self._note(session, logs)
        is_best = False
        if session.is_at_epoch_end:
            session.saving.policy.check_goal(logs)
            is_best = session.saving.is_best()
        # Only rank 0 knows the values; the sum sends them to every rank.
        is_report_due, is_best_somewhere = session.sum([float(reporter.is_report_due()), float(is_best)])
        if is_report_due and not self._is_reported:
            self._is_reported = True
            with session.heartbeat.doing(Activity.REPORT):
                reporter.report({**flat(logs), "epoch": self._epoch, "step": state.step})
        if is_best_somewhere:
            session.saving.keep_best()

    def _note(self, session: RankSession, logs: dict[str, Any]) -> None:
        self._is_noted = True
        session.state.history.append({"epoch": self._epoch, "step": self.step, **logs})
        session.model.reset_metrics()
        if session.is_first_rank:
            numbers = flat(logs)
            session.reporter.scalars({f"epoch_{name}": value for name, value in numbers.items()}, self.step)
            text = ", ".join(f"{name} {number_text(value)}" for name, value in numbers.items())
            session.reporter.note(f"epoch {self._epoch + 1}: {text}")


def _validate(session: RankSession, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
    """Return loss and metrics over the validation data; empty if this epoch is not validated."""
    source = session.sources.validation
    if source is None or not session.job.validates_after(epoch):
        return {}
    session.show("validating")
    with session.heartbeat.doing(Activity.VALIDATION):
        results = session.evaluator("validation", source).run(session.heartbeat.progress)
    session.show("training", flat(logs))  # from now on, time counts as training again
    return {f"val_{name}": value for name, value in results.items()}
