"""The classes of Ray Train from which raytf's policies derive, and functions for their objects."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import _AutoscalingCoordinatorActor
from ray.train._internal.utils import get_address_and_port
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2._internal.execution.scaling_policy import (
    ElasticScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)
from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
    TrainAutoscalingCoordinatorClient,
)
from ray.train.v2.tensorflow.tensorflow_trainer import TensorflowTrainer

from raytf._ray import train_env

__all__ = ["DefaultFailurePolicy", "ElasticScalingPolicy", "FailureDecision", "NoopDecision", "ResizeDecision"]
__all__ += ["ScalingDecision", "TensorflowTrainer", "WorkerGroupCallback", "WorkerGroupStartupFailedError"]
__all__ += ["WorkerGroupStartupTimeoutError", "coordinator_here", "drop", "free_address", "raised_by"]
__all__ += ["resources_of_worker", "run_controller"]
#: Seconds between two calls of `poll`.
_POLL_SECONDS = 0.3
#: The modules that the processes of a controller and of each group's synchronization actor import first.
CONTROLLER_MODULES = (TrainController.__module__, "ray.train.v2._internal.execution.checkpoint.sync_actor")


def run_controller(
    env_vars: Mapping[str, str],
    arguments: Mapping[str, Any],
    kind: type[TrainController] = TrainController,
    poll: Callable[[], None] = lambda: None,
) -> Any:
    """Run Ray Train's controller on this node, as its trainers do, but without their handler of Ctrl-C.
    That handler would stop the workers before they can save, and exit the driver with code 0.

    Args:
        env_vars: environment variables of the controller's process, in addition to those that Ray Train passes on.
        arguments: the controller's arguments.
        kind: the controller's class.
        poll: called a few times a second while the controller runs. Its exception stops the controller, and is raised.

    Returns:
        The controller's result.
    """
    raylet: Any = ray._raylet  # compiled code, which mypy does not know
    here = {raylet.RAY_NODE_ID_KEY: ray.get_runtime_context().get_node_id()}
    actor: Any = ray.remote(
        num_cpus=0, label_selector=here, runtime_env={"env_vars": train_env.of_controller(env_vars)}
    )
    controller = actor(kind).remote(**arguments)
    running = controller.run.remote()
    while not ray.wait([running], timeout=_POLL_SECONDS)[0]:
        poll()
    ray.get(running)
    return ray.get(controller.get_result.remote())


class _Coordinator:
    """Ray's coordinator of requests for resources, in this process, with the interface of its actor."""

    def __init__(self) -> None:
        self._coordinator = _AutoscalingCoordinatorActor()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._coordinator, name)
        return types.SimpleNamespace(remote=lambda *args, **kwargs: ray.put(method(*args, **kwargs)))


def coordinator_here(requester: str) -> TrainAutoscalingCoordinatorClient:
    """Return the client of a coordinator in this process, for a Ray that no other program uses.
    There, starting the coordinator's actor would take longer than all of its work.

    Args:
        requester: the name of the run.
    """
    client = TrainAutoscalingCoordinatorClient(requester)
    client.__dict__["_autoscaling_coordinator"] = _Coordinator()
    return client


def free_address() -> tuple[str, int]:
    """Return this node's address and a port at which nothing listens yet."""
    return get_address_and_port()


def resources_of_worker(scaling_config: Any) -> dict[str, float]:
    """Return the resources of each worker."""
    return scaling_config._resources_per_worker_not_none


def raised_by(failure: Any) -> Any:
    """Return the exception of a worker's code without Ray Train's wrappers, or Ray's error about a lost worker."""
    inner = failure._base_exc if isinstance(failure, UserExceptionWithTraceback) else failure
    return inner.health_check_failure if isinstance(inner, WorkerHealthCheckFailedError) else inner


def drop(worker_group: Any) -> None:
    """Make Ray Train forget a group that failed while its backend started, and release its resources."""
    worker_group._clear_state()
