"""What is left of a cluster on Azure: machines by Ray's tag, all else by the names that Ray's templates give."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor import machines
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.rest import AzureAccount, NoCredentials, RestError
from raytf.doctor.document import Document
from raytf.doctor.leftovers.resource import ADDRESS_USD, CLUSTER_TAG, Leftovers, LeftResource, disk_usd, gather
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError

_RESOURCES, _COMPUTE = "2021-04-01", "2024-07-01"
_DISKS = "2023-10-02"
#: Resources that cost nothing by themselves.
_FREE = {
    "microsoft.network/networkinterfaces": "network interface",
    "microsoft.network/virtualnetworks": "network",
    "microsoft.network/networksecuritygroups": "security group",
    "microsoft.managedidentity/userassignedidentities": "identity",
}


def find(document: Document, here: Surroundings) -> Leftovers:
    """Find everything that `ray up` of this file has made."""
    group, name = document.get("provider", "resource_group"), document.get("cluster_name", default="default")
    if not isinstance(group, str):
        raise ConfigError("the file has no provider.resource_group. Expected that of the cluster.")
    try:
        azure = rest.azure_account(document, here.environ)
    except NoCredentials as problem:
        raise ConfigError(f"there are no credentials for Azure. {problem}.") from None
    left = Leftovers(place=f"Azure, resource group {group}, clusters named {name}")
    unique_id = str(document.get("provider", "unique_id") or "")
    return gather(left, [("resources", lambda: _resources(azure, group, str(name), unique_id))])


def _resources(azure: AzureAccount, group: str, name: str, unique_id: str) -> Iterator[LeftResource]:
    base = azure.path(f"/resourceGroups/{group}")
    try:
        every = azure.arm.pages(f"{base}/resources", "value", **{"api-version": _RESOURCES})
    except RestError as problem:
        if problem.is_missing:
            return  # the group is gone, and all that was in it
        raise
    mine = [r for r in every if _is_of(r, name, unique_id)]
    for r in mine:
        yield from _resource(azure, group, r)
    if mine and len(mine) == len(every):
        remove = f"az group delete --name {group} --yes"
        yield LeftResource(
            "resource group", group, "there", 0.0, remove, "holds nothing else: this removes all of the above"
        )


def _is_of(resource: dict[str, Any], name: str, unique_id: str) -> bool:
    tags = resource.get("tags") or {}
    if CLUSTER_TAG in tags:
        return bool(tags[CLUSTER_TAG] == name)
    # Clusters `test` and `test-2` begin alike: what follows the name must be Ray's, four digits of a hash if not given.
    unique = re.escape(unique_id) or "[0-9a-f]{4}"
    pattern = rf"ray-{re.escape(name)}-((head|worker)-{unique}|{unique}-(msi|nsg|ra|subnet|vnet)$)"
    return re.match(pattern, str(resource.get("name", "")), re.IGNORECASE) is not None


def _resource(azure: AzureAccount, group: str, resource: dict[str, Any]) -> Iterator[LeftResource]:
    kind, name = str(resource["type"]).casefold(), resource["name"]
    remove = f"az resource delete --ids {resource['id']}"
    if kind == "microsoft.compute/virtualmachines":
        yield _machine(azure, group, name)
    elif kind == "microsoft.compute/disks":
        disk = azure.arm.get(resource["id"], **{"api-version": _DISKS})
        about = disk.get("properties", {})
        size, sku = about.get("diskSizeGB", 0), disk.get("sku", {}).get("name", "")
        remove = f"az disk delete --resource-group {group} --name {name} --yes"
        state = about.get("diskState", "?")
        yield LeftResource("disk", name, state, disk_usd(sku, size), remove, f"{size} GB {sku}")
    elif kind == "microsoft.network/publicipaddresses":
        remove = f"az network public-ip delete --resource-group {group} --name {name}"
        yield LeftResource("address", name, "there", ADDRESS_USD, remove)
    elif kind in _FREE:
        yield LeftResource(_FREE[kind], name, "there", 0.0, remove)
    else:
        yield LeftResource(kind, name, "there", None, remove)


def _machine(azure: AzureAccount, group: str, name: str) -> LeftResource:
    path = azure.path(f"/resourceGroups/{group}/providers/Microsoft.Compute/virtualMachines/{name}")
    vm = azure.arm.get(path, **{"api-version": _COMPUTE, "$expand": "instanceView"})
    about = vm.get("properties", {})
    size = about.get("hardwareProfile", {}).get("vmSize", "")
    codes = [s.get("code", "") for s in about.get("instanceView", {}).get("statuses", ())]
    state = next((c.partition("/")[2] for c in codes if c.startswith("PowerState/")), "?")
    machine = machines.machine("azure", {"azure_arm_parameters": {"vmSize": size}})
    # A machine that is stopped and not deallocated is paid for in full.
    usd = None if state == "deallocated" else machine.usd if machine else None
    spot = ", spot: at most this" if about.get("priority") == "Spot" else ""
    note = f"{size}{spot}" + ("; its disks are paid for" if state == "deallocated" else "")
    remove = f"az vm delete --resource-group {group} --name {name} --yes"
    return LeftResource("instance", name, state, usd, remove, note)
