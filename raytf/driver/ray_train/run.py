"""A run with Ray Train: one controller, and another one if it dies while the run makes progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray.train

from raytf.config import strategy_rules
from raytf.config.train_config import TrainConfig
from raytf.driver.ray_train.backend import MwmsConfig
from raytf.driver.ray_train.scaling_policy import remove_abandoned
from raytf.driver.ray_train.start_ahead import env_of_workers
from raytf.driver.ray_train.trainer import Trainer
from raytf.driver.supervision.attempts import until_done
from raytf.driver.supervision.diagnosis import ControllerDiedError, diagnose
from raytf.errors import ClusterError, one_line
from raytf.runs.notebook import in_notebook
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob
from raytf.training.process.process_settings import ProcessSettings


def run(job: TrainingJob, run: Storage, resources: dict[str, float], look: Callable[[], None]) -> Any:
    """Train a job to its end.

    Args:
        job: to train.
        run: its folder.
        resources: of each worker.
        look: called a few times a second meanwhile; what it raises ends the run.

    Returns:
        Its result.

    Raises:
        RaytfError: the controller's failure policy made no further attempt, or controllers keep dying.
        RayError: Ray failed.
    """

    def attempt() -> Any:
        return _fit(_trainer(job, run, resources, look)).return_value

    return until_done(attempt, (ControllerDiedError,), job.monitor, lambda: True, job.monitor.say)


def _fit(trainer: Trainer) -> Any:
    """Run a trainer; its errors are for the user, or a ControllerDiedError."""
    try:
        return trainer.fit()
    except ray.train.TrainingFailedError as error:
        found = diagnose(error, lambda died: False)
        assert found.error is not None
        raise found.error from None
    except ray.exceptions.RayActorError as error:
        if not error.actor_init_failed:
            # Its workers end with it, but what was reserved for them would stay reserved until this driver ends.
            remove_abandoned()
            raise ControllerDiedError(one_line(error, 200)) from None
        # It did not die: it could not start, and would not the next time.
        why = [line for line in str(error).splitlines() if line.strip()][-1]
        raise ClusterError(
            f"Ray Train could not start on the cluster's head: {one_line(why, 500)}. The head needs the job's "
            "modules and access to the storage, too."
        ) from None


def _trainer(job: TrainingJob, run: Storage, resources: dict[str, float], look: Callable[[], None]) -> Trainer:
    config, verbose = job.config, job.config.run.verbose
    filesystem, path = Storage(config.storage_uri).arrow()
    env = env_of_workers(config, resources)
    return Trainer(
        _train_function(job),
        run=f"raytf {run.uri}",
        monitor=job.monitor,
        run_uri=run.uri,
        flags=config.cluster,
        keeps_kind=config.compute.exact,
        arbiter=job.arbiter,
        look=look,
        backend_config=MwmsConfig(_of_processes(config, "GPU" in resources)),
        scaling_config=ray.train.ScalingConfig(
            num_workers=_num_workers(config),
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
        one_worker=config.strategy.strategy in strategy_rules.ONE_WORKER,
        logical_devices=config.strategy.logical_devices or 1,
        is_next_soon=config.cluster.warm_workers and in_notebook(),
    )


def _threads(config: TrainConfig, on_gpu: bool) -> int | None:
    """TensorFlow's threads in each worker.

    Returns:
        None for the node's CPUs per GPU.
    """
    cluster = config.cluster
    if on_gpu and cluster.cpus_per_worker is None and not config.compute.exact:
        return None
    return max(1, int(cluster.cpus))


def _train_function(job: TrainingJob) -> Callable[[], Any]:
    def train() -> Any:
        from raytf.training import worker

        return worker.run(job)

    return train


def _num_workers(config: TrainConfig) -> int | tuple[int, int]:
    low, high = config.worker_range
    return high if low == high else (low, high)
