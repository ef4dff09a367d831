"""Queries Ray Serve's controller directly, since its public status has no `user_config`."""

from __future__ import annotations

from typing import Any

import ray
from ray.serve import context


def http_options() -> Any:
    """Return the options of the proxies, such as host and port."""
    client: Any = context._get_global_client()
    return client.http_config


def details(timeout: float) -> dict[str, Any]:
    """Return all applications and deployments with their settings, after at most `timeout` seconds."""
    client: Any = context._get_global_client()
    return ray.get(client._controller.get_serve_instance_details.remote(), timeout=timeout)
