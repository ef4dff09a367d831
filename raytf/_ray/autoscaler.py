"""The parts of Ray's autoscaler that node providers use."""

from __future__ import annotations

import importlib
from typing import Any

from ray.autoscaler._private.cli_logger import cli_logger
from ray.autoscaler._private.providers import _get_default_config
from ray.autoscaler.node_launch_exception import NodeLaunchException
from ray.autoscaler.tags import NODE_KIND_HEAD, NODE_KIND_WORKER, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

__all__ = ["NODE_KIND_HEAD", "NODE_KIND_WORKER", "TAG_RAY_NODE_KIND", "TAG_RAY_USER_NODE_TYPE", "NodeLaunchException"]
__all__ += ["cli_logger", "default_config", "node_provider", "retry_of_google"]


def default_config(cloud: str) -> dict[str, Any]:
    """Return Ray's own defaults for a cluster YAML of a cloud."""
    return _get_default_config({"type": cloud})


def node_provider(cloud: str) -> Any:
    """Import Ray's module with the node provider of a cloud, which needs the cloud's SDK."""
    name = "_azure" if cloud == "azure" else cloud
    return importlib.import_module(f"ray.autoscaler._private.{name}.node_provider")


def retry_of_google(method: Any) -> Any:
    """Decorate a method so that it is called again if a connection to Google breaks."""
    return node_provider("gcp")._retry(method)
