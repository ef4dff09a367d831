"""Ray's node provider for Azure; needs Azure's packages."""

from __future__ import annotations

from ray.autoscaler._private._azure.node_provider import AzureNodeProvider as AzureNodeProvider
