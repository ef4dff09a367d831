"""Checks KubeRay manifests against an API server: operator, CRDs, GPUs of nodes, quotas, rights, and Secrets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from raytf.doctor.check import kuberay
from raytf.doctor.check.kube_pods import ACCELERATORS, number
from raytf.doctor.clouds.kubectl import Kubectl, KubeError, namespace_of, plural, segment
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, warning
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe.queries import ProbeResults, Query, no_answer, no_credentials, no_right, refused, run

_UNSEEN = "the operator, its CRDs, GPUs of nodes, quotas, rights and Secrets"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RIGHTS = {
    "operator": "get on CustomResourceDefinitions and list on Deployments",
    "nodes": "list on nodes",
    "quotas": "list on resourcequotas",
    "objects": "get on secrets, configmaps, serviceaccounts and persistentvolumeclaims",
}


def inspect(documents: Sequence[Document], here: Surroundings) -> ProbeResults:
    """Check manifests against the API server of kubectl's context."""
    seen = ProbeResults()
    rays = [d for d in documents if d.get("kind") in kuberay.KINDS]
    if not rays:
        return seen
    kubectl = Kubectl.installed(here.environ)
    if kubectl is None:
        return ProbeResults([no_credentials("Kubernetes", _UNSEEN, "Install kubectl")])
    context = kubectl.context()
    if not context:
        fix = "Get a context: `aws eks update-kubeconfig`, `gcloud container clusters get-credentials` or "
        return ProbeResults([no_credentials("Kubernetes", _UNSEEN, f"{fix}`az aks get-credentials`")])
    try:
        version = kubectl.get("/version")
    except KubeError as problem:
        return ProbeResults([_explain(Query("API server", list), problem)])
    seen.notes.append(f"Kubernetes {version.get('gitVersion')}, context {context}")
    default = kubectl.namespace()
    queries = [
        Query("operator", partial(_operator, kubectl, rays)),
        Query("rights", partial(_rights, kubectl, rays, default)),
        Query("nodes", partial(nodes, kubectl, rays)),
        Query("quotas", partial(quotas, kubectl, rays, default)),
        Query("objects", partial(_objects, kubectl, documents, rays, default)),
    ]
    seen.findings += run(queries, _explain)
    return seen


def _explain(query: Query, problem: Exception) -> ConfigFinding:
    reason = problem.reason if isinstance(problem, KubeError) else ""
    if reason == "Forbidden":
        return no_right(query.what, _RIGHTS.get(query.what, "the right to read it"))
    if reason == "Unauthorized":
        return refused("The API server", problem, "Log in to the cluster again.", "kubectl apply")
    return no_answer(query.what, problem)


def _operator(kubectl: Kubectl, rays: Sequence[Document]) -> Iterator[ConfigFinding]:
    install = (
        "Run `helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0`, which includes the CRDs "
        "(docs/clusters/kubernetes.md)."
    )
    is_complete = True
    for document in rays:
        kind = document.get("kind")
        version = str(document.get("apiVersion", default="ray.io/v1")).rpartition("/")[2]
        crd = kubectl.find(f"{_CRDS}/{plural(kind)}.ray.io") or {"spec": {"versions": []}}
        served = {v["name"]: v for v in crd["spec"]["versions"] if v.get("served")}
        if version not in served:
            is_complete = False
            what = f"the API server has no {kind} of ray.io/{version}"
            what += f"; it has {', '.join(sorted(served))}" if served else ""
            why = "`kubectl apply` fails with `no matches for kind`."
            yield error("crd-missing", ("apiVersion",), what, why, install)
            continue
        schema = served[version].get("schema", {}).get("openAPIV3Schema", {})
        known = schema.get("properties", {}).get("spec", {}).get("properties")
        for key in document.mapping("spec") if known else ():
            if key not in known:
                what = f"the installed {kind} has no spec.{key}"
                why = "The API server drops the field or refuses the object: the operator is older than this manifest."
                yield error("crd-too-old", ("spec", key), what, why, install.replace("install", "upgrade", 1))
    if not is_complete:
        return
    deployments = kubectl.get("/apis/apps/v1/deployments?labelSelector=app.kubernetes.io%2Fname%3Dkuberay-operator")
    if not any(d.get("status", {}).get("readyReplicas") for d in deployments.get("items", ())):
        what = "no deployment of kuberay-operator is ready"
        why = "The API server accepts the object, but nothing starts a pod for it."
        yield warning("operator-missing", ("apiVersion",), what, why, install)


def _rights(kubectl: Kubectl, rays: Sequence[Document], default: str) -> Iterator[ConfigFinding]:
    effects = {"create": "`kubectl apply` fails.", "delete": "You cannot delete it after you created it."}
    for document in rays:
        kinds, namespace = plural(document.get("kind")), namespace_of(document, default)
        for verb, why in effects.items():
            if not kubectl.may(verb, f"{kinds}.ray.io", namespace):
                what = f"you may not {verb} {kinds}.ray.io in namespace {namespace}"
                fix = f"Ask for a role with {verb} on {kinds} of ray.io."
                yield error("right-missing", ("metadata",), what, why, fix)


def _objects(
    kubectl: Kubectl, documents: Sequence[Document], rays: Sequence[Document], default: str
) -> Iterator[ConfigFinding]:
    """Find objects to which pods refer, but which are neither in the manifests nor on the server."""
    known = {(d.get("kind"), d.get("metadata", "name")) for d in documents}
    for document in rays:
        namespace = namespace_of(document, default)
        for (kind, name), path in _references(document.value, ()):
            if (kind, name) not in known and not kubectl.has(kind, name, namespace):
                what = f"there is no {kind} {name!r} in namespace {namespace}, nor in these manifests"
                why = "Pods wait forever (CreateContainerConfigError, FailedMount), or are never created."
                command = f"kubectl create {kind.lower()} ... --namespace {namespace}"
                fix = f"Run `{command}` first; docs/clusters/kubernetes.md has an example."
                yield error("kube-object-missing", path, what, why, fix)


#: Key of a reference -> the kind that it refers to, and its key for the name.
_REFERENCES = {
    "secretRef": ("Secret", "name"),
    "secretKeyRef": ("Secret", "name"),
    "secret": ("Secret", "secretName"),
    "configMapRef": ("ConfigMap", "name"),
    "configMapKeyRef": ("ConfigMap", "name"),
    "configMap": ("ConfigMap", "name"),
    "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
}


def _references(value: Any, path: Path) -> Iterator[tuple[tuple[str, str], Path]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in _REFERENCES and isinstance(inner, dict) and not inner.get("optional"):
                kind, name = _REFERENCES[key]
                if isinstance(inner.get(name), str):
                    yield (kind, inner[name]), (*path, key)
            if key == "serviceAccountName" and isinstance(inner, str) and inner != "default":
                yield ("ServiceAccount", inner), (*path, key)
            yield from _references(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _references(inner, (*path, i))


@dataclass(frozen=True)
class PodGroup:
    """A group of identical pods.

    Attributes:
        name: the group's name, or `head`.
        most: the most pods that it may have.
        wants: resource -> the amount that all containers of a pod request together.
        selector: labels that a node must have.
        tolerated: the pod's tolerations.
        path: the group's path in the manifest.
    """

    name: str
    most: int
    wants: dict[str, float]
    selector: dict[str, str]
    tolerated: tuple[dict[str, Any], ...]
    path: Path


def groups(document: Document) -> list[PodGroup]:
    """Return the head and worker groups of a RayCluster, or of the one in a RayJob."""
    pods = []
    for path, spec, is_head in kuberay.groups(document):
        most = 1 if is_head else spec.get("maxReplicas", spec.get("replicas", 1))
        name = "head" if is_head else str(spec.get("groupName", path[-1]))
        pods.append(_group(document, name, most if isinstance(most, int) else 1, path))
    return pods


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
    """Find pods that fit on no existing node, even if no other pod used resources there."""
    there = kubectl.get("/api/v1/nodes").get("items", [])
    for document in rays:
        for group in groups(document):
            if any(_fits(group, node) for node in there):
                continue
            accelerators = [a for a in ACCELERATORS if group.wants.get(a)]
            most = {
                key: max((number(n.get("status", {}).get("allocatable", {}).get(key, 0)) for n in there), default=0.0)
                for key in (*accelerators, "cpu", "memory")
            }
            has = ", ".join(f"{key} {_text(key, value)}" for key, value in most.items())
            wants = ", ".join(f"{key} {_text(key, value)}" for key, value in sorted(group.wants.items()))
            selector = f", label {group.selector}" if group.selector else ""
            what = f"none of {len(there)} nodes fits a pod of {group.name!r}, which needs {wants}{selector}; "
            what += f"the most that a node has is {has}"
            plugin = ", with the device plugin of its GPUs." if accelerators else "; then ignore this."
            why = f"The pod stays Pending, unless an autoscaler of the cluster adds such a node{plugin}"
            fix = "Add a node pool for it, install the device plugin, or request less."
            yield warning("no-node-fits", (*group.path, "template", "spec"), what, why, fix)


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
        # Clouds let pods that request a GPU tolerate the taint of that GPU.
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
    """Find quotas of the namespace that are too small for one pod, or for all pods."""
    for document in rays:
        namespace = namespace_of(document, default)
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
    quota = f"ResourceQuota {name!r} has room for {key} {_text(key, room)}"
    over = [g for g in every if each[g.name] > room]
    for group in over:
        what = f"{quota}, but one pod of {group.name!r} needs {_text(key, each[group.name])}"
        why = "No pod of this group is ever created (exceeded quota), and only events show it."
        fix = "Ask for a larger quota, or request less for the pod."
        yield error("quota-too-small", (*group.path, "template", "spec"), what, why, fix)
    total = sum(g.most * each[g.name] for g in every)
    if not over and total > room:
        what = f"{quota}, but the cluster may need {_text(key, total)}"
        why = "The API server refuses pods beyond the quota, whatever maxReplicas is."
        fix = "Ask for a larger quota, or lower maxReplicas."
        yield warning("quota-too-small", (*every[-1].path, "maxReplicas"), what, why, fix)
