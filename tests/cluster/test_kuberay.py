"""The KubeRay manifests: as kubectl builds them, as the published fields have it, and as Ray's autoscaler changes them.

Stood in for: the API server, which cannot be here. Ray takes a client for it as an argument; this one applies the
patches to the object and refuses what the fields do not allow. A second reading of the fields, by jsonschema, checks
the first.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonpatch
import jsonschema
import pytest
import yaml

from raytf.doctor import inputs
from raytf.doctor.check import field_types

ROOT = Path(__file__).parents[2]
KUBERAY = ROOT / "cluster-configs" / "kuberay"
OVERLAYS = ("aks", "eks", "gke", "local")
FIELDS: dict[str, Any] = json.loads(files("raytf.doctor.check").joinpath("kube_fields.json").read_text())
needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
#: As the CRDs have it.
_NUMBER = r"(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))"
QUANTITY = {
    "anyOf": [{"type": "number"}, {"type": "string"}],
    "pattern": rf"^(\+|-)?{_NUMBER}(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?{_NUMBER}))?$",
}


def built(overlay: str) -> list[dict[str, Any]]:
    """The objects that `kubectl apply -k` sends."""
    (text,) = inputs.read([str(KUBERAY / "overlays" / overlay)]).values()
    return list(yaml.safe_load_all(text))


def as_schema() -> jsonschema.Draft202012Validator:
    """The fields as JSON Schema: what is not named is refused."""

    def one(kind: str) -> dict[str, Any]:
        kind = kind.removesuffix("!")
        if kind[0] == "[":
            return {"type": ["array", "null"], "items": one(kind[1:-1])}
        if kind[0] == "{":
            inner = one(kind[1:-1])
            if kind[1:-1] == "str":
                inner = {"type": "string"}
            return {"type": ["object", "null"], "additionalProperties": inner}
        if kind[0] == "=":
            return {"enum": kind[1:].split("|")}
        plain = {"str": "string", "int": "integer", "num": "number", "bool": "boolean"}
        if kind in plain:
            return {"type": [plain[kind], "null"]}
        return {"any": {}, "quantity": QUANTITY}.get(kind, {"$ref": f"#/$defs/{kind}"})

    defs = {
        name: {
            "type": "object",
            "properties": {key: one(kind) for key, kind in fields.items()},
            "required": [key for key, kind in fields.items() if kind.endswith("!")],
            "additionalProperties": False,
        }
        for name, fields in FIELDS["types"].items()
    }
    kinds = {name: {"$ref": f"#/$defs/{name}"} for names in FIELDS["kinds"].values() for name in names}
    return jsonschema.Draft202012Validator({"$defs": defs, "properties": kinds, "additionalProperties": False})


def findings(value: dict[str, Any]) -> set[str]:
    """Where raytf finds something, as paths."""
    return {"/".join(map(str, f.path)) for f in field_types.check(value, value["kind"], (), field_types.KUBERNETES)}


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_object_of_an_overlay_has_the_fields_that_are_published(overlay: str) -> None:
    validator = as_schema()
    for value in built(overlay):
        assert field_types.knows(value["apiVersion"], value["kind"]), value["kind"]
        assert findings(value) == set()
        assert [e.message for e in validator.iter_errors({value["kind"]: value})] == []


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_bill_knows_each_pod_and_disk(overlay: str) -> None:
    pods, wanted = 0, {"app.kubernetes.io/part-of": "raytf"}
    for value in built(overlay):
        assert wanted.items() <= value["metadata"]["labels"].items(), value["kind"]
        for path in places(value):
            if path[-1] == "template":
                inside = value
                for part in path:
                    inside = inside[part]
                assert wanted.items() <= inside["metadata"]["labels"].items(), path
                pods += 1
    assert pods >= 3


@needs_kubectl
def test_on_eks_head_and_redis_stay_off_the_spot_group_with_gpus() -> None:
    groups = yaml.safe_load((KUBERAY / "overlays/eks/node-groups.yaml").read_text())["managedNodeGroups"]
    base, gpu = ((group["labels"], group) for group in groups)
    assert (gpu[1]["spot"], gpu[1]["propagateASGTags"], "spot" in base[1]) == (True, True, False)
    assert [taint["key"] for taint in gpu[1]["taints"]] == ["nvidia.com/gpu"]
    of = {value["kind"]: value["spec"] for value in built("eks") if value["kind"] in ("RayCluster", "Deployment")}
    head, redis = of["RayCluster"]["headGroupSpec"]["template"]["spec"], of["Deployment"]["template"]["spec"]
    (worker,) = (group["template"]["spec"] for group in of["RayCluster"]["workerGroupSpecs"])
    assert [pod["nodeSelector"] for pod in (head, redis, worker)] == [base[0], base[0], gpu[0]]
    assert ["tolerations" in pod for pod in (head, redis, worker)] == [False, False, True]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all that is in an object."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield (*path, key)
        yield from places(value[key], (*path, key))


#: What happens to one member of an object.
MISTAKES: dict[str, Callable[[Any, Any], None]] = {
    "renamed": lambda inside, key: inside.__setitem__(f"{key}x", inside.pop(key)),
    "a list": lambda inside, key: inside.__setitem__(key, [["x"]]),
    "a number": lambda inside, key: inside.__setitem__(key, 3.5),
    "a mapping": lambda inside, key: inside.__setitem__(key, {"x": 1}),
    "true": lambda inside, key: inside.__setitem__(key, True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_anywhere_is_seen_as_by_jsonschema(mistake: str) -> None:
    validator = as_schema()
    cluster = yaml.safe_load((KUBERAY / "base/raycluster.yaml").read_text())
    job = yaml.safe_load((KUBERAY / "rayjob.yaml").read_text())
    seen = 0
    for value in (cluster, job):
        for path in places(value):
            if path[:1] in (("kind",), ("apiVersion",)) or (mistake == "renamed" and isinstance(path[-1], int)):
                continue
            broken = copy.deepcopy(value)
            inside = broken
            for part in path[:-1]:
                inside = inside[part]
            MISTAKES[mistake](inside, path[-1])
            refused = not validator.is_valid({value["kind"]: broken})
            assert bool(findings(broken)) == refused, (mistake, path)
            seen += refused
    assert seen > 50


class ApiServer:
    """The objects of a namespace, for Ray's `IKubernetesHttpApiClient`."""

    def __init__(self, cluster: dict[str, Any]) -> None:
        # What the CRD gives to a group that does not say.
        for group in cluster["spec"]["workerGroupSpecs"]:
            group.setdefault("numOfHosts", 1)
        self.cluster = cluster
        self.pods: list[dict[str, Any]] = [self._pod("raytf-head-x7k2p", "head", "headgroup")]

    def _pod(self, name: str, kind: str, group: str) -> dict[str, Any]:
        labels = {"ray.io/cluster": "raytf", "ray.io/node-type": kind, "ray.io/group": group}
        status = {"phase": "Running", "podIP": "10.0.0.7", "containerStatuses": [{"state": {"running": {}}}]}
        return {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [{}]}, "status": status}

    def get(self, path: str) -> dict[str, Any]:
        if path == "rayclusters/raytf":
            return copy.deepcopy(self.cluster)
        assert path == "pods?labelSelector=ray.io/cluster%3Draytf", path
        return {"metadata": {"resourceVersion": "1"}, "items": copy.deepcopy(self.pods)}

    def patch(self, path: str, payload: Any, content_type: str = "application/json-patch+json") -> dict[str, Any]:
        assert (path, content_type) == ("rayclusters/raytf", "application/json-patch+json")
        # Kubernetes lets `replace` make a member that is missing, unlike the RFC: evanphx/json-patch 4 does.
        assert {change["op"] for change in payload} == {"replace"}
        patched = jsonpatch.apply_patch(self.cluster, [{**change, "op": "add"} for change in payload])
        assert findings(patched) == set()
        self.cluster = patched
        return self.cluster

    def delete(self, path: str) -> dict[str, Any]:
        raise AssertionError(f"nothing here is to delete {path}")

    def reconcile(self) -> None:
        """What the operator does: pods as the object wants them."""
        for group in self.cluster["spec"]["workerGroupSpecs"]:
            name = group["groupName"]
            gone = group.get("scaleStrategy", {}).get("workersToDelete", [])
            self.pods = [p for p in self.pods if p["metadata"]["name"] not in gone]
            there = [p for p in self.pods if p["metadata"]["labels"]["ray.io/group"] == name]
            for i in range(len(there), group["replicas"] * group["numOfHosts"]):
                self.pods.append(self._pod(f"raytf-{name}-worker-{i}", "worker", name))


@needs_kubectl
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_rays_autoscaler_scales_each_group_up_and_down(overlay: str) -> None:
    from ray.autoscaler.v2.instance_manager.cloud_providers.kuberay.cloud_provider import KubeRayProvider
    from ray.core.generated.instance_manager_pb2 import NodeKind

    (cluster,) = [value for value in built(overlay) if value["kind"] == "RayCluster"]
    server = ApiServer(cluster)
    provider = KubeRayProvider("raytf", {"namespace": "raytf"}, gcs_client=None, k8s_api_client=server)
    most = {group["groupName"]: group["maxReplicas"] for group in cluster["spec"]["workerGroupSpecs"]}

    provider.launch(dict.fromkeys(most, 2), "up")
    server.reconcile()
    workers = {name: i for name, i in provider.get_non_terminated().items() if i.node_kind == NodeKind.WORKER}
    assert sorted(i.node_type for i in workers.values()) == sorted([*most, *most])
    provider.terminate(list(workers), "down")
    server.reconcile()
    assert [i.node_kind for i in provider.get_non_terminated().values()] == [NodeKind.HEAD]
    assert provider.poll_errors() == []

    provider.launch({name: count + 1 for name, count in most.items()}, "too many")
    assert {g["groupName"]: g["replicas"] for g in server.cluster["spec"]["workerGroupSpecs"]} == most
    assert {error.node_type for error in provider.poll_errors()} == set(most)
