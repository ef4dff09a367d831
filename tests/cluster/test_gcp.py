"""A Google Cloud config, and one for TPUs, through Ray's own provider code, against what Google publishes of its API.

Stood in for: Google's control plane, which cannot be here (`google_api.py`), and the file that `gcloud auth
application-default login` writes. Nothing of Ray or of Google's client is changed: the environment sends their HTTPS
to the loopback, and httplib2, which looks for its certificates only when it is imported, is told of another one.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytf.doctor.check import gcp, offline
from raytf.doctor.check.fallbacks import as_cloud
from raytf.doctor.document import Document
from raytf.doctor.local_environment import here
from tests.cluster import ray_up
from tests.cluster.discovery import document
from tests.cluster.google_api import BOOT_DISKS, Google, boot_disk
from tests.cluster.loopback import Loopback
from tests.support.data_files import put_tree

ROOT = Path(__file__).parents[2]
GPU, TPU = ROOT / "cluster-configs" / "gcp-gpu-spot.yaml", ROOT / "tests" / "data" / "gcp_tpu.yaml"
PROJECT, REGION = "acme-vision-417", "us-central1"
WORKER = f"raytf-worker@{PROJECT}.iam.gserviceaccount.com"
HEAD = f"ray-autoscaler-sa-v1@{PROJECT}.iam.gserviceaccount.com"
TOOLS = {"google-api-python-client", "google-auth-httplib2", "cryptography"}


@pytest.fixture(autouse=True)
def _client() -> None:
    pytest.importorskip("googleapiclient", reason="google-api-python-client is not installed: pip install -e '.[test]'")


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    plane = Google(PROJECT, REGION, [WORKER])
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


def filled_in(config: Path) -> dict[str, Any]:
    """A config with its values."""
    return ray_up.filled_in(config.read_text().replace("your-project", PROJECT))


def spread(config: dict[str, Any]) -> dict[str, Any]:
    """The same, with nodes wherever there are any: else they would stay in the zone of the first."""
    return config | {"provider": config["provider"] | {"spread": True}}


def bring_up(config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """What `ray up` prepares, and the head; the provider, and the config that goes to the head."""
    provider, config = ray_up.prepare(config)
    start(provider, config, config["head_node_type"])
    return provider, config


def start(provider: Any, config: dict[str, Any], name: str, count: int = 1) -> None:
    """Nodes of a type, with what Ray gives them."""
    head = name == config["head_node_type"]
    # commands.py gives the account that Ray makes to the head alone.
    node = {**(config["head_node"] if head else {}), **config["available_node_types"][name]["node_config"]}
    provider.create_node(copy.deepcopy(node), ray_up.tags(config, name), count)


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


def test_the_gpu_config_goes_from_spot_to_the_next_zone_machine_and_market(google: Google) -> None:
    provider, config = bring_up(spread(filled_in(GPU)))

    def next_one() -> tuple[str, str, dict[str, Any]]:
        before = set(google.instances)
        start(provider, config, "gpu")
        (name,) = google.instances.keys() - before
        made = google.instances[name]
        assert made["machineType"].startswith(f"zones/{made['zone'][-13:]}/")
        return made["zone"][-1], made["machineType"].rsplit("/", 1)[-1], made["scheduling"]

    spot = {
        "provisioningModel": "SPOT",
        "instanceTerminationAction": "DELETE",
        "onHostMaintenance": "TERMINATE",
        "automaticRestart": False,
    }
    assert next_one() == ("a", "g2-standard-4", spot)
    google.empty = {("a", "g2-standard-4", True)}
    assert next_one() == ("b", "g2-standard-4", spot)
    google.empty = {(zone, "g2-standard-4", True) for zone in "abc"}
    assert next_one() == ("a", "n1-standard-4", spot)
    google.empty |= {(zone, "n1-standard-4", True) for zone in "abc"}
    on_demand = {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE", "automaticRestart": False}
    assert next_one() == next_one() == ("a", "g2-standard-4", on_demand)
    # Two on demand are the most; there is none for the third.
    with pytest.raises(Exception, match="no capacity anywhere"):
        start(provider, config, "gpu")

    made = google.instances.values()
    assert {i["machineType"].rsplit("/", 1)[-1] for i in made if i["labels"]["ray-node-kind"] == "head"} == {
        "e2-standard-2"
    }
    for body in made:
        account = HEAD if body["labels"]["ray-node-kind"] == "head" else WORKER
        assert [account["email"] for account in body["serviceAccounts"]] == [account]
        assert body["labels"]["project"] == "raytf"
        assert body["labels"]["ray-cluster-name"] == "raytf-gcp-gpu-spot"
        assert all(disk["autoDelete"] for disk in body["disks"])
    roles = {b["role"] for b in google.policy["bindings"] if f"serviceAccount:{HEAD}" in b["members"]}
    assert roles == {
        "roles/storage.objectAdmin",
        "roles/compute.admin",
        "roles/iam.serviceAccountUser",
        "roles/iam.roleViewer",
    }
    assert google.metadata["items"][0]["value"].startswith("ubuntu:ssh-rsa ")
    end_all(provider)
    assert google.instances == {}


def test_workers_of_the_gpu_config_stay_in_one_zone_and_of_one_kind(google: Google) -> None:
    provider, config = bring_up(filled_in(GPU))
    google.empty = {("a", "g2-standard-4", True)}
    start(provider, config, "gpu")
    google.empty = {("b", "g2-standard-4", True)}
    start(provider, config, "gpu")  # in zone a and in zone c there are machines on Spot
    workers = [made for made in google.instances.values() if made["labels"]["ray-node-kind"] == "worker"]
    assert [(made["zone"][-1], made["scheduling"]["provisioningModel"]) for made in workers] == [
        ("b", "SPOT"),
        ("b", "STANDARD"),
    ]
    assert len({made["machineType"].rsplit("/", 1)[-1] for made in workers}) == 1
    end_all(provider)


def test_ray_starts_each_type_of_the_tpu_config_and_leaves_nothing(google: Google) -> None:
    provider, config = bring_up(filled_in(TPU))
    for name in ("tpu_spot_v5e", "tpu_on_demand_v5e"):
        start(provider, config, name)
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
        (GPU, "gpu", {"scheduling": {"preemtible": True}}, 'Unknown name "preemtible"'),
        (GPU, "gpu", {"scheduling": {"provisioningModel": "Spot"}}, "provisioningModel"),
        (GPU, "gpu", {"serviceAccount": {"email": WORKER}}, 'Unknown name "serviceAccount"'),
        (GPU, "gpu", {"disks": [{"boot": "yes"}]}, "boot"),
        (GPU, "gpu", {"disks": [{"boot": True}]}, "pd-standard"),
        (GPU, "gpu", {"scheduling": {"automaticRestart": False}}, "live migration"),
        (GPU, "gpu", {"labels": {"Project": "raytf"}}, "labels"),
        (TPU, "tpu_spot_v5e", {"schedulingConfig": {"Spot": True}}, 'Unknown name "Spot"'),
        (TPU, "tpu_spot_v5e", {"tpuVmSelfLink": "x"}, 'Unknown name "tpuVmSelfLink"'),
    ],
)
def test_what_google_publishes_refuses_a_mistake(
    google: Google, file: Path, kind: str, change: dict[str, Any], said: str
) -> None:
    config = filled_in(file)
    config["auth"]["ssh_private_key"] = "~/key"  # Ray makes none, which takes a second
    config["available_node_types"][kind]["node_config"].update(change)
    provider, config = bring_up(config)
    with pytest.raises(Exception, match=said):
        start(provider, config, kind)
    assert len(google.instances) == 1
    assert google.tpus == {}


@pytest.mark.parametrize("kind", [None, "pd-standard", "pd-balanced", "pd-ssd", "pd-extreme"])
@pytest.mark.parametrize("family", BOOT_DISKS)
def test_check_finds_each_boot_disk_that_compute_engine_refuses(family: str, kind: str | None) -> None:
    config = filled_in(GPU)
    gpu = config["available_node_types"]["gpu"]["node_config"]
    setup = {"diskSizeGb": 100} | ({"diskType": f"zones/{REGION}-a/diskTypes/{kind}"} if kind else {})
    gpu |= {"machineType": f"{family}-standard-4", "disks": [{"boot": True, "initializeParams": setup}]}
    answers = boot_disk(gpu["disks"][0], gpu["machineType"], f"{REGION}-a")
    found = [f for f in gcp.check(as_cloud(Document(config))) if f.code == "gcp-disk-type"]
    # pd-extreme needs 64 CPUs or more, which check does not count: it lets old families be.
    if kind != "pd-extreme" or family not in ("a2", "e2", "n1"):
        assert bool(found) == bool(list(answers))


def test_a_disk_type_by_its_short_name_needs_the_provider_of_raytf(google: Google) -> None:
    config = filled_in(GPU)
    config["auth"]["ssh_private_key"] = "~/key"
    del config["available_node_types"]["gpu"]["node_config"]["fallback"]
    own = {key: value for key, value in config["provider"].items() if key != "module"}
    config["provider"] = own | {"type": "gcp", "availability_zone": f"{REGION}-a"}
    (found,) = [f for f in offline.check(yaml.safe_dump(config), here()).findings if f.code == "gcp-disk-type"]
    provider, config = bring_up(config)
    with pytest.raises(Exception, match="diskType"):
        start(provider, config, "gpu")
    setup = config["available_node_types"]["gpu"]["node_config"]["disks"][0]["initializeParams"]
    setup["diskType"] = found.fix.removeprefix("Write ").removesuffix(".")
    start(provider, config, "gpu")
    assert len(google.instances) == 2


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


def test_the_head_gets_the_client_that_these_tests_use() -> None:
    (command,) = yaml.safe_load(GPU.read_text())["head_setup_commands"]
    words = set(command.split())
    assert words > TOOLS
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert "-c" in words
    assert pinned > TOOLS


#: What a worker's account may do by roles/storage.objectUser on the bucket: docs/clusters/gcp.md gives it no more.
OBJECT_USER = re.compile(
    r"(GET /storage/v1/b/raytf/o(/|\?)|DELETE /storage/v1/b/raytf/o/|(POST|PUT) /upload/storage/v1/b/raytf/o\?)"
)


def test_a_run_asks_the_bucket_for_objects_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from gcp_storage_emulator.server import create_server

    from raytf.storage.storage import Storage

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="raytf")
    caplog.set_level(logging.INFO, logger="gcp_storage_emulator")
    server.start()
    try:
        for root in ("gs://raytf/runs", "gs://raytf"):
            storage = Storage(f"{root}?endpoint_override=127.0.0.1:{port}&scheme=http&anonymous=true")
            storage.preflight()
            storage.put("mnist/model", b"x")
            assert storage.create("mnist/first", b"x")
            assert storage.get("mnist/model") == b"x"
            assert not storage.exists("mnist/none")
            assert storage.list("mnist") == ["first", "model"]
            assert len(storage.files("mnist")) == 2
            storage.get_tree("mnist", str(tmp_path))
            put_tree(storage, str(tmp_path), "copy")
            for name in ("mnist", "copy", "none"):
                storage.delete(name)
    finally:
        server.stop()
    asked = [line.strip('"') for r in caplog.records if (line := r.getMessage()).startswith('"')]
    assert len(asked) > 20
    assert [line for line in asked if not OBJECT_USER.match(line)] == []
