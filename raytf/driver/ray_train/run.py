"""Runs a job with Ray Train: a trainer, its failure policy, and a controller that is replaced if it dies while the run
makes progress."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable
from typing import Any, TypeVar

import ray
import ray.train
from ray.train import WorkerGroupError
from ray.train.backend import Backend, BackendConfig

from raytf._ray import partial_group, train
from raytf._ray.train import DefaultFailurePolicy, FailureDecision, TensorflowTrainer, WorkerGroupCallback
from raytf.cluster import connect
from raytf.config.flags import ONE_WORKER
from raytf.config.train_config import TrainConfig
from raytf.distributed.membership.member import LeftBehindError
from raytf.distributed.membership.rendezvous import Meeting
from raytf.driver.ray_train import warm_processes
from raytf.driver.ray_train.scaling_policy import PolicyContext, ScalingPolicy, remove_abandoned
from raytf.driver.ray_train.warm_processes import env_of_workers
from raytf.driver.supervision.diagnosis import ControllerDiedError, diagnose, until_done, worker_errors
from raytf.driver.supervision.failures import lost_ranks
from raytf.driver.supervision.retry import Scene, Supervisor
from raytf.driver.supervision.watchdog import explain_loss
from raytf.errors import ClusterError, GpuError, WorkerLostError, one_line
from raytf.runs.notebook import in_notebook
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob
from raytf.training.process.heartbeat_types import LastHeartbeat
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.process.process import ProcessSettings

#: Seconds that all workers together have to exit by themselves; Ray would wait 5 s for each worker that hangs.
_END_SECONDS = 0.5
#: Ray Train's callbacks that raytf leaves out. The first would change the workers' folder, but a job's relative paths
#: start at the driver's folder. The second starts a Ray Data process for each group, which raytf does not use. The
#: third starts a process that needs Ray's dashboard to check whether a controller is alive; see `remove_abandoned`.
_LEFT_OUT = ("WorkingDirectorySetupCallback", "DatasetsCallback", "PlacementGroupCleanerCallback")
Answer = TypeVar("Answer")
#: Seconds to wait for a reply from the monitor.
_ANSWER_SECONDS = 10.0


def run(job: TrainingJob, run: Storage, resources: dict[str, float], poll: Callable[[], None]) -> Any:
    """Train a job to its end, and return its result.

    Args:
        run: the run's folder.
        resources: resources of each worker.
        poll: called a few times a second during training; an error that it raises ends the run.

    Raises:
        RaytfError: the controller's failure policy made no further attempt, or controllers keep dying.
        RayError: Ray failed.
    """

    def attempt() -> Any:
        return _fit(_trainer(job, run, resources, poll)).return_value

    return until_done(attempt, (ControllerDiedError,), job.monitor, -1, job.monitor.say)


def _fit(trainer: Trainer) -> Any:
    """Run a trainer, and raise either an error for the user or a ControllerDiedError."""
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        failure = diagnose(error, lambda died: False)
        assert failure.error is not None
        raise failure.error from None
    except ray.exceptions.RayActorError as error:
        if not error.actor_init_failed:
            # Its workers end with it, but their resources would stay reserved until this driver exits.
            remove_abandoned()
            raise ControllerDiedError(one_line(error, 200)) from None
        # The controller did not die: it could not start, and another attempt would fail, too.
        why = [line for line in str(error).splitlines() if line.strip()][-1]
        raise ClusterError(
            f"Ray Train could not start on the cluster's head: {one_line(why, 500)}. The head needs the job's "
            "modules and access to the storage, too."
        ) from None


def _trainer(job: TrainingJob, run: Storage, resources: dict[str, float], poll: Callable[[], None]) -> Trainer:
    config, verbose = job.config, job.config.run.verbose
    low, high = config.worker_range
    filesystem, path = Storage(config.storage_uri).arrow()
    env = env_of_workers(config, resources)
    context = PolicyContext(
        name=f"raytf {run.uri}",
        monitor=job.monitor,
        uri=run.uri,
        flags=config.cluster,
        supervisor=Supervisor(),
        keeps_kind=config.compute.exact,
        is_alone=connect.is_own(),
        arbiter=job.arbiter,
    )
    return Trainer(
        _train_function(job),
        context,
        poll,
        backend_config=MwmsConfig(_of_processes(config, "GPU" in resources)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=high if low == high else (low, high),
            use_gpu="GPU" in resources,
            use_tpu="TPU" in resources,
            resources_per_worker=resources,
        ),
        run_config=ray.train.RunConfig(
            name=config.run.name,
            storage_path=path,
            storage_filesystem=filesystem,
            failure_config=ray.train.FailureConfig(max_failures=config.cluster.max_failures),
            logging_config=ray.train.LoggingConfig(log_level="INFO" if verbose else "ERROR"),
            worker_runtime_env={"env_vars": env} if env else None,
        ),
    )


def _of_processes(config: TrainConfig, on_gpu: bool) -> ProcessSettings:
    return ProcessSettings(
        threads=_threads(config, on_gpu),
        quiet=not config.run.verbose,
        exact=config.compute.exact,
        jit=config.compute.jit,
        one_worker=config.strategy.strategy in ONE_WORKER,
        logical_devices=config.strategy.logical_devices or 1,
        is_next_soon=config.cluster.warm_workers and in_notebook(),
    )


def _threads(config: TrainConfig, on_gpu: bool) -> int | None:
    """Return TensorFlow's number of threads in each worker, or None to use the node's CPUs per GPU."""
    cluster = config.cluster
    if on_gpu and cluster.cpus_per_worker is None and not config.compute.exact:
        return None
    return max(1, int(cluster.cpus))


def _train_function(job: TrainingJob) -> Callable[[], Any]:
    def train() -> Any:
        from raytf.training import worker

        return worker.run(job)

    return train


class Trainer(TensorflowTrainer):
    """TensorflowTrainer with raytf's policies. `poll` is called a few times a second while the controller runs, and an
    error that it raises ends the run."""

    def __init__(self, train_loop: Callable[[], Any], context: PolicyContext, poll: Callable[[], None], **kwargs: Any):
        self._context, self._poll = context, poll
        # Skip TensorflowTrainer's own __init__, which only sets a default backend and imports TensorFlow for it.
        super(TensorflowTrainer, self).__init__(train_loop, **kwargs)

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        run, is_partial = self._context, self._context.arbiter is not None
        hangs = run.uri if run.flags.hang_seconds else None
        kwargs["failure_policy"] = FailurePolicy(
            self.run_config.failure_config, run.monitor, hangs, run.supervisor, is_partial
        )
        kwargs["scaling_policy"] = ScalingPolicy(self.scaling_config, run)
        return partial_group.run(warm_processes.controller_variables(), kwargs, is_partial, self._poll)

    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        return [c for c in made if type(c).__name__ not in _LEFT_OUT] + [HungWorkerTeardown()]


class HungWorkerTeardown(WorkerGroupCallback):
    """Ends workers that hang, before Ray waits for them."""

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        answers = {worker.actor.shutdown.remote(): worker.actor for worker in worker_group.get_workers()}
        hanging = ray.wait(list(answers), num_returns=len(answers), timeout=_END_SECONDS)[1]
        for answer in hanging:
            ray.kill(answers[answer])


@dataclasses.dataclass
class MwmsConfig(BackendConfig):
    """Ray Train's backend for MultiWorkerMirroredStrategy: prepares each worker's process for its place in the group.

    Ray's own backend imports TensorFlow in the controller (10 s) and sets TF_USE_LEGACY_KERAS in every worker.
    """

    process: ProcessSettings = dataclasses.field(default_factory=ProcessSettings)

    @property
    def backend_cls(self) -> type[Backend]:
        return _MwmsBackend


class _MwmsBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        try:
            self._set_up(worker_group, backend_config)
        except ray.exceptions.RayError as error:
            # Ray Train does not shut down a group that fails here: the CPUs of its placement group would be lost to the
            # run.
            if hasattr(worker_group, "get_replica_groups"):  # a whole group, not a single worker that is replaced
                train.drop(worker_group)
            cause = getattr(error, "cause", None)
            if isinstance(cause, GpuError):
                # Ray Train retries only after this error.
                raise train.WorkerGroupStartupFailedError(cause) from None
            raise

    def _set_up(self, worker_group: Any, config: BackendConfig) -> None:
        from raytf.training import worker

        assert isinstance(config, MwmsConfig)
        addresses = tuple(worker_group.execute(worker.listen))
        key = secrets.token_bytes(32)
        started = [
            worker_group.execute_single_async(rank, worker.set_up, Meeting(rank, addresses, key), config.process)
            for rank in range(len(worker_group))
        ]
        ray.get(started)


class FailurePolicy(DefaultFailurePolicy):
    """Combines Ray Train's retry budgets with the Supervisor's decisions, and reports failures to user and ledger.

    Args:
        run_uri: the run's folder, where stacks of frozen workers are written; None to not check for frozen workers.
        supervisor: the run's Supervisor, shared with the scaling policy.
        is_partial: whether the surviving workers continue when others are lost.

    Attributes:
        lost: ranks that are lost while the others continue; None if all have to restart.
        size: number of workers, set by the controller.
        left: ranks of workers that have left as planned, set by the controller.
    """

    def __init__(
        self,
        failure_config: Any,
        monitor: MonitorClient,
        run_uri: str | None,
        supervisor: Supervisor,
        is_partial: bool = False,
    ):
        super().__init__(failure_config)
        self._is_partial = is_partial
        self.lost: set[int] | None = set()
        self.size, self.left = 0, set[int]()
        self._run_monitor, self._run_uri, self._supervisor = monitor, run_uri, supervisor
        self._reached = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        error, monitor = training_failed_error, self._run_monitor
        none: list[LastHeartbeat] = []
        sightings = _or_else(none, monitor.sightings)
        hung = self._frozen(error)
        if hung is not None:  # the driver raises Ray's error, which must contain the ranks that hung
            error.worker_failures = hung.worker_failures
        self._reached = _or_else(self._reached, monitor.reached)
        scene = Scene(self._reached, {s.beat.rank: s.beat.node for s in sightings}, _or_else({}, monitor.noticed))

        def has_budget() -> bool:
            return super(FailurePolicy, self).make_decision(error) is FailureDecision.RETRY

        failure = diagnose(error)
        decision = self._supervisor.decide(failure, scene, has_budget)
        if isinstance(error, WorkerGroupError):
            goes_on = self._is_partial and decision.retry
            self.lost = lost_ranks(failure, worker_errors(error), self.left) if goes_on else None
        survivors = max(0, self.size - len(self.lost)) if self.lost else 0
        self._supervisor.survivors = survivors
        fault = dataclasses.replace(decision.fault, survived=survivors > 0)
        monitor.book(fault)
        if survivors > 0 and decision.retry:
            monitor.say(f"{fault.failure}; the others continue")
        elif decision.message:
            monitor.say(decision.message)
        return FailureDecision.RETRY if decision.retry else FailureDecision.RAISE

    def _frozen(self, error: Any) -> WorkerGroupError | None:
        """Return the error to raise instead if all ranks report only the loss of a peer, and that peer is frozen."""
        errors = worker_errors(error)
        unknown = all(isinstance(e, WorkerLostError) and not isinstance(e, LeftBehindError) for e in errors.values())
        if self._run_uri is None or not errors or not unknown:
            return None
        with contextlib.suppress(ray.exceptions.RayError):
            return explain_loss(self._run_monitor, self._run_uri, list(errors))
        return None


def _or_else(otherwise: Answer, question: Callable[[float], Answer]) -> Answer:
    try:
        return question(_ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return otherwise
