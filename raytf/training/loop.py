"""The training loop, as every worker runs it.

All ranks go through it in step: whatever decides what comes next is either arithmetic on the step, or a flag that was
added over the ranks with the gradients. Rank 0 alone writes logs and talks to the driver.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from raytf._ray import raylets
from raytf.checkpoint import variables
from raytf.checkpoint.digest import Digest
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.memory import MemoryTier, place_on_node
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.restore import Restorer
from raytf.checkpoint.tier import GroupAttempt
from raytf.checkpoint.training_state import TrainingState
from raytf.cluster.preemption import watcher
from raytf.config import precision
from raytf.data.pipeline import CallBatch, Pipeline
from raytf.data.plan import StepPlan, assign, imbalance
from raytf.data.prefetch import DEPTH, Prefetch
from raytf.data.sources import Source, fingerprint
from raytf.distributed import buckets, factory, memory_needs, ranks, worker_table
from raytf.distributed.devices import DeviceRoom, computes_on_gpu, free_bytes
from raytf.distributed.step_flags import LENGTH, StepFlag, vector
from raytf.errors import ConfigError, NonFiniteLossError, RunMismatchError, StorageError
from raytf.inference import architecture, export
from raytf.runs.lease import check_owner
from raytf.runs.restart_phases import Phases
from raytf.runs.run_log import StepLog, new_attempt, read_attempts, write_attempt
from raytf.storage.storage import Storage
from raytf.training import exact, gpu_probe, learning_rate, run_identity, warm_pool
from raytf.training import model as models
from raytf.training.callbacks import Callbacks
from raytf.training.checkpoint_policy import CheckpointPolicy
from raytf.training.checkpointer import Checkpointer, Listener
from raytf.training.device_placement import Placement
from raytf.training.evaluation import Evaluator
from raytf.training.heartbeat import Activity, Heartbeat, WatchedGroup
from raytf.training.job import Sources, TrainingJob
from raytf.training.learning_rate import LearningRate
from raytf.training.live_state import LiveState
from raytf.training.reporter import Reporter, Saves
from raytf.training.step import StepOptions, StepOutcome, TrainStep
from raytf.training.upload import Upload

#: How long a call should take: long enough that its overhead does not count, short enough to save and stop soon.
_CALL_SECONDS = 0.1
_MAX_CALL_STEPS = 32
#: Seconds between two looks of waiting ranks whether to go on.
_PARK_SECONDS = 0.1
#: Seconds for which a shard alone is measured, now and then.
_PROBE_SECONDS = 0.05


def _begin_attempt(job: TrainingJob) -> tuple[str, list[str], int | None]:
    """A new attempt's name, those before it, and the step of the newest checkpoint on storage where that is known."""
    attempt = new_attempt()
    return attempt, *job.monitor.begin(attempt)


def _try(call: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        call()


class Worker:
    """One rank of one attempt.

    Args:
        job: to be done.
        pulse: of this rank.
        phases: of the restart; marked as they end.
    """

    def __init__(self, job: TrainingJob, pulse: Heartbeat, phases: Phases):
        self.job, self.config, self.pulse, self._phases = job, job.config, pulse, phases
        self.group = WatchedGroup(self._join(), pulse)
        self.rank, self.world_size, self.devices = self.group.rank, self.group.world_size, self.group.devices
        self.storage = Storage(job.run_uri)
        # Ray's way to broadcast would wait for an actor that starts with the group.
        begun = json.dumps(_begin_attempt(job)).encode() if self.rank == 0 else b""
        self.attempt, earlier, known_step = json.loads(self.group.share(begun))
        if not self.config.strategy.has_servers:  # the coordinator has no GPU
            gpu_probe.check()
        phases.mark("rendezvous")
        place = place_on_node(self.group)
        ranks.take(ranks.RankInfo(self.rank, self.world_size, *place))
        self.reporter = Reporter(job, self.storage, self.rank, self.workers, self.attempt)
        if self.group.route is not None and self.group.route.why:
            self.reporter.say(str(self.group.route))
        if self.config.strategy.show_cluster and not self.config.strategy.has_servers:  # the driver shows those
            worker_table.show(self.group, self.config.strategy.strategy, place[0], self.reporter.say)
        watcher.start_in_worker(self.config.notices, job.run_uri, self.reporter.say_here, self.reporter.event)
        self.sources: Sources = ray.get(job.sources)
        self.plan = job.plan
        self.shards = assign(self.plan.shards, self.world_size)[self.rank]
        self.pipeline = self._pipeline(self.sources.train, self.plan, training=True)
        attempt = GroupAttempt(self.attempt, self.rank, self.world_size, tuple(earlier))
        self.snapshots = MemoryTier(
            job.run_uri,
            self.group,
            attempt,
            0 if self.config.strategy.has_servers else self.config.checkpoints.snapshot_every_steps,
            job.monitor.handle,
            self.reporter.say_here,
            place,
        )
        policy = CheckpointPolicy.of(self.config.checkpoints)
        durable = DurableTier(
            self.storage,
            attempt,
            Keep(self.config.checkpoints.keep, policy.goal),
            self.reporter.say_here,
            fence=functools.partial(check_owner, self.storage, self.job.lease),
            late=self.reporter.upload_anew,
        )
        restorer = Restorer(self.snapshots, durable, self.group, self.reporter.say)
        restorer.begin(known_step)
        self._build()
        self._check_needs(place[1], not earlier)
        phases.mark("build")
        self.train_step.trace()
        phases.mark("trace")
        chosen = restorer.find(self._check_identity)
        self.named |= self.train_step.reduction.state()
        self.state = TrainingState.of(chosen, known_step)
        if chosen is not None:
            self.reporter.resume(chosen.step, chosen.files)
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
        uneven = imbalance(self.plan.shards, min(self.plan.shards, self.world_size * len(self.devices.names)))
        self._imbalance_per_step = uneven and uneven * self._mean_over_ranks(self.train_step.shard_seconds())
        self._begin(chosen)
        tier = "new" if chosen is None else "memory" if chosen.is_in_memory else "durable"
        #: Where this attempt began: the step, and which tier it is from.
        self._from = (self.state.step, tier)
        if chosen is None and self.rank == 0:  # a run that goes on has heard of it
            for problem in export.obstacles(self.model):
                self.reporter.say(f"WARNING: {problem}")
        phases.mark("restore")
        # Not sooner: the keeper drops what is no longer needed.
        most = memory_needs.held(
            variables.size_of(self.named), self.world_size, self.config.checkpoints.keep_best is not None
        )
        room = DeviceRoom(most, free_bytes, self.reporter.say)
        self._source = functools.partial(variables.Variables, self.named, may_hold=room)
        self.snapshots.reserve(variables.sizes(self.named), self._source)
        pulse.also(self.snapshots.look)
        self.live = self._live_state(chosen)
        listener = Listener(self.reporter, self.pulse, self._logs)
        self.saving = Checkpointer(self.live, self.snapshots, durable, self.group, policy, listener, self._replicas())
        self.saving.start()
        self.call_steps = self.config.compute.steps_per_call or 1
        self._seconds_per_step = 0.0
        self._trained = False
        #: Kinds of call that TensorFlow has compiled: those that are full, or not.
        self._traced: set[bool] = set()
        self._evaluators: dict[str, Evaluator] = {}
        self._placement = Placement(self.storage, self.attempt, self.rank, self.reporter.say_here)

    @property
    def _is_placement_wanted(self) -> bool:
        return self.config.strategy.log_device_placement and not self._trained

    def _join(self) -> Any:
        """This process's place among the ranks, before anything of TensorFlow."""
        given = ray.get_runtime_context().get_assigned_resources()
        return factory.make(self.config.strategy, float(given.get("GPU", 0.0)))

    @property
    def workers(self) -> int:
        """That compute gradients: all ranks."""
        return self.world_size

    def _build(self) -> None:
        """The model, the compiled step, and what identifies the run."""
        job, compute = self.job, self.config.compute
        given = [self.sources.train, self.sources.validation, self.sources.test]
        with self.devices.at_home():
            self.model = models.build(
                job.model,
                self.pipeline.sample(),
                [source for source in given if source is not None],
                compute,
                self.config.batch.seed,
                self.reporter.say,
                job.precision,
            )
        if self.config.strategy.has_servers:
            precision.check_for_servers(models.scaled_policy(self.model))
        self.pipeline.prepare(len(variables.seed_states(self.model)), models.sparse_classes(self.model))
        self.named = variables.variables(self.model)
        self.identity = run_identity.of_model(models.describe(self.model), models.code(self.model, (job.augment,)))
        # Of the driver, which has read the data once for all; but the records that training reads are those of here.
        known = job.identity or run_identity.of_run(job, self.sources)
        self.identity |= known | {"training data": fingerprint(self.sources.train)}
        self.train_step = self._make_step()
        if compute.exact:
            self.identity |= exact.admit(
                self.train_step, self.pipeline, self.config.batch.seed, self.group, job.augment
            )
            if self.devices.is_home_apart:  # a CPU's update of a GPU's gradients has other last bits than the GPU's
                self.identity["updates"] = "made on the host's CPU"

    def _check_needs(self, ranks_on_node: int, is_first: bool) -> None:
        """Tell what the state needs of a node's memory, on a run's first start.

        Raises:
            ConfigError: the node does not have it.
        """
        if self.config.strategy.has_servers:  # they hold the state
            return
        checkpoints = self.config.checkpoints
        own = {name: variables.size_of({name: v}) for name, v in self.named.items()}
        total, largest = sum(own.values()), max(own.values(), default=0)
        weights = sum(size for name, size in own.items() if name.startswith("model/"))
        found = memory_needs.MemoryNeeds(
            weights,
            total - weights,
            max(largest, -(-total // self.world_size)),
            largest,
            ranks_on_node,
            variables.is_on_host(self.named),
            checkpoints.snapshot_every_steps != 0,
            checkpoints.keep_best is not None,
        )
        refused = memory_needs.refusal(found, raylets.all_bytes(), bool(checkpoints.snapshot_every_steps))
        if refused is not None:
            raise ConfigError(refused)
        if is_first:
            self.reporter.say(found.text())

    def _make_step(self) -> Any:
        compute = self.config.compute
        options = StepOptions(
            flags=LENGTH,
            jit=compute.jit,
            fixed_point=compute.reduction == "fixed",
            compress=compute.compress_gradients,
            devices=self.devices,
            keeps_gradients=self.config.run.histograms_every > 0,
            overlap=self._overlap(),
        )
        return TrainStep(
            self.model,
            self.plan,
            self.shards,
            self.group.all_reduce if self.world_size > 1 else None,
            self.pipeline.template,
            self.pipeline.leaf_specs,
            options,
            self._make_rate(),
        )

    def _overlap(self) -> buckets.Overlap | None:
        most_shards = -(-self.plan.shards // self.world_size)  # of a worker
        return buckets.Overlap(buckets.BYTES, most_shards) if self.config.compute.overlap else None

    def _make_rate(self) -> LearningRate:
        """The rate of the model's optimizer, which is scaled by this; that of a checkpoint comes after."""
        law = learning_rate.law(self.config.rate, self.plan.global_batch_size, self.plan.steps_per_epoch)
        return LearningRate(self.model.optimizer, law)

    def _check_identity(self, found: Any) -> None:
        before = found.document.identity
        difference = run_identity.not_going_on(before, self.identity)
        if (
            not difference
            and before.get(run_identity.CODE, self.identity[run_identity.CODE]) != self.identity[run_identity.CODE]
        ):
            self.reporter.say(
                "the code of the model, of its loss or of a layer was changed: the run goes on with the new"
            )
        if difference:
            raise RunMismatchError(
                f"run {self.config.run.run!r} in storage was made with other settings: {difference}. "
                "Give them as they were, or choose another --run name."
            )

    def _begin(self, chosen: Checkpoint | None) -> None:
        """Give the model, the callbacks and the log the state of a checkpoint, or of a new run."""
        self.callbacks.run("on_train_begin")
        if chosen is None:
            # Equal seeds give equal weights on equal machines; rank 0's go to all, whatever the machines are.
            values = [np.array(v.numpy() if hasattr(v, "numpy") else v) for v in self.named.values()]
            for variable, value in zip(self.named.values(), self.group.broadcast(values), strict=True):
                if self.rank != 0:
                    variable.assign(value)
            return
        if chosen.step % self.plan.steps_per_epoch:
            self.callbacks.run("on_epoch_begin", self.plan.locate(chosen.step)[0])
        own = {k: v for k, v in chosen.tensors.items() if not k.startswith("callback/")}
        variables.restore(self.named, own)
        self.callbacks.load_state(chosen.document.callbacks, chosen.tensors)
        place = chosen.name if chosen.is_in_memory else f"checkpoint {chosen.name}"
        self.reporter.say(f"restored step {chosen.step} from {place}")

    def _live_state(self, chosen: Checkpoint | None) -> LiveState:
        """What checkpoints are made from; the log begins with the rows that only memory has."""
        log = StepLog(self.storage, self.attempt)
        if chosen is not None and chosen.rows is not None:
            log.restore(chosen.rows)
        note = self._note(self.state.step)
        if self.rank == 0:
            # Beside training: storage that is slow or away does not hold up a restart. It comes again with a save.
            threading.Thread(target=_try, args=[note], daemon=True, name="raytf-note").start()
        return LiveState(
            self.rank,
            self.state,
            self.identity,
            self.model,
            self.named,
            self._source,
            self.callbacks,
            log,
            self.reporter,
            note,
        )

    def _replicas(self) -> Replicas | None:
        """What compares the ranks' weights.

        Returns:
            None where they have none of their own.
        """
        if self.world_size == 1 or self.config.strategy.has_servers:
            return None
        # Another slot of the optimizer shows in the weights, but later: too late for who promises each bit.
        hashed = ("model/", "optimizer/") if self.config.compute.exact else ("model/",)
        return Replicas(
            self.group,
            self.named,
            Digest([v.value for name, v in self.named.items() if name.startswith(hashed)]).value,
            self.config.compute.exact,
            self.reporter.say,
            self.reporter.event,
            worker_table.whereabouts,
        )

    def _note(self, step: int) -> Callable[[], None]:
        """What writes down that this attempt has begun, and what of the model any export needs; rank 0 calls it."""
        began = time.time()
        described = architecture.describe(self.model, self.pipeline.sample()[0]) if self.rank == 0 else b""
        is_kept, turn = False, threading.Lock()

        def write() -> None:
            nonlocal is_kept
            with turn:
                write_attempt(self.storage, self.attempt, self.workers, step, began)
                if not is_kept:  # a large model's is not worth writing again with each save
                    self.storage.put(architecture.FILE, described)
                    is_kept = True

        return write

    # -- the loop ------------------------------------------------------------------------------------------------------

    def train(self) -> dict[str, Any] | None:
        """Train to the end of the run; the result on rank 0."""
        total, plan = self.job.total_steps, self.plan
        calls = Prefetch(self.pipeline, self.state.step, self._call_end)
        self.pulse.settle(Activity.LOOP, self.state.step)
        self.show("starting")
        while self.state.step < total and not self.state.stopped_early:
            calls.fill(total)
            epoch, inside = plan.locate(self.state.step)
            if inside == 0:
                self.callbacks.run("on_epoch_begin", epoch)
                self.saving.callbacks_ran()
            with self.pulse.doing(Activity.INPUT):
                call = calls.take()
            self.callbacks.run_batch("on_train_batch_begin", inside)
            began = time.perf_counter()
            activity = Activity.STEP if call.full in self._traced else Activity.TRACE
            with self.pulse.doing(activity), self._placement.read(self._is_placement_wanted):
                outcome = self.train_step(call, self._flags(call.stop))
            self._traced.add(call.full)
            self.state.train_seconds += time.perf_counter() - began
            self._check_finite(call, outcome)
            self._after_call(call, outcome, epoch, time.perf_counter() - began)
            self.pulse.advance(self.state.step, call.stop - call.start, len(self.shards))
            if self.state.step % plan.steps_per_epoch == 0:
                self._end_epoch(epoch)
            if outcome.flags[StepFlag.PROBE]:
                self.pulse.probed(*self.train_step.sample_shard(_PROBE_SECONDS))
            self.saving.act(outcome.flags)
            if outcome.flags[StepFlag.PARK]:
                self._park()
        self.show("saving")
        self.saving.finish()
        if self.state.step % plan.steps_per_epoch:
            # The run ends inside an epoch: what was saved is from before this, to go on from with more steps.
            self._end_epoch(plan.locate(self.state.step)[0])
        self.reporter.finish()
        return self._finish()

    def _call_end(self, step: int, stop: int) -> int:
        """Where a call that begins at a step ends: nothing that is due by the step lies within it."""
        due = self.saving.cadence.every_steps, self.config.run.histograms_every
        return min(self.plan.call_end(step, self.call_steps, stop, boundary) for boundary in due)

    def _after_call(self, call: CallBatch, outcome: StepOutcome, epoch: int, seconds: float) -> None:
        self.state.step = call.stop
        self.state.imbalance_seconds += (call.stop - call.start) * self._imbalance_per_step
        self.live.log.add(call.start + 1, epoch, outcome.losses, outcome.learning_rates)
        last = self.plan.locate(call.stop - 1)[1]
        if self.callbacks.has_batch_hooks:
            self.callbacks.run_batch("on_train_batch_end", last, self._logs())
        else:
            self.callbacks.run_batch("on_train_batch_end", last)
        self.state.stopped_early = self.callbacks.stopped
        if not self.config.compute.steps_per_call and outcome.flags[StepFlag.CALL_STEPS]:
            self.call_steps = int(outcome.flags[StepFlag.CALL_STEPS])
        self._seconds_per_step = seconds / (call.stop - call.start)
        if not self._trained:
            self._trained = True
            if self.rank == 0 and self.config.run.histograms_every:
                self.reporter.graph(self.train_step.probe_function.graph)
            warm_pool.trains()
            self._phases.mark("first step")
            self._tell_of_start()
        self._show_histograms(outcome)
        if self.reporter.is_status_due():
            loss, rate = float(outcome.losses[-1]), float(outcome.learning_rates[-1])
            self.reporter.scalars({"batch_loss": loss, "learning_rate": rate}, call.stop)
            self.show("training")

    def _show_histograms(self, outcome: StepOutcome) -> None:
        """Rank 0 writes them where they are due; what a call has told costs nothing that training waits for."""
        every = self.config.run.histograms_every
        if self.rank == 0 and every and self.state.step % every == 0:
            with self.pulse.doing(Activity.CALLBACK):
                values: dict[str, Any] = {f"weights/{w.path}": w.value for w in self.model.trainable_variables}
                gradients = self.train_step.named_gradients(outcome)
                values |= {f"gradients/{path}": gradient for path, gradient in gradients.items()}
                self.reporter.histograms(values, self.state.step)

    def _tell_of_start(self) -> None:
        node = ray.get_runtime_context().get_node_id()
        fields = {"attempt": self.attempt, "world_size": self.workers, "from_step": self._from[0]}
        if self.rank == 0:
            self.reporter.event("attempt", **fields, tier=self._from[1], node=node, phases=self._phases.seconds)
        self.show("training")

    def _end_epoch(self, epoch: int) -> None:
        logs = self._logs()
        if self.sources.validation is not None and (epoch + 1) % self.job.validation_freq == 0:
            self.show("validating")
            with self.pulse.doing(Activity.VALIDATION):
                logs |= {f"val_{k}": v for k, v in self._evaluate("validation", self.sources.validation).items()}
        self.callbacks.run("on_epoch_end", epoch, dict(logs))
        self.state.stopped_early = self.callbacks.stopped
        self.state.history.append({"epoch": epoch, "step": self.state.step, **logs})
        self.model.reset_metrics()
        if self.rank == 0:
            self.reporter.scalars({f"epoch_{k}": v for k, v in logs.items()}, self.state.step)
            self.reporter.say(f"epoch {epoch + 1}: " + ", ".join(f"{k} {v:.4f}" for k, v in logs.items()))
        is_best = False
        if self.state.step % self.plan.steps_per_epoch == 0:
            self.saving.check_goal(logs)
            is_best = self.saving.is_best()
        report, best = self._sum([float(self.reporter.is_report_due()), float(is_best)])
        if report:  # rank 0's answers, on every rank
            with self.pulse.doing(Activity.REPORT):
                self.reporter.report({**logs, "epoch": epoch, "step": self.state.step})
        if best:
            self.saving.keep_best()

    def _check_finite(self, call: CallBatch, outcome: Any) -> None:
        bad = np.flatnonzero(~(np.isfinite(outcome.losses) & outcome.finite))
        if not len(bad):
            return
        step, loss = call.start + int(bad[0]), outcome.losses[bad[0]]
        what = "a gradient became NaN or infinite" if np.isfinite(loss) else f"the loss became {loss}"
        epoch, inside = self.plan.locate(step)
        kept = (
            "no checkpoint was written yet"
            if self.state.durable_step is None
            else f"the checkpoint of step {self.state.durable_step} is kept"
        )
        raise NonFiniteLossError(
            f"{what} at step {step + 1} (epoch {epoch + 1}, batch {inside + 1}); {kept}. "
            "Lower the learning rate, clip gradients (global_clipnorm), or look at that batch.",
            step + 1,
        )

    def _flags(self, stop: int) -> np.ndarray:
        """This rank's flags for the call that ends at step `stop`."""
        ends_epoch = stop % self.plan.steps_per_epoch == 0
        given: dict[StepFlag, float] = self.saving.votes(stop, self._seconds_per_step, ends_epoch)
        if self.rank == 0:
            given[StepFlag.PARK] = self.reporter.is_parking_wanted()
            given[StepFlag.PROBE] = self.world_size > 1 and self.pulse.is_probe_due()
            if not self.config.compute.steps_per_call and self._seconds_per_step:
                wanted = max(1.0, min(_CALL_SECONDS / self._seconds_per_step, _MAX_CALL_STEPS))
                given[StepFlag.CALL_STEPS] = 2 ** int(np.log2(wanted))
        return vector(given, self.saving.tell())

    def _park(self) -> None:
        """The number of workers is about to change: save this step, and wait to be replaced or released."""
        self.show("resizing")
        saved = self.saving.save_now()
        self.show("resizing")  # before the answer: the next group takes nothing older than what the driver knows
        self.reporter.answer(saved)
        with self.pulse.doing(Activity.PARK):
            while not self._sum([float(self.reporter.is_released())])[0]:
                time.sleep(_PARK_SECONDS)
        self.show("training")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self) -> dict[str, Any] | None:
        self.pulse.settle(Activity.END, self.state.step)
        self.model.optimizer.finalize_variable_values(self.model.trainable_variables)
        metrics = {
            k: v
            for k, v in (self.state.history[-1] if self.state.history else {}).items()
            if k not in ("epoch", "step")
        }
        # Before the test: EarlyStopping restores its best weights here.
        self.callbacks.run("on_train_end", dict(metrics))
        if self.sources.test is not None:
            self.show("testing")
            metrics |= {f"test_{k}": v for k, v in self._evaluate("test", self.sources.test).items()}
        if self.rank != 0:
            return None
        self.show("exporting")
        attempts = read_attempts(self.storage)
        samples, digest = self._samples(), variables.weights_sha256(self.model)
        result = {
            "run": self.config.run.run,
            "status": "finished",
            "metrics": metrics,
            "steps": self.state.step,
            "epochs": self.state.step / self.plan.steps_per_epoch,
            "samples": samples,
            "stopped_early": self.state.stopped_early,
            "wall_seconds": time.time() - attempts[0]["time"] if attempts else self.state.train_seconds,
            "train_seconds": self.state.train_seconds,
            "imbalance_seconds": self.state.imbalance_seconds,
            "samples_per_second": samples / self.state.train_seconds if self.state.train_seconds else 0.0,
            "world_sizes": sorted({a["world_size"] for a in attempts}),
            "restarts": max(0, len(attempts) - 1),
            "weights_sha256": digest,
            "identity": self.identity,
            "history": self.state.history,
            "export": export.export(self.model, self.storage, self.state.step, digest, self.reporter.say),
        }
        self.reporter.upload()
        return result

    def _samples(self) -> int:
        epochs, rest = divmod(self.state.step, self.plan.steps_per_epoch)
        return epochs * self.plan.records + sum(self.plan.records_of(s) for s in range(rest))

    def show(self, phase: str) -> None:
        """Tell the driver where the run is; rank 0 does."""
        metrics = self._logs() if phase == "training" and self.rank == 0 and self._trained else None
        saves = Saves(
            checkpoint=self.state.durable_step,
            snapshot=self.snapshots.step,
            snapshot_bytes=self.snapshots.bytes,
            stall_seconds=self.saving.stall_seconds,
            trouble=self.saving.trouble(),
        )
        self.reporter.show(phase, self.state.step, saves, metrics, self.state.history)

    def _evaluate(self, name: str, source: Source) -> dict[str, float]:
        if name not in self._evaluators:
            plan = StepPlan(source.records, self.plan.global_batch_size, self.plan.shards)
            pipeline = self._pipeline(source, plan, training=False)
            self._evaluators[name] = Evaluator(self.model, pipeline, self.group, self.callbacks, self.devices)
        return self._evaluators[name].run(self.pulse.progress)

    def _logs(self) -> dict[str, float]:
        return models.logs(self.model)

    def _mean_over_ranks(self, value: float) -> float:
        return float(self._sum([value])[0]) / self.world_size

    def _sum(self, values: Any) -> np.ndarray:
        return self.group.sum(np.asarray(values, np.float32))

    def _pipeline(self, source: Source, plan: StepPlan, training: bool) -> Pipeline:
        made = Pipeline(
            source,
            plan,
            self.shards,
            self.config.batch.seed,
            shuffle=training,
            class_weight=self.job.class_weight if training else None,
            augment=self.job.augment if training else None,
        )
        made.send = self._upload
        return made

    @property
    def _upload(self) -> Callable[[list[np.ndarray]], list[Any]]:
        """What becomes of a batch that was gathered: it goes to the GPU ahead of its step, where there is one alone."""
        if self.config.strategy.has_servers or len(self.devices.names) > 1 or not computes_on_gpu(self.devices):
            return list
        return Upload(self.devices.names[0] or "GPU:0", DEPTH + 1)
