"""The Google Cloud configs through Ray's own provider code, against what Google publishes of its API.

Stood in for: Google's control plane, which cannot be here (`google_api.py`), and the file that `gcloud auth
application-default login` writes. Nothing of Ray or of Google's client is changed: the environment sends their HTTPS
to the loopback, and httplib2, which looks for its certificates only when it is imported, is told of another one.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytf.cluster.check import gcp
from tests.cluster.google_api import Google, document
from tests.cluster.loopback import Loopback

CONFIGS = Path(__file__).parents[2] / "cluster-configs"
PROJECT, ZONE = "acme-vision-417", "us-central1-a"
WORKER = f"raytf-worker@{PROJECT}.iam.gserviceaccount.com"
HEAD = f"ray-autoscaler-sa-v1@{PROJECT}.iam.gserviceaccount.com"
TOOLS = {"google-api-python-client", "google-auth-httplib2", "cryptography"}


@pytest.fixture(autouse=True)
def _client() -> None:
    pytest.importorskip("googleapiclient", reason="google-api-python-client is not installed: pip install -e '.[test]'")


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    plane = Google(PROJECT, ZONE, [WORKER])
    login = tmp_path / "application_default_credentials.json"
    login.write_text(
        json.dumps({"type": "authorized_user", "client_id": "x", "client_secret": "x", "refresh_token": "x"})
    )
    with Loopback(plane.services(), tmp_path) as loopback:
        for name, value in {
            **loopback.environ,
            "GOOGLE_APPLICATION_CREDENTIALS": str(login),
            "GOOGLE_CLOUD_PROJECT": PROJECT,
            "HOME": str(tmp_path),
        }.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("httplib2.CA_CERTS", str(loopback.certificate))
        yield plane
    assert loopback.faults == []


def filled_in(name: str) -> dict[str, Any]:
    """A config as a user leaves it, with the defaults of Ray, and as Ray's own validation takes it."""
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = (CONFIGS / name).read_text().replace("your-project", PROJECT)
    config = GCPNodeProvider.fillout_available_node_types_resources(prepare_config(yaml.safe_load(text)))
    validate_config(config)
    found: dict[str, Any] = config
    return found


def start_all(config: dict[str, Any]) -> Any:
    """One node of each type, with what `ray up` and Ray's autoscaler give to it; the provider."""
    from ray.autoscaler._private.gcp.config import bootstrap_gcp
    from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

    config = bootstrap_gcp(config)
    provider = GCPNodeProvider(config["provider"], config["cluster_name"])
    for name, kind in config["available_node_types"].items():
        head = name == config["head_node_type"]
        role = "head" if head else "worker"
        tags = {
            "ray-node-kind": role,
            "ray-node-type": role,
            "ray-node-name": f"ray-{config['cluster_name']}-{role}",
            "ray-node-status": "uninitialized",
            "ray-launch-config": "5cbbd9d8aa4e0f1d",
            "ray-user-node-type": name,
        }
        # commands.py gives the account that Ray makes to the head alone.
        node = {**(config["head_node"] if head else {}), **kind["node_config"]}
        provider.create_node(copy.deepcopy(node), tags, 1)
    return provider


def end_all(provider: Any) -> None:
    """What `ray down` does, and what the autoscaler does before: labels set, nodes found by them, ended."""
    nodes = provider.non_terminated_nodes({})
    for node in nodes:
        assert provider.is_running(node)
        assert provider.external_ip(node).startswith("203.0.113.")
        assert provider.internal_ip(node).startswith("10.128.0.")
        provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    assert sorted(provider.non_terminated_nodes({"ray-node-status": "up-to-date"})) == sorted(nodes)
    assert len(provider.non_terminated_nodes({"ray-node-kind": "worker"})) == len(nodes) - 1
    for node in nodes:
        provider.terminate_node(node)
    assert provider.non_terminated_nodes({}) == []


def test_ray_starts_each_type_of_the_gpu_config_and_leaves_nothing(google: Google) -> None:
    provider = start_all(filled_in("gcp-gpu-spot.yaml"))
    made = {body["labels"]["ray-user-node-type"]: body for body in google.bodies("compute.instances.insert")}
    spot = {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    zone = f"zones/{ZONE}/machineTypes"
    assert {name: (body["machineType"], body.get("scheduling")) for name, body in made.items()} == {
        "head": (f"{zone}/e2-standard-2", None),
        "gpu_spot_l4": (f"{zone}/g2-standard-4", spot),
        "gpu_spot_t4": (f"{zone}/n1-standard-4", spot),
        "gpu_on_demand": (f"{zone}/g2-standard-4", {"onHostMaintenance": "TERMINATE", "automaticRestart": False}),
    }
    for name, body in made.items():
        assert [account["email"] for account in body["serviceAccounts"]] == [HEAD if name == "head" else WORKER]
        assert body["labels"]["project"] == "raytf"
        assert body["labels"]["ray-cluster-name"] == "raytf-gcp-gpu-spot"
        assert all(disk["autoDelete"] for disk in body["disks"])
    roles = {b["role"] for b in google.policy["bindings"] if f"serviceAccount:{HEAD}" in b["members"]}
    assert roles == {
        f"roles/{r}" for r in ("storage.objectAdmin", "compute.admin", "iam.serviceAccountUser", "iam.roleViewer")
    }
    assert google.metadata["items"][0]["value"].startswith("ubuntu:ssh-rsa ")
    end_all(provider)
    assert google.instances == {}


def test_ray_starts_each_type_of_the_tpu_config_and_leaves_nothing(google: Google) -> None:
    provider = start_all(filled_in("gcp-tpu.yaml"))
    (head,) = google.bodies("compute.instances.insert")
    assert head["labels"]["ray-user-node-type"] == "head"
    made = {b["labels"]["ray-user-node-type"]: b for b in google.bodies("tpu.projects.locations.nodes.create")}
    assert {name: body.get("schedulingConfig") for name, body in made.items()} == {
        "tpu_spot_v5e": {"spot": True},
        "tpu_on_demand_v5e": None,
    }
    for body in made.values():
        assert (body["acceleratorType"], body["serviceAccount"]["email"]) == ("v5litepod-4", WORKER)
        assert body["networkConfig"]["enableExternalIps"] is True
    end_all(provider)
    assert google.instances == google.tpus == {}


@pytest.mark.parametrize(
    ("file", "kind", "change", "said"),
    [
        ("gcp-gpu-spot.yaml", "gpu_spot_l4", {"scheduling": {"preemtible": True}}, 'Unknown name "preemtible"'),
        ("gcp-gpu-spot.yaml", "gpu_spot_l4", {"scheduling": {"provisioningModel": "Spot"}}, "provisioningModel"),
        ("gcp-gpu-spot.yaml", "gpu_spot_l4", {"serviceAccount": {"email": WORKER}}, 'Unknown name "serviceAccount"'),
        ("gcp-gpu-spot.yaml", "gpu_spot_l4", {"disks": [{"boot": "yes"}]}, "boot"),
        ("gcp-gpu-spot.yaml", "gpu_spot_l4", {"scheduling": {"automaticRestart": False}}, "live migration"),
        ("gcp-gpu-spot.yaml", "gpu_on_demand", {"labels": {"Project": "raytf"}}, "labels"),
        ("gcp-tpu.yaml", "tpu_spot_v5e", {"schedulingConfig": {"Spot": True}}, 'Unknown name "Spot"'),
        ("gcp-tpu.yaml", "tpu_spot_v5e", {"tpuVmSelfLink": "x"}, 'Unknown name "tpuVmSelfLink"'),
    ],
)
def test_what_google_publishes_refuses_a_mistake(
    google: Google, file: str, kind: str, change: dict[str, Any], said: str
) -> None:
    config = filled_in(file)
    config["auth"]["ssh_private_key"] = "~/key"  # Ray makes none, which takes a second
    types = config["available_node_types"]
    config["available_node_types"] = {"head": types["head"], kind: types[kind]}
    types[kind]["node_config"].update(change)
    with pytest.raises(Exception, match=said):
        start_all(config)
    assert len(google.instances) == 1
    assert google.tpus == {}


def test_the_fields_that_raytf_check_knows_are_those_that_google_publishes() -> None:
    # Not Google's: a parameter of the request, and what Ray moves to the field of the other kind.
    for table, (name, schema), of_ray, never_given in (
        (
            gcp._INSTANCE,
            ("compute.v1", "Instance"),
            {"sourceInstanceTemplate", "networkConfig"},
            {"fingerprint", "labelFingerprint"},
        ),
        (gcp._TPU, ("tpu.v2alpha1", "Node"), {"networkInterfaces", "serviceAccounts"}, {"health"}),
        (gcp._SCHEDULING, ("compute.v1", "Scheduling"), set(), set()),
    ):
        known = document(name)["schemas"][schema]["properties"]
        shown_only = {k for k, v in known.items() if "output only" in str(v.get("description", "")).lower()[:14]}
        assert table - known.keys() == of_ray
        assert known.keys() - shown_only - table == never_given


@pytest.mark.parametrize("file", ["gcp-gpu-spot.yaml", "gcp-tpu.yaml"])
def test_the_head_gets_the_client_that_these_tests_use(file: str) -> None:
    (command,) = yaml.safe_load((CONFIGS / file).read_text())["head_setup_commands"]
    words = set(command.split())
    assert words > TOOLS
    pinned = {line.split("==")[0] for line in (CONFIGS.parent / "constraints.txt").read_text().splitlines()}
    assert "-c" in words
    assert pinned > TOOLS
