"""Ray's GCPNodeProvider with fallbacks and zones, by Google's own client, against a Compute Engine on the loopback.

The stand-in knows instances and operations of zones as the API documents them, and zones that have run out of machines.
"""

from __future__ import annotations

import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("googleapiclient", reason="Google's client is not installed")

PROJECT = "/compute/v1/projects/p/zones/"
CONFIG = {
    "machineType": "g2-standard-4",
    "scheduling": {"provisioningModel": "SPOT", "instanceTerminationAction": "DELETE"},
    "labels": {"project": "raytf"},
    "fallback": [
        {"machineType": "n1-standard-4", "guestAccelerators": [{"acceleratorType": "t4", "acceleratorCount": 1}]},
        {"scheduling": {"provisioningModel": "STANDARD", "instanceTerminationAction": None}, "at_most": 1},
    ],
}


class Compute:
    """Compute Engine: (zone, machine, model) -> how many are left, without end where it is not named."""

    def __init__(self) -> None:
        self.left: dict[tuple[str, str, str], int] = {}
        self.code = "ZONE_RESOURCE_POOL_EXHAUSTED"
        self.instances: dict[str, dict[str, Any]] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, str]] = []

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        zone, kind, *name = path.removeprefix(PROJECT).split("/")
        if kind == "operations":
            return 200, self.operations[name[0]]
        if method == "GET" and not name:
            assert "labels.ray-cluster-name" in query["filter"][0]
            return 200, {"items": [i for i in self.instances.values() if i["zone"] == zone]}
        if method == "GET":
            return 200, self.instances[name[0]]
        operation: dict[str, Any] = {"name": f"operation-{len(self.operations)}", "status": "DONE"}
        self.operations[operation["name"]] = operation
        if method == "DELETE":
            assert self.instances.pop(name[0])["zone"] == zone
            return 200, operation
        assert body["machineType"].startswith(f"zones/{zone}/machineTypes/")
        wanted = (zone, body["machineType"].rsplit("/", 1)[-1], body["scheduling"]["provisioningModel"])
        self.asked.append(wanted)
        if self.left.get(wanted, 1) <= 0:
            operation["error"] = {"errors": [{"code": self.code, "message": f"{wanted} has run out"}]}
            return 200, operation
        if wanted in self.left:
            self.left[wanted] -= 1
        self.instances[body["name"]] = {**body, "zone": zone, "status": "RUNNING", "labelFingerprint": "1"}
        return 200, operation


@pytest.fixture
def compute():
    engine = Compute()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def _serve(self) -> None:
            address = urllib.parse.urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            given = json.loads(body) if body else None
            status, answer = engine.answer(self.command, address.path, urllib.parse.parse_qs(address.query), given)
            content = json.dumps(answer).encode()
            self.send_response_only(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = _serve

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    engine.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield engine
    server.shutdown()
    server.server_close()


@pytest.fixture
def provider(make):
    """Its workers may be anywhere."""
    return make(spread=True)


@pytest.fixture
def make(compute):
    import google.auth.credentials
    import google_auth_httplib2
    import httplib2
    from googleapiclient import discovery

    from raytf.cluster.providers.gcp import Provider

    class Here(Provider):
        def _clients(self):
            http = google_auth_httplib2.AuthorizedHttp(
                google.auth.credentials.AnonymousCredentials(), http=httplib2.Http()
            )
            client = discovery.build(
                "compute", "v1", http=http, client_options={"api_endpoint": f"{compute.url}/compute/v1/"}
            )
            return client, None

    config = {"type": "external", "project_id": "p", "region": "r", "availability_zone": "r-a, r-b"}
    return lambda **more: Here({**config, **more}, "raytf-c", clock=lambda: 100.0)


def launch(provider, count):
    tags = {"ray-node-name": "ray-raytf-c-worker", "ray-user-node-type": "gpu", "ray-node-type": "worker"}
    return provider.create_node_with_resources_and_labels(CONFIG, tags, count, {"CPU": 4, "GPU": 1}, {})


def test_the_next_zone_and_then_the_next_machine(compute, provider):
    assert len(launch(provider, 1)) == 1
    assert compute.asked == [("r-a", "g2-standard-4", "SPOT")]
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 0}
    (node,) = launch(provider, 1)
    assert compute.instances[node]["zone"] == "r-b"
    assert compute.instances[node]["labels"].items() >= {
        ("project", "raytf"),
        ("ray-cluster-name", "raytf-c"),
        ("raytf-machine", "g2-standard-4-spot"),
    }
    compute.left[("r-b", "g2-standard-4", "SPOT")] = 0
    (node,) = launch(provider, 1)
    assert compute.instances[node]["machineType"] == "zones/r-a/machineTypes/n1-standard-4"
    assert compute.instances[node]["guestAccelerators"][0]["acceleratorType"].endswith("zones/r-a/acceleratorTypes/t4")


def test_workers_stay_in_one_zone_and_of_one_kind(compute, make):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    provider = make()
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 0}
    (node,) = launch(provider, 1)
    labels = compute.instances[node]["labels"]
    assert (labels["raytf-place"], labels["raytf-kind"]) == ("r-b", "g2-standard-4")
    compute.left = {("r-b", "g2-standard-4", "SPOT"): 1}
    launch(make(), 2)  # another provider, as of a head that was started again
    assert {i["zone"] for i in compute.instances.values()} == {"r-b"}
    assert {i["machineType"] for i in compute.instances.values()} == {"zones/r-b/machineTypes/g2-standard-4"}
    compute.left = {("r-b", "g2-standard-4", market): 0 for market in ("SPOT", "STANDARD")}
    with pytest.raises(NodeLaunchException, match="no capacity beside the workers that run"):
        launch(make(), 1)


def test_machines_that_started_stay_and_only_the_rest_is_asked_elsewhere(compute, provider):
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 2}
    nodes = launch(provider, 3)
    assert len(nodes) == 3
    assert set(nodes) == set(compute.instances)
    assert sorted(i["zone"] for i in compute.instances.values()) == ["r-a", "r-a", "r-b"]


def test_nodes_of_all_zones_are_listed_and_ended(compute, provider):
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 1}
    launch(provider, 2)
    nodes = provider.non_terminated_nodes({})
    assert sorted(nodes) == sorted(compute.instances)
    assert all(provider.is_running(node) for node in nodes)
    provider.terminate_nodes(nodes)
    assert compute.instances == {}


def test_a_quota_concerns_all_zones_and_on_demand_is_bounded(compute, provider):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    compute.code = "QUOTA_EXCEEDED"
    compute.left = {("r-a", machine, "SPOT"): 0 for machine in ("g2-standard-4", "n1-standard-4")}
    assert len(launch(provider, 2)) == 1
    assert compute.asked[-1] == ("r-a", "g2-standard-4", "STANDARD")
    assert {zone for zone, _, _ in compute.asked} == {"r-a"}
    with pytest.raises(NodeLaunchException, match="no capacity anywhere"):
        launch(provider, 1)
    assert len(compute.instances) == 1


def test_another_error_is_not_taken_for_a_shortage(compute, provider):
    compute.code = "INVALID_USAGE"
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 0}
    with pytest.raises(Exception, match="INVALID_USAGE"):
        launch(provider, 1)
    assert len(compute.asked) == 1


def test_types_of_disks_are_those_of_the_zone(compute, provider):
    compute.left = {("r-a", "g2-standard-4", "SPOT"): 0}
    disks = [{"boot": True, "initializeParams": {"diskType": "pd-balanced"}}, {"initializeParams": {"diskSizeGb": 9}}]
    tags = {"ray-node-name": "ray-raytf-c-worker", "ray-user-node-type": "gpu", "ray-node-type": "worker"}
    config = {**CONFIG, "disks": disks}
    (node,) = provider.create_node_with_resources_and_labels(config, tags, 1, {"CPU": 4, "GPU": 1}, {})
    first, second = (disk["initializeParams"] for disk in compute.instances[node]["disks"])
    assert first == {"diskType": "zones/r-b/diskTypes/pd-balanced"}
    assert second == {"diskSizeGb": 9}
    assert config["disks"][0]["initializeParams"] == {"diskType": "pd-balanced"}
