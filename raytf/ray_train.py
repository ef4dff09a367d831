"""Ray Train, filled in for TensorFlow: the backend, which failures are worth another attempt, and the driver's ear."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer

from raytf.errors import JobError, RaytfError, one_line
from raytf.progress import Status

#: Failures in a row without a new step after which a run stops: the next one would end alike.
_FRUITLESS_FAILURES = 5


@dataclasses.dataclass
class MwmsConfig(BackendConfig):
    """Ray Train's TensorFlow backend without its imports.

    Ray's own configuration imports TensorFlow in the controller (10 s) and sets TF_USE_LEGACY_KERAS in every worker.

    Attributes:
        threads: TensorFlow's threads within an operation, for each worker; 0 leaves it to TensorFlow.
        quiet: silence TensorFlow's messages.
    """

    threads: int = 0
    quiet: bool = True

    @property
    def backend_cls(self) -> type[Backend]:
        return _MwmsBackend


class _MwmsBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        from raytf import worker

        assert isinstance(backend_config, MwmsConfig)
        addresses = worker_group.execute(_free_address)
        started = [
            worker_group.execute_single_async(
                rank, worker.set_up, addresses, rank, backend_config.threads, backend_config.quiet
            )
            for rank in range(len(worker_group))
        ]
        ray.get(started)


def _free_address() -> str:
    from ray.train._internal.utils import get_address_and_port

    host, port = get_address_and_port()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Trainer(TensorflowTrainer):
    """TensorflowTrainer whose failure policy knows which errors another attempt would meet again."""

    def __init__(self, train_loop: Callable[[], Any], monitor: Any, **kwargs: Any):
        self._monitor = monitor
        # Past TensorflowTrainer's own __init__, which only fills in a default backend and imports TensorFlow for it.
        super(TensorflowTrainer, self).__init__(train_loop, **kwargs)

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        kwargs["failure_policy"] = FailurePolicy(self.run_config.failure_config, self._monitor)
        return super()._initialize_and_run_controller(**kwargs)

    def _create_default_callbacks(self) -> list[Any]:
        # Ray would change the workers' folder; a job's relative paths mean those of the driver.
        made = super()._create_default_callbacks()
        return [c for c in made if type(c).__name__ != "WorkingDirectorySetupCallback"]


class FailurePolicy(DefaultFailurePolicy):
    """Ray Train's retry budgets, and two reasons to stop sooner: an error that would come again, and no progress.

    Args:
        failure_config: Ray Train's.
        monitor: answers `reached`, the latest step that a run has reached; a Monitor's handle.
    """

    def __init__(self, failure_config: Any, monitor: Any):
        super().__init__(failure_config)
        self._run_monitor = monitor
        self._reached, self._fruitless = -1, 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        errors = worker_errors(training_failed_error)
        died = any(isinstance(e, ray.exceptions.RayActorError) for e in errors)
        for error in errors:
            # A dying peer can make TensorFlow raise anything.
            if isinstance(error, RaytfError) and not error.retryable and not (died and isinstance(error, JobError)):
                return FailureDecision.RAISE
        reached = self._ask_reached()
        self._fruitless = 0 if died or reached > self._reached else self._fruitless + 1
        self._reached = max(reached, self._reached)
        if self._fruitless >= _FRUITLESS_FAILURES:
            return FailureDecision.RAISE
        decision = super().make_decision(training_failed_error)
        if decision is FailureDecision.RETRY:
            self._run_monitor.say.remote(f"workers were lost ({_short(training_failed_error)}); starting again")
        return decision

    def _ask_reached(self) -> int:
        try:
            return ray.get(self._run_monitor.reached.remote(), timeout=10)
        except ray.exceptions.RayError:
            return self._reached


def _short(error: Exception) -> str:
    found = worker_errors(error) or [error]
    dead = sum(isinstance(e, ray.exceptions.RayActorError) for e in found)
    if dead:
        return f"{dead} worker process{'es' if dead > 1 else ''} died"
    return f"{type(found[0]).__name__}: {one_line(found[0], 120)}"


def worker_errors(error: Exception) -> list[BaseException]:
    """What was raised or happened in each worker, out of what Ray Train wrapped it in, by rank."""
    found = []
    for _, failure in sorted(getattr(error, "worker_failures", {}).items()):
        inner = getattr(failure, "_base_exc", failure)  # what the worker's code raised
        found.append(getattr(inner, "health_check_failure", inner))  # why Ray could not reach the worker
    return found


class Monitor:
    """An actor that rank 0 talks to and the driver reads; it dies with the driver."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._messages: list[str] = []
        self._reached = 0

    def update(self, status: Status) -> None:
        self._status = status
        self._reached = max(self._reached, status.step)

    def say(self, message: str) -> None:
        self._messages.append(message)

    def reached(self) -> int:
        """The latest global step that was ever reported."""
        return self._reached

    def read(self) -> tuple[Status | None, list[str]]:
        """The latest status and the messages since the last call."""
        messages, self._messages = self._messages, []
        return self._status, messages
