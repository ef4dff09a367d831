"""`fit`: from a configuration to a finished run. The driver's side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

import ray
import ray.train

from raytf import _process
from raytf.checkpoint import memory_keeper
from raytf.cluster import ray_watch
from raytf.cluster.connect import ray_for
from raytf.config import precision, strategy_rules
from raytf.config.objective import Goal
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import Augment
from raytf.data.plan import StepPlan
from raytf.distributed.gpu import visibility
from raytf.driver import inputs, parameter_servers, preflight
from raytf.driver.background import Book, Ear, add_times, booked, driver_event, exported, listening, monitoring
from raytf.driver.graceful_stop import saved_before, saving_first
from raytf.driver.ray_train.backend import MwmsConfig
from raytf.driver.ray_train.scaling_policy import remove_abandoned
from raytf.driver.ray_train.trainer import Trainer
from raytf.driver.supervision.failures import gpu_errors, worker_errors
from raytf.errors import ClusterError, ConfigError, DataError, JobError, ModelError, RaytfError, one_line
from raytf.runs import run_log
from raytf.runs.display import Display
from raytf.runs.lease import Lease, check_owner
from raytf.runs.status import StatusFile
from raytf.storage.storage import Storage
from raytf.training import finished_run, run_identity, warm_pool
from raytf.training.job import Job, Sources

#: Controllers that may die in a row without a new step; then something kills them, and will again.
_FRUITLESS_CONTROLLERS = 3


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run left.

    Attributes:
        metrics: last training and validation metrics, and the test metrics as `test_...`.
        steps: global steps.
        path: the run's folder.
        weights_sha256: over all weights; see `raytf.checkpoint.variables.weights_sha256` for the order.
        document: all of `result.json`.
    """

    metrics: dict[str, float]
    steps: int
    path: str
    weights_sha256: str
    document: dict[str, Any]
    _model: Callable[[], Any] | None = dataclasses.field(default=None, repr=False, compare=False)

    def load_model(self, model: Callable[[], Any] | None = None) -> Any:
        """The trained keras.Model, in this process, which imports TensorFlow for it.

        Where Keras cannot make it again by itself (a Lambda layer, a class without get_config), it is what the model
        function makes, with the run's weights.

        Args:
            model: function that makes the model; by default that of `fit`.

        Raises:
            ModelError: the run left none.
            JobError: the function raised.
        """
        with visibility.unseen():
            _process.load_tensorflow()
        from raytf.inference import trained_model

        return trained_model.load(Storage(self.path), model or self._model)


def load_weights(run: str, model: Any) -> Any:
    """A model with a run's weights, in this process: those of its end, or of its newest checkpoint until then.

    Args:
        run: the run's folder, `Result.path`.
        model: the job's model function, or a keras.Model of the same layers.

    Returns:
        The keras.Model.

    Raises:
        ModelError: the run has no weights, or they are of another model.
    """
    with visibility.unseen():
        _process.load_tensorflow()
    from raytf.inference import trained_model

    return trained_model.load_weights(Storage(run), model)


def fit(
    model: Callable[[], Any],
    train: Any,
    *,
    validation: Any = None,
    test: Any = None,
    config: TrainConfig | None = None,
    callbacks: Any = None,
    class_weight: dict[int, float] | None = None,
    augment: Augment | None = None,
    validation_freq: int = 1,
) -> Result:
    """Train a Keras model on Ray workers; go on where an earlier call of the same name stopped.

    Args:
        model: function without arguments that returns a compiled keras.Model. Runs on every worker.
        train: a Source; a tuple (x, y) or (x, y, sample_weight) of arrays, nested dicts or lists of arrays; a data set
            with `len()` and `[i]`, see MappingSource; or a Ray Dataset, which is written once to `data/` in the run's
            folder and read from there, see RayDataSource.
        validation: likewise; evaluated at the end of every `validation_freq` epochs.
        test: likewise; evaluated once at the end.
        config: all settings.
        callbacks: a list of Keras callbacks, or a function that returns one and takes the folder for their files,
            which ends up as `files/` in the run's folder. They run on rank 0.
        class_weight: weight of each class, as in Keras.
        augment: function ((x, y, sample_weight), seed) -> (x, y, sample_weight) of tensors, called for each
            micro-batch with an int32 seed [2] that is a function of the run's seed, the step and the shard.
        validation_freq: epochs between validations.

    Returns:
        What the run left, also when it had finished before.

    Raises:
        RaytfError: one line that says what is wrong and how to mend it.
    """
    config = config or TrainConfig()
    config.check()
    own = precision.of_process()
    _check_precision(config, own)
    if train is None:
        raise DataError("there is no training data: fit(model, train=...) got None.")
    given = inputs.Given.of(train, validation, test)
    if validation_freq < 1:
        raise DataError(f"validation_freq is {validation_freq}. Expected 1 or more.")
    best = config.checkpoints.keep_best
    if validation is None and best is not None and Goal.of(best).metric.startswith("val_"):
        raise ConfigError(f"--keep-best {best}: there is no validation data. Give some, or a metric of training.")
    if not callable(model) or hasattr(model, "compile"):
        raise ModelError(
            f"fit(model, ...) got a {type(model).__name__}. Expected a function without arguments that returns a "
            "compiled keras.Model: every worker builds its own."
        )
    status_file = StatusFile(config.run.status_file)
    storage = Storage(config.storage_uri)
    storage.preflight()
    run = storage.child(config.run.run)
    preflight.check_folder(run)
    sources = given.sources(run)
    stored = preflight.stored_identity(run)
    preflight.compare_strategy(stored, config)
    shards = preflight.stored_shards(stored) if config.batch.logical_shards is None else None
    if shards is not None:
        config = config.replace(logical_shards=shards)
        config.check()
    plan = StepPlan(sources.train.records, config.batch.global_batch_size, config.logical_shards)
    total = config.length.steps or (config.length.epochs or 1) * plan.steps_per_epoch
    job = Job(
        model=model,
        config=config,
        sources=None,
        monitor=None,
        run_uri=run.uri,
        plan=plan,
        total_steps=total,
        callbacks=callbacks,
        class_weight=class_weight,
        augment=augment,
        validation_freq=validation_freq,
        precision=own,
    )
    with Display() as display:
        display.say(f"run {config.run.run} in {run.locate('')}")
        # Ray's dashboard has no page about runs of Train; it shows this line, as part of the job's log.
        display.say(f"its page, at any time: raytf report {shlex.quote(run.locate(''))} --html report.html")
        with Lease(run, display.say) as lease:
            finished = preflight.finished(run, total, display.say)
            preflight.compare_batch(stored, config, plan.records, own)
            if finished is not None:
                finished_run.compare(job, sources, finished_run.stored(finished) or stored, display.say)
                display.say(f"run {config.run.run} has finished ({finished['steps']} steps); nothing to do")
                return _result(run, finished, model)
            run_log.abort_uploads(run)
            job = dataclasses.replace(job, identity=run_identity.of_run(job, sources))
            with booked(run) as book:
                document = _until_done(job, sources, run, display, status_file, lease, book)
                book.add([driver_event("ended", outcome="finished")])
                add_times(document, run, book)
                run.put(run_log.RESULT, json.dumps(document, indent=1).encode())
        display.say(_summary(document))
        return _result(run, document, model)


def _check_precision(config: TrainConfig, own: precision.Precision) -> None:
    """Refuse what a flag contradicts, or servers cannot have, before anything is started."""
    chosen = precision.choose(config.compute.mixed_precision, own)
    if config.strategy.has_servers:
        precision.check_for_servers(chosen.policy)


class _ControllerLostError(Exception):
    """The process of Ray Train's controller died.

    Attributes:
        reached: the latest step of the run.
    """

    def __init__(self, reached: int, message: str):
        super().__init__(message)
        self.reached = reached


def _until_done(
    job: Job,
    sources: Sources,
    run: Storage,
    display: Display,
    status_file: StatusFile,
    lease: Lease,
    book: Book,
) -> dict[str, Any]:
    """Connect to Ray and train."""
    with connected(job.config) as local:
        return _train(job, sources, run, local, display, status_file, lease, book)


def _train(
    job: Job,
    sources: Sources,
    run: Storage,
    local: bool,
    display: Display,
    status_file: StatusFile,
    lease: Lease,
    book: Book,
) -> dict[str, Any]:
    resources = preflight.check_cluster(job.config, local, display.say)
    job = _for_gpus(job, sources, resources.get("GPU", 0.0))
    config = job.config
    try:
        ray.cloudpickle.dumps(job)
    except Exception as error:
        raise ConfigError(
            f"the job cannot be sent to the workers: {type(error).__name__}: {error}. Create what cannot be pickled "
            "(open files, locks, models) inside the model or callbacks function."
        ) from error
    with monitoring(run_log.attempt_names(run)) as monitor:
        job = dataclasses.replace(job, sources=ray.put(sources), monitor=monitor, lease=lease.owner["id"])
        ear = Ear(monitor, book)

        def leave(why: str) -> None:
            with contextlib.suppress(ray.exceptions.RayError):
                ear.read(1)  # what was said since the last look: the save
            book.add([driver_event("ended", outcome="stopped", text=why)])
            book.flush()
            lease.release()

        with (
            listening(ear, display, status_file, lease),
            exported(job.config.run.run, monitor, book),
            saving_first(monitor, display.say, leave),
            ray_watch.farewell(lambda loss: saved_before(monitor, loss, leave)),
        ):
            if config.strategy.has_servers:
                document = _with_servers(job, "GPU" in resources, display.say)
            else:
                document = _with_controllers(job, run, resources)
    if document is None:
        raise RaytfError("training ended without a result. The same command goes on from the last checkpoint.")
    check_owner(run, lease.owner["id"])
    memory_keeper.dismiss(run.uri)
    return document


def _for_gpus(job: Job, sources: Sources, each: float) -> Job:
    """The job of a new run, with fewer logical shards where its workers compute on GPUs and nobody said how many."""
    config = job.config
    if not each or config.batch.logical_shards is not None or config.strategy.has_servers:
        return job
    config = config.replace(logical_shards=config.shards_on_gpus(each))
    config.check()
    plan = StepPlan(sources.train.records, config.batch.global_batch_size, config.logical_shards)
    job = dataclasses.replace(job, config=config, plan=plan)
    return dataclasses.replace(job, identity=run_identity.of_run(job, sources))


def _with_controllers(job: Job, run: Storage, resources: dict[str, float]) -> Any:
    """Train; with another controller of Ray Train where one dies while the run makes progress."""
    reached, fruitless = -1, 0
    while True:
        try:
            return _fit(_trainer(job, run, resources), job.monitor).return_value
        except _ControllerLostError as error:
            fruitless = 0 if error.reached > reached else fruitless + 1
            reached = error.reached
            goes_on = fruitless < _FRUITLESS_CONTROLLERS
            fields: dict[str, Any] = {"cause": "controller_died", "ranks": [], "nodes": [], "text": str(error)}
            job.monitor.event.remote("fault", {**fields, "retry": goes_on, "preemption": False})
            if not goes_on:
                raise ClusterError(
                    f"Ray Train's controller died: {error}. The same command goes on from the last checkpoint.",
                    passes=True,
                ) from None
            job.monitor.say.remote("Ray Train's controller died; starting another one")
            # Its workers end with it; what they had would stay reserved as long as this driver lives.
            remove_abandoned()


def _trainer(job: Job, run: Storage, resources: dict[str, float]) -> Trainer:
    config, verbose = job.config, job.config.run.verbose
    filesystem, path = Storage(config.storage_uri).arrow()
    hidden = not resources.keys() & {"GPU", "TPU"}
    return Trainer(
        _train_function(job),
        run=f"raytf {run.uri}",
        monitor=job.monitor,
        run_uri=run.uri,
        flags=config.cluster,
        keeps_kind=config.compute.exact,
        backend_config=MwmsConfig(
            _threads(config, "GPU" in resources),
            quiet=not verbose,
            exact=config.compute.exact,
            jit=config.compute.jit,
            one_worker=config.strategy.strategy in strategy_rules.ONE_WORKER,
            logical_devices=config.strategy.logical_devices or 1,
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=_num_workers(config),
            use_gpu="GPU" in resources,
            use_tpu="TPU" in resources,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=config.run.run,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.cluster.max_failures),
            logging_config=ray.train.LoggingConfig(log_level="INFO" if verbose else "ERROR"),
            worker_runtime_env={"env_vars": warm_pool.environment(not verbose, hidden)}
            if config.cluster.warm_workers
            else None,
        ),
    )


def _threads(config: TrainConfig, on_gpu: bool) -> int | None:
    """Of TensorFlow for each worker; None for what its node has for each GPU."""
    cluster = config.cluster
    if on_gpu and cluster.cpus_per_worker is None and not config.compute.exact:
        return None
    return max(1, int(cluster.cpus))


def _fit(trainer: Trainer, monitor: Any) -> Any:
    """Run a trainer; what it raises is for people, or a _ControllerLostError."""
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise _cause(error) from None
    except ray.exceptions.RayActorError as error:
        if "creation task" in str(error):  # it did not die: it could not begin, and would not the next time
            why = [line for line in str(error).splitlines() if line.strip()][-1]
            raise ClusterError(
                f"Ray Train could not start on the cluster's head: {one_line(why, 500)}. The head needs the job's "
                "modules and access to the storage, too."
            ) from None
        with contextlib.suppress(ray.exceptions.RayError):
            raise _ControllerLostError(ray.get(monitor.reached.remote(), timeout=10), one_line(error, 200)) from None
        raise _ray_failed(error) from None
    except ray.exceptions.RayError as error:
        raise _ray_failed(error) from None


def _with_servers(job: Job, use_gpu: bool, say: Callable[[str], None]) -> Any:
    """Train with parameter servers; what it raises is for people."""
    try:
        return parameter_servers.run(job, use_gpu, say)
    except ray.exceptions.RayError as error:
        raise _ray_failed(error) from None


def _ray_failed(error: Exception) -> ClusterError:
    text = f"Ray failed: {one_line(error, 400)}. The same command goes on from the last checkpoint."
    return ClusterError(text, passes=True)


def _train_function(job: Job) -> Callable[[], Any]:
    def train() -> Any:
        from raytf.training import worker

        return worker.run(job)

    return train


def _num_workers(config: TrainConfig) -> int | tuple[int, int]:
    low, high = config.worker_range
    return high if low == high else (low, high)


def _result(run: Storage, document: dict[str, Any], model: Callable[[], Any]) -> Result:
    return Result(document["metrics"], document["steps"], run.locate(""), document["weights_sha256"], document, model)


def _summary(document: dict[str, Any]) -> str:
    metrics = ", ".join(f"{name} {value:.4f}" for name, value in document["metrics"].items())
    waited = document["imbalance_seconds"]
    return (
        f"finished: {document['steps']} steps, {metrics}\n"
        f"{document['samples_per_second']:,.0f} samples/s, {document['restarts']} restarts, "
        + (f"goodput {document['goodput']:.0%}, " if "goodput" in document else "")
        + (f"{waited:.1f} s lost to uneven shards, " if waited >= 0.05 else "")
        + _left(document.get("export") or {})
    )


def _left(export: dict[str, str]) -> str:
    """What there is of the model, in the order of what it is good for."""
    kind = next((kind for kind in ("saved_model", "keras", "weights") if kind in export), None)
    if kind is None:
        return "the model is in the last checkpoint alone"
    return f"{'weights' if kind == 'weights' else 'model'} in {export[kind]}"


def _cause(error: Exception) -> RaytfError:
    """The error that a person should see, out of what Ray Train wrapped it in."""
    found = worker_errors(error)
    # What one rank found wrong makes the others lose it; they say so, and that is not the cause.
    for inner in sorted(found, key=lambda e: getattr(e, "retryable", False)):
        if isinstance(inner, RaytfError):
            return inner
    for inner in found:
        return JobError(f"training failed for good: {type(inner).__name__}: {one_line(inner, 600)}", str(error))
    for broken in gpu_errors(error):
        return broken
    inner = getattr(error, "controller_failure", error)
    inner = getattr(inner, "cause", None) or inner  # what was raised in another process
    if isinstance(inner, ModuleNotFoundError):
        return ClusterError(
            f"the workers cannot load the job: {inner}. Every node needs the job's modules: give them with `ray job "
            "submit --working-dir .`, or install them on the nodes."
        )
    return ClusterError(f"training failed: {type(inner).__name__}: {one_line(inner, 600)}")


@contextlib.contextmanager
def connected(config: TrainConfig) -> Iterator[bool]:
    """Connect to Ray, or start one here. Yields whether it was started here."""
    # One report each 2 s is what the default allows; a poll costs the controller little.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    os.environ.setdefault("RAY_TRAIN_ENABLE_STATE_TRACKING", "1")
    # `ray_train.ScalingPolicy` follows notices of preemption: with Ray's watcher the run would stop to wait for the end
    # of the node, and count it as a failure.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Only nodes that answer are asked for workers; where they cannot start all the same, look anew.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    with ray_for(lambda: preflight.cpus_here(config), config.run.verbose, dashboard=True) as local:
        yield local
