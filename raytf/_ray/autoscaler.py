"""The parts of Ray's autoscaler that node providers use. What needs a cloud's SDK is in a module for that cloud."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.cli_logger import cli_logger as cli_logger
from ray.autoscaler._private.providers import _get_default_config
from ray.autoscaler.node_launch_exception import NodeLaunchException as NodeLaunchException
from ray.autoscaler.tags import (
    NODE_KIND_WORKER as NODE_KIND_WORKER,
)
from ray.autoscaler.tags import (
    TAG_RAY_NODE_KIND as TAG_RAY_NODE_KIND,
)
from ray.autoscaler.tags import (
    TAG_RAY_USER_NODE_TYPE as TAG_RAY_USER_NODE_TYPE,
)


def default_config(cloud: str) -> dict[str, Any]:
    """Return Ray's own defaults for a cluster YAML of a cloud."""
    return _get_default_config({"type": cloud})
