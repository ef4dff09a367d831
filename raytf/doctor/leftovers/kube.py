"""Finds what is left of KubeRay manifests: the objects, and the pods, services and volume claims made for them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from functools import partial

from raytf.doctor.clouds.kubectl import Kubectl, namespace_of, plural, segment
from raytf.doctor.document import Document
from raytf.doctor.leftovers.resource import Leftovers, LeftResource, Query, gather
from raytf.doctor.local_environment import Surroundings
from raytf.errors import ConfigError

#: Kind -> path of its API, and whether it costs money or starts something that does.
_KINDS = {
    "RayCluster": ("/apis/ray.io/v1", True),
    "RayJob": ("/apis/ray.io/v1", True),
    "RayService": ("/apis/ray.io/v1", True),
    "Deployment": ("/apis/apps/v1", True),
    "StatefulSet": ("/apis/apps/v1", True),
    "PersistentVolumeClaim": ("/api/v1", True),
    "Service": ("/api/v1", False),
    "ConfigMap": ("/api/v1", False),
    "Secret": ("/api/v1", False),
    "ServiceAccount": ("/api/v1", False),
}


def find(documents: Sequence[Document], here: Surroundings) -> Leftovers:
    """Find the objects that were applied, and what was made for them.

    Raises:
        ConfigError: there is no kubectl with a context.
    """
    kubectl = Kubectl.installed(here.environ)
    context = kubectl.context() if kubectl else ""
    if kubectl is None or not context:
        raise ConfigError(
            "There is no kubectl with a context. Install kubectl, and choose the context that the objects were applied "
            "with by `kubectl config use-context`, or get it from your cloud (`aws eks update-kubeconfig`, "
            "`gcloud container clusters get-credentials`, `az aks get-credentials`)."
        )
    default = kubectl.namespace()
    queries: list[Query] = []
    claims: set[tuple[str, str]] = set()
    for document in documents:
        kind, name = str(document.get("kind")), str(document.get("metadata", "name"))
        space = namespace_of(document, default)
        if kind in _KINDS:
            queries.append((f"{kind} {name}", partial(_object, kubectl, kind, name, space)))
        if kind in ("RayCluster", "RayJob", "RayService"):
            queries.append((f"pods of {name}", partial(_descendants, kubectl, kind, name, space)))
        if kind == "PersistentVolumeClaim":
            claims.add((space, name))
    if claims:
        queries.append(("volumes", partial(_volumes, kubectl, claims)))
    return gather(f"Kubernetes, context {context}", queries)


def _object(kubectl: Kubectl, kind: str, name: str, space: str) -> Iterator[LeftResource]:
    api, costs = _KINDS[kind]
    if kubectl.has(kind, name, space, api):
        remove = f"kubectl delete {plural(kind)} {name} --namespace {space}"
        yield LeftResource(kind, f"{space}/{name}", "there", None if costs else 0.0, remove)


def _volumes(kubectl: Kubectl, claims: set[tuple[str, str]]) -> Iterator[LeftResource]:
    """Find volumes of reclaimPolicy Retain, which outlive their claim with what they cost."""
    for volume in kubectl.get("/api/v1/persistentvolumes").get("items") or ():
        spec, name = volume.get("spec", {}), volume["metadata"]["name"]
        claim, state = spec.get("claimRef") or {}, volume.get("status", {}).get("phase", "?")
        # A volume whose claim is still there is bound, and the claim is listed.
        if (claim.get("namespace"), claim.get("name")) in claims and state != "Bound":
            size, remove = spec.get("capacity", {}).get("storage", "?"), f"kubectl delete persistentvolume {name}"
            note = f"{size}; the cloud's disk or share stays: delete it there too"
            yield LeftResource("volume", name, state, None, remove, note)


def _descendants(kubectl: Kubectl, kind: str, name: str, space: str) -> Iterator[LeftResource]:
    clusters = {name} if kind == "RayCluster" else set[str]()
    if kind != "RayCluster":
        # The operator makes a cluster of its own for a job and labels it.
        label = f"ray.io/originated-from-cr-name={name}"
        for cluster in _list(kubectl, "/apis/ray.io/v1", space, "rayclusters", label):
            clusters.add(cluster["metadata"]["name"])
            yield _left("RayCluster", "rayclusters", cluster, space, f"of {kind} {name}")
        for pod in _list(kubectl, "/api/v1", space, "pods", f"job-name={name}"):
            yield _pod(pod, space)
    for cluster_name in sorted(clusters):
        label = f"ray.io/cluster={cluster_name}"
        for pod in _list(kubectl, "/api/v1", space, "pods", label):
            yield _pod(pod, space)
        for claim in _list(kubectl, "/api/v1", space, "persistentvolumeclaims", label):
            size = claim.get("spec", {}).get("resources", {}).get("requests", {}).get("storage", "?")
            state = claim.get("status", {}).get("phase", "?")
            yield _left("volume claim", "persistentvolumeclaim", claim, space, state, note=size)
        for service in _list(kubectl, "/api/v1", space, "services", label):
            service_type = service.get("spec", {}).get("type", "ClusterIP")
            usd = None if service_type == "LoadBalancer" else 0.0  # a machine of the cloud
            yield _left("service", "service", service, space, service_type, usd)


def _left(
    kind: str, argument: str, item: dict, space: str, state: str, usd: float | None = None, note: str = ""
) -> LeftResource:
    name = item["metadata"]["name"]
    remove = f"kubectl delete {argument} {name} --namespace {space}"
    return LeftResource(kind, f"{space}/{name}", state, usd, remove, note)


def _list(kubectl: Kubectl, base: str, space: str, plural: str, label: str) -> list[dict]:
    selector = urllib.parse.quote(label, safe="")
    return kubectl.get(f"{base}/namespaces/{segment(space)}/{plural}?labelSelector={selector}").get("items") or []


def _pod(pod: dict, space: str) -> LeftResource:
    gpus = sum(
        int(c.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
        for c in pod.get("spec", {}).get("containers", ())
    )
    where = pod.get("spec", {}).get("nodeName")
    note = f"on node {where}, which is paid for" if where else "on no node yet"
    note += f"; {gpus} GPUs" if gpus else ""
    return _left("pod", "pod", pod, space, pod.get("status", {}).get("phase", "?"), note=note)
