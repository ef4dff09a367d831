"""The Azure config through Ray's own provider code and its ARM templates, against what Azure publishes.

Stood in for: Azure's control plane, which cannot be here (`azure_api.py`), and the command `az`, which hands out a
token. Nothing of Ray or of Azure's clients is changed: the environment sends their HTTPS to the loopback.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import ray_up
from tests.cluster.azure_api import Azure
from tests.cluster.loopback import Loopback

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "cluster-configs" / "azure-gpu-spot.yaml"
SUBSCRIPTION = "6a4d8f0e-3b57-4b0e-9f43-d7a1e6a1c2b5"
AZ = """#!/bin/sh
# Stands for `az account get-access-token`.
echo '{"accessToken": "test", "expires_on": 4102444800, "expiresOn": "2100-01-01 00:00:00.000000"}'
"""


@pytest.fixture(autouse=True)
def _clients() -> None:
    for package in ("azure.mgmt.compute", "azure.mgmt.network", "azure.mgmt.resource.resources", "msrestazure"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install -e '.[test]'")


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Azure]:
    plane = Azure(SUBSCRIPTION)
    plane.give_identity("raytf-runs", "raytf-nodes")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "az").write_text(AZ)
    (tmp_path / "bin" / "az").chmod(0o755)
    with Loopback(plane.services(), tmp_path) as loopback:
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        for name, value in {**loopback.environ, "PATH": path, "HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        yield plane
    assert loopback.faults == []


def filled_in() -> dict[str, Any]:
    """The config with its values."""
    return ray_up.filled_in(CONFIG.read_text().replace("your-subscription", SUBSCRIPTION))


def start(provider: Any, config: dict[str, Any], name: str, count: int = 1) -> None:
    """Nodes of a type, with the tags that Ray gives them."""
    node = copy.deepcopy(config["available_node_types"][name]["node_config"])
    provider.create_node(node, ray_up.tags(config, name), count)


def test_the_config_tries_the_next_size_and_market_and_leaves_nothing(azure: Azure) -> None:
    filled = filled_in()
    filled["provider"]["spread"] = True  # workers would else be of the size of the first
    provider, config = ray_up.prepare(filled)
    assert azure.group["tags"] == {"project": "raytf"}
    (rules,) = [group["properties"]["securityRules"] for group in azure.of("Microsoft.Network/networkSecurityGroups")]
    assert [rule["properties"]["destinationPortRange"] for rule in rules] == ["22"]

    def machines() -> dict[str, dict[str, Any]]:
        return {machine["name"]: machine for machine in azure.of("Microsoft.Compute/virtualMachines")}

    def started(name: str, count: int = 1) -> list[tuple[Any, ...]]:
        before = machines()
        start(provider, config, name, count)
        finish(provider)
        new = [machine for name, machine in sorted(machines().items()) if name not in before]
        return [
            (m["properties"]["hardwareProfile"]["vmSize"], m["properties"]["priority"], m.get("zones")) for m in new
        ]

    small, large = "Standard_NC4as_T4_v3", "Standard_NC8as_T4_v3"
    assert started("head") == [("Standard_D2s_v5", "Regular", None)]
    assert started("gpu", 2) == [(small, "Spot", ["2"]), (small, "Spot", ["3"])]
    # The machine is made and fails; it is deleted, and the next size taken.
    azure.empty = {(small, "Spot"): "AllocationFailed"}
    assert started("gpu") == [(large, "Spot", ["1"])]
    # Refused before anything is made.
    azure.empty[(large, "Spot")] = "SkuNotAvailable"
    assert started("gpu") == [(small, "Regular", ["2"])]

    (identity,) = azure.of("Microsoft.ManagedIdentity/userAssignedIdentities")
    for machine in machines().values():
        assert list(machine["identity"]["userAssignedIdentities"]) == [identity["id"]]
        assert machine["tags"]["project"] == "raytf"
        assert machine["tags"]["ray-cluster-name"] == "raytf-azure-gpu-spot"
        assert machine["properties"]["osProfile"]["linuxConfiguration"]["disablePasswordAuthentication"] is True
        given = machine["properties"]
        spot = given["priority"] == "Spot"
        assert (given["evictionPolicy"], given.get("billingProfile")) == (
            ("Delete", {"maxPrice": -1}) if spot else ("", {})
        )

    nodes = provider.non_terminated_nodes({})
    assert len(nodes) == 5
    for node in nodes:
        assert provider.is_running(node)
        assert provider.external_ip(node).startswith("203.0.113.")
        assert provider.internal_ip(node).startswith("10.7.0.")
        provider.set_node_tags(node, {"ray-node-status": "up-to-date"})
    assert len(provider.non_terminated_nodes({"ray-node-status": "up-to-date", "ray-node-kind": "worker"})) == 4
    for node in nodes:
        provider.terminate_node(node)
    finish(provider)
    assert provider.non_terminated_nodes({}) == []
    # What `ray down` does in the end. The identity stays, and with it the role on the runs.
    provider.cleanup_cluster_resources()
    assert list(azure.resources.values()) == [identity]


def finish(provider: Any) -> None:
    """Wait for what the provider deletes in threads of its own."""
    for ended in list(provider.terminating_nodes.values()):
        ended.result(timeout=60)


def test_without_the_identity_ray_up_exits(azure: Azure) -> None:
    azure.resources.clear()
    with pytest.raises(Exception, match="raytf-nodes"):
        ray_up.prepare(filled_in())


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gpu", {"priorty": "Spot"}, "priorty"),
        ("gpu", {"priority": "Spotty"}, "'Spotty' of parameter 'properties.priority' is not allowed"),
        # Ray's template compares with Spot alone.
        ("gpu", {"priority": "Spot", "evictionPolicy": "Remove"}, "'Remove' of parameter"),
        ("gpu", {"billingProfile": {"maxPrize": -1}}, "maxPrize"),
        ("gpu", {"osDiskSize": "128"}, "osDiskSize"),
        ("gpu", {"vmSize": "Standard_NC4as_T4"}, "VM size"),
        ("gpu", {"imageVersion": ""}, "platform image"),
        ("gpu", {"priority": "Regular"}, "maxPrice"),
    ],
)
def test_what_azure_publishes_refuses_a_mistake(azure: Azure, kind: str, change: dict[str, Any], said: str) -> None:
    config = filled_in()
    config["available_node_types"][kind]["node_config"]["azure_arm_parameters"].update(change)
    provider, config = ray_up.prepare(config)
    with pytest.raises(Exception, match=said):
        start(provider, config, kind)
    assert azure.of("Microsoft.Compute/virtualMachines") == []


def test_the_head_gets_the_packages_that_these_tests_use() -> None:
    (command,) = yaml.safe_load(CONFIG.read_text())["head_setup_commands"]
    wanted = {word for word in command.split() if "==" in word}
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {word.split("==")[0] for word in wanted} >= {"azure-identity", "azure-mgmt-resource", "msrest"}
    assert wanted <= pinned
