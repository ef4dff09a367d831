"""The list `fallback` of a node_config: other machines for a node type whose first choice has no capacity.

Each entry lists its differences from the node_config around it: mappings are merged, other values replaced, and null
deletes a key. `at_most` limits how many nodes of the type may use that entry.

    node_config:
      InstanceType: g6.xlarge
      InstanceMarketOptions: {MarketType: spot}
      fallback:
        - {InstanceType: g5.xlarge}
        - {InstanceMarketOptions: null, at_most: 2}
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

KEY, AT_MOST = "fallback", "at_most"
#: Provider classes (the `module` of a provider of type external) that read `fallback`, and the cloud of each.
MODULES = {f"raytf.cluster.providers.{cloud}.Provider": cloud for cloud in ("aws", "gcp", "azure")}
#: Key of the provider: for how many seconds a place without capacity is not tried again.
HOLD = "hold_seconds"
HOLD_SECONDS = 120.0
#: Key of the provider: whether nodes may be in several zones, and nodes of one type may be different machines.
SPREAD = "spread"
#: Key of the provider: how long no job may have run before the cluster ends itself, see raytf.cluster.autostop.
AUTOSTOP = "autostop"


@dataclass(frozen=True)
class Candidate:
    """One choice of machine for the nodes of a type.

    Attributes:
        config: the complete node_config to launch.
        at_most: the most nodes of the type that may use this choice, or None for no limit.
    """

    config: dict[str, Any]
    at_most: int | None = None


def cloud_of(provider: Mapping[str, Any]) -> str:
    """Return the cloud of a provider: for raytf's own providers from their module, otherwise the provider's type."""
    kind = str(provider.get("type"))
    return MODULES.get(str(provider.get("module")), kind) if kind == "external" else kind


def zones_of(provider: Mapping[str, Any]) -> list[str]:
    """Return the zones in a provider's `availability_zone`, in order. An empty list stands for the whole region."""
    zones = provider.get("availability_zone")
    return [zone.strip() for zone in zones.split(",") if zone.strip()] if isinstance(zones, str) else []


def is_spot_of_gcp(node_config: Mapping[str, Any]) -> bool:
    """Return whether a Google Cloud node_config requests a spot machine. In Ray's examples `scheduling` is a list."""
    scheduling = node_config.get("scheduling") or node_config.get("schedulingConfig") or {}
    entries = scheduling if isinstance(scheduling, list) else [scheduling]
    merged = {key: value for entry in entries if isinstance(entry, dict) for key, value in entry.items()}
    return bool(merged.get("preemptible") or merged.get("spot") or merged.get("provisioningModel") == "SPOT")


def candidates(node_config: Mapping[str, Any]) -> list[Candidate]:
    """Return the machines to try for a node type, in order: the node_config itself, then its fallbacks."""
    base = {key: value for key, value in node_config.items() if key != KEY}
    machines = [Candidate(copy.deepcopy(base))]
    for entry in node_config.get(KEY) or ():
        change = {key: value for key, value in entry.items() if key != AT_MOST}
        machines.append(Candidate(merge(base, change), entry.get(AT_MOST)))
    return machines


def malformed(node_config: Mapping[str, Any]) -> tuple[tuple[str | int, ...], str] | None:
    """Return the path of the first malformed part of a node_config's `fallback` and the reason, or None."""
    entries = node_config.get(KEY)
    if entries is None:
        return None
    if not isinstance(entries, list):
        return (KEY,), f"{KEY} is {entries!r}, expected a list of differences from the node_config"
    for i, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            return (KEY, i), f"entry {i + 1} of {KEY} is {entry!r}, expected a mapping of the keys that differ"
        most = entry.get(AT_MOST)
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            return (KEY, i, AT_MOST), f"{AT_MOST} is {most!r}, expected a whole number of 1 or more"
    return None


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a node_config with the changes of a fallback applied."""
    merged = dict(copy.deepcopy(dict(base)))
    for key, value in change.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            inner = merged.get(key)
            merged[key] = merge(inner if isinstance(inner, Mapping) else {}, value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def wrong(resources: Mapping[str, float], cpus: float, gpus: float) -> str | None:
    """Return how a machine contradicts the resources that Ray expects of its node type, or None if it does not.

    Args:
        resources: the node type's resources.
        cpus, gpus: the machine's CPUs and GPUs.
    """
    wanted = resources.get("GPU", 0)
    if wanted != gpus:
        return f"{_count(gpus, 'GPU')}, and nodes of this type have {_count(wanted, 'GPU')}"
    if resources.get("CPU", 0) > cpus > 0:
        return f"{_count(cpus, 'CPU')}, and nodes of this type have {_count(resources['CPU'], 'CPU')}"
    return None


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}" if number else f"no {what}"
