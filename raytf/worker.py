"""The training loop, as every worker runs it.

All ranks go through it in step: whatever decides what comes next is either arithmetic on the step, or a flag that was
added over the ranks with the gradients. Rank 0 alone writes logs and talks to the driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import ray
import ray.train

from raytf import warm
from raytf.checkpoint import manifest, policy
from raytf.cluster import watch
from raytf.data.order import StepPlan, assign, imbalance
from raytf.data.pipeline import Call, Pipeline
from raytf.data.sources import Source, fingerprint
from raytf.errors import (
    CheckpointError,
    ConfigError,
    ExactnessError,
    JobError,
    NonFiniteLossError,
    RaytfError,
    RunMismatchError,
    StorageError,
    WorkerLostError,
    brief,
    one_line,
)
from raytf.goal import Goal
from raytf.hangs import Activity
from raytf.job import Job, Sources, batch_identity, differences
from raytf.lease import check_owner
from raytf.phases import Phases
from raytf.progress import SaveTrouble, clock_text
from raytf.pulse import Pulse, WatchedGroup
from raytf.reporter import Reporter
from raytf.runlog import StepLog, new_attempt, read_attempts, write_attempt
from raytf.storage import Storage

#: Places in the vector of flags.
_WANT_SAVE, _WRITTEN, _COMMITTED, _FAILED, _CALL_STEPS, _PARK, _COPY, _SHARE, _PROBE = range(9)
_FLAGS = 9
#: Calls gathered ahead of the one that runs.
_PREFETCH = 2
#: How long a call should take: long enough that its overhead does not count, short enough to save and stop soon.
_CALL_SECONDS = 0.1
_MAX_CALL_STEPS = 32
#: Seconds before each try to save the last checkpoint; the others simply come again with the next one.
_LAST_SAVE_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)
#: Seconds between two looks of waiting ranks whether to go on.
_PARK_SECONDS = 0.1
#: Seconds for which a shard alone is measured, now and then.
_PROBE_SECONDS = 0.05


def set_up(addresses: list[str], rank: int, threads: int, quiet: bool, exact: bool, jit: bool) -> None:
    """Prepare this worker's process for MultiWorkerMirroredStrategy, before any TensorFlow operation.

    Args:
        addresses: HOST:PORT of every rank's collective server.
        rank: of this worker.
        threads: TensorFlow's threads within an operation; 0 leaves it to TensorFlow.
        quiet: silence TensorFlow's messages.
        exact: have TensorFlow choose deterministic kernels, and refuse operations that have none.
        jit: XLA compiles; what it compiled stays on the node for the next group.
    """
    global _phases
    _phases = Phases()
    warm.become_worker()
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    os.environ["KERAS_BACKEND"] = "tensorflow"
    if quiet:
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    if jit:
        compiled = warm.session_folder() / "raytf-xla"
        compiled.mkdir(exist_ok=True)
        flags = f"{os.environ.get('TF_XLA_FLAGS', '')} --tf_xla_persistent_cache_directory={compiled}"
        os.environ["TF_XLA_FLAGS"] = flags.strip()
    import tensorflow as tf

    if exact:
        tf.config.experimental.enable_op_determinism()
    if threads:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    for device in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(device, True)
    _phases.mark("tensorflow")


def _begin_attempt(job: Job) -> tuple[str, list[str], int | None]:
    """A new attempt's name, those before it, and the step of the newest checkpoint on storage where that is known."""
    attempt = new_attempt()
    return attempt, *ray.get(job.monitor.begin.remote(attempt))


#: Since this process was given its rank.
_phases = Phases()

#: Freeing TensorFlow's objects can take longer than the process has left to live.
_keep: list[Any] = []


def run(job: Job) -> dict[str, Any] | None:
    """Train, and return the run's result on rank 0.

    Raises:
        WorkerLostError: a peer is gone; Ray Train starts a new group.
        RaytfError: any other is one that another attempt would meet again.
    """
    context = ray.train.get_context()
    pulse = Pulse(job.monitor, context.get_world_rank(), context.get_world_size())
    try:
        return _run(job, pulse)
    except JobError as error:
        error.step = pulse.step
        raise
    finally:
        pulse.stop()


def _run(job: Job, pulse: Pulse) -> dict[str, Any] | None:
    import tensorflow as tf

    errors = tf.errors
    lost = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    try:
        worker = Worker(job, pulse)
        _keep.append(worker)
        return worker.train()
    except (RaytfError, OSError, ray.exceptions.RayError) as error:
        raise _inexact(job, error) or error from None
    except lost as error:
        raise WorkerLostError(one_line(error, 500)) from None
    except (errors.InternalError, errors.UnknownError, errors.FailedPreconditionError) as error:
        # What gRPC says of a peer that died in the middle of a message, and of a port that was just taken.
        if "ollective" in str(error) or "onnection" in str(error) or "gRPC" in str(error):
            raise WorkerLostError(one_line(error, 500)) from None
        raise _as_job_error(error) from None
    except Exception as error:
        raise _inexact(job, error) or _as_job_error(error) from None


def _try(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


def _inexact(job: Job, error: Exception) -> RaytfError | None:
    """What an error says about exact mode, where that is on."""
    from raytf import exact

    return exact.explain(error) if job.config.compute.exact and not isinstance(error, ExactnessError) else None


def _as_job_error(error: Exception) -> JobError:
    import traceback

    return JobError(f"training raised {type(error).__name__}: {one_line(error, 500)}", traceback.format_exc())


class Worker:
    """One rank of one attempt."""

    def __init__(self, job: Job, pulse: Pulse):
        from raytf import exact
        from raytf import model as models
        from raytf.callbacks import Callbacks
        from raytf.checkpoint import durable, format
        from raytf.snapshots import Snapshots
        from raytf.step import TrainStep
        from raytf.strategies.multi_worker import Group

        self.job, self.config, self.pulse = job, job.config, pulse
        self.group = WatchedGroup(Group(), pulse)
        self.rank, self.world_size = self.group.rank, self.group.world_size
        self.storage = Storage(job.run_uri)
        # Ray's way to broadcast would wait for an actor that starts with the group.
        begun = json.dumps(_begin_attempt(job)).encode() if self.rank == 0 else b""
        self.attempt, self._attempts, self._known_step = json.loads(self.group.share(begun))
        _phases.mark("rendezvous")
        self.reporter = Reporter(job, self.storage, self.rank, self.world_size, self.attempt)
        watch.start_in_worker(self.config.notices, job.run_uri, self.reporter.say_here, self.reporter.event)
        self.sources: Sources = ray.get(job.sources)
        self.plan = job.plan
        self.shards = assign(self.plan.shards, self.world_size)[self.rank]
        self.pipeline = self._pipeline(self.sources.train, self.plan, training=True)
        given = [self.sources.train, self.sources.validation, self.sources.test]
        self.model = models.build(
            job.model,
            self.pipeline.sample(),
            [source for source in given if source is not None],
            self.config.compute,
            self.config.batch.seed,
            self.reporter.say,
        )
        self.pipeline.prepare(len(models.seed_states(self.model)), models.sparse_classes(self.model))
        self.named = format.variables(self.model)
        self.identity = batch_identity(self.config, self.plan.records) | {
            f"model {key}": value for key, value in models.describe(self.model).items()
        }
        self.identity["training data"] = fingerprint(self.sources.train)
        self.identity["class weights"] = json.dumps(sorted((job.class_weight or {}).items()))
        self.identity["augmentation"] = str(job.augment is not None)
        self.train_step = TrainStep(
            self.model,
            self.plan,
            self.shards,
            self.group.all_reduce,
            self.pipeline.template,
            self.pipeline.leaf_specs,
            _FLAGS,
            self.config.compute.jit,
            self.config.compute.reduction == "fixed",
        )
        if self.config.compute.exact:
            self.identity |= exact.admit(
                self.train_step, self.pipeline, self.config.batch.seed, self.group, job.augment
            )
        _phases.mark("build")
        self.damaged: list[str] = []
        self.snapshots = Snapshots(
            job.run_uri,
            self.group,
            self.attempt,
            self.config.checkpoints.snapshot_every_steps,
            job.monitor,
            self.reporter.say_here,
        )
        chosen = self._choose_checkpoint(durable)
        self.named |= self.train_step.reduction.state()
        if chosen is not None:
            self.reporter.resume(chosen.step, chosen.document.get("files"))
        self.callbacks = Callbacks(
            job.callbacks,
            self.model,
            self.group,
            self.reporter.say,
            self.reporter.files,
            {"epochs": -(-job.total_steps // self.plan.steps_per_epoch), "steps": self.plan.steps_per_epoch},
            epoch=None if chosen is None else self.plan.locate(chosen.step)[0],
            watch=lambda: pulse.doing(Activity.CALLBACK),
        )
        self.step = 0
        self.train_seconds = 0.0
        #: That a worker waited, on average, because shards did not divide evenly.
        self.imbalance_seconds = 0.0
        uneven = imbalance(self.plan.shards, self.world_size)
        self._imbalance_per_step = uneven and uneven * self._mean_over_ranks(self.train_step.shard_seconds())
        self.history: list[dict[str, Any]] = []
        self.stopped_early = False
        #: Of the newest checkpoint on storage; None where there is none.
        self.durable_step: int | None = None
        self.log = StepLog(self.storage, self.attempt)
        best = self.config.checkpoints.keep_best
        self.goal = None if best is None else Goal.of(best)
        #: The metric and the best of its values at a checkpoint on storage.
        self.best: tuple[str, float] | None = None
        #: Begins a save of an earlier state, that with the best value, once the one under way has ended.
        self._waiting_save: Callable[[], None] | None = None
        self._begin(chosen, format)
        tier = "new" if chosen is None else "memory" if "rows" in chosen.document else "durable"
        #: Where this attempt began: the step, and which tier it is from.
        self._from = (self.step, tier)
        #: For which training stood still to save or copy the state, seconds.
        self.stall_seconds = 0.0
        _phases.mark("restore")
        # Not sooner: the keeper drops what is no longer needed.
        self.snapshots.begin(self.named)
        self.saver = durable.Saver(
            self.storage,
            self.rank,
            self.world_size,
            self.attempt,
            self.config.checkpoints.keep,
            self.reporter.say_here,
            restored=None if chosen is None or "rows" in chosen.document else chosen.name,
            damaged=self.damaged,
            late=self.reporter.upload_anew,
            goal=self.goal,
            over=self._attempts,
            fence=functools.partial(check_owner, self.storage, job.lease),
        )
        #: Rank 0's: the others learn by the votes when to save.
        self.outage = policy.Outage(random.random)
        checkpoints = self.config.checkpoints
        self.cadence = policy.Cadence.of(checkpoints.checkpoint_every_steps, checkpoints.checkpoint_every_seconds)
        self.saved_step, self.saved_at = self.step, time.monotonic()
        self.saving_step = 0
        self.saving_best: tuple[str, float] | None = None
        #: Whether rank 0 may know something new that is not a function of the step: the state of callbacks.
        self._is_news = self.callbacks.active
        self.call_steps = self.config.compute.steps_per_call or 1
        self._seconds_per_step = 0.0
        self._trained = False
        #: Kinds of call that TensorFlow has compiled: those that are full, or not.
        self._traced: set[bool] = set()
        self._evaluators: dict[str, Any] = {}

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any] | None:
        """Train to the end of the run; the result on rank 0."""
        total, plan = self.job.total_steps, self.plan
        pending: deque[Future[Call]] = deque()
        asked = self.step
        self.pulse.settle(Activity.LOOP, self.step)
        self.show("starting")
        while self.step < total and not self.stopped_early:
            while asked < total and len(pending) < _PREFETCH:
                end = plan.call_end(asked, self.call_steps, total, self.cadence.every_steps)
                pending.append(self.pipeline.submit(asked, end))
                asked = end
            epoch, inside = plan.locate(self.step)
            if inside == 0:
                self.callbacks.run("on_epoch_begin", epoch)
                self._is_news = self.callbacks.active
            with self.pulse.doing(Activity.INPUT):
                call = pending.popleft().result()
            self.callbacks.run_batch("on_train_batch_begin", inside)
            began = time.perf_counter()
            with self.pulse.doing(Activity.STEP if call.full in self._traced else Activity.TRACE):
                outcome = self.train_step(call, self._flags(call.stop))
            self._traced.add(call.full)
            self.train_seconds += time.perf_counter() - began
            self._check_finite(call, outcome)
            self._after_call(call, outcome, epoch, time.perf_counter() - began)
            self.pulse.advance(self.step, call.stop - call.start, len(self.shards))
            if self.step % plan.steps_per_epoch == 0:
                self._end_epoch(epoch)
            if outcome.flags[_PROBE]:
                self.pulse.probed(*self.train_step.sample_shard(_PROBE_SECONDS))
            began = time.perf_counter()
            if outcome.flags[_COPY]:
                self._copy(bool(outcome.flags[_SHARE]))
            self._save_protocol(outcome.flags)
            self.stall_seconds += time.perf_counter() - began
            if outcome.flags[_PARK]:
                self._park()
        self.show("saving")
        self._finish_saving()
        if self.step % plan.steps_per_epoch:
            # The run ends inside an epoch: what was saved is from before this, to go on from with more steps.
            self._end_epoch(plan.locate(self.step)[0])
        return self._finish()

    def _after_call(self, call: Call, outcome: Any, epoch: int, seconds: float) -> None:
        self.step = call.stop
        self.imbalance_seconds += (call.stop - call.start) * self._imbalance_per_step
        self.log.add(call.start + 1, epoch, outcome.losses, outcome.learning_rates)
        last = self.plan.locate(call.stop - 1)[1]
        if self.callbacks.has_batch_hooks:
            self.callbacks.run_batch("on_train_batch_end", last, self._logs())
        else:
            self.callbacks.run_batch("on_train_batch_end", last)
        self.stopped_early = self.callbacks.stopped
        if not self.config.compute.steps_per_call and outcome.flags[_CALL_STEPS]:
            self.call_steps = int(outcome.flags[_CALL_STEPS])
        self._seconds_per_step = seconds / (call.stop - call.start)
        if not self._trained:
            self._trained = True
            warm.trains()
            _phases.mark("first step")
            self._tell_of_start()
        if self.reporter.is_status_due():
            loss, rate = float(outcome.losses[-1]), float(outcome.learning_rates[-1])
            self.reporter.scalars({"batch_loss": loss, "learning_rate": rate}, call.stop)
            self.show("training")

    def _tell_of_start(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        fields = {"attempt": self.attempt, "world_size": self.world_size, "from_step": self._from[0]}
        if self.rank == 0:
            self.reporter.event("attempt", **fields, tier=self._from[1], node=node, phases=_phases.seconds)
        self.show("training")

    def _end_epoch(self, epoch: int) -> None:
        logs = self._logs()
        if self.sources.validation is not None and (epoch + 1) % self.job.validation_freq == 0:
            self.show("validating")
            with self.pulse.doing(Activity.VALIDATION):
                logs |= {f"val_{k}": v for k, v in self._evaluate("validation", self.sources.validation).items()}
        self.callbacks.run("on_epoch_end", epoch, dict(logs))
        self.stopped_early = self.callbacks.stopped
        self.history.append({"epoch": epoch, "step": self.step, **logs})
        self.model.reset_metrics()
        if self.rank == 0:
            self.reporter.scalars({f"epoch_{k}": v for k, v in logs.items()}, self.step)
            self.reporter.say(f"epoch {epoch + 1}: " + ", ".join(f"{k} {v:.4f}" for k, v in logs.items()))
        report, best = self._sum([float(self.reporter.is_report_due()), float(self._is_best(logs))])
        if report:  # rank 0's answers, on every rank
            with self.pulse.doing(Activity.REPORT):
                self.reporter.report({**logs, "epoch": epoch, "step": self.step})
        if best:
            self._waiting_save = self._prepare_save()

    def _is_best(self, logs: dict[str, float]) -> bool:
        """Whether this state is to be kept for its metric; rank 0 knows."""
        if self.goal is None or self.step % self.plan.steps_per_epoch:
            return False
        metric = self.goal.metric
        if metric not in logs and (any(name.startswith("val_") for name in logs) or not metric.startswith("val_")):
            raise ConfigError(f"--keep-best {metric}: there is no such metric. Expected one of {', '.join(logs)}.")
        return self.rank == 0 and self.goal.is_better(self.goal.value(logs), self._best_value())

    def _best_value(self) -> float | None:
        return self.best[1] if self.best and self.goal and self.best[0] == self.goal.metric else None

    def _check_finite(self, call: Call, outcome: Any) -> None:
        bad = np.flatnonzero(~(np.isfinite(outcome.losses) & outcome.finite))
        if not len(bad):
            return
        step, loss = call.start + int(bad[0]), outcome.losses[bad[0]]
        what = "a gradient became NaN or infinite" if np.isfinite(loss) else f"the loss became {loss}"
        epoch, inside = self.plan.locate(step)
        kept = (
            "no checkpoint was written yet"
            if self.durable_step is None
            else f"the checkpoint of step {self.durable_step} is kept"
        )
        raise NonFiniteLossError(
            f"{what} at step {step + 1} (epoch {epoch + 1}, batch {inside + 1}); {kept}. "
            "Lower the learning rate, clip gradients (global_clipnorm), or look at that batch.",
            step + 1,
        )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _choose_checkpoint(self, durable: Any) -> Any:
        """The newest checkpoint that every rank could read whole, in memory or on storage; None for a new run."""
        snapshots = self.snapshots.find(self._attempts)
        # Where memory holds what the driver knows to be on storage, or later steps, storage need not be asked.
        newer = [] if self._known_step is None else [s for s in snapshots if s.step >= self._known_step]
        found = self._first_that_loads(durable, newer)
        if found is None:
            names = self._list_durable()
            rest = [snapshot for snapshot in snapshots if snapshot not in newer]
            found = self._first_that_loads(durable, policy.candidates(rest, names))
            if found is None and names:
                raise CheckpointError(
                    f"none of the {len(names)} checkpoints of run {self.config.run.run!r} can be restored; the reasons "
                    "are above. Mend them, or choose another --run name to begin anew."
                )
        return found

    def _first_that_loads(self, durable: Any, candidates: Sequence[policy.Generation | str]) -> Any:
        """The first of some snapshots and checkpoints that every rank can read whole, or None."""
        for candidate in candidates:
            found, problem = None, ""
            try:
                if isinstance(candidate, str):
                    found = durable.load(self.storage, candidate)
                else:
                    found = self.snapshots.load(candidate)
            except CheckpointError as error:  # not an outage of storage: that must not make a run begin anew
                problem = str(error)
            if self._sum([float(found is not None)])[0] == self.world_size and found is not None:
                self._check_identity(found)
                return found
            problem = problem or "another rank could not read it"
            if isinstance(candidate, str):
                self.damaged.append(candidate)
                self.reporter.say(f"checkpoint {candidate} is skipped: {problem}")
            else:
                self.reporter.say(f"a snapshot is skipped: {problem}")
        return None

    def _list_durable(self) -> list[str]:
        names = manifest.list_complete(self.storage) if self.rank == 0 else []
        return json.loads(self.group.share(json.dumps(names).encode()))

    def _check_identity(self, found: Any) -> None:
        difference = differences(found.document["identity"], self.identity)
        if difference:
            raise RunMismatchError(
                f"run {self.config.run.run!r} in storage was made with other settings: {difference}. "
                "Give them as they were, or choose another --run name."
            )

    def _begin(self, chosen: Any, format: Any) -> None:
        self.callbacks.run("on_train_begin")
        if chosen is None:
            # Equal seeds give equal weights on equal machines; rank 0's go to all, whatever the machines are.
            values = [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in self.named.values()]
            for variable, value in zip(self.named.values(), self.group.broadcast(values), strict=True):
                if self.rank != 0:
                    variable.assign(value)
        else:
            if chosen.step % self.plan.steps_per_epoch:
                self.callbacks.run("on_epoch_begin", self.plan.locate(chosen.step)[0])
            own = {k: v for k, v in chosen.tensors.items() if not k.startswith("callback/")}
            format.restore(self.named, own)
            document = chosen.document
            self.step = chosen.step
            self.train_seconds = document["train_seconds"]
            self.imbalance_seconds = document["imbalance_seconds"]
            self.history = document["history"]
            self.stopped_early = document["stopped_early"]
            self.durable_step = document.get("durable_step", chosen.step)
            best = document.get("best")
            self.best = None if best is None else (best[0], best[1])
            self.log.restore(document.get("rows", ()))
            self.callbacks.load_state(document["callbacks"], chosen.tensors)
            place = chosen.name if "rows" in document else f"checkpoint {chosen.name}"
            self.reporter.say(f"restored step {self.step} from {place}")
        self._note = functools.partial(
            write_attempt, self.storage, self.attempt, self.world_size, self.step, time.time()
        )
        if self.rank == 0:
            # Beside training: storage that is slow or away does not hold up a restart. It comes again with a save.
            threading.Thread(target=_try, args=[self._note], daemon=True, name="raytf-note").start()

    def _flags(self, stop: int) -> np.ndarray:
        """This rank's flags for the call that ends at step `stop`."""
        flags = np.zeros(_FLAGS, np.float32)
        votes = self.saver.votes()
        flags[_WRITTEN], flags[_COMMITTED], flags[_FAILED] = votes.written, votes.committed, votes.failed
        if self.rank == 0:
            flags[_PARK] = self.reporter.is_parking_wanted()
            flags[_COPY] = self.snapshots.wish(stop, self._seconds_per_step)
            ends_epoch = stop % self.plan.steps_per_epoch == 0
            flags[_SHARE] = self._is_news or (self.callbacks.active and ends_epoch) or self.callbacks.has_batch_hooks
            flags[_PROBE] = self.world_size > 1 and self.pulse.is_probe_due()
            idle, now = self.saver.phase is policy.Phase.IDLE, time.monotonic()
            due = self.cadence.is_due(stop, now, self.saved_step, self.saved_at)
            flags[_WANT_SAVE] = idle and self.outage.allows(now, due)
            if not self.config.compute.steps_per_call and self._seconds_per_step:
                wanted = max(1.0, min(_CALL_SECONDS / self._seconds_per_step, _MAX_CALL_STEPS))
                flags[_CALL_STEPS] = 2 ** int(np.log2(wanted))
        return flags

    def _save_protocol(self, flags: np.ndarray) -> None:
        votes = policy.Votes(*(float(flags[i]) for i in (_WANT_SAVE, _WRITTEN, _COMMITTED, _FAILED)))
        if self._waiting_save is not None:
            votes = dataclasses.replace(votes, want=1)
        self.saver.phase, event = policy.advance(self.saver.phase, votes, self.world_size)
        if event is policy.Event.BEGIN:
            self._begin_save()
        elif event is policy.Event.COMMIT:
            self.saver.commit()
        elif event is policy.Event.FAILED:
            if self.rank == 0:
                why = self.saver.failure
                self.reporter.event(
                    "save_failed", of_step=self.saving_step, why="another rank failed" if why is None else brief(why)
                )
            self._save_failed()
        elif event is policy.Event.DONE:
            self.saver.done()
            self.durable_step = self.saving_step
            value = self.saving_best
            if value is not None and self.goal and self.goal.is_better(value[1], self._best_value()):
                self.best = value
            if self.outage.failures:
                lasted = clock_text(time.monotonic() - self.outage.since)
                self.reporter.say(f"saving works again: step {self.saving_step} is on storage, after {lasted}")
                self.outage.end()
            if self.rank != 0:
                self.log.forget(self.saving_step)
            if self.rank == 0:
                self.reporter.event("save", name=self.saver.name, of_step=self.saving_step)
            with self.pulse.doing(Activity.REPORT):
                self.reporter.report({**self._logs(), "step": self.step}, self.saver.name)

    def _save_failed(self) -> None:
        if not self.outage.failures:
            self.reporter.say(
                f"the checkpoint of step {self.saving_step} was NOT saved; training goes on, the last good one stays, "
                "and saving is tried again"
            )
        self._waiting_save = None  # its try would come too soon; the next better one will be kept
        failure = self.saver.failure
        if self.saver.drop():
            self.log = self.log.renewed()  # the old one may still be written
        self.outage.fail(time.monotonic(), "another worker's part" if failure is None else brief(failure))

    def _copy(self, share_rank_zero: bool) -> None:
        """Copy the present state into the memory of this rank's node; every rank does at the same step."""
        if share_rank_zero:
            state = (*self.callbacks.state(), self.reporter.pack_files()) if self.rank == 0 else None
            self.snapshots.share_rank_zero(state)
            self._is_news = False
        live = {
            "train_seconds": self.train_seconds,
            "imbalance_seconds": self.imbalance_seconds,
            "stopped_early": self.stopped_early,
            "durable_step": self.durable_step,
            "world_size": self.world_size,
            "best": self.best,
        }
        self.snapshots.copy(
            self.step,
            live,
            len(self.history),
            lambda: {"identity": self.identity, "history": self.history},
            self.log.since(-1 if self.durable_step is None else self.durable_step),
        )

    def _begin_save(self) -> None:
        begin, self._waiting_save = self._waiting_save or self._prepare_save(), None
        begin()

    def _prepare_save(self) -> Callable[[], None]:
        """Copy the present state; what is returned begins to save it, now or later."""
        from raytf.checkpoint import codec, format

        # So that what is in memory is never older than what is on storage.
        self._copy(self.callbacks.active)
        values, arrays = self.callbacks.state()
        sizes = {name: int(np.prod(v.shape, dtype=np.int64)) for name, v in self.named.items()}
        own = format.snapshot(self.named, codec.shares(sizes, self.world_size)[self.rank])
        document = {
            "identity": self.identity,
            "train_seconds": self.train_seconds,
            "imbalance_seconds": self.imbalance_seconds,
            "history": list(self.history),
            "stopped_early": self.stopped_early,
            "callbacks": values,
            "world_size": self.world_size,
        }
        step, best = self.step, self.best
        if self.goal is not None:
            value = self.goal.value_at(step, self.history)
            if value is not None and self.goal.is_better(value, self._best_value()):
                best = (self.goal.metric, value)
        document["best"] = best
        trainable = {id(v) for v in self.model.trainable_variables}
        finite = [name for name, v in self.named.items() if id(v) in trainable]
        return lambda: self._start_save(step, own | arrays, document, finite, best)

    def _start_save(
        self,
        step: int,
        tensors: dict[str, np.ndarray],
        document: dict[str, Any],
        finite: list[str],
        best: tuple[str, float] | None,
    ) -> None:
        log = self.log
        rows = log.take() if self.rank == 0 else np.empty((0, 4))

        def first() -> None:
            if self.rank == 0:
                self._note()
            log.write(rows)
            self.reporter.upload()

        self.saver.begin(step, tensors, document, finite, first)
        self.saving_step, self.saving_best = step, best
        self.saved_step, self.saved_at = step, time.monotonic()

    def _finish_saving(self) -> None:
        """Have the last state on storage, whatever it takes."""
        self.show("saving")
        if not self._save_now(_LAST_SAVE_PAUSES):
            raise CheckpointError(
                f"the last checkpoint, of step {self.step}, could not be saved: "
                f"{self.saver.failure or 'another rank failed'}. Mend the storage and run the same command: it goes on "
                f"from step {self.durable_step or 0}."
            )

    def _save_now(self, pauses: tuple[float, ...]) -> bool:
        """Bring the save under way to its end, and save the present state too; whether it is on storage then."""
        with self.pulse.doing(Activity.SAVE):
            self._drain_save()
            for pause in pauses:
                if self.durable_step == self.step:
                    return True
                time.sleep(pause)
                self._begin_save()
                self.saver.phase = policy.Phase.WRITING
                self._drain_save()
            return self.durable_step == self.step

    def _park(self) -> None:
        """The number of workers is about to change: save this step, and wait to be replaced or released."""
        self.show("resizing")
        self.reporter.answer(self._save_now((0.0,)))
        with self.pulse.doing(Activity.PARK):
            while not self._sum([float(self.reporter.is_released())])[0]:
                time.sleep(_PARK_SECONDS)
        self.show("training")

    def _drain_save(self) -> None:
        while self.saver.phase is not policy.Phase.IDLE or self._waiting_save is not None:
            votes = self.saver.votes()
            flags = np.zeros(_FLAGS, np.float32)
            flags[[_WRITTEN, _COMMITTED, _FAILED]] = votes.written, votes.committed, votes.failed
            self._save_protocol(self._sum(flags))
            time.sleep(0.02)

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any] | None:
        from raytf import export
        from raytf import model as models

        self.pulse.settle(Activity.END, self.step)
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        metrics = {k: v for k, v in (self.history[-1] if self.history else {}).items() if k not in ("epoch", "step")}
        # Before the test: EarlyStopping restores its best weights here.
        self.callbacks.run("on_train_end", dict(metrics))
        if self.sources.test is not None:
            self.show("testing")
            metrics |= {f"test_{k}": v for k, v in self._evaluate("test", self.sources.test).items()}
        if self.rank != 0:
            return None
        self.show("exporting")
        attempts = read_attempts(self.storage)
        samples = self._samples()
        result = {
            "run": self.config.run.run,
            "status": "finished",
            "metrics": metrics,
            "steps": self.step,
            "epochs": self.step / self.plan.steps_per_epoch,
            "samples": samples,
            "stopped_early": self.stopped_early,
            "wall_seconds": time.time() - attempts[0]["time"],
            "train_seconds": self.train_seconds,
            "imbalance_seconds": self.imbalance_seconds,
            "samples_per_second": samples / self.train_seconds if self.train_seconds else 0.0,
            "world_sizes": sorted({a["world_size"] for a in attempts}),
            "restarts": len(attempts) - 1,
            "weights_sha256": models.weights_sha256(self.model),
            "history": self.history,
            "export": export.export(self.model, self.storage),
        }
        self.reporter.upload()
        return result

    def _samples(self) -> int:
        epochs, rest = divmod(self.step, self.plan.steps_per_epoch)
        return epochs * self.plan.records + sum(int(self.plan.counts(s).sum()) for s in range(rest))

    def show(self, phase: str) -> None:
        """Tell the driver where the run is; rank 0 does."""
        metrics = self._logs() if phase == "training" and self.rank == 0 and self._trained else None
        self.reporter.show(
            phase,
            self.step,
            self.durable_step,
            metrics,
            snapshot=self.snapshots.step,
            snapshot_bytes=self.snapshots.bytes,
            stall_seconds=self.stall_seconds,
            trouble=self._trouble(),
        )

    def _trouble(self) -> SaveTrouble | None:
        outage, now = self.outage, time.monotonic()
        return SaveTrouble(now - outage.since, outage.retry_at - now, outage.why) if outage.failures else None

    def _evaluate(self, name: str, source: Source) -> dict[str, float]:
        from raytf.evaluation import Evaluator

        if name not in self._evaluators:
            plan = StepPlan(source.records, self.plan.global_batch_size, self.plan.shards)
            pipeline = self._pipeline(source, plan, training=False)
            self._evaluators[name] = Evaluator(self.model, pipeline, self.group, self.callbacks)
        return self._evaluators[name].run(self.pulse.progress)

    def _logs(self) -> dict[str, float]:
        from raytf import model as models

        return models.logs(self.model)

    def _mean_over_ranks(self, value: float) -> float:
        return float(self._sum([value])[0]) / self.world_size

    def _sum(self, values: Any) -> np.ndarray:
        return self.group.sum(np.asarray(values, np.float32))

    def _pipeline(self, source: Source, plan: StepPlan, training: bool) -> Pipeline:
        return Pipeline(
            source,
            plan,
            self.shards,
            self.config.batch.seed,
            shuffle=training,
            class_weight=self.job.class_weight if training else None,
            augment=self.job.augment if training else None,
        )
