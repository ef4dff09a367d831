"""Mistakes in the pod groups of a KubeRay cluster: replicas, resources, volumes and flags of `ray start`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor.check.field_types import is_quantity
from raytf.doctor.check.shell_commands import START_OPTIONS
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, near, warning

#: Names of the resources under which device plugins offer GPUs and TPUs.
ACCELERATORS = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "gpu.intel.com/i915", "aws.amazon.com/neuroncore")
_RESOURCES = ("cpu", "memory", "ephemeral-storage", *ACCELERATORS)


def refused(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that an object breaks a rule that only the operator checks."""
    return error("kube-rule", path, what, "The operator refuses the object, and only its events show it.", fix)


def refused_pod(code: str, path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that a pod breaks a rule that the API server checks when the operator creates the pod."""
    return error(code, path, what, "The API server refuses the pod, and only events show it.", fix)


def check(
    document: Document, path: Path, group: dict[str, Any], is_head: bool, scaling: bool
) -> Iterator[ConfigFinding]:
    """Find mistakes in one group of pods."""
    if not is_head:
        yield from _replicas(path, group, scaling)
    yield from _start_parameters(path, group)
    pod: Path = (*path, "template", "spec")
    if document.get(*pod, "containers") == []:
        yield refused((*pod, "containers"), "there is no container", "Add Ray's container as the first one.")
    if not document.sequence(*pod, "containers"):
        return
    yield from _container(document, pod, group, scaling)
    yield from _mounts(document, pod)
    restart = document.get(*pod, "restartPolicy")
    if scaling and not is_head and restart not in (None, "Never"):
        what = f"restartPolicy is {restart!r} in a group that the autoscaler scales"
        why = "Kubernetes restarts each pod that the autoscaler stops: idle nodes are never released."
        yield error("restart-policy", (*pod, "restartPolicy"), what, why, "Write Never, or delete it.")


def _replicas(path: Path, group: dict[str, Any], scaling: bool) -> Iterator[ConfigFinding]:
    least, most, now = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        what = f"minReplicas {least} is above maxReplicas {most}"
        why = "The operator accepts neither: the group keeps its current pods."
        yield error("min-above-max", (*path, "minReplicas"), what, why, f"Set maxReplicas to {least} or more.")
    elif isinstance(now, int) and ((isinstance(most, int) and now > most) or (isinstance(least, int) and now < least)):
        what = f"replicas {now} is not between minReplicas {least} and maxReplicas {most}"
        why, fix = "The operator uses the nearest bound.", "Write a number between them."
        yield warning("replicas-out-of-range", (*path, "replicas"), what, why, fix)
    if scaling and most is None:
        what = f"group {group.get('groupName')!r} has no maxReplicas"
        why = "Its default is 2147483647: one job may use every GPU that the cloud has."
        yield error("no-max-replicas", path, what, why, "Add maxReplicas.")
    # With replicas, maxReplicas is only the bound that the operator requires: KubeRay's own samples have it.
    if not scaling and isinstance(most, int) and most > (now if isinstance(now, int) else whole(least)) == 0:
        what = f"group {group.get('groupName')!r} has no replicas, and enableInTreeAutoscaling is not true"
        why = "Nothing scales the group: it never gets a pod."
        fix = "Add enableInTreeAutoscaling: true to the cluster, or set replicas."
        yield warning("autoscaling-off", (*path, "maxReplicas"), what, why, fix)


def _start_parameters(path: Path, group: dict[str, Any]) -> Iterator[ConfigFinding]:
    parameters = group.get("rayStartParams")
    parameters = parameters if isinstance(parameters, dict) else {}
    path = (*path, "rayStartParams")
    why = "`ray start` refuses it, and the container stops at once, again and again."
    for key in parameters:
        what, fix = "", ""
        if key.startswith("-") or "_" in key:
            what = f"{key!r} is not spelled like a flag of `ray start` without its leading dashes"
            fix = f"Write {key.lstrip('-').replace('_', '-')}."
        elif key not in START_OPTIONS:
            what = f"`ray start` has no flag --{key}{near(key, START_OPTIONS)}"
            fix = instead(key, START_OPTIONS, "Its flags are")
        if what:
            yield error("start-parameter", (*path, key), what, why, fix)
    if "labels" in parameters:
        yield refused((*path, "labels"), "rayStartParams has labels", "Write labels beside rayStartParams.")
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & parameters.keys():
        where = (*path[:-1], "resources")
        yield refused(where, "resources and rayStartParams set the same values", "Keep one of them.")
    custom = parameters.get("resources")
    if isinstance(custom, str) and not re.fullmatch(r"\s*(['\"])\{.*\}\1\s*", custom):
        what = f"resources is {custom!r}, expected JSON in quotes for the shell"
        yield error("start-parameter", (*path, "resources"), what, why, """Write '"{\\"TPU\\": 4}"'.""")


def _container(document: Document, pod: Path, group: dict[str, Any], scaling: bool) -> Iterator[ConfigFinding]:
    path: Path = (*pod, "containers", 0, "resources")
    limits, requests = document.mapping(*path, "limits"), document.mapping(*path, "requests")
    yield from _resource_names(path, {"limits": limits, "requests": requests})
    own = [group.get(key) for key in ("rayStartParams", "resources")]
    is_sized = "cpu" in {*limits, *requests} or any(isinstance(m, dict) and {"num-cpus", "CPU"} & m.keys() for m in own)
    if scaling and not is_sized:
        where = path if document.get(*path) else path[:-1]
        why, fix = "Ray's autoscaler stops with ValueError.", "Add resources: {limits: {cpu: ..., memory: ...}}."
        yield error("no-cpu", where, "the first container has no CPU in its resources", why, fix)
    if "memory" not in limits and is_sized:
        why = "Ray uses all memory of the machine as its own, until Kubernetes kills the pod without a message."
        what = "the first container has no memory limit"
        yield warning("no-memory-limit", path, what, why, "Add limits: {memory: ...}.")
    yield from _claims(path, limits, requests)
    yield from _node_selector(document, pod, limits)


def _resource_names(path: Path, both: dict[str, dict[str, Any]]) -> Iterator[ConfigFinding]:
    for part, quantities in both.items():
        for name in quantities:
            if name in _RESOURCES or name.startswith(("hugepages-", "rdma/", "vpc.amazonaws.com/", "nvidia.com/mig-")):
                continue
            hint = near(name, _RESOURCES)
            if "/" not in name or hint:
                what = f"there is no resource {name!r}{hint or '. A GPU is nvidia.com/gpu'}"
                why = "No node has it: the pod stays Pending, or is refused."
                fix = f"Write one of {', '.join(_RESOURCES[:4])}, google.com/tpu."
                yield error("kube-resource", (*path, part, name), what, why, fix)


def _claims(path: Path, limits: dict[str, Any], requests: dict[str, Any]) -> Iterator[ConfigFinding]:
    for name in ACCELERATORS:
        if name in requests and requests[name] != limits.get(name):
            what = f"requests of {name} need the same limits, since GPUs are not shared"
            fix = f"Add limits: {{{name}: {requests[name]}}}."
            yield refused_pod("gpu-requests", (*path, "requests", name), what, fix)
    for name in ("cpu", "memory"):
        wanted, most = requests.get(name), limits.get(name)
        if is_quantity(wanted) and is_quantity(most) and number(wanted) > number(most):
            what, fix = f"requests of {name} {wanted} are above limits {most}", "Lower the requests to the limits."
            yield refused_pod("requests-above-limits", (*path, "requests", name), what, fix)


def _node_selector(document: Document, pod: Path, limits: dict[str, Any]) -> Iterator[ConfigFinding]:
    selector = document.mapping(*pod, "nodeSelector")
    if "google.com/tpu" in limits:
        examples = {"accelerator": "tpu-v5-lite-podslice", "topology": "2x2"}
        for key in [key for key in examples if f"cloud.google.com/gke-tpu-{key}" not in selector]:
            path = (*pod, "nodeSelector") if selector else pod
            what = f"google.com/tpu needs nodeSelector cloud.google.com/gke-tpu-{key}"
            yield error("tpu-selector", path, what, "GKE never places the pod.", f"Add it, such as {examples[key]}.")
    elif any("gke-accelerator" in key for key in selector) and not any(name in limits for name in ACCELERATORS):
        what = "the pod selects a node with GPUs, but its container requests none"
        why, fix = "The container gets no GPU there, but you pay for it.", "Add limits: {nvidia.com/gpu: 1}."
        yield error("gpu-not-declared", (*pod, "containers", 0, "resources"), what, why, fix)


def _mounts(document: Document, pod: Path) -> Iterator[ConfigFinding]:
    volumes = [v.get("name") for v in document.sequence(*pod, "volumes") if isinstance(v, dict)]
    for key in ("containers", "initContainers"):
        for i in range(len(document.sequence(*pod, key))):
            path: Path = (*pod, key, i, "volumeMounts")
            for j in range(len(document.sequence(*path))):
                name = document.get(*path, j, "name")
                if name is not None and name not in volumes:
                    what = f"there is no volume {name!r}{near(name, [str(v) for v in volumes])}"
                    yield refused_pod("kube-volume", (*path, j, "name"), what, "Add it to volumes, or fix the name.")


def whole(value: object) -> int:
    """Return a value if it is a whole number, or 0 otherwise; another check reports the wrong type."""
    return value if isinstance(value, int) else 0


#: Suffix of a quantity -> its factor; longer suffixes first.
_UNITS = {
    **{f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTPE", 1)},
    **{unit: 1000.0**power for power, unit in enumerate("kMGTPE", 1)},
    "m": 1e-3,
}


def number(value: Any) -> float:
    """Return a Kubernetes quantity as a number, or 0 for any other value."""
    text = str(value)
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        result = float(text.removesuffix(unit)) * _UNITS.get(unit, 1.0)
    except ValueError:
        return 0.0
    return result if math.isfinite(result) else 0.0
