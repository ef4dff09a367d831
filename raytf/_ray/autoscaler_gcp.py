"""Ray's node provider for Google Cloud; needs Google's packages."""

from __future__ import annotations

from ray.autoscaler._private.gcp import config, node, node_provider

GCPNodeProvider = node_provider.GCPNodeProvider
GCPCompute = node.GCPCompute
GCPTPU = node.GCPTPU
GCPNodeType = node.GCPNodeType
construct_clients_from_provider_config = config.construct_clients_from_provider_config
get_node_type = config.get_node_type
#: Decorates a method that Google's connections may break, which is then called again.
retry = node_provider._retry
