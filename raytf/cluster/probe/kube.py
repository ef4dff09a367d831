"""What an API server says about manifests of KubeRay: operator, CRDs, GPUs of nodes, quotas, rights, and Secrets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, error, warning
from raytf.cluster.check.local_environment import Surroundings
from raytf.cluster.clouds.kubectl import Kubectl, KubeError, segment
from raytf.cluster.probe import kube_capacity
from raytf.cluster.probe.queries import ProbeResults, Query, no_answer, no_credentials, no_right, run

_UNSEEN = "the operator, its CRDs, GPUs of nodes, quotas, rights and Secrets"
_KINDS = {"RayCluster": "rayclusters", "RayJob": "rayjobs", "RayService": "rayservices"}
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_RIGHTS = {
    "operator": "get on CustomResourceDefinitions and list on Deployments",
    "nodes": "list on nodes",
    "quotas": "list on resourcequotas",
    "objects": "get on secrets, configmaps, serviceaccounts and persistentvolumeclaims",
}


def look(documents: Sequence[Document], here: Surroundings) -> ProbeResults:
    """Ask the API server of kubectl's context all that concerns some manifests."""
    seen = ProbeResults()
    rays = [d for d in documents if d.get("kind") in _KINDS]
    if not rays:
        return seen
    kubectl = Kubectl.find(here.environ)
    if kubectl is None:
        seen.findings.append(no_credentials("Kubernetes", _UNSEEN, "Install kubectl"))
        return seen
    context = kubectl.context()
    if not context:
        fix = "Get a context: `aws eks update-kubeconfig`, `gcloud container clusters get-credentials` or "
        seen.findings.append(no_credentials("Kubernetes", _UNSEEN, f"{fix}`az aks get-credentials`"))
        return seen
    try:
        version = kubectl.get("/version")
    except KubeError as problem:
        seen.findings.append(_explain(Query("API server", list), problem))
        return seen
    seen.notes.append(f"Kubernetes {version.get('gitVersion')}, context {context}")
    default = kubectl.namespace()
    looks = [
        Query("operator", partial(_operator, kubectl, rays)),
        Query("rights", partial(_rights, kubectl, rays, default)),
        Query("nodes", partial(kube_capacity.nodes, kubectl, rays)),
        Query("quotas", partial(kube_capacity.quotas, kubectl, rays, default)),
        Query("objects", partial(_objects, kubectl, documents, rays, default)),
    ]
    seen.findings += run(looks, _explain)
    return seen


def _explain(what: Query, problem: Exception) -> ConfigFinding:
    if isinstance(problem, KubeError) and problem.reason == "Forbidden":
        return no_right(what.what, _RIGHTS.get(what.what, "the right to read it"))
    if isinstance(problem, KubeError) and problem.reason == "Unauthorized":
        return error(
            "credentials-refused",
            (),
            f"the API server refuses these credentials: {problem}",
            "`kubectl apply` asks with the same ones and ends.",
            "Log in to the cluster again.",
        )
    return no_answer(what.what, problem)


def namespace_of(document: Document, default: str) -> str:
    """Where an object goes."""
    found = document.get("metadata", "namespace")
    return found if isinstance(found, str) else default


def _operator(kubectl: Kubectl, rays: Sequence[Document]) -> Iterator[ConfigFinding]:
    install = (
        "Run `helm install kuberay-operator kuberay/kuberay-operator --version 1.7.0`, which brings the CRDs "
        "(docs/clusters/kubernetes.md)."
    )
    lacking = False
    for document in rays:
        plural, kind = _KINDS[document.get("kind")], document.get("kind")
        version = str(document.get("apiVersion", default="ray.io/v1")).rpartition("/")[2]
        try:
            crd = kubectl.get(f"{_CRDS}/{plural}.ray.io")
        except KubeError as problem:
            if problem.reason != "NotFound":
                raise
            crd = {"spec": {"versions": []}}
        served = {v["name"]: v for v in crd["spec"]["versions"] if v.get("served")}
        if version not in served:
            lacking = True
            yield error(
                "crd-missing",
                ("apiVersion",),
                f"the API server has no {kind} of ray.io/{version}"
                + (f"; it has {', '.join(sorted(served))}" if served else ""),
                "`kubectl apply` ends: no matches for kind.",
                install,
            )
            continue
        schema = served[version].get("schema", {}).get("openAPIV3Schema", {})
        known = schema.get("properties", {}).get("spec", {}).get("properties")
        for key in document.mapping("spec") if known else ():
            if key not in known:
                yield error(
                    "crd-too-old",
                    ("spec", key),
                    f"the {kind} that is installed has no spec.{key}",
                    "The API server drops the field or refuses the object: the operator is older than this manifest.",
                    install.replace("install", "upgrade", 1),
                )
    if lacking:
        return
    found = kubectl.get("/apis/apps/v1/deployments?labelSelector=app.kubernetes.io%2Fname%3Dkuberay-operator")
    ready = sum(d.get("status", {}).get("readyReplicas") or 0 for d in found.get("items", ()))
    if not ready:
        yield warning(
            "operator-missing",
            ("apiVersion",),
            "no deployment of kuberay-operator is ready",
            "The object is taken, and nobody starts a pod for it.",
            install,
        )


def _rights(kubectl: Kubectl, rays: Sequence[Document], default: str) -> Iterator[ConfigFinding]:
    for document in rays:
        plural, namespace = _KINDS[document.get("kind")], namespace_of(document, default)
        for verb in ("create", "delete"):
            if not kubectl.may(verb, f"{plural}.ray.io", namespace):
                yield error(
                    "right-missing",
                    ("metadata",),
                    f"you may not {verb} {plural}.ray.io in namespace {namespace}",
                    "`kubectl apply` ends." if verb == "create" else "Nobody can end what was started.",
                    f"Ask for a role with {verb} on {plural} of ray.io.",
                )


def _objects(
    kubectl: Kubectl, documents: Sequence[Document], rays: Sequence[Document], default: str
) -> Iterator[ConfigFinding]:
    """What pods refer to, which must be in the manifests or on the server."""
    given = {(d.get("kind"), d.get("metadata", "name")) for d in documents}
    for document in rays:
        namespace = namespace_of(document, default)
        for (kind, name), path in _references(document.value, ()):
            if (kind, name) in given or _has(kubectl, kind, name, namespace):
                continue
            yield error(
                "kube-object-missing",
                path,
                f"there is no {kind} {name!r} in namespace {namespace}, nor in these manifests",
                "Pods wait forever (CreateContainerConfigError, FailedMount), or are never made.",
                f"`kubectl create {kind.lower()} ... --namespace {namespace}` before this; "
                "docs/clusters/kubernetes.md has it.",
            )


def _has(kubectl: Kubectl, kind: str, name: str, namespace: str) -> bool:
    plural = {"ConfigMap": "configmaps", "PersistentVolumeClaim": "persistentvolumeclaims"}.get(
        kind, f"{kind.lower()}s"
    )
    try:
        kubectl.get(f"/api/v1/namespaces/{segment(namespace)}/{plural}/{segment(name)}")
    except KubeError as problem:
        if problem.reason == "NotFound":
            return False
        raise
    return True


def _references(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str, str], tuple[str | int, ...]]]:
    keys = {
        "secretRef": ("Secret", "name"),
        "secretKeyRef": ("Secret", "name"),
        "secret": ("Secret", "secretName"),
        "configMapRef": ("ConfigMap", "name"),
        "configMapKeyRef": ("ConfigMap", "name"),
        "configMap": ("ConfigMap", "name"),
        "persistentVolumeClaim": ("PersistentVolumeClaim", "claimName"),
    }
    if isinstance(value, dict):
        for key, inner in value.items():
            if key in keys and isinstance(inner, dict) and not inner.get("optional"):
                kind, name = keys[key]
                if isinstance(inner.get(name), str):
                    yield (kind, inner[name]), (*path, key)
            if key == "serviceAccountName" and isinstance(inner, str) and inner != "default":
                yield ("ServiceAccount", inner), (*path, key)
            yield from _references(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _references(inner, (*path, i))
