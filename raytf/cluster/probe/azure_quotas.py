"""Quotas of Azure: vCPUs of a family of sizes on demand, of all sizes together on Spot."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, error, warning
from raytf.cluster.check.node_types import NodeType, most_used
from raytf.cluster.clouds.accounts import AzureAccount

_API = "2024-07-01"


def size(t: NodeType) -> str:
    """The vmSize of a node type; empty where it has none."""
    parameters = t.config.get("azure_arm_parameters")
    return str(parameters.get("vmSize") or "") if isinstance(parameters, dict) else ""


def family(name: str) -> str:
    """The family of a size, such that it can be compared with that of a usage: letters and digits, sorted.

    Azure has no rule for it but the list of sizes: Standard_NC4as_T4_v3 counts on `Standard NCASv3_T4 Family`.
    The number of vCPUs is left out, and the parts of the name may change places.
    """
    return _folded(re.sub(r"(?<=[A-Za-z])\d+(-\d+)?", "", name.removeprefix("Standard_"), count=1))


def usage_family(name: str) -> str:
    """The same of what a usage is called."""
    return _folded(re.sub(r"^standard|family$", "", name, flags=re.IGNORECASE))


def _folded(text: str) -> str:
    return "".join(sorted(re.sub(r"[^a-z0-9]", "", text.casefold())))


def quotas(azure: AzureAccount, document: Document, types: Sequence[NodeType]) -> Iterator[ConfigFinding]:
    """Find quotas that have no room for a node, or not for all of them."""
    location = document.get("provider", "location")
    path = azure.path(f"/providers/Microsoft.Compute/locations/{location}/usages")
    usages = {u["name"]["value"]: u for u in azure.arm.pages(path, "value", **{"api-version": _API})}
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
    limit = document.get("max_workers", default=2)
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
        most = most_used(
            [(t, t.machine.cpus if t.machine else 0) for t in members], limit if isinstance(limit, int) else 2
        )
        if not small and most > room:
            yield warning(
                "quota-too-small",
                (*members[0].path, "max_workers"),
                f"the quota {title!r} has room for {room} of {usage['limit']} vCPUs, and the cluster may want {most}",
                "Beyond the quota nodes are refused, whatever max_workers says.",
                f"{ask}, or lower max_workers.",
            )
