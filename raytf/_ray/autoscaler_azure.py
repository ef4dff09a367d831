"""Ray's node provider for Azure; needs Azure's packages."""

from __future__ import annotations

from ray.autoscaler._private._azure.node_provider import AzureNodeProvider as AzureNodeProvider

SEEN = {
    "ray.autoscaler._private._azure.node_provider.AzureNodeProvider.create_node": "2.60.0",
    "ray.autoscaler._private._azure.node_provider.AzureNodeProvider.compute_client": "2.60.0",
}
