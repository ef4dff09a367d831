"""Room on a Kubernetes cluster: nodes on which a pod fits, and quotas of the namespace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.cluster.check import kuberay
from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, Path, error, warning
from raytf.cluster.check.kube_pods import number
from raytf.cluster.clouds.kubectl import Kubectl, segment

_ACCELERATORS = ("nvidia.com/gpu", "amd.com/gpu", "google.com/tpu")


@dataclass(frozen=True)
class PodGroup:
    """Pods of one kind.

    Attributes:
        name: of the group; `head` for the head.
        most: how many there may be.
        wants: resource -> how much a pod asks for, of all its containers.
        selector: labels that a node must have.
        tolerated: taints that do not keep a pod away.
        path: where the group is in the manifest.
    """

    name: str
    most: int
    wants: dict[str, float]
    selector: dict[str, str]
    tolerated: tuple[dict[str, Any], ...]
    path: Path


def groups(document: Document) -> list[PodGroup]:
    """Head and worker groups of a RayCluster, or of the one in a RayJob."""
    found = []
    for path, spec, is_head in kuberay.groups(document):
        most = 1 if is_head else spec.get("maxReplicas", spec.get("replicas", 1))
        name = "head" if is_head else str(spec.get("groupName", path[-1]))
        found.append(_group(document, name, most if isinstance(most, int) else 1, path))
    return found


def _group(document: Document, name: str, most: int, path: Path) -> PodGroup:
    pod = (*path, "template", "spec")
    wants: dict[str, float] = defaultdict(float)
    for i in range(len(document.sequence(*pod, "containers"))):
        limits = document.mapping(*pod, "containers", i, "resources", "limits")
        for key, value in (limits | document.mapping(*pod, "containers", i, "resources", "requests")).items():
            wants[key] += number(value)
    tolerations = tuple(t for t in document.sequence(*pod, "tolerations") if isinstance(t, dict))
    selector = {k: str(v) for k, v in document.mapping(*pod, "nodeSelector").items()}
    return PodGroup(name, most, dict(wants), selector, tolerations, path)


def nodes(kubectl: Kubectl, rays: Sequence[Document]) -> Iterator[ConfigFinding]:
    """Find pods that fit on no node that is there now; what pods already use of a node is not counted."""
    there = kubectl.get("/api/v1/nodes").get("items", [])
    for document in rays:
        for group in groups(document):
            if any(_fits(group, node) for node in there):
                continue
            accelerators = [a for a in _ACCELERATORS if group.wants.get(a)]
            most: dict[str, float] = {
                key: max((number(n.get("status", {}).get("allocatable", {}).get(key, 0)) for n in there), default=0)
                for key in (*accelerators, "cpu", "memory")
            }
            has = ", ".join(f"{key} {_text(key, value)}" for key, value in most.items())
            wants = ", ".join(f"{key} {_text(key, value)}" for key, value in sorted(group.wants.items()))
            selector = f", label {group.selector}" if group.selector else ""
            yield warning(
                "no-node-fits",
                (*group.path, "template", "spec"),
                f"none of {len(there)} nodes fits a pod of {group.name!r} (it wants {wants}{selector}; the most of a "
                f"node is {has})",
                "The pod stays Pending, unless an autoscaler of the cluster brings such a node"
                + (", with the device plugin of its GPUs." if accelerators else "; then ignore this."),
                "Add a node pool for it, install the device plugin, or ask for less.",
            )


def _text(key: str, value: float) -> str:
    return f"{value / 2**30:.1f}Gi" if key == "memory" or "storage" in key else f"{value:g}"


def _fits(group: PodGroup, node: dict[str, Any]) -> bool:
    labels = node.get("metadata", {}).get("labels", {})
    if any(labels.get(key) != value for key, value in group.selector.items()):
        return False
    spec = node.get("spec", {})
    if spec.get("unschedulable"):
        return False
    for taint in spec.get("taints", ()):
        # Clouds add the toleration of a GPU's own taint to pods that ask for that GPU.
        if taint.get("effect") == "PreferNoSchedule" or group.wants.get(taint.get("key"), 0):
            continue
        if not any(_tolerates(t, taint) for t in group.tolerated):
            return False
    room = node.get("status", {}).get("allocatable", {})
    return all(number(room.get(key, 0)) >= value for key, value in group.wants.items())


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return toleration.get("key") == taint.get("key") and str(toleration.get("value", "")) == str(taint.get("value", ""))


def quotas(kubectl: Kubectl, rays: Sequence[Document], default: str) -> Iterator[ConfigFinding]:
    """Find quotas of the namespace that have no room for a pod, or not for all of them."""
    for document in rays:
        namespace = document.get("metadata", "namespace") or default
        every = groups(document)
        if not every:
            continue
        for quota in kubectl.get(f"/api/v1/namespaces/{segment(namespace)}/resourcequotas").get("items", []):
            status = quota.get("status", {})
            for key, hard in status.get("hard", {}).items():
                resource = key.removeprefix("requests.").removeprefix("limits.")
                room = number(hard) - number(status.get("used", {}).get(key, 0))
                each = {g.name: 1.0 if key == "pods" else g.wants.get(resource, 0.0) for g in every}
                yield from _room(quota["metadata"]["name"], key, room, every, each)


def _room(
    name: str, key: str, room: float, every: Sequence[PodGroup], each: dict[str, float]
) -> Iterator[ConfigFinding]:
    over = [g for g in every if each[g.name] > room]
    for group in over:
        yield error(
            "quota-too-small",
            (*group.path, "template", "spec"),
            f"ResourceQuota {name!r} has room for {key} {_text(key, room)}, and one pod of {group.name!r} takes "
            f"{_text(key, each[group.name])}",
            "No pod of this group is ever made (exceeded quota), which only events say.",
            "Ask for a larger quota, or for less in the pod.",
        )
    total = sum(g.most * each[g.name] for g in every)
    if not over and total > room:
        yield warning(
            "quota-too-small",
            (*every[-1].path, "maxReplicas"),
            f"ResourceQuota {name!r} has room for {key} {_text(key, room)}, and the cluster may want "
            f"{_text(key, total)}",
            "Beyond the quota pods are refused, whatever maxReplicas says.",
            "Ask for a larger quota, or lower maxReplicas.",
        )
