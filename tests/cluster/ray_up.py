"""What `ray up` does with a config before it talks to a node, by Ray's own code."""

from __future__ import annotations

from typing import Any

import yaml


def filled_in(text: str) -> dict[str, Any]:
    """A config as a user leaves it, with the defaults of Ray, and as Ray's own validation takes it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load(text))
    config = provider_class(config).fillout_available_node_types_resources(config)
    validate_config(config)
    found: dict[str, Any] = config
    return found


def provider_class(config: dict[str, Any]) -> Any:
    """The class that Ray takes: its own, or raytf's on top of it."""
    from ray.autoscaler._private.providers import _get_node_provider_cls

    return _get_node_provider_cls(config["provider"])


def prepare(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The provider, and the config that goes to the head."""
    kind = provider_class(config)
    config = kind.bootstrap_config(config)
    return kind(config["provider"], config["cluster_name"]), config


def tags(config: dict[str, Any], name: str) -> dict[str, str]:
    """Those that Ray gives to a node of a type."""
    role = "head" if name == config["head_node_type"] else "worker"
    return {
        "ray-node-kind": role,
        "ray-node-type": role,
        "ray-node-name": f"ray-{config['cluster_name']}-{role}",
        "ray-node-status": "uninitialized",
        "ray-launch-config": "5cbbd9d8aa4e0f1d",
        "ray-user-node-type": name,
    }
