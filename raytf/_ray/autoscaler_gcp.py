"""Ray's node provider for Google Cloud; needs Google's packages."""

from __future__ import annotations

from ray.autoscaler._private.gcp import config, node, node_provider

_PROVIDER = "ray.autoscaler._private.gcp.node_provider"
SEEN = {
    "ray.autoscaler._private.gcp.config.construct_clients_from_provider_config": "2.60.0",
    "ray.autoscaler._private.gcp.config.get_node_type": "2.60.0",
    "ray.autoscaler._private.gcp.node.GCPCompute.create_instance": "2.60.0",
    "ray.autoscaler._private.gcp.node.GCPCompute.wait_for_operation": "2.60.0",
    "ray.autoscaler._private.gcp.node.GCPNodeType.TPU": "2.60.0",
    "ray.autoscaler._private.gcp.node.GCPTPU": "2.60.0",
    f"{_PROVIDER}.GCPNodeProvider._construct_clients": "2.60.0",
    f"{_PROVIDER}.GCPNodeProvider._get_resource_depending_on_node_name": "2.60.0",
    f"{_PROVIDER}.GCPNodeProvider.cached_nodes": "2.60.0",
    f"{_PROVIDER}._retry": "2.60.0",
}

GCPNodeProvider = node_provider.GCPNodeProvider
GCPCompute = node.GCPCompute
GCPTPU = node.GCPTPU
GCPNodeType = node.GCPNodeType
construct_clients_from_provider_config = config.construct_clients_from_provider_config
get_node_type = config.get_node_type
#: Decorates a method that Google's connections may break, which is then called again.
retry = node_provider._retry
