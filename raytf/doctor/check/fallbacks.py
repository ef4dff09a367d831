"""Mistakes in the use of raytf's own node providers, and in the fallbacks of their node types."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

from raytf.cluster.providers import fallback
from raytf.doctor.document import CLOUDS, Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, near, stops_ray_up, warning, zone_not_in_region
from raytf.doctor.node_types import NodeType, node_types

#: Keys that Ray requires, but fills in only for its own types of providers and not for external ones.
_NEEDED = ("max_workers", "setup_commands", "head_setup_commands", "worker_setup_commands")


def as_cloud(document: Document, all_zones: bool = False) -> Document:
    """Return the document with raytf's own provider replaced by Ray's for that cloud, or unchanged for others.

    Args:
        all_zones: keep all zones on Google Cloud, where Ray's own provider allows only one.
    """
    provider = document.get("provider")
    cloud = fallback.cloud_of(provider) if isinstance(provider, dict) else ""
    if not isinstance(provider, dict) or provider.get("type") != "external" or cloud not in CLOUDS:
        return document
    own = ("module", fallback.HOLD, fallback.SPREAD, fallback.AUTOSTOP)
    changed = {key: value for key, value in provider.items() if key not in own} | {"type": cloud}
    if cloud == "gcp" and not all_zones and isinstance(provider.get("availability_zone"), str):
        changed["availability_zone"] = provider["availability_zone"].split(",")[0].strip()
    is_ours = str(provider.get("module")) in fallback.MODULES
    return replace(document, value={**document.value, "provider": changed}, is_ours=is_ours)


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find fallbacks that no provider reads, are malformed, or contradict the resources of their node type."""
    provider = document.mapping("provider")
    cloud, is_ours = fallback.cloud_of(provider), str(provider.get("module")) in fallback.MODULES
    if provider.get("type") == "external":
        yield from _module(document, is_ours)
    if is_ours and cloud == "gcp":
        yield from _zones(document)
    for t in node_types(as_cloud(document)):
        path: Path = (*t.path, "node_config")
        config = document.mapping(*path)
        if fallback.KEY not in config:
            continue
        malformed = fallback.malformed(config)
        if not is_ours and cloud not in CLOUDS:
            continue  # another provider may read it
        if not is_ours:
            what = f"provider {provider.get('type')} does not read `{fallback.KEY}`"
            why = "The cloud refuses the request for a node, or Ray drops the key and no fallback is used."
            fix = f"Set `type: external` and `module: raytf.cluster.providers.{cloud}.Provider`."
            yield error("fallback-not-read", (*path, fallback.KEY), what, why, fix)
        elif malformed is not None:
            inner, text = malformed
            fix = "Write a list such as `- InstanceType: g5.xlarge`; each entry has the keys that differ."
            yield stops_ray_up("fallback-shape", (*path, *inner), text, fix)
        else:
            yield from _machines(t, path)


def _module(document: Document, is_ours: bool) -> Iterator[ConfigFinding]:
    module = document.get("provider", "module")
    if isinstance(module, str) and module.startswith("raytf.") and not is_ours:
        what = f"there is no provider {module!r}{near(module, fallback.MODULES)}"
        fix = instead(module, fallback.MODULES, "Write one of")
        yield stops_ray_up("provider-module", ("provider", "module"), what, fix, "an import error")
    elif module is None:
        fix = f"Add module: {next(iter(fallback.MODULES))}, or your own class."
        what = "type external needs a module"
        yield stops_ray_up("provider-module", ("provider",), what, fix, "KeyError: 'module'")
    if not is_ours:
        return
    hold, spread = document.get("provider", fallback.HOLD), document.get("provider", fallback.SPREAD)
    if hold is not None and (isinstance(hold, bool) or not isinstance(hold, int | float) or hold < 0):
        path, fix = ("provider", fallback.HOLD), f"Write seconds, such as {fallback.HOLD_SECONDS:g}."
        yield error("wrong-value", path, f"{fallback.HOLD} is {hold!r}", "The provider does not start.", fix)
    if spread is not None and not isinstance(spread, bool):
        what = f"{fallback.SPREAD} is {spread!r}"
        why = "Any text counts as true: workers may then be in several zones, between which traffic is billed."
        yield error("wrong-value", ("provider", fallback.SPREAD), what, why, "Write true or false.")
    for key in [key for key in _NEEDED if key not in document.mapping()]:
        what = f"{key!r} is missing, and Ray does not fill it in if provider.type is external"
        fix = f"Add {key}" + (": [] or the commands to run." if key.endswith("commands") else ".")
        yield stops_ray_up("missing-key", (), what, fix, "a KeyError or an assertion")


def _zones(document: Document) -> Iterator[ConfigFinding]:
    region = document.get("provider", "region")
    for zone in fallback.zones_of(document.mapping("provider"))[1:] if isinstance(region, str) else ():
        if zone.rpartition("-")[0] != region:
            why = "Google refuses a node there, since its subnet is in the provider's region."
            yield zone_not_in_region(zone, region, why, f"Write {region}-a or another zone of that region.")


def _machines(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    seen = [t.config]
    for i, other in enumerate(t.others):
        where: Path = (*path, fallback.KEY, i)
        if other.config in seen:
            what, fix = "this entry repeats an earlier choice", "Name another machine or market, or delete it."
            yield warning("fallback-twice", where, what, "If the earlier one has no capacity, this one has none.", fix)
        seen.append(other.config)
        if other.machine is None or (t.machine is None and not t.resources):
            continue
        believed = {"CPU": t.resources.get("CPU", 0.0), "GPU": t.has("GPU")}
        if t.machine is not None and fallback.wrong(believed, t.machine.cpus, t.machine.gpus):
            continue  # the first choice has this finding already
        wrong = fallback.wrong(believed, other.machine.cpus, other.machine.gpus)
        if wrong:
            why = "Ray places jobs by the type's resources: they wait for missing resources, or leave GPUs unused."
            fix = "Name a machine with the same GPUs and no fewer CPUs, or add another node type for it."
            yield error("fallback-resources", where, f"{other.machine.name} has {wrong}", why, fix)


def variants(document: Document) -> Iterator[tuple[Document, Path, Path]]:
    """Yield a copy of the document for each fallback, with the fallback as the first choice.

    Yields:
        The copy, the path of the replaced node_config, and the path of the entry in `fallback`.
    """
    for t in node_types(document):
        for i, other in enumerate(t.others):
            path: Path = (*t.path, "node_config")
            value = copy.copy(document.value)
            types = value["available_node_types"]
            value["available_node_types"] = {**types, t.name: {**types[t.name], "node_config": other.config}}
            yield replace(document, value=value), path, (*path, fallback.KEY, i)


def at_entry(finding: ConfigFinding, config: Path, entry: Path, document: Document) -> ConfigFinding:
    """Return a variant's finding, moved from the node_config to the fallback's entry, or to its value there."""
    if finding.path[: len(config)] != config:
        return finding
    inner = finding.path[len(config) :]
    return replace(finding, path=(*entry, *inner) if inner and inner[0] in document.mapping(*entry) else entry)
