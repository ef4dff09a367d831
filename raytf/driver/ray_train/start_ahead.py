"""The processes of a run's first group, started while its driver still imports Ray Train and starts a controller."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import grpc
import ray

from raytf._ray import state, train_env
from raytf.config.resources import fitting
from raytf.config.train_config import TrainConfig
from raytf.driver.ray_train import controller_process
from raytf.training.process import warm_pool

_log = logging.getLogger(__name__)


def env_of_workers(config: TrainConfig, resources: Mapping[str, float]) -> dict[str, str]:
    """The environment variables of a run's workers, beside those that Ray Train hands on.

    Args:
        config: of the run.
        resources: of each worker.
    """
    if not config.cluster.warm_workers:
        return {}
    return warm_pool.environment(not config.run.verbose, hidden=not resources.keys() & {"GPU", "TPU"})


def start_ahead(config: TrainConfig, resources: dict[str, float]) -> None:
    """Start them where it is known on which node they will be: on a Ray of one node. A failure costs only time.

    Args:
        config: of the run.
        resources: of each worker.
    """
    if not config.cluster.warm_workers or config.strategy.has_servers:
        return
    here = ray.get_runtime_context().get_node_id()
    try:
        if [node["NodeID"] for node in ray.nodes() if node["Alive"]] == [here]:
            count = min(config.worker_range[1], fitting(state.free_resources().get(here, {}), resources))
            env = train_env.of_workers(controller_process.variables(), env_of_workers(config, resources))
            warm_pool.prepare(count, env)
    except (ray.exceptions.RayError, grpc.RpcError, OSError) as error:
        _log.debug("no process was started ahead: %s", error)
