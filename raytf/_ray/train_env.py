"""The environment and rank of Ray Train's processes, without `ray.train`, whose import takes longer than connecting."""

from __future__ import annotations

import functools
import importlib.resources
import importlib.util
import json
from collections.abc import Mapping
from typing import Any

import ray


def of_controller(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a controller's process: `env_vars`, and the variables that Ray Train passes on."""
    constants = _constants()
    warns = constants.RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
    known = {warns: constants.DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE}
    return {**known, **constants.get_env_vars_to_propagate(), **env_vars}


def of_workers(controller: Mapping[str, str], workers: Mapping[str, str]) -> str:
    """Return the serialized runtime environment that workers will have, before any worker exists.

    Ray merges the environments of the driver, the controller and the worker, in this order: a variable of a later one
    replaces the same variable of an earlier one. Ray writes the result as JSON without spaces, with sorted keys.

    Args:
        controller: environment variables of the controller, in addition to Ray Train's own.
        workers: environment variables of the workers.
    """
    env = json.loads(ray.get_runtime_context().get_runtime_env_string() or "{}")
    handed_on = _constants().get_env_vars_to_propagate()
    of_all = {**env.get("env_vars", {}), **of_controller(controller), **handed_on, **workers}
    return json.dumps(env | {"env_vars": of_all}, ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def set_rank(context: Any) -> None:
    """Set the rank that Ray Train reports in this process; `context` is its DistributedContext."""
    from ray.train.v2._internal.execution.context import get_train_context  # Ray Train has imported it

    get_train_context().distributed_context = context


@functools.cache
def _constants() -> Any:
    """Return Ray Train's module of constants. Importing it by name would import all of Ray Train."""
    file = importlib.resources.files("ray").joinpath("train/v2/_internal/constants.py")
    spec = importlib.util.spec_from_file_location("constants", str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
