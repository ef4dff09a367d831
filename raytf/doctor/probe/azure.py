"""Checks a cluster against Azure: subscription, providers, location, sizes, quotas, images, rights and the share."""

from __future__ import annotations

import fnmatch
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from raytf.doctor import machines
from raytf.doctor.check.job_fit import JobNeeds
from raytf.doctor.clouds import rest
from raytf.doctor.clouds.rest import AzureAccount, NoCredentials, RestError
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, error, listed, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import NodeType, most_used, most_workers, too_many_gpus
from raytf.doctor.probe import images
from raytf.doctor.probe.queries import ProbeResults, Query, all_nodes, no_answer, no_credentials, no_right, refused, run

_UNSEEN = "the subscription, its resource providers, sizes, quotas, images, rights and the share"
#: API versions that were current when this was written; Azure keeps them for years.
_RESOURCES, _COMPUTE, _SKUS, _STORAGE = "2021-04-01", "2024-07-01", "2021-07-01", "2023-05-01"
_AUTHORIZATION = "2022-04-01"
_PROVIDERS = ("Microsoft.Compute", "Microsoft.Network", "Microsoft.ManagedIdentity", "Microsoft.Authorization")
_WANTED = (
    "Microsoft.Resources/subscriptions/resourceGroups/write",
    "Microsoft.Resources/deployments/write",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Network/virtualNetworks/write",
    "Microsoft.Network/networkSecurityGroups/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/write",
    "Microsoft.Authorization/roleAssignments/write",
)
_RIGHTS = {
    "sizes": "Microsoft.Compute/skus/read",
    "quotas": "Microsoft.Compute/locations/usages/read",
    "images": "Microsoft.Compute/locations/publishers/artifacttypes/offers/skus/versions/read",
    "rights": "Microsoft.Authorization/permissions/read",
    "resource providers": "Microsoft.Resources/subscriptions/providers/read",
    "resource group": "Microsoft.Resources/subscriptions/resourceGroups/read",
    "share": "Microsoft.Storage/checknameavailability/read",
}


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Ask Azure everything that concerns a cluster. Storage is a share there, which is checked by its name."""
    seen = ProbeResults()
    location = document.get("provider", "location")
    if not isinstance(location, str):
        return seen  # the offline part has said so
    try:
        azure = rest.azure_account(document, here.environ)
    except NoCredentials as problem:
        return ProbeResults([no_credentials("Azure", _UNSEEN, str(problem))])
    try:
        subscription = azure.arm.get(azure.path(), **{"api-version": _RESOURCES})
    except RestError as problem:
        return ProbeResults([_no_subscription(azure, problem)])
    seen.notes.append(f"Azure subscription {subscription.get('displayName')} ({azure.subscription})")
    if subscription.get("state", "Enabled") not in ("Enabled", "Warned"):
        state = RestError(403, "", f"its state is {subscription['state']}")
        return ProbeResults([_no_subscription(azure, state)], seen.notes)
    types = all_nodes(document)
    seen.findings += run(
        [
            Query("resource providers", partial(_providers, azure)),
            Query("resource group", partial(_group, azure, document)),
            Query("sizes", partial(_sizes, azure, document, types)),
            Query("quotas", partial(quotas, azure, document, types)),
            Query("images", partial(_images, azure, location, types)),
            Query("rights", partial(_rights, azure)),
            Query("share", partial(_share, azure, document)),
        ],
        _explain,
    )
    return seen


def _no_subscription(azure: AzureAccount, problem: RestError) -> ConfigFinding:
    if problem.status == 401:
        return refused("Azure", problem, "Run `az login` again.")
    if problem.status == 0:
        return no_answer("subscription", problem)
    return error(
        "project-missing",
        ("provider",),
        f"subscription {azure.subscription!r} is not there, or not for this login: {problem}",
        "`ray up` ends.",
        "Give provider.subscription_id, or run `az account set --subscription ID`.",
    )


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    if isinstance(problem, RestError):
        if problem.status == 401:
            return refused("Azure", problem, "Run `az login` again.")
        if problem.is_denied:
            return no_right(query.what, _RIGHTS[query.what])
    return no_answer(query.what, f"{type(problem).__name__}: {problem}")


def _providers(azure: AzureAccount) -> Iterator[ConfigFinding]:
    for name in _PROVIDERS:
        provider = azure.arm.get(azure.path(f"/providers/{name}"), **{"api-version": _RESOURCES})
        if provider.get("registrationState") != "Registered":
            yield error(
                "api-disabled",
                ("provider",),
                f"resource provider {name} is not registered ({provider.get('registrationState')})",
                "`ray up` ends, or the head starts no worker (MissingSubscriptionRegistration).",
                f"Run `az provider register --namespace {name}` and wait some minutes.",
            )


def _group(azure: AzureAccount, document: Document) -> Iterator[ConfigFinding]:
    name, location = document.get("provider", "resource_group"), document.get("provider", "location")
    try:
        group = azure.arm.get(azure.path(f"/resourcegroups/{name}"), **{"api-version": _RESOURCES})
    except RestError as problem:
        if problem.is_missing:
            return  # Ray makes it
        raise
    if str(group.get("location", location)).casefold() != str(location).casefold():
        yield error(
            "resource-group-elsewhere",
            ("provider", "location"),
            f"resource group {name} is in {group['location']}, and location is {location}",
            "`ray up` ends: InvalidResourceGroupLocation.",
            f"Write location: {group['location']}, or another resource_group.",
        )


def _sizes(azure: AzureAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    location = str(document.get("provider", "location"))
    wanted = {"api-version": _SKUS, "$filter": f"location eq '{location}'"}
    offered = {
        sku["name"].casefold(): sku
        for sku in azure.arm.pages(azure.path("/providers/Microsoft.Compute/skus"), "value", **wanted)
        if sku.get("resourceType") == "virtualMachines"
    }
    for t in types:
        name, path = size(t), (*t.path, "node_config", "azure_arm_parameters", "vmSize")
        if not name:
            continue
        sku = offered.get(name.casefold())
        closed = [r for r in (sku or {}).get("restrictions", ()) if r.get("type") == "Location"]
        if sku is None or closed:
            why = closed[0].get("reasonCode", "") if closed else "no such size there"
            yield error(
                "instance-type-not-offered",
                path,
                f"{name} is not offered to you in {location} ({why})",
                "Azure refuses each node of this type (SkuNotAvailable), which Ray repeats forever.",
                "Take another size or location; for NotAvailableForSubscription, ask Azure's support.",
            )
            continue
        has = {c["name"]: c["value"] for c in sku.get("capabilities", ())}
        if t.market == "spot" and has.get("LowPriorityCapable") == "False":
            yield error(
                "spot-not-offered",
                (*path[:-1], "priority"),
                f"{name} is not sold as Spot",
                "Azure refuses each node of this type.",
                "Take another size, or leave priority out.",
            )
        gpus = float(has.get("GPUs", 0))
        if t.machine is None and t.resources.get("GPU", 0) > gpus:
            yield too_many_gpus(t, name, gpus, f"Write GPU: {gpus:g}, or take another size.")


def _images(azure: AzureAccount, location: str, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    seen: set[tuple[str, ...]] = set()
    for t in types:
        parameters = t.config.get("azure_arm_parameters")
        own = parameters if isinstance(parameters, dict) else {}
        name = tuple(str(own.get(f"image{key}") or "") for key in ("Publisher", "Offer", "Sku", "Version"))
        path = (*t.path, "node_config", "azure_arm_parameters", "imageSku")
        if own.get("imageId") or not all(name) or name in seen:
            continue
        seen.add(name)
        publisher, offer, sku, version = name
        base = azure.path(
            f"/providers/Microsoft.Compute/locations/{location}/publishers/{publisher}/artifacttypes/vmimage"
            f"/offers/{offer}/skus/{sku}/versions"
        )
        try:
            versions = [v["name"] for v in azure.arm.get(base, **{"api-version": _COMPUTE})]
        except RestError as problem:
            if not problem.is_missing:
                raise
            versions = []
        if not versions or version not in ("latest", *versions):
            yield error(
                "image-missing",
                path,
                f"there is no image {':'.join(name)} in {location}",
                "Azure refuses each node of this type (PlatformImageNotFound).",
                f"`az vm image list --all --publisher {publisher} --offer {offer} --output table` has those there are.",
            )
            continue
        last = versions[-1] if version == "latest" else version
        yield from _plan(azure.arm.get(f"{base}/{last}", **{"api-version": _COMPUTE}), t, name, own)


def _plan(image: dict[str, Any], t: NodeType, name: tuple[str, ...], own: dict[str, Any]) -> Iterator[ConfigFinding]:
    path = (*t.path, "node_config", "azure_arm_parameters")
    about = image.get("properties", {})
    if about.get("plan"):
        yield error(
            "image-plan",
            (*path, "imageOffer"),
            f"image {':'.join(name)} is sold with a plan, which Ray's template does not name",
            "Azure refuses each node of this type (MarketplacePurchaseEligibilityFailed, VMMarketplaceInvalidInput).",
            "Take an image without a plan, such as microsoft-dsvm:ubuntu-hpc:2204.",
        )
    least, disk = about.get("osDiskImage", {}).get("sizeInGb"), own.get("osDiskSize")
    if isinstance(least, int) and isinstance(disk, int) and disk < least:
        place = (*path, "osDiskSize")
        yield images.small_disk(place, f"a disk of {disk} GB", ":".join(name), f"{least} GB", "Azure")
    built = {"x64": "x64", "Arm64": "Arm64"}.get(str(about.get("architecture")))
    # The letter p after the digits of a size is Arm: Standard_D4ps_v5.
    runs = "Arm64" if re.match(r"Standard_[A-Z]+\d+(-\d+)?[a-z]*p", size(t)) else "x64"
    if built and size(t) and built != runs:
        yield images.wrong_architecture((*path, "imageSku"), ":".join(name), built, size(t), runs, "Azure")


def _rights(azure: AzureAccount) -> Iterator[ConfigFinding]:
    query = {"api-version": _AUTHORIZATION}
    granted = azure.arm.pages(azure.path("/providers/Microsoft.Authorization/permissions"), "value", **query)
    lacks = [action for action in _WANTED if not any(_grants(p, action) for p in granted)]
    if lacks:
        yield error(
            "right-missing",
            ("provider",),
            f"this login may not {listed(lacks)} in the subscription",
            "`ray up` ends, or leaves things behind: Ray gives the head a role of its own.",
            "Ask for the roles Contributor and Role Based Access Control Administrator (or Owner).",
        )


def _grants(permission: dict[str, Any], action: str) -> bool:
    def hit(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.casefold(), p.casefold()) for p in patterns)

    return hit(permission.get("actions", ())) and not hit(permission.get("notActions", ()))


def _share(azure: AzureAccount, document: Document) -> Iterator[ConfigFinding]:
    """Check the storage account of an NFS share that the set-up mounts: a name that is still free is no account."""
    query = azure.path("/providers/Microsoft.Storage/checkNameAvailability")
    for path, command in document.commands("setup_commands", "worker_setup_commands", "initialization_commands"):
        for name in set(re.findall(r"([a-z0-9]{3,24})\.file\.core\.windows\.net", command)):
            body = {"name": name, "type": "Microsoft.Storage/storageAccounts"}
            if azure.arm.post(query, body, **{"api-version": _STORAGE}).get("nameAvailable"):
                yield error(
                    "bucket-missing",
                    path,
                    f"there is no storage account {name}",
                    "The set-up of each node ends when it mounts the share.",
                    "Make it as docs/clusters/azure.md says, or correct the name.",
                )


def size(t: NodeType) -> str:
    """Return the vmSize of a node type; empty if it has none."""
    return machines.instance_type("azure", t.config) or ""


def family(name: str) -> str:
    """Return the family of a size as sorted letters and digits, to compare it with that of a usage.

    Azure has no rule for it but the list of sizes: Standard_NC4as_T4_v3 counts on `Standard NCASv3_T4 Family`.
    The number of vCPUs is left out, and the parts of the name may change places.
    """
    return _folded(re.sub(r"(?<=[A-Za-z])\d+(-\d+)?", "", name.removeprefix("Standard_"), count=1))


def usage_family(name: str) -> str:
    """Return the same for the name of a usage."""
    return _folded(re.sub(r"^standard|family$", "", name, flags=re.IGNORECASE))


def _folded(text: str) -> str:
    return "".join(sorted(re.sub(r"[^a-z0-9]", "", text.casefold())))


def quotas(azure: AzureAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find quotas that have no room for a node, or not for all of them."""
    location = document.get("provider", "location")
    path = azure.path(f"/providers/Microsoft.Compute/locations/{location}/usages")
    usages = {u["name"]["value"]: u for u in azure.arm.pages(path, "value", **{"api-version": _COMPUTE})}
    by_family = {usage_family(name): name for name in usages if name.endswith("Family")}
    wanted: dict[str, list[NodeType]] = defaultdict(list)
    for t in types:
        if t.machine is None:
            continue
        name = "lowPriorityCores" if t.market == "spot" else by_family.get(family(size(t)))
        if name in usages:
            wanted[str(name)].append(t)
        if t.market != "spot" and "cores" in usages:
            wanted["cores"].append(t)
    for name, members in sorted(wanted.items()):
        usage = usages[name]
        room = usage["limit"] - usage["currentValue"]
        title = usage["name"].get("localizedValue", name)
        ask = f"Ask for more of {title!r} in {location}: portal, Subscriptions, Usage + quotas"
        small = [t for t in members if t.machine and t.machine.cpus > room]
        for t in small:
            cpus = t.machine.cpus if t.machine else 0
            yield error(
                "quota-too-small",
                (*t.path, "node_config", "azure_arm_parameters", "vmSize"),
                f"the quota {title!r} has room for {room} of {usage['limit']} vCPUs, and one {size(t)} has {cpus}",
                "No node of this type ever starts (QuotaExceeded, OperationNotAllowed).",
                f"{ask}, {cpus * max(1, t.most)} or more.",
            )
        most = most_used([(t, t.machine.cpus if t.machine else 0) for t in members], most_workers(document))
        if not small and most > room:
            yield warning(
                "quota-too-small",
                (*members[0].path, "max_workers"),
                f"the quota {title!r} has room for {room} of {usage['limit']} vCPUs, and the cluster may want {most}",
                "Beyond the quota nodes are refused, whatever max_workers says.",
                f"{ask}, or lower max_workers.",
            )
