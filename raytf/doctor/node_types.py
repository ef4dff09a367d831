"""Node types of a cluster YAML: their machines, and mistakes in their resources and numbers of nodes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor import machines
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, near, warning
from raytf.doctor.machines import Machine

#: Provider -> the head_node_type that Ray uses if a file has none.
DEFAULT_HEADS = {"aws": "ray.head.default", "azure": "ray.head.default", "gcp": "ray_head_default"}
#: Provider -> the two keys of a node_config that lead to its market, and the value for spot.
_SPOT = {
    "aws": ("InstanceMarketOptions", "MarketType", "spot"),
    "external": ("InstanceMarketOptions", "MarketType", "spot"),
    "azure": ("azure_arm_parameters", "priority", "Spot"),
}


@dataclass(frozen=True)
class FallbackType:
    """Another machine for the nodes of a type: an entry of `fallback`, merged with the node_config."""

    config: dict[str, Any]
    machine: Machine | None
    market: str
    at_most: int | None


@dataclass(frozen=True)
class NodeType:
    """A node type.

    Attributes:
        least, most: bounds for its number of workers; `most` is the cluster's if the type has no max_workers.
        most_given: whether the type has max_workers.
        resources: the numbers in its resources in the file.
        config: the provider's node_config, without `fallback`.
        machine: the machine of the instance type, if known.
        market: spot or on-demand.
        others: its fallbacks, in order.
    """

    name: str
    is_head: bool
    least: int
    most: int
    most_given: bool
    resources: dict[str, float] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    machine: Machine | None = None
    market: str = "on-demand"
    others: tuple[FallbackType, ...] = ()

    @property
    def path(self) -> Path:
        return ("available_node_types", self.name)

    @property
    def may_have_gpus(self) -> bool:
        """Whether the machine has GPUs, or is unknown."""
        return self.machine is None or self.machine.gpus > 0

    def has(self, resource: str) -> float:
        """Return how much of a resource Ray schedules on a node of this type."""
        if resource in self.resources:
            return self.resources[resource]
        if self.machine is None:
            return 0
        return {"CPU": self.machine.cpus, "GPU": self.machine.gpus, "TPU": self.machine.tpus}.get(resource, 0)


def node_types(document: Document) -> list[NodeType]:
    """Return all node types that are mappings; the schema reports the others."""
    provider = str(document.get("provider", "type"))
    head = document.get("head_node_type", default=DEFAULT_HEADS.get(provider))
    names = document.mapping("available_node_types")
    if not isinstance(head, str) or head not in names:  # guess it: only _head_type reports that it is missing
        hint = near(head, names)
        head = hint.split("'")[1] if hint else next(iter(names), None)
    types = []
    for name, value in names.items():
        if not isinstance(value, dict):
            continue
        config = value.get("node_config")
        config = config if isinstance(config, dict) else {}
        first, *others = fallback.candidates({} if fallback.malformed(config) else config)
        config = first.config or {key: value for key, value in config.items() if key != fallback.KEY}
        most = value.get("max_workers")
        resources = value.get("resources")
        resources = resources if isinstance(resources, dict) else {}
        types.append(
            NodeType(
                name,
                name == head,
                _whole(value.get("min_workers"), 0),
                _whole(most, 0 if name == head else most_workers(document)),
                most is not None,
                {str(k): float(v) for k, v in resources.items() if isinstance(v, int | float) and math.isfinite(v)},
                config,
                machines.machine(provider, config),
                market(provider, config),
                tuple(
                    FallbackType(o.config, machines.machine(provider, o.config), market(provider, o.config), o.at_most)
                    for o in others
                ),
            )
        )
    return types


def most_workers(document: Document) -> int:
    """Return the most workers of all types together: the cluster's max_workers, or Ray's default of 2."""
    return _whole(document.get("max_workers"), 2)


def _whole(value: Any, default: int) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def market(provider: str, config: dict[str, Any]) -> str:
    """Return the market of a provider's node_config: spot or on-demand."""
    if provider == "gcp":
        return "spot" if fallback.is_spot_of_gcp(config) else "on-demand"
    key, inner, word = _SPOT.get(provider, ("", "", ""))
    options = config.get(key)
    return "spot" if isinstance(options, dict) and options.get(inner) == word else "on-demand"


def most_used(members: Sequence[tuple[NodeType, float]], limit: int) -> float:
    """Return how much of a resource the largest allowed cluster has: the head's and that of the largest workers.

    Args:
        members: node types, each with the amount that one node has.
        limit: the cluster's max_workers.
    """
    total, left = sum(each for t, each in members if t.is_head), limit
    for t, each in sorted(members, key=lambda member: -member[1]):
        count = min(t.most, left)
        total, left = total + count * each, left - count
    return total


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find resources that the machine does not have, and machines that do not exist."""
    provider = str(document.get("provider", "type"))
    for t in node_types(document):
        for resource, count in document.mapping(*t.path, "resources").items():
            if isinstance(count, float) and not math.isfinite(count):
                path, what = (*t.path, "resources", resource), f"{resource} is {count}"
                yield error("wrong-value", path, what, "Ray needs a finite number.", "Write the machine's number.")
        name = machines.instance_type(provider, t.config)
        if t.machine is not None:
            yield from _resources(t, t.machine, provider)
        elif name is not None:
            hint = near(name, machines.names(provider))
            if hint and machines.family_known(provider, name):
                path, what = machines.instance_path(provider, t.path), f"{name!r} is not a known instance type{hint}"
                why = "Every launch of a node of this type fails, and Ray repeats it forever."
                fix = "Use an existing type; if this one is newer than raytf, ignore this finding."
                yield error("unknown-instance-type", path, what, why, fix)


def stopped_nodes(why: str) -> ConfigFinding:
    """Return the finding that the provider keeps stopped nodes because cache_stopped_nodes is missing."""
    what = "cache_stopped_nodes is missing: Ray's default is true"
    return warning("cache-stopped-nodes", ("provider",), what, why, "Add `cache_stopped_nodes: false`.")


def spot_head(path: Path, cloud: str, key: str) -> ConfigFinding:
    """Return the finding that the head is a spot machine."""
    why = f"When {cloud} preempts it, the whole cluster is lost, and its workers keep running until you stop them."
    return warning("spot-head", path, "the head is a spot machine", why, f"Delete {key} from the head's type.")


def small_disk(
    t: NodeType, path: Path, size: object, least: tuple[int, int], unit: str, cloud: str
) -> Iterator[ConfigFinding]:
    """Find a system disk that is too small for TensorFlow; `least` is the size without and with a GPU."""
    wanted = least[t.machine is not None and t.machine.gpus > 0]
    if isinstance(size, int) and not isinstance(size, bool) and size < wanted:
        why = f"{cloud} refuses a disk smaller than the image (up to 75 {unit}), or pip runs out of space."
        yield error("disk-too-small", path, f"a system disk of {size} {unit}", why, f"Write {wanted} or more.")


def too_many_gpus(t: NodeType, machine: str, gpus: float, fix: str) -> ConfigFinding:
    """Return the finding that a type's resources list more GPUs than its machine has."""
    has = f"{gpus:g} GPU{'s' if gpus > 1 else ''}" if gpus else "no GPU"
    what = f"GPU: {t.resources['GPU']:g} on {machine}, which has {has}"
    why = "Ray starts nodes for jobs that then find too few GPUs there, and the jobs wait forever."
    return error("gpu-count", (*t.path, "resources", "GPU"), what, why, fix)


def _resources(t: NodeType, machine: Machine, provider: str) -> Iterator[ConfigFinding]:
    path = (*t.path, "resources")
    declared = t.resources.get("GPU")
    if declared is not None and declared > machine.gpus:
        fix = f"Write GPU: {machine.gpus}, or use a machine with {declared:g}."
        yield too_many_gpus(t, machine.name, machine.gpus, fix if machine.gpus else "Delete GPU from resources.")
    elif machine.gpus and declared is not None and declared < machine.gpus and not t.is_head:
        what, why = f"GPU: {declared:g} on {machine.name}, which has {machine.gpus}", "You pay for GPUs that stay idle."
        yield warning("gpu-count", (*path, "GPU"), what, why, f"Write GPU: {machine.gpus}.")
    elif machine.gpus and declared is None and provider in ("gcp", "azure") and not t.is_head:
        what = f"{machine.name} has {machine.gpus} GPUs, but resources list none"
        why = f"On {provider} Ray does not detect them, and never starts such a node for a job that needs a GPU."
        yield error("gpu-not-declared", path, what, why, f'Add "GPU": {machine.gpus} to resources.')
    cpus = t.resources.get("CPU")
    if cpus is not None and machine.cpus and cpus > machine.cpus:
        what = f"CPU: {cpus:g} on {machine.name}, which has {machine.cpus}"
        why = "The autoscaler plans with CPUs that the node does not have, and jobs wait forever."
        yield error("cpu-count", (*path, "CPU"), what, why, f"Write CPU: {machine.cpus} or fewer.")
    if t.is_head and machine.gpus:
        what = f"the head is a {machine.name} with {machine.gpus} GPU{'s' if machine.gpus > 1 else ''}"
        why = "The head runs as long as the cluster, so you pay for that GPU all the time."
        yield warning("gpu-head", (*t.path, "node_config"), what, why, "Use a small machine without GPUs for the head.")


def check_counts(document: Document) -> Iterator[ConfigFinding]:
    """Find counts that contradict each other."""
    if document.get("provider", "type") == "local":
        return
    types = node_types(document)
    yield from _head_type(document, [t.name for t in types])
    most = document.get("max_workers")
    for t in types:
        yield from _bounds(t, most)
    yield from _sums(types, most)
    yield from _times(document)


def _sums(types: list[NodeType], most: Any) -> Iterator[ConfigFinding]:
    workers = [t for t in types if not t.is_head]
    least = sum(t.least for t in workers)
    if _is_number(most) and least > most:
        what = f"min_workers of the types sum to {least}, but max_workers is {most}"
        why = "Ray refuses the file when it validates it."
        yield error("sum-of-minimums", ("max_workers",), what, why, f"Set max_workers to {least} or more.")
    reach = sum(t.most for t in workers if t.most_given)
    if most is None and reach > 2:
        what = f"max_workers is missing at the top: Ray's default is 2, but the types allow {reach}"
        why = "The cluster stops growing at 2 workers without a warning, and Ray refuses minimums above 2."
        fix = f"Add `max_workers: {reach}` at the top."
        yield error("default-max-workers", ("available_node_types",), what, why, fix)
    if not _is_number(most) or most <= 0:
        return
    if workers and all(t.most_given and t.most == 0 for t in workers):
        what, fix = f"max_workers is {most}, but each type has max_workers 0", "Set max_workers of a type above 0."
        yield error("no-workers", ("max_workers",), what, "No worker ever starts.", fix)
    if types and not workers and types[0].most == 0:
        what = f"max_workers is {most}, but there is only the head's type"
        why = "Ray sets max_workers of the head's type to 0: no worker ever starts."
        fix = "Add a type for workers, or add max_workers to the head's type."
        yield error("no-workers", ("available_node_types",), what, why, fix)


def _head_type(document: Document, names: list[str]) -> Iterator[ConfigFinding]:
    head = document.get("head_node_type")
    if not names or (head is None and DEFAULT_HEADS.get(str(document.get("provider", "type"))) in names):
        return
    if head is None:
        what = "available_node_types needs head_node_type"
        why = "Ray uses its default name, which is not one of these types, and refuses the file."
        fix = f"Add `head_node_type: {names[0]}`."
        yield error("head-node-type", ("available_node_types",), what, why, fix)
    elif head not in names:
        what = f"head_node_type {head!r} is not one of the types{near(head, names)}"
        why = "Ray refuses the file when it validates it."
        yield error("head-node-type", ("head_node_type",), what, why, f"Name one of {', '.join(names)}.")


def _bounds(t: NodeType, most: Any) -> Iterator[ConfigFinding]:
    if t.most_given and t.least > t.most:
        what = f"min_workers {t.least} is above max_workers {t.most}"
        why = "Ray accepts it, but never starts more than max_workers: a job waits for nodes that never start."
        fix = f"Set max_workers to {t.least}, or min_workers to {t.most}."
        yield error("min-above-max", (*t.path, "min_workers"), what, why, fix)
    for key, value in (("min_workers", t.least), ("max_workers", t.most)):
        if value < 0:
            why = "Ray accepts it, but starts no node."
            yield error("negative-count", (*t.path, key), f"{key} is {value}", why, "Write 0 or more.")
    if _is_number(most) and t.most_given and not t.is_head and t.most > most and t.least <= most:
        what = f"max_workers {t.most} of the type is above max_workers {most} of the cluster"
        why = f"The cluster stops at {most} workers without a warning."
        fix = f"Set max_workers at the top to {t.most} or more."
        yield warning("above-cluster-max", (*t.path, "max_workers"), what, why, fix)
    if t.is_head and t.least > 0:
        what = f"min_workers {t.least} of the head's type starts this many workers beside the head"
        why = "The head is not one of them, and each of them costs as much as the head."
        fix = "Delete min_workers from the head's type, unless you want these workers."
        yield warning("head-type-workers", (*t.path, "min_workers"), what, why, fix)


def _times(document: Document) -> Iterator[ConfigFinding]:
    idle, path = document.get("idle_timeout_minutes"), ("idle_timeout_minutes",)
    if _is_number(idle) and idle == 0:
        why = "Ray removes a node as soon as it is idle, even for the seconds between two worker groups of a run."
        yield warning("idle-timeout", path, "idle_timeout_minutes is 0", why, "Write about 5.")
    elif _is_number(idle) and idle > 60:
        what = f"idle_timeout_minutes is {idle}: you pay for idle nodes for {idle / 60:.0f} hours"
        yield warning("idle-timeout", path, what, "Each node costs this much after its last job.", "Write 5 to 15.")
    if document.get("upscaling_speed") in (0, 0.0) and _is_number(document.get("upscaling_speed")):
        why = "Ray then starts at most 5 nodes at a time."
        yield warning("upscaling-speed", ("upscaling_speed",), "upscaling_speed is 0", why, "Write 1.0 or more.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
