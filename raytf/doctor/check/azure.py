"""Mistakes of Azure clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, listed, near
from raytf.doctor.local_environment import ray_file
from raytf.doctor.node_types import NodeType, node_types, spot_head, stopped_nodes

#: Parameters of Ray's template that Ray fills in by itself.
_RAYS = {
    "vmName",
    "vmTags",
    "vmCount",
    "msi",
    "nsg",
    "subnet",
    "provisionPublicIp",
    "zones",
    "publicKey",
    "adminUsername",
}
_IMAGE = ("imagePublisher", "imageOffer", "imageSku", "imageVersion")
_PRIORITIES = ("Regular", "Low", "Spot")
_LEAST_GB, _GPU_GB = 32, 64
_EVICTIONS = ("Deallocate", "Delete")


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find what Azure refuses, and parameters that Ray's template does not have."""
    template = ray_file("autoscaler/_private/_azure/azure-vm-template.json")
    known = {*template["parameters"], "availability_zone"} - {"zones"}
    provider = document.mapping("provider")
    for key, example in (("location", "eastus"), ("resource_group", "raytf")):
        if not provider.get(key):
            yield error(
                "azure-place",
                ("provider",),
                f"provider.{key} is missing",
                "`ray up` ends with an assertion.",
                f"Add {key}: {example}.",
            )
    location = provider.get("location")
    if isinstance(location, str) and "-" in location:
        yield error(
            "azure-place",
            ("provider", "location"),
            f"{location} is not a place of Azure",
            "Azure refuses each request (LocationNotAvailableForResourceType).",
            "Write it as `az account list-locations` does, such as eastus.",
        )
    if "region" in provider:
        return  # the unknown provider key says it
    yield from _keys(document)
    yield from _packages(document)
    for t in node_types(document):
        yield from _node(t, known)
    if "cache_stopped_nodes" not in provider:
        yield stopped_nodes("Machines are stopped, not deleted: their disks are paid for after `ray down`.")


def _node(t: NodeType, known: set[str]) -> Iterator[ConfigFinding]:
    path: Path = (*t.path, "node_config")
    parameters = t.config.get("azure_arm_parameters")
    if not isinstance(parameters, dict):
        yield error(
            "azure-parameters",
            path,
            f"type {t.name!r} has no azure_arm_parameters",
            "Ray reads the machine from there alone, and ends with KeyError: 'azure_arm_parameters'.",
            "Indent vmSize, imageSku and so on below azure_arm_parameters.",
        )
        return
    path = (*path, "azure_arm_parameters")
    for key in parameters:
        if key not in known or key in _RAYS:
            own = key in _RAYS
            yield error(
                "azure-unknown-key",
                (*path, str(key)),
                f"{key!r} is filled in by Ray" if own else f"Ray's template has no parameter {key!r}{near(key, known)}",
                "Ray overwrites it." if own else "Azure refuses the deployment of each node (InvalidTemplate).",
                "Leave it out." if own else instead(key, known - _RAYS, "Parameters are"),
            )
    if not parameters.get("vmSize"):
        yield error(
            "azure-size", path, "vmSize is missing", "Ray ends with KeyError: 'vmSize'.", "Add vmSize: Standard_D4s_v5."
        )
    yield from _size(t, parameters, path)
    yield from _choices(parameters, path)
    missing = [k for k in _IMAGE if not parameters.get(k)]
    if not parameters.get("imageId") and missing:
        yield error(
            "azure-image",
            path,
            f"{listed(missing)} and imageId are missing",
            "Azure refuses a machine without an image.",
            "Give all four of imagePublisher, imageOffer, imageSku and imageVersion, or imageId.",
        )
    if t.is_head and parameters.get("priority") in ("Spot", "Low"):
        yield spot_head((*path, "priority"), "Azure", "priority")


def _size(t: NodeType, parameters: dict[str, Any], path: Path) -> Iterator[ConfigFinding]:
    size, disk = parameters.get("vmSize"), parameters.get("osDiskSize")
    if isinstance(size, str) and size and not re.match(r"(Standard|Basic)_", size, re.IGNORECASE):
        yield error(
            "azure-size",
            (*path, "vmSize"),
            f"vmSize is {size!r}",
            "Azure refuses each machine (InvalidParameter): sizes begin with Standard_.",
            f"Write Standard_{size}.",
        )
    least = _GPU_GB if t.machine is not None and t.machine.gpus else _LEAST_GB
    if isinstance(disk, int) and not isinstance(disk, bool) and 0 < disk < least:  # 0 is the image's own size
        yield error(
            "disk-too-small",
            (*path, "osDiskSize"),
            f"a disk of {disk} GB for the system",
            "Azure refuses less than the image has, 30 GB for Ubuntu; TensorFlow takes 8 GB more with CUDA.",
            f"Give {least} or more.",
        )


def _choices(parameters: dict[str, Any], path: Path) -> Iterator[ConfigFinding]:
    for key, choices in (("priority", _PRIORITIES), ("evictionPolicy", _EVICTIONS)):
        value = parameters.get(key)
        if value is not None and value not in choices:
            yield error(
                "azure-value",
                (*path, key),
                f"{key} is {value!r}{near(value, choices)}",
                "Azure refuses the machine.",
                f"Write one of {', '.join(choices)}, with capitals as here.",
            )
    billing = parameters.get("billingProfile")
    price = billing.get("maxPrice") if isinstance(billing, dict) else None
    if price is not None and parameters.get("priority") != "Spot":
        yield error(
            "azure-value",
            (*path, "billingProfile"),
            "billingProfile.maxPrice without priority: Spot",
            "Azure refuses a maximal price for a machine on demand.",
            "Add priority: Spot, or leave billingProfile out.",
        )
    elif price is not None and (
        isinstance(price, bool) or not isinstance(price, int | float) or (price <= 0 and price != -1)
    ):
        yield error(
            "azure-value",
            (*path, "billingProfile"),
            f"maxPrice is {price!r}",
            "Azure refuses it.",
            "Write US dollars an hour as a number, or -1 for up to the price on demand.",
        )


def _keys(document: Document) -> Iterator[ConfigFinding]:
    auth = document.mapping("auth")
    pair = [k for k in ("ssh_private_key", "ssh_public_key") if k in auth]
    if len(pair) == 1:
        other = "ssh_public_key" if pair[0] == "ssh_private_key" else "ssh_private_key"
        yield error(
            "azure-key-pair",
            ("auth", pair[0]),
            f"{pair[0]} is given without {other}",
            "`ray up` ends with ValueError.",
            f"Add {other}, or leave both out, and Ray makes a pair.",
        )
    if not auth.get("ssh_user"):
        yield error(
            "ssh-user",
            ("auth",),
            "auth.ssh_user is missing",
            "`ray up` ends with KeyError: 'ssh_user'.",
            "Add auth: {ssh_user: ubuntu}.",
        )


def _packages(document: Document) -> Iterator[ConfigFinding]:
    for path, command in document.commands("setup_commands", "head_setup_commands"):
        match = re.search(r"azure-mgmt-resource\s*(==|>=)?\s*([\d.]+)?", command)
        if match and (not match[2] or int(match[2].split(".")[0]) > 24 or match[1] == ">="):
            yield error(
                "azure-packages",
                path,
                "azure-mgmt-resource is not pinned to 24 or older",
                "Version 25 has no deployments client: the head starts no worker, which only its monitor.log says.",
                "Write azure-mgmt-resource==24.0.0 and add msrest, as Ray's own defaults do.",
            )
