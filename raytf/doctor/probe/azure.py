"""Checks a cluster against Azure: subscription, providers, location, sizes, quotas, images, rights and storage."""

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
from raytf.doctor.finding import ConfigFinding, error, listed, refuses_nodes, stops_ray_up
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import NodeType, too_many_gpus
from raytf.doctor.probe.queries import (
    ProbeResults,
    Query,
    all_nodes,
    check_bucket,
    no_answer,
    no_credentials,
    no_right,
    over_quota,
    refused,
    run,
    small_disk,
    wrong_architecture,
)

_LOGIN = "Run `az login` again."
_UNSEEN = "the subscription, its resource providers, sizes, quotas, images, rights, the identity and the bucket"
#: API versions that were current when this was written; Azure keeps them for years.
_RESOURCES, _COMPUTE, _SKUS = "2021-04-01", "2024-07-01", "2021-07-01"
_AUTHORIZATION, _IDENTITY = "2022-04-01", "2023-01-31"
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
    "identity": "Microsoft.ManagedIdentity/userAssignedIdentities/read",
}


def inspect(document: Document, here: Surroundings, need: JobNeeds | None) -> ProbeResults:
    """Check a cluster against Azure."""
    seen = ProbeResults()
    location = document.get("provider", "location")
    if not isinstance(location, str):
        return seen  # the offline part reports it
    try:
        azure = rest.azure_account(document, here.environ)
    except NoCredentials as problem:
        return ProbeResults([no_credentials("Azure", _UNSEEN, str(problem))])
    try:
        subscription = azure.get("", _RESOURCES)
    except RestError as problem:
        return ProbeResults([_no_subscription(azure, problem)])
    seen.notes.append(f"Azure subscription {subscription.get('displayName')} ({azure.subscription})")
    if subscription.get("state", "Enabled") not in ("Enabled", "Warned"):
        state = RestError(403, "", f"its state is {subscription['state']}")
        return ProbeResults([_no_subscription(azure, state)], seen.notes)
    types = all_nodes(document)
    queries = [
        Query("resource providers", partial(_providers, azure)),
        Query("resource group", partial(_group, azure, document)),
        Query("sizes", partial(_sizes, azure, location, types)),
        Query("quotas", partial(quotas, azure, document, types)),
        Query("images", partial(_images, azure, location, types)),
        Query("rights", partial(_rights, azure)),
        Query("identity", partial(_identity, azure, document)),
    ]
    if need is not None and need.storage.startswith("az://"):
        queries.append(Query("bucket", partial(check_bucket, need.storage)))
    seen.findings += run(queries, _explain)
    return seen


def _no_subscription(azure: AzureAccount, problem: RestError) -> ConfigFinding:
    if problem.status == 401:
        return refused("Azure", problem, _LOGIN)
    if problem.status == 0:
        return no_answer("subscription", problem)
    what = f"subscription {azure.subscription!r} does not exist, or this login cannot see it: {problem}"
    fix = "Set provider.subscription_id, or run `az account set --subscription ID`."
    return stops_ray_up("project-missing", ("provider",), what, fix)


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    if isinstance(problem, RestError) and problem.status == 401:
        return refused("Azure", problem, _LOGIN)
    if isinstance(problem, RestError) and problem.is_denied:
        return no_right(query.what, _RIGHTS[query.what])
    return no_answer(query.what, f"{type(problem).__name__}: {problem}")


def _providers(azure: AzureAccount) -> Iterator[ConfigFinding]:
    for name in _PROVIDERS:
        state = azure.get(f"/providers/{name}", _RESOURCES).get("registrationState")
        if state != "Registered":
            what = f"resource provider {name} is not registered ({state})"
            why = "`ray up` exits, or the head starts no worker (MissingSubscriptionRegistration)."
            fix = f"Run `az provider register --namespace {name}` and wait some minutes."
            yield error("api-disabled", ("provider",), what, why, fix)


def _group(azure: AzureAccount, document: Document) -> Iterator[ConfigFinding]:
    name, location = document.get("provider", "resource_group"), document.get("provider", "location")
    group = azure.find(f"/resourcegroups/{name}", _RESOURCES) or {}  # Ray creates a missing group
    if str(group.get("location", location)).casefold() != str(location).casefold():
        what = f"resource group {name} is in {group['location']}, but location is {location}"
        fix = f"Write location: {group['location']}, or choose another resource_group."
        how = "InvalidResourceGroupLocation"
        yield stops_ray_up("resource-group-elsewhere", ("provider", "location"), what, fix, how)


def _sizes(azure: AzureAccount, location: str, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    skus = azure.pages("/providers/Microsoft.Compute/skus", _SKUS, **{"$filter": f"location eq '{location}'"})
    offered = {sku["name"].casefold(): sku for sku in skus if sku.get("resourceType") == "virtualMachines"}
    for t in types:
        name, path = size(t), (*t.path, "node_config", "azure_arm_parameters", "vmSize")
        if not name:
            continue
        sku = offered.get(name.casefold())
        closed = [r for r in (sku or {}).get("restrictions", ()) if r.get("type") == "Location"]
        if sku is None or closed:
            why = closed[0].get("reasonCode", "") if closed else "no such size there"
            what = f"{name} is not offered to you in {location} ({why})"
            fix = "Use another size or location; for NotAvailableForSubscription, ask Azure's support."
            yield refuses_nodes("Azure", "instance-type-not-offered", path, what, fix, "SkuNotAvailable")
            continue
        has = {c["name"]: c["value"] for c in sku.get("capabilities", ())}
        if t.market == "spot" and has.get("LowPriorityCapable") == "False":
            what, fix = f"{name} is not sold as Spot", "Use another size, or delete priority."
            yield refuses_nodes("Azure", "spot-not-offered", (*path[:-1], "priority"), what, fix)
        gpus = float(has.get("GPUs", 0))
        if t.machine is None and t.resources.get("GPU", 0) > gpus:
            yield too_many_gpus(t, name, gpus, f"Write GPU: {gpus:g}, or use another size.")


def _images(azure: AzureAccount, location: str, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    seen: set[tuple[str, ...]] = set()
    for t in types:
        parameters = t.config.get("azure_arm_parameters")
        own = parameters if isinstance(parameters, dict) else {}
        name = tuple(str(own.get(f"image{key}") or "") for key in ("Publisher", "Offer", "Sku", "Version"))
        if own.get("imageId") or not all(name) or name in seen:
            continue
        seen.add(name)
        publisher, offer, sku, version = name
        base = (
            f"/providers/Microsoft.Compute/locations/{location}/publishers/{publisher}/artifacttypes/vmimage"
            f"/offers/{offer}/skus/{sku}/versions"
        )
        versions = [v["name"] for v in azure.find(base, _COMPUTE) or ()]
        if not versions or version not in ("latest", *versions):
            path = (*t.path, "node_config", "azure_arm_parameters", "imageSku")
            what = f"there is no image {':'.join(name)} in {location}"
            fix = f"List them with `az vm image list --all --publisher {publisher} --offer {offer} --output table`."
            yield refuses_nodes("Azure", "image-missing", path, what, fix, "PlatformImageNotFound")
            continue
        last = versions[-1] if version == "latest" else version
        yield from _fits(azure.get(f"{base}/{last}", _COMPUTE).get("properties", {}), t, ":".join(name), own)


def _fits(about: dict[str, Any], t: NodeType, name: str, own: dict[str, Any]) -> Iterator[ConfigFinding]:
    path = (*t.path, "node_config", "azure_arm_parameters")
    if about.get("plan"):
        what = f"image {name} is sold with a plan, which Ray's template cannot name"
        fix = "Use an image without a plan, such as microsoft-dsvm:ubuntu-hpc:2204."
        reason = "MarketplacePurchaseEligibilityFailed, VMMarketplaceInvalidInput"
        yield refuses_nodes("Azure", "image-plan", (*path, "imageOffer"), what, fix, reason)
    least = about.get("osDiskImage", {}).get("sizeInGb")
    yield from small_disk((*path, "osDiskSize"), own.get("osDiskSize"), least, "GB", name, "Azure")
    built = about.get("architecture")
    # The letter p after the digits of a size means Arm: Standard_D4ps_v5.
    runs = "Arm64" if re.match(r"Standard_[A-Z]+\d+(-\d+)?[a-z]*p", size(t)) else "x64"
    if built in ("x64", "Arm64") and size(t) and built != runs:
        yield wrong_architecture((*path, "imageSku"), name, built, size(t), runs, "Azure")


def _rights(azure: AzureAccount) -> Iterator[ConfigFinding]:
    permissions = azure.pages("/providers/Microsoft.Authorization/permissions", _AUTHORIZATION)
    lacks = [action for action in _WANTED if not any(_grants(p, action) for p in permissions)]
    if lacks:
        what = f"this login may not {listed(lacks)} in the subscription"
        why = "`ray up`, which also assigns a role to the head, exits or leaves resources behind."
        fix = "Ask for the roles Contributor and Role Based Access Control Administrator (or Owner)."
        yield error("right-missing", ("provider",), what, why, fix)


def _grants(permission: dict[str, Any], action: str) -> bool:
    def hit(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatchcase(action.casefold(), p.casefold()) for p in patterns)

    return hit(permission.get("actions", ())) and not hit(permission.get("notActions", ()))


def _identity(azure: AzureAccount, document: Document) -> Iterator[ConfigFinding]:
    """Check the identity of the nodes. Ray makes one, but not where both keys name one that exists."""
    name, group = document.get("provider", "msi_name"), document.get("provider", "msi_resource_group")
    if name is None or group is None:
        return
    kind = "Microsoft.ManagedIdentity/userAssignedIdentities"
    if azure.find(f"/resourceGroups/{group}/providers/{kind}/{name}", _IDENTITY) is None:
        what = f"there is no managed identity {name} in the resource group {group}"
        fix = f"Run `az identity create --name {name} --resource-group {group}`, and give it a role on your storage."
        yield stops_ray_up("identity-missing", ("provider", "msi_name"), what, fix)


def size(t: NodeType) -> str:
    """Return the vmSize of a node type, or an empty string if it has none."""
    return machines.instance_type("azure", t.config) or ""


def family(name: str) -> str:
    """Return the family of a size as sorted letters and digits, to compare it with the family of a usage.

    Azure documents no rule for a family's name: Standard_NC4as_T4_v3 counts against `Standard NCASv3_T4 Family`.
    The name omits the number of vCPUs, and may have the parts of the size in another order.
    """
    return _folded(re.sub(r"(?<=[A-Za-z])\d+(-\d+)?", "", name.removeprefix("Standard_"), count=1))


def usage_family(name: str) -> str:
    """Return the family of a usage, by its name, in the form that `family` returns."""
    return _folded(re.sub(r"^standard|family$", "", name, flags=re.IGNORECASE))


def _folded(text: str) -> str:
    return "".join(sorted(re.sub(r"[^a-z0-9]", "", text.casefold())))


def quotas(azure: AzureAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find quotas that are too small for one node, or for all nodes."""
    location = document.get("provider", "location")
    entries = azure.pages(f"/providers/Microsoft.Compute/locations/{location}/usages", _COMPUTE)
    usages = {u["name"]["value"]: u for u in entries}
    by_family = {usage_family(name): name for name in usages if name.endswith("Family")}
    wanted: dict[str, list[tuple[NodeType, float]]] = defaultdict(list)
    for t in types:
        if t.machine is None:
            continue
        name = "lowPriorityCores" if t.market == "spot" else by_family.get(family(size(t)))
        for quota in (name, None if t.market == "spot" else "cores"):
            if quota in usages:
                wanted[str(quota)].append((t, t.machine.cpus))
    for name, members in sorted(wanted.items()):
        usage = usages[name]
        room, title = usage["limit"] - usage["currentValue"], usage["name"].get("localizedValue", name)
        yield from over_quota(
            document,
            "azure",
            f"the quota {title!r} has room for {room} of {usage['limit']} vCPUs",
            members,
            room,
            "QuotaExceeded, OperationNotAllowed",
            partial("Ask for {2:g} of {0!r} in {1}: portal, Subscriptions, Usage + quotas.".format, title, location),
        )
