"""The Azure config through Ray's own provider code and its ARM templates, against what Azure publishes.

Stood in for: Azure's control plane, which cannot be here (`azure_api.py`), and the command `az`, which hands out a
token. Nothing of Ray or of Azure's clients is changed: the environment sends their HTTPS to the loopback.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    """The config as a user leaves it, with the defaults of Ray, and as Ray's own validation takes it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    text = CONFIG.read_text().replace("your-subscription", SUBSCRIPTION).replace("your-account", "acmeruns")
    config: dict[str, Any] = prepare_config(yaml.safe_load(text))
    validate_config(config)
    return config


def provider_of(config: dict[str, Any]) -> Any:
    """The bootstrap of `ray up`, and the provider that it and the head use."""
    from ray.autoscaler._private._azure.config import bootstrap_azure
    from ray.autoscaler._private._azure.node_provider import AzureNodeProvider

    config = bootstrap_azure(config)
    return AzureNodeProvider(config["provider"], config["cluster_name"])


def start(provider: Any, config: dict[str, Any], name: str, count: int = 1) -> None:
    """Nodes of a type, with the tags that Ray gives them."""
    role = "head" if name == config["head_node_type"] else "worker"
    tags = {
        "ray-node-kind": role,
        "ray-node-type": role,
        "ray-node-name": f"ray-{config['cluster_name']}-{role}",
        "ray-node-status": "uninitialized",
        "ray-launch-config": "5cbbd9d8aa4e0f1d",
        "ray-user-node-type": name,
    }
    provider.create_node(copy.deepcopy(config["available_node_types"][name]["node_config"]), tags, count)


def test_ray_starts_each_type_as_the_config_says_and_leaves_nothing(azure: Azure) -> None:
    config = filled_in()
    provider = provider_of(config)
    assert azure.group["tags"] == {"project": "raytf"}
    (rules,) = [group["properties"]["securityRules"] for group in azure.of("Microsoft.Network/networkSecurityGroups")]
    assert [rule["properties"]["destinationPortRange"] for rule in rules] == ["22"]
    for name in config["available_node_types"]:
        start(provider, config, name, count=2 if name == "gpu_spot_t4" else 1)

    machines = azure.of("Microsoft.Compute/virtualMachines")
    seen = {}
    for machine in machines:
        given = machine["properties"]
        image = given["storageProfile"]["imageReference"]
        seen.setdefault(machine["tags"]["ray-user-node-type"], []).append(
            (
                given["hardwareProfile"]["vmSize"],
                given["priority"],
                given["evictionPolicy"],
                image["offer"],
                machine.get("zones"),
            )
        )
    hpc = "ubuntu-hpc"
    assert seen == {
        "head": [("Standard_D2s_v5", "Regular", "", "0001-com-ubuntu-server-jammy", None)],
        "gpu_spot_t4": [("Standard_NC4as_T4_v3", "Spot", "Delete", hpc, [zone]) for zone in ("2", "3")],
        "gpu_spot_a100": [("Standard_NC24ads_A100_v4", "Spot", "Delete", hpc, ["1"])],
        "gpu_on_demand": [("Standard_NC4as_T4_v3", "Regular", "", hpc, ["2"])],
    }
    for machine in machines:
        assert machine["tags"]["project"] == "raytf"
        assert machine["tags"]["ray-cluster-name"] == "raytf-azure-gpu-spot"
        assert machine["properties"]["osProfile"]["linuxConfiguration"]["disablePasswordAuthentication"] is True

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
    for ended in list(provider.terminating_nodes.values()):
        ended.result(timeout=60)
    assert provider.non_terminated_nodes({}) == []
    provider.cleanup_cluster_resources()
    assert azure.resources == {}


def test_a_second_ray_up_keeps_what_was_given_to_the_subnet(azure: Azure) -> None:
    provider_of(filled_in())
    (network,) = azure.of("Microsoft.Network/virtualNetworks")
    endpoints = [{"service": "Microsoft.Storage", "locations": ["eastus"]}]
    network["properties"]["subnets"][0]["properties"]["serviceEndpoints"] = endpoints
    provider_of(filled_in())
    (network,) = azure.of("Microsoft.Network/virtualNetworks")
    assert network["properties"]["subnets"][0]["properties"]["serviceEndpoints"] == endpoints


@pytest.mark.parametrize(
    ("kind", "change", "said"),
    [
        ("gpu_spot_t4", {"priorty": "Spot"}, "priorty"),
        ("gpu_spot_t4", {"priority": "Spotty"}, "'Spotty' of parameter 'properties.priority' is not allowed"),
        # Ray's template compares with Spot alone.
        ("gpu_spot_t4", {"priority": "Spot", "evictionPolicy": "Remove"}, "'Remove' of parameter"),
        ("gpu_spot_t4", {"billingProfile": {"maxPrize": -1}}, "maxPrize"),
        ("gpu_spot_t4", {"osDiskSize": "128"}, "osDiskSize"),
        ("gpu_spot_t4", {"vmSize": "Standard_NC4as_T4"}, "VM size"),
        ("gpu_spot_t4", {"imageVersion": ""}, "platform image"),
        ("gpu_on_demand", {"billingProfile": {"maxPrice": -1}}, "maxPrice"),
    ],
)
def test_what_azure_publishes_refuses_a_mistake(azure: Azure, kind: str, change: dict[str, Any], said: str) -> None:
    config = filled_in()
    config["available_node_types"][kind]["node_config"]["azure_arm_parameters"].update(change)
    provider = provider_of(config)
    with pytest.raises(Exception, match=said):
        start(provider, config, kind)
    assert azure.of("Microsoft.Compute/virtualMachines") == []


def test_the_head_gets_the_packages_that_these_tests_use() -> None:
    (command,) = yaml.safe_load(CONFIG.read_text())["head_setup_commands"]
    wanted = {word for word in command.split() if "==" in word}
    pinned = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {word.split("==")[0] for word in wanted} >= {"azure-identity", "azure-mgmt-resource", "msrest"}
    assert wanted <= pinned


def test_rays_templates_are_of_the_published_kind() -> None:
    import ray.autoscaler._private._azure as package

    for name in ("azure-config-template.json", "azure-vm-template.json"):
        template = json.loads((Path(package.__file__).parent / name).read_text())
        assert template["$schema"].endswith("/schemas/2019-04-01/deploymentTemplate.json#")
