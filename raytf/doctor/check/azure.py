"""Mistakes of Azure clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, listed, near, refuses_nodes, stops_ray_up
from raytf.doctor.local_environment import package_file, ray_file
from raytf.doctor.node_types import NodeType, node_types, small_disk, spot_head, stopped_nodes

#: Parameters of Ray's template that Ray fills in itself.
_RAYS = {
    *("vmName", "vmTags", "vmCount", "msi", "nsg", "subnet", "provisionPublicIp", "zones", "publicKey"),
    "adminUsername",
}
_IMAGE = ("imagePublisher", "imageOffer", "imageSku", "imageVersion")
_CHOICES = {"priority": ("Regular", "Low", "Spot"), "evictionPolicy": ("Deallocate", "Delete")}
_LEAST_GB, _GPU_GB = 32, 64


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find values that Azure refuses, and parameters that Ray's template does not have."""
    template = ray_file("autoscaler/_private/_azure/azure-vm-template.json")
    known = {*template["parameters"], "availability_zone"} - {"zones"}
    provider = document.mapping("provider")
    for key, example in (("location", "eastus"), ("resource_group", "raytf")):
        if not provider.get(key):
            what, fix = f"provider.{key} is missing", f"Add {key}: {example}."
            yield stops_ray_up("azure-place", ("provider",), what, fix, "an assertion")
    if not provider.get("subscription_id") and package_file("azure.cli.core", "_profile.py") is None:
        what = "provider.subscription_id is missing, and azure-cli-core is not installed here"
        fix = "Add subscription_id: the one that `az account show --query id` prints."
        yield stops_ray_up("azure-place", ("provider",), what, fix, "an ImportError: it looks for it in that package")
    location = provider.get("location")
    if isinstance(location, str) and "-" in location:
        path, what = ("provider", "location"), f"{location} is not a location of Azure"
        fix = "Write a name that `az account list-locations` prints, such as eastus."
        yield refuses_nodes("Azure", "azure-place", path, what, fix, "LocationNotAvailableForResourceType")
    if "region" in provider:
        return  # the finding about this unknown key is enough
    yield from _keys(document)
    yield from _packages(document)
    for t in node_types(document):
        yield from _node(t, known)
    if "cache_stopped_nodes" not in provider:
        yield stopped_nodes("Machines are stopped, not deleted: you pay for their disks after `ray down`.")


def _node(t: NodeType, known: set[str]) -> Iterator[ConfigFinding]:
    path: Path = (*t.path, "node_config")
    parameters = t.config.get("azure_arm_parameters")
    if not isinstance(parameters, dict):
        what = f"type {t.name!r} has no azure_arm_parameters"
        fix = "Indent vmSize, imageSku and so on below azure_arm_parameters."
        yield stops_ray_up("azure-parameters", path, what, fix, "KeyError: 'azure_arm_parameters'")
        return
    path = (*path, "azure_arm_parameters")
    for key in parameters:
        where = (*path, str(key))
        if key in _RAYS:
            yield error("azure-unknown-key", where, f"{key!r} is filled in by Ray", "Ray overwrites it.", "Delete it.")
        elif key not in known:
            what, fix = f"Ray's template has no parameter {key!r}", instead(key, known - _RAYS, "Parameters are")
            yield refuses_nodes("Azure", "azure-unknown-key", where, what, fix, "InvalidTemplate")
    if not parameters.get("vmSize"):
        fix = "Add vmSize: Standard_D4s_v5."
        yield stops_ray_up("azure-size", path, "vmSize is missing", fix, "KeyError: 'vmSize'")
    size = parameters.get("vmSize")
    if isinstance(size, str) and size and not re.match(r"(Standard|Basic)_", size, re.IGNORECASE):
        fix = f"Write Standard_{size}: all sizes begin with Standard_."
        yield refuses_nodes("Azure", "azure-size", (*path, "vmSize"), f"vmSize is {size!r}", fix, "InvalidParameter")
    disk = parameters.get("osDiskSize") or None  # 0 is the image's own size
    yield from small_disk(t, (*path, "osDiskSize"), disk, (_LEAST_GB, _GPU_GB), "GB", "Azure")
    yield from _choices(parameters, path)
    missing = [k for k in _IMAGE if not parameters.get(k)]
    if not parameters.get("imageId") and missing:
        what = f"{listed(missing)} and imageId are missing"
        fix = "Add all four of imagePublisher, imageOffer, imageSku and imageVersion, or imageId."
        yield refuses_nodes("Azure", "azure-image", path, what, fix)
    if t.is_head and parameters.get("priority") in ("Spot", "Low"):
        yield spot_head((*path, "priority"), "Azure", "priority")


def _choices(parameters: dict[str, Any], path: Path) -> Iterator[ConfigFinding]:
    for key, choices in _CHOICES.items():
        value = parameters.get(key)
        if value is not None and value not in choices:
            what = f"{key} is {value!r}{near(value, choices)}"
            fix = f"Write one of {', '.join(choices)}, in this capitalization."
            yield refuses_nodes("Azure", "azure-value", (*path, key), what, fix)
    billing = parameters.get("billingProfile")
    price = billing.get("maxPrice") if isinstance(billing, dict) else None
    if price is None:
        return
    path = (*path, "billingProfile")
    if parameters.get("priority") != "Spot":
        what, fix = "billingProfile.maxPrice needs priority: Spot", "Add priority: Spot, or delete billingProfile."
        yield refuses_nodes("Azure", "azure-value", path, what, fix)
    elif isinstance(price, bool) or not isinstance(price, int | float) or (price <= 0 and price != -1):
        fix = "Write US dollars an hour as a number, or -1 to pay at most the on-demand price."
        yield refuses_nodes("Azure", "azure-value", path, f"maxPrice is {price!r}", fix)


def _keys(document: Document) -> Iterator[ConfigFinding]:
    auth = document.mapping("auth")
    pair = {"ssh_private_key": "ssh_public_key", "ssh_public_key": "ssh_private_key"}
    halves = [key for key in pair if key in auth]
    if len(halves) == 1:
        what = f"{halves[0]} needs {pair[halves[0]]}"
        fix = f"Add {pair[halves[0]]}, or delete both to let Ray create a pair."
        yield stops_ray_up("azure-key-pair", ("auth", halves[0]), what, fix, "ValueError")
    if not auth.get("ssh_user"):
        fix = "Add auth: {ssh_user: ubuntu}."
        yield stops_ray_up("ssh-user", ("auth",), "auth.ssh_user is missing", fix, "KeyError: 'ssh_user'")


def _packages(document: Document) -> Iterator[ConfigFinding]:
    for path, command in document.commands("setup_commands", "head_setup_commands"):
        match = re.search(r"azure-mgmt-resource\s*(==|>=)?\s*([\d.]+)?", command)
        if match and (not match[2] or int(match[2].split(".")[0]) > 24 or match[1] == ">="):
            yield error(
                "azure-packages",
                path,
                "azure-mgmt-resource is not pinned to 24 or older",
                "Version 25 has no deployments client: the head starts no worker, and only its monitor.log shows why.",
                "Write azure-mgmt-resource==24.0.0 and add msrest, as Ray's own defaults do.",
            )
