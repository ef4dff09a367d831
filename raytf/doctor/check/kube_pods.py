"""Groups of pods of a KubeRay cluster: replicas, resources, volumes and flags of `ray start`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from raytf.doctor.check import ray_start, versions
from raytf.doctor.check.kube_schema import is_quantity
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, near, warning
from raytf.doctor.local_environment import Surroundings

#: Resources by which device plugins offer a GPU or a TPU.
ACCELERATORS = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu", "gpu.intel.com/i915", "aws.amazon.com/neuroncore")
_RESOURCES = ("cpu", "memory", "ephemeral-storage", *ACCELERATORS)


def refused(path: Path, what: str, fix: str) -> ConfigFinding:
    """Return the finding that an object breaks a rule which the operator checks only when it has the object."""
    return error("kube-rule", path, what, "The operator refuses the object, which only its events say.", fix)


def check(
    document: Document, path: Path, group: dict[str, Any], is_head: bool, scaling: bool, here: Surroundings
) -> Iterator[ConfigFinding]:
    """Find what is wrong with one group."""
    if not is_head:
        yield from _replicas(path, group, scaling)
    yield from _start_parameters(path, group)
    pod: Path = (*path, "template", "spec")
    if document.get(*pod, "containers") == []:
        yield refused((*pod, "containers"), "there is no container", "Add the container of Ray as the first.")
    if not document.sequence(*pod, "containers"):
        return
    yield from _container(document, pod, group, scaling)
    restart = document.get(*pod, "restartPolicy")
    if scaling and not is_head and restart not in (None, "Never"):
        yield error(
            "restart-policy",
            (*pod, "restartPolicy"),
            f"restartPolicy is {restart!r} in a group that the autoscaler scales",
            "A pod that the autoscaler ends comes back by itself: idle nodes are never given up.",
            "Write Never, or leave it out.",
        )
    image = document.get(*pod, "containers", 0, "image")
    if isinstance(image, str):
        yield from versions.image(image, (*pod, "containers", 0, "image"), here)


def _replicas(path: Path, group: dict[str, Any], scaling: bool) -> Iterator[ConfigFinding]:
    least, most, now = group.get("minReplicas"), group.get("maxReplicas"), group.get("replicas")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield error(
            "min-above-max",
            (*path, "minReplicas"),
            f"minReplicas {least} is above maxReplicas {most}",
            "The operator takes neither: the group keeps the pods that it has.",
            f"Set maxReplicas to {least} or more.",
        )
    elif isinstance(now, int) and ((isinstance(most, int) and now > most) or (isinstance(least, int) and now < least)):
        yield warning(
            "replicas-out-of-range",
            (*path, "replicas"),
            f"replicas {now} is not between minReplicas {least} and maxReplicas {most}",
            "The operator takes the nearest bound.",
            "Give one between them.",
        )
    if scaling and most is None:
        yield error(
            "no-max-replicas",
            path,
            f"group {group.get('groupName')!r} has no maxReplicas",
            "It then is 2147483647: one job may take every GPU that the cloud gives.",
            "Add maxReplicas.",
        )
    if not scaling and isinstance(most, int) and most > (now if isinstance(now, int) else whole(least)):
        yield warning(
            "autoscaling-off",
            (*path, "maxReplicas"),
            f"maxReplicas {most}, and enableInTreeAutoscaling is not true",
            "Nothing scales the group: it stays at replicas.",
            "Add enableInTreeAutoscaling: true to the cluster, or set maxReplicas to replicas.",
        )


def _start_parameters(path: Path, group: dict[str, Any]) -> Iterator[ConfigFinding]:
    parameters = group.get("rayStartParams")
    parameters = parameters if isinstance(parameters, dict) else {}
    for key in parameters:
        if str(key).startswith("-") or "_" in str(key):
            yield error(
                "start-parameter",
                (*path, "rayStartParams", str(key)),
                f"{key!r} is not a flag of `ray start` without its dashes",
                "The container ends at once with an error of `ray start`, again and again.",
                f"Write {str(key).lstrip('-').replace('_', '-')}.",
            )
        elif str(key) not in ray_start.OPTIONS:
            yield error(
                "start-parameter",
                (*path, "rayStartParams", str(key)),
                f"`ray start` has no flag --{key}{near(key, ray_start.OPTIONS)}",
                "The container ends at once with an error of `ray start`, again and again.",
                instead(key, ray_start.OPTIONS, "Its flags are"),
            )
    if "labels" in parameters:
        yield refused(
            (*path, "rayStartParams", "labels"), "labels in rayStartParams", "Write labels beside rayStartParams."
        )
    if group.get("resources") and {"num-cpus", "num-gpus", "memory", "resources"} & parameters.keys():
        yield refused((*path, "resources"), "resources beside rayStartParams with the same", "Give one of them.")
    custom = parameters.get("resources")
    if isinstance(custom, str) and not re.fullmatch(r"\s*(['\"])\{.*\}\1\s*", custom):
        yield error(
            "start-parameter",
            (*path, "rayStartParams", "resources"),
            f"resources is {custom!r}",
            "`ray start` wants JSON, in quotes for the shell.",
            """Write '"{\\"TPU\\": 4}"'.""",
        )


def _container(document: Document, pod: Path, group: dict[str, Any], scaling: bool) -> Iterator[ConfigFinding]:
    first: Path = (*pod, "containers", 0)
    limits = document.mapping(*first, "resources", "limits")
    requests = document.mapping(*first, "resources", "requests")
    yield from _resource_names(first, {"limits": limits, "requests": requests})
    parameters = group.get("rayStartParams") if isinstance(group.get("rayStartParams"), dict) else {}
    sized = (
        "cpu" in limits
        or "cpu" in requests
        or "num-cpus" in (parameters or {})
        or "CPU" in (group.get("resources") or {})
    )
    if scaling and not sized:
        yield error(
            "no-cpu",
            (*first, "resources") if document.get(*first, "resources") else first,
            "the first container has no CPU in its resources",
            "Ray's autoscaler ends with ValueError, and nothing is scaled.",
            "Add resources: {limits: {cpu: ..., memory: ...}}.",
        )
    if "memory" not in limits and sized:
        yield warning(
            "no-memory-limit",
            (*first, "resources"),
            "the first container has no memory limit",
            "Ray takes all memory of the machine for its own, and Kubernetes ends the pod without a word of Ray's.",
            "Add limits: {memory: ...}.",
        )
    yield from _gpu_claims(document, pod, limits, requests)
    yield from _mounts(document, pod)


def _resource_names(first: Path, both: dict[str, dict[str, Any]]) -> Iterator[ConfigFinding]:
    for part, quantities in both.items():
        for name in quantities:
            path = (*first, "resources", part, name)
            if name in _RESOURCES or name.startswith(("hugepages-", "rdma/", "vpc.amazonaws.com/", "nvidia.com/mig-")):
                continue
            hint = near(name, _RESOURCES)
            if "/" not in name or hint:
                yield error(
                    "kube-resource",
                    path,
                    f"there is no resource {name!r}{hint or '. A GPU is nvidia.com/gpu'}",
                    "No node has it: the pod stays Pending, or is refused.",
                    f"Write one of {', '.join(_RESOURCES[:4])}, google.com/tpu.",
                )


def _gpu_claims(
    document: Document, pod: Path, limits: dict[str, Any], requests: dict[str, Any]
) -> Iterator[ConfigFinding]:
    first: Path = (*pod, "containers", 0)
    for name in ACCELERATORS:
        if name in requests and requests[name] != limits.get(name):
            yield error(
                "gpu-requests",
                (*first, "resources", "requests", name),
                f"requests of {name} without the same limits",
                "The API server refuses the pod: GPUs are not shared, so both are one.",
                f"Give limits: {{{name}: {requests[name]}}}.",
            )
    for name in ("cpu", "memory"):
        if (
            is_quantity(requests.get(name))
            and is_quantity(limits.get(name))
            and number(requests[name]) > number(limits[name])
        ):
            yield error(
                "requests-above-limits",
                (*first, "resources", "requests", name),
                f"requests of {name} {requests[name]} are above limits {limits[name]}",
                "The API server refuses the pod.",
                "Give requests up to the limits.",
            )
    selector = document.mapping(*pod, "nodeSelector")
    if "google.com/tpu" in limits:
        for key in ("cloud.google.com/gke-tpu-accelerator", "cloud.google.com/gke-tpu-topology"):
            if key not in selector:
                yield error(
                    "tpu-selector",
                    (*pod, "nodeSelector") if selector else pod,
                    f"google.com/tpu without nodeSelector {key}",
                    "GKE places no such pod.",
                    f"Add it, such as {'tpu-v5-lite-podslice' if 'accelerator' in key else '2x2'}.",
                )
    elif any("gke-accelerator" in key for key in selector) and not any(name in limits for name in ACCELERATORS):
        yield error(
            "gpu-not-declared",
            (*first, "resources"),
            "the pod asks for a node with GPUs, and its container for none",
            "Ray sees no GPU there, and the node is paid for.",
            "Add limits: {nvidia.com/gpu: 1}.",
        )


def _mounts(document: Document, pod: Path) -> Iterator[ConfigFinding]:
    volumes = [v.get("name") for v in document.sequence(*pod, "volumes") if isinstance(v, dict)]
    for key in ("containers", "initContainers"):
        for i, container in enumerate(document.sequence(*pod, key)):
            mounts = container.get("volumeMounts") if isinstance(container, dict) else None
            for j, mount in enumerate(mounts if isinstance(mounts, list) else ()):
                name = mount.get("name") if isinstance(mount, dict) else None
                if name is not None and name not in volumes:
                    yield error(
                        "kube-volume",
                        (*pod, key, i, "volumeMounts", j, "name"),
                        f"there is no volume {name!r}{near(name, [str(v) for v in volumes])}",
                        "The API server refuses the pod: the cluster stays without it, and only events say so.",
                        "Add it to volumes, or fix the name.",
                    )


def whole(value: object) -> int:
    """Return a whole number, or 0 for any other value, which the schema's check names."""
    return value if isinstance(value, int) else 0


def number(value: Any) -> float:
    """Return a quantity of Kubernetes as a number, or 0 for any other value."""
    units: Sequence[tuple[str, float]] = (
        *((f"{unit}i", 1024.0**power) for power, unit in enumerate("KMGTPE", 1)),
        *((unit, 1000.0**power) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)),
        ("m", 1e-3),
    )
    text = str(value)
    for unit, factor in units:
        if text.endswith(unit):
            text, scale = text.removesuffix(unit), factor
            break
    else:
        scale = 1.0
    try:
        result = float(text) * scale
    except ValueError:
        return 0.0
    return result if math.isfinite(result) else 0.0
