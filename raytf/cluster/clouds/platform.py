"""Which place a cluster YAML is about, also where its node provider is one of raytf's own."""

from __future__ import annotations

from enum import StrEnum

from raytf.cluster.check.document import Document


class Platform(StrEnum):
    """Where nodes come from."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    HOSTS = "local"
    OTHER = "other"


#: A key of a node_config that only one place has; `external` says nothing by itself.
_SIGNS = {
    "InstanceType": Platform.AWS,
    "machineType": Platform.GCP,
    "runtimeVersion": Platform.GCP,
    "azure_arm_parameters": Platform.AZURE,
}


def place_of(document: Document) -> Platform:
    """The place of a cluster YAML."""
    kind = document.get("provider", "type")
    if isinstance(kind, str) and kind in ("aws", "gcp", "azure", "local"):
        return Platform(kind)
    if kind == "external":
        for name in document.mapping("available_node_types"):
            for key in document.mapping("available_node_types", name, "node_config"):
                if key in _SIGNS:
                    return _SIGNS[key]
    return Platform.OTHER
