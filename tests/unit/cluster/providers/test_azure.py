"""Ray's AzureNodeProvider with fallbacks: a deployment that fails for want of capacity, and what it leaves.

Azure's clients are stand-ins: of deployments, which fail as ARM reports it, and of machines.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("azure.mgmt.resource", reason="Azure's packages are not installed")
pytest.importorskip("azure.mgmt.compute", reason="Azure's packages are not installed")

CONFIG = {
    "azure_arm_parameters": {"vmSize": "Standard_NC4as_T4_v3", "priority": "Spot", "availability_zone": "none"},
    "fallback": [
        {"azure_arm_parameters": {"vmSize": "Standard_NC24ads_A100_v4"}},
        {"azure_arm_parameters": {"priority": None}, "at_most": 2},
    ],
}


class Arm:
    """Azure's resource manager: (size, priority) -> how many are left, without end where it is not named."""

    def __init__(self) -> None:
        self.left: dict[tuple[str, str], int] = {}
        self.code = "AllocationFailed"
        self.machines: dict[str, Any] = {}
        self.asked: list[tuple[str, str]] = []
        self.virtual_machines = SimpleNamespace(list=lambda resource_group_name: list(self.machines.values()))
        self.deployments = SimpleNamespace(begin_create_or_update=self.deploy)

    def deploy(self, resource_group_name: str, deployment_name: str, parameters: dict[str, Any]) -> Any:
        from azure.core.exceptions import HttpResponseError, ODataV4Format

        given = {key: value["value"] for key, value in parameters["properties"]["parameters"].items()}
        kind = (given["vmSize"], given.get("priority", "Regular"))
        self.asked.append(kind)
        failed = 0
        for i in range(given["vmCount"]):
            has_room = self.left.get(kind, 1) > 0
            if kind in self.left and has_room:
                self.left[kind] -= 1
            failed += not has_room
            name = f"{given['vmName']}{i}"
            state = "Succeeded" if has_room else "Failed"
            self.machines[name] = SimpleNamespace(name=name, tags=given["vmTags"], provisioning_state=state, kind=kind)
        error = HttpResponseError("(DeploymentFailed) At least one resource deployment operation failed.")
        details = [{"code": "Conflict", "message": f'{{"error": {{"code": "{self.code}"}}}}'}]
        error.error = ODataV4Format({"code": "DeploymentFailed", "message": "see details", "details": details})

        def wait(timeout: float) -> None:
            if failed:
                raise error

        return SimpleNamespace(wait=wait)


@pytest.fixture
def arm():
    return Arm()


@pytest.fixture
def provider(arm):
    from ray.autoscaler.node_provider import NodeProvider

    from raytf.cluster.providers.azure import Provider

    class Here(Provider):
        """Without Azure's credentials, which AzureNodeProvider looks for when it is made."""

        def terminate_node(self, node_id):
            del arm.machines[node_id]

        def non_terminated_nodes(self, tag_filters):
            return [name for name, vm in arm.machines.items() if tag_filters.items() <= vm.tags.items()]

        def node_tags(self, node_id):
            return arm.machines[node_id].tags

    class Offline(NodeProvider):
        pass

    config = {"resource_group": "g", "location": "l", "unique_id": "u", "msi": "m", "nsg": "n", "subnet": "s"}
    here = Here.__new__(Here)
    Offline.__init__(here, config, "raytf-c")
    from raytf.cluster.providers.capacity import EmptyPools

    here._clock = lambda: 100.0
    here._empty, here._recent, here._counting = EmptyPools(120.0, here._clock), {}, threading.Lock()
    here._is_spread = True
    here.cache_stopped_nodes, here.lock = False, threading.RLock()
    here.resource_client, here.compute_client = arm, arm
    return here


def launch(provider, count):
    tags = {"ray-node-name": "w", "ray-user-node-type": "gpu", "ray-node-type": "worker"}
    return provider.create_node_with_resources_and_labels(CONFIG, tags, count, {"CPU": 4, "GPU": 1}, {})


SPOT_T4, SPOT_A100 = ("Standard_NC4as_T4_v3", "Spot"), ("Standard_NC24ads_A100_v4", "Spot")
T4 = ("Standard_NC4as_T4_v3", "Regular")


def test_without_a_shortage_it_is_one_deployment(arm, provider):
    assert len(launch(provider, 3)) == 3
    assert arm.asked == [SPOT_T4]
    assert [vm.tags["raytf-machine"] for vm in arm.machines.values()] == ["standard-nc4as-t4-v3-spot"] * 3


def test_what_a_failed_deployment_gave_stays_and_what_it_left_is_deleted(arm, provider):
    arm.left = {SPOT_T4: 1}
    assert len(launch(provider, 3)) == 3
    assert arm.asked == [SPOT_T4, SPOT_A100]
    assert sorted(vm.kind for vm in arm.machines.values()) == [SPOT_A100, SPOT_A100, SPOT_T4]
    assert all(vm.provisioning_state == "Succeeded" for vm in arm.machines.values())


def test_the_last_resort_is_bounded(arm, provider):
    arm.left, arm.code = {SPOT_T4: 0, SPOT_A100: 0}, "SkuNotAvailable"
    assert len(launch(provider, 4)) == 2
    assert [vm.kind for vm in arm.machines.values()] == [T4, T4]


def test_workers_are_of_one_kind(arm, provider):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    provider._is_spread = False
    arm.left = {SPOT_T4: 2}
    launch(provider, 2)
    provider._empty.put = lambda offer, shortage: None
    arm.left[T4] = 0
    with pytest.raises(NodeLaunchException, match="no capacity beside the workers that run"):
        launch(provider, 1)
    assert SPOT_A100 not in arm.asked
    assert {vm.tags["raytf-kind"] for vm in arm.machines.values()} == {"standard-nc4as-t4-v3"}


def test_another_error_is_not_taken_for_a_shortage(arm, provider):
    arm.left, arm.code = {SPOT_T4: 0}, "InvalidTemplate"
    with pytest.raises(Exception, match="DeploymentFailed"):
        launch(provider, 1)
    assert arm.asked == [SPOT_T4]
