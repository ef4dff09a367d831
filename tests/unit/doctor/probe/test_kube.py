"""`raytf check` online and `raytf down-check` for KubeRay: the real kubectl against recorded shapes of an API server.

There is no API server here: a small HTTP server on the loopback answers with objects as Kubernetes' OpenAPI has them.
"""

import copy
import os
import shutil
from pathlib import Path

import pytest

from raytf.commands import down_check
from raytf.doctor import inputs
from raytf.doctor.check import offline
from raytf.doctor.document import parse
from raytf.doctor.finding import Severity
from raytf.doctor.leftovers import report
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.probe import kube, online
from tests.support.recorded import Recorded

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
ROOT = Path(__file__).parents[4]
SPACE = "/api/v1/namespaces/raytf"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/rayclusters.ray.io"
OPERATORS = "/apis/apps/v1/deployments"
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def status(code, reason):
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"{reason}: no",
        "reason": reason,
        "code": code,
    }


@pytest.fixture(scope="module")
def manifests():
    """The overlay for EKS with its placeholders filled in."""
    (text,) = inputs.read([str(ROOT / "cluster-configs/kuberay/overlays/eks")]).values()
    for word, own in (("your-registry", "registry.test"), ("your-", "own-"), ("000000000000", "210987654321")):
        text = text.replace(word, own)
    return text.replace("YOUR_", "OWN_")


def crd(spec):
    properties = {key: {} for key in spec}
    version = {"name": "v1", "served": True, "storage": True}
    schema = {"openAPIV3Schema": {"properties": {"spec": {"properties": properties}}}}
    return {"kind": "CustomResourceDefinition", "spec": {"versions": [{**version, "schema": schema}]}}


def node(name, gpus=0, cpus="16", memory="64Gi", labels=None, taints=()):
    room = {"cpu": cpus, "memory": memory, "pods": "58", "ephemeral-storage": "200Gi"}
    room |= {"nvidia.com/gpu": str(gpus)} if gpus else {}
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": room},
    }


def review(is_allowed):
    """kubectl asks in protobuf, and takes JSON for an answer."""
    answer = {"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "metadata": {}, "spec": {}}
    return 201, {**answer, "status": {"allowed": is_allowed}}


def routes(documents):
    (cluster,) = [d for d in documents if d.get("kind") == "RayCluster"]
    group = {"kind": "APIResourceList", "groupVersion": "ray.io/v1", "resources": []}
    for kind in ("RayCluster", "RayJob"):
        plural = f"{kind.lower()}s"
        verbs = ["create", "delete", "get", "list"]
        group["resources"].append(
            {"name": plural, "kind": kind, "namespaced": True, "verbs": verbs, "singularName": ""}
        )
    taint = {"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}
    found = {
        "/version": {"major": "1", "minor": "32", "gitVersion": "v1.32.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {
            "kind": "APIGroupList",
            "groups": [
                {
                    "name": "ray.io",
                    "versions": [{"groupVersion": "ray.io/v1", "version": "v1"}],
                    "preferredVersion": {"groupVersion": "ray.io/v1", "version": "v1"},
                }
            ],
        },
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis/ray.io/v1": group,
        CRD: crd(cluster.get("spec")),
        OPERATORS: {"items": [{"metadata": {"name": "kuberay-operator"}, "status": {"readyReplicas": 1}}]},
        REVIEW: review(True),
        "/api/v1/nodes": {
            "items": [
                node("a", labels=_labels(cluster, is_head=True)),
                node("b", gpus=1, labels=_labels(cluster, is_head=False), taints=[taint]),
            ],
        },
        f"{SPACE}/resourcequotas": {"items": []},
    }
    for (kind, name), _ in _references(cluster):
        plural = {"Secret": "secrets", "ConfigMap": "configmaps", "ServiceAccount": "serviceaccounts"}.get(kind, "x")
        found[f"{SPACE}/{plural}/{name}"] = {"kind": kind, "metadata": {"name": name}}
    return found


def _labels(cluster, is_head):
    groups = [group for group in kube.groups(cluster) if (group.name == "head") is is_head]
    return {k: v for group in groups for k, v in group.selector.items()}


def _references(document):
    from raytf.doctor.probe import kube

    return list(kube._references(document.value, ()))


@pytest.fixture
def api(manifests):
    documents, _ = parse(manifests)
    volumes = {"/api/v1/persistentvolumes": {"items": []}}
    server = Recorded(routes(documents) | volumes, status(403, "Forbidden"), status(404, "NotFound"))
    yield server
    server.close()


def kubeconfig(folder, url):
    file = folder / "kubeconfig"
    file.write_text(
        f"apiVersion: v1\nkind: Config\ncurrent-context: here\n"
        f"clusters: [{{name: here, cluster: {{server: '{url}'}}}}]\n"
        f"users: [{{name: me, user: {{token: t}}}}]\n"
        f"contexts: [{{name: here, context: {{cluster: here, user: me}}}}]\n"
    )
    return {"HOME": str(folder), "PATH": os.environ["PATH"], "KUBECONFIG": str(file)}


@pytest.fixture
def here(api, tmp_path):
    return Surroundings("3.11.7", "2.60.0", ROOT, kubeconfig(tmp_path, api.url))


def ask(text, here):
    return online.inspect(text, here, None, offline.check(text, here))


def codes(seen):
    return {f.code for f in seen.findings}


def test_nothing_is_found_on_a_cluster_that_the_docs_were_followed_in(api, here, manifests):
    seen = ask(manifests, here)
    assert codes(seen) == set(), seen.findings
    assert seen.notes == ["Kubernetes v1.32.4, context here"]
    assert {path.partition("?")[0] for method, path, _, _ in api.asked if method != "GET"} == {REVIEW}


CASES = {
    "crd-missing": (CRD, (404, status(404, "NotFound"))),
    "crd-too-old": (CRD, crd(["headGroupSpec", "workerGroupSpecs", "rayVersion"])),
    "operator-missing": (OPERATORS, {"items": []}),
    "no-node-fits": ("/api/v1/nodes", {"items": [node("a")]}),
    "right-missing": (REVIEW, review(False)),
    "quota-too-small": (
        f"{SPACE}/resourcequotas",
        {
            "items": [
                {
                    "metadata": {"name": "team"},
                    "status": {"hard": {"requests.nvidia.com/gpu": "4"}, "used": {"requests.nvidia.com/gpu": "4"}},
                }
            ]
        },
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_a_mistake_is_found_and_nothing_else(api, here, manifests, code):
    path, answer = CASES[code]
    assert path in api.routes
    api.routes[path] = answer
    seen = ask(manifests, here)
    assert codes(seen) == {code}, seen.findings
    assert all(f.line and f.why and f.fix for f in seen.findings)


def test_a_quota_for_some_of_the_pods_is_a_warning(api, here, manifests):
    quota = {"hard": {"requests.nvidia.com/gpu": "4"}, "used": {"requests.nvidia.com/gpu": "1"}}
    api.routes[f"{SPACE}/resourcequotas"] = {"items": [{"metadata": {"name": "team"}, "status": quota}]}
    (found,) = ask(manifests, here).findings
    assert (found.code, found.severity) == ("quota-too-small", Severity.WARNING)
    assert "room for requests.nvidia.com/gpu 3, but the cluster may need 8" in found.what


def test_a_secret_that_is_not_there(api, here, manifests):
    paths = [p for p in api.routes if p.startswith(f"{SPACE}/secrets/")]
    assert paths, "the cluster refers to a Secret that is made by hand"
    for path in paths:
        del api.routes[path]
    seen = ask(manifests, here)
    assert codes(seen) == {"kube-object-missing"}
    assert "nor in these manifests" in seen.findings[0].what


def test_a_taint_keeps_a_pod_away(api, here, manifests):
    nodes = copy.deepcopy(api.routes["/api/v1/nodes"])
    nodes["items"][1]["spec"]["taints"].append({"key": "team", "value": "x", "effect": "NoSchedule"})
    api.routes["/api/v1/nodes"] = nodes
    assert codes(ask(manifests, here)) == {"no-node-fits"}


def test_rights_to_look_that_are_missing_are_warnings(api, here, manifests):
    api.denied = {"/api/v1/nodes", f"{SPACE}/resourcequotas"}
    seen = ask(manifests, here)
    assert codes(seen) == {"no-right-to-look"}
    assert sorted(f.what.partition(":")[0] for f in seen.findings) == ["nodes", "quotas"]


def test_an_api_server_that_is_away_or_refuses(api, here, manifests, tmp_path):
    away = Surroundings("3.11.7", "2.60.0", ROOT, kubeconfig(tmp_path, "http://127.0.0.1:1"))
    assert codes(ask(manifests, away)) == {"no-answer"}
    back = Surroundings("3.11.7", "2.60.0", ROOT, kubeconfig(tmp_path, api.url))
    api.routes["/version"] = (401, status(401, "Unauthorized"))
    assert codes(ask(manifests, back)) == {"credentials-refused"}


def test_without_a_context_one_warning(manifests, tmp_path):
    empty = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "KUBECONFIG": str(tmp_path / "none")}
    for environ in (empty, {**empty, "PATH": str(tmp_path)}):
        (found,) = ask(manifests, Surroundings("3.11.7", "2.60.0", ROOT, environ)).findings
        assert found.code == "no-credentials"


def test_what_is_left(api, here, manifests):
    documents, _ = parse(manifests)
    (cluster,) = [d for d in documents if d.get("kind") == "RayCluster"]
    name = cluster.get("metadata", "name")
    wanted = [f"ray.io/cluster={name}"]
    limits = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    pod = {
        "metadata": {"name": f"{name}-gpu-worker-x"},
        "spec": {"nodeName": "b", "containers": [limits]},
        "status": {"phase": "Running"},
    }
    for plural, item in (
        ("pods", pod),
        ("persistentvolumeclaims", {"metadata": {"name": "spill"}, "status": {"phase": "Bound"}}),
        ("services", {"metadata": {"name": f"{name}-head-svc"}, "spec": {"type": "LoadBalancer"}}),
    ):
        api.routes[f"{SPACE}/{plural}"] = lambda query, _, item=item: {
            "items": [item] if query["labelSelector"] == wanted else []
        }
    for path in [p for p in api.routes if p.startswith((f"{SPACE}/secrets/", f"{SPACE}/serviceaccounts/"))]:
        del api.routes[path]
    left = report.find("c.yaml", manifests, here)
    assert [(t.kind, t.state) for t in left.resources] == [
        ("pod", "Running"),
        ("volume claim", "Bound"),
        ("service", "LoadBalancer"),
    ]
    assert left.resources[0].note == "on node b, which is paid for; 1 GPUs"
    assert left.resources[0].remove == f"kubectl delete pod {name}-gpu-worker-x --namespace raytf"
    assert down_check.exit_code(left) == 1


def test_nothing_is_left(api, here, manifests):
    for plural in ("pods", "persistentvolumeclaims", "services"):
        api.routes[f"{SPACE}/{plural}"] = {"items": []}
    for path in [p for p in api.routes if p.startswith((f"{SPACE}/secrets/", f"{SPACE}/serviceaccounts/"))]:
        del api.routes[path]
    left = report.find("c.yaml", manifests, here)
    assert (left.resources, left.unseen, down_check.exit_code(left)) == ([], [], 0)


def test_a_volume_that_outlives_its_claim(api, here):
    text = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata: {name: runs, namespace: raytf}\nspec: {}\n"
    api.routes["/api/v1/persistentvolumes"] = {
        "items": [
            {
                "metadata": {"name": f"pv-{state}-{claim}"},
                "spec": {"claimRef": {"namespace": "raytf", "name": claim}, "capacity": {"storage": "100Gi"}},
                "status": {"phase": state},
            }
            for state, claim in (("Released", "runs"), ("Bound", "runs"), ("Released", "other"))
        ]
    }
    (thing,) = report.find("c.yaml", text, here).resources
    assert (thing.kind, thing.name, thing.state, thing.is_free) == ("volume", "pv-Released-runs", "Released", False)
    assert thing.remove == "kubectl delete persistentvolume pv-Released-runs"


def test_a_job_has_a_cluster_of_its_own(api, here):
    text = "apiVersion: ray.io/v1\nkind: RayJob\nmetadata: {name: mnist, namespace: raytf}\nspec: {}\n"
    api.routes["/apis/ray.io/v1/namespaces/raytf/rayclusters"] = lambda query, _: {
        "items": [{"metadata": {"name": "mnist-abcde"}}]
        if query["labelSelector"] == ["ray.io/originated-from-cr-name=mnist"]
        else []
    }
    for plural in ("pods", "persistentvolumeclaims", "services"):
        api.routes[f"{SPACE}/{plural}"] = {"items": []}
    (thing,) = report.find("c.yaml", text, here).resources
    assert (thing.kind, thing.name, thing.state) == ("RayCluster", "raytf/mnist-abcde", "of RayJob mnist")


def test_an_api_server_that_may_not_be_asked_proves_nothing(api, here, manifests):
    api.denied = {"/api/v1", "/apis/ray.io/v1/namespaces"}
    assert down_check.exit_code(report.find("c.yaml", manifests, here)) == 2
