"""Ray Serve's controller, asked directly: its public status has no `user_config`."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve import context


def http_options() -> Any:
    """With which host and port the proxies were started."""
    client: Any = context._get_global_client()
    return client.http_config


def details(timeout: float) -> dict[str, Any]:
    """All applications and deployments, with what was given to them.

    Args:
        timeout: seconds for the answer.
    """
    client: Any = context._get_global_client()
    return ray.get(client._controller.get_serve_instance_details.remote(), timeout=timeout)
