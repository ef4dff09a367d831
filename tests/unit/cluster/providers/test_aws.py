"""Ray's AWSNodeProvider with fallbacks, against a strict EC2 on the loopback whose capacity runs out on demand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from raytf.testing.processes import wait_until
from tests.cluster.cloud import Cloud

CONFIGS = Path(__file__).parents[4] / "cluster-configs"
SPOT = [
    {"type": "g6.xlarge", "market": "spot", "code": "InsufficientInstanceCapacity"},
    {"type": "g5.xlarge", "market": "spot", "code": "SpotMaxPriceTooLow"},
]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Cloud() as cloud, pytest.MonkeyPatch.context() as environment:
        for name, value in {**cloud.env, "HOME": str(tmp_path_factory.mktemp("home"))}.items():
            environment.setenv(name, value)
        cloud.account()
        yield cloud


@pytest.fixture
def cloud(running):
    yield running
    running.empty([])
    ids = [i["InstanceId"] for i in running.instances("running", "pending")]
    if ids:
        running.client("ec2").terminate_instances(InstanceIds=ids)


@pytest.fixture(scope="module")
def config(running) -> dict[str, Any]:
    """aws-gpu-spot.yaml as `ray up` has it in the end."""
    return bootstrapped()


def bootstrapped(change: dict[str, Any] | None = None) -> dict[str, Any]:
    """The same, with changes of its node type for GPUs."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    from raytf.cluster.providers.aws import Provider

    raw = yaml.safe_load((CONFIGS / "aws-gpu-spot.yaml").read_text())
    raw["available_node_types"]["gpu"] |= change or {}
    config = Provider.fillout_available_node_types_resources(prepare_config(raw))
    validate_config(config)
    return Provider.bootstrap_config(config)


class Cluster:
    """A provider as Ray's autoscaler has it, and its node type for GPUs."""

    def __init__(self, config: dict[str, Any], name: str, spread: bool):
        from raytf.cluster.providers.aws import Provider

        self.clock = Clock()
        self.node_type = config["available_node_types"]["gpu"]
        self.provider = Provider({**config["provider"], "spread": spread}, name, clock=self.clock)

    def launch(self, count: int) -> dict[str, Any]:
        tags = {
            "ray-node-type": "worker",
            "ray-launch-config": "1",
            "ray-node-name": "w",
            "ray-user-node-type": "gpu",
            "ray-node-status": "uninitialized",
            "ray-launch-request": "r",
        }
        before = copy.deepcopy((self.node_type, tags))
        nodes = self.provider.create_node_with_resources_and_labels(
            self.node_type["node_config"], tags, count, self.node_type["resources"], {}
        )
        assert (self.node_type, tags) == before
        return nodes


@pytest.fixture
def cluster(cloud, config, request):
    """Its workers may be anywhere."""
    return Cluster(config, f"raytf-{request.node.name[:40]}", spread=True)


def asked(cloud: Cloud, since: int) -> list[tuple[Any, ...]]:
    return [(c["type"], c["market"], c["zone"][-1:], c.get("error")) for c in cloud.calls()[since:]]


def test_without_a_shortage_it_is_one_call_for_the_first_choice(cloud, cluster):
    since = len(cloud.calls())
    nodes = cluster.launch(2)
    assert asked(cloud, since) == [("g6.xlarge", "spot", "a", None)]
    assert len(nodes) == 2
    for instance in cloud.instances("running"):
        assert instance["InstanceId"] in nodes
        assert instance["InstanceLifecycle"] == "spot"
        assert (
            instance["Tags"].items()
            >= {
                "project": "raytf",
                "ray-cluster-name": cluster.provider.cluster_name,
                "ray-user-node-type": "gpu",
                "ray-node-type": "worker",
                "ray-launch-request": "r",
                "raytf-machine": "g6-xlarge-spot",
                "Name": "w",
            }.items()
        )
    # Moto gives the profile to the first of several.
    assert any(i.get("IamInstanceProfile", {}).get("Arn", "").endswith("/raytf-worker") for i in cloud.instances())
    assert sorted(cluster.provider.non_terminated_nodes({"ray-user-node-type": "gpu"})) == sorted(nodes)


def test_each_zone_is_asked_once_and_then_the_next_machine(cloud, cluster, caplog):
    cloud.empty(SPOT[:1])
    since = len(cloud.calls())
    nodes = cluster.launch(2)
    assert asked(cloud, since) == [
        *[("g6.xlarge", "spot", zone, "InsufficientInstanceCapacity") for zone in "abc"],
        ("g5.xlarge", "spot", "a", None),
    ]
    assert len(nodes) == len(cloud.instances("running")) == 2
    assert [record.getMessage() for record in caplog.records if record.name.startswith("raytf")] == [
        *[
            f"raytf: no capacity for 2 x g6.xlarge spot in us-west-2{zone} (InsufficientInstanceCapacity)"
            for zone in "abc"
        ],
        "raytf: 2 x g5.xlarge spot in us-west-2a started instead of g6.xlarge spot in us-west-2a",
    ]


def test_what_was_empty_is_remembered_and_asked_again_later(cloud, cluster):
    cloud.empty(SPOT[:1])
    cluster.launch(1)
    cloud.empty([])
    since = len(cloud.calls())
    cluster.launch(1)
    assert asked(cloud, since) == [("g5.xlarge", "spot", "a", None)]
    cluster.clock.now += 121
    since = len(cloud.calls())
    cluster.launch(1)
    assert asked(cloud, since) == [("g6.xlarge", "spot", "a", None)]


def test_a_quota_concerns_all_zones(cloud, cluster):
    cloud.empty([{"type": "g6.xlarge", "market": "spot", "code": "MaxSpotInstanceCountExceeded"}])
    since = len(cloud.calls())
    cluster.launch(1)
    assert asked(cloud, since) == [
        ("g6.xlarge", "spot", "a", "MaxSpotInstanceCountExceeded"),
        ("g5.xlarge", "spot", "a", None),
    ]


def test_no_more_on_demand_than_at_most(cloud, cluster):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    cloud.empty(SPOT)
    assert len(cluster.launch(1)) == 1
    assert len(cluster.launch(4)) == 1  # of two that are allowed
    since = len(cloud.calls())
    with pytest.raises(NodeLaunchException, match="no capacity anywhere; asked again in 120 s") as caught:
        cluster.launch(1)
    assert caught.value.category == "NoCapacity"
    assert "g6.xlarge on-demand in us-west-2a (2 run, at_most is 2)" in caught.value.description
    assert asked(cloud, since) == []
    on_demand = cloud.instances("running")
    assert [i.get("InstanceLifecycle") for i in on_demand] == [None, None]
    # One goes, and after a minute in which EC2's list may lag, there is room again.
    cluster.provider.terminate_node(on_demand[0]["InstanceId"])
    cluster.clock.now += 61
    assert len(cluster.launch(3)) == 1
    assert len(cloud.instances("running")) == 2


def test_what_ec2_gave_of_several_is_not_launched_again(cloud, cluster):
    cloud.empty([{"type": "g6.xlarge", "market": "spot", "zone": "us-west-2a", "most": 1}, SPOT[0]])
    nodes = cluster.launch(3)
    running = {i["InstanceId"]: i["InstanceType"] for i in cloud.instances("running")}
    assert set(running) == set(nodes)
    assert sorted(running.values()) == ["g5.xlarge", "g5.xlarge", "g6.xlarge"]
    tokens = [call["token"] for call in cloud.calls()]
    assert all(tokens)
    assert len(set(tokens)) == len(tokens)


def test_workers_stay_in_one_zone_and_of_one_kind(cloud, config):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    cluster = Cluster(config, "raytf-together", spread=False)
    cloud.empty([{"type": "g6.xlarge", "market": "spot", "zone": "us-west-2a", "code": "InsufficientInstanceCapacity"}])
    (first,) = cluster.launch(1)
    cloud.empty([])
    cluster.clock.now += 3600
    since = len(cloud.calls())
    assert len(cluster.launch(1)) == 1
    assert asked(cloud, since) == [("g6.xlarge", "spot", "b", None)]
    (tags,) = (i["Tags"] for i in cloud.instances("running") if i["InstanceId"] == first)
    assert (tags["raytf-place"], tags["raytf-kind"]) == ("us-west-2b", "g6-xlarge")

    # Where their zone has no more, on demand is of their kind; nothing else is asked for.
    cloud.empty([{"market": "spot", "code": "InsufficientInstanceCapacity"}])
    since = len(cloud.calls())
    assert len(cluster.launch(4)) == 2
    with pytest.raises(NodeLaunchException, match="no capacity beside the workers that run"):
        cluster.launch(1)
    assert asked(cloud, since) == [
        ("g6.xlarge", "spot", "b", "InsufficientInstanceCapacity"),
        ("g6.xlarge", "on-demand", "b", None),
    ]

    # A provider that starts again, as with a head that was restarted, knows them by their tags.
    cloud.empty([])
    again, since = Cluster(config, "raytf-together", spread=False), len(cloud.calls())
    again.launch(1)
    assert asked(cloud, since) == [("g6.xlarge", "spot", "b", None)]


def test_any_other_error_is_ray_s_and_ends_it(cloud, cluster):
    from ray.autoscaler.node_launch_exception import NodeLaunchException

    cloud.empty([{"type": "g6.xlarge", "code": "UnauthorizedOperation"}])
    since = len(cloud.calls())
    with pytest.raises(NodeLaunchException) as caught:
        cluster.launch(1)
    assert caught.value.category == "UnauthorizedOperation"
    calls = cloud.calls()[since:]
    assert {call["type"] for call in calls} == {"g6.xlarge"}
    assert len({call["token"] for call in calls}) == 1  # Ray repeats it, and EC2 would know it again
    assert cloud.instances("running") == []


def test_the_older_autoscaler_s_launcher_falls_back_and_hears_of_a_shortage(cloud, cluster, config):
    from ray.autoscaler._private.event_summarizer import EventSummarizer
    from ray.autoscaler._private.node_launcher import BaseNodeLauncher
    from ray.autoscaler._private.node_provider_availability_tracker import NodeProviderAvailabilityTracker
    from ray.autoscaler._private.util import ConcurrentCounter

    pending, tracker = ConcurrentCounter(), NodeProviderAvailabilityTracker()
    launcher = BaseNodeLauncher(
        cluster.provider, pending, EventSummarizer(), tracker, node_types=config["available_node_types"]
    )

    def launch():
        pending.inc("gpu", 2)
        return launcher.launch_node(config, 2, "gpu")

    cloud.empty(SPOT[:1])
    assert len(launch()) == 2
    assert {i["InstanceType"] for i in cloud.instances("running")} == {"g5.xlarge"}
    cloud.empty([{"market": "spot", "code": "InsufficientInstanceCapacity"}, {"code": "VcpuLimitExceeded"}])
    assert launch() == {}
    (record,) = tracker.summary().node_availabilities.values()
    assert record.unavailable_node_information.category == "NoCapacity"
    assert len(cloud.instances("running")) == 2


def test_the_newer_autoscaler_s_adapter_falls_back_and_hears_of_a_shortage(cloud, cluster, config, tmp_path):
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader
    from ray.autoscaler.v2.instance_manager.node_provider import NodeProviderAdapter

    # As `ray up` brings it to the head.
    file = tmp_path / "ray_bootstrap_config.yaml"
    file.write_text(json.dumps({key: value for key, value in config.items() if key != "head_node"}))
    adapter = NodeProviderAdapter(cluster.provider, FileConfigReader(str(file)))
    cloud.empty(SPOT[:1])
    adapter.launch({"gpu": 2}, "first")
    wait_until(lambda: len(adapter.get_non_terminated()) == 2, "two instances", 60)
    assert {(i.node_type, i.request_id) for i in adapter.get_non_terminated().values()} == {("gpu", "first")}
    cloud.empty([{"market": "spot", "code": "InsufficientInstanceCapacity"}, {"code": "VcpuLimitExceeded"}])
    adapter.launch({"gpu": 1}, "second")
    errors: list[Any] = []
    wait_until(lambda: errors.extend(adapter.poll_errors()) or errors, "an error", 60)
    assert [(e.node_type, e.count, e.request_id, e.__cause__.category) for e in errors] == [
        ("gpu", 1, "second", "NoCapacity")
    ]
    assert len(cloud.instances("running")) == 2


def test_ray_believes_what_is_true_of_all_machines_of_a_type(config):
    # One of them has an L4, the other an A10G: a job that wants an L4 is promised none.
    resources = config["available_node_types"]["gpu"]["resources"]
    assert resources == {"CPU": 4, "GPU": 1, "memory": resources["memory"]}
    assert 10 * 2**30 < resources["memory"] < 16 * 2**30


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        ("g4dn.12xlarge", "g4dn.12xlarge has 4 GPUs, and nodes of this type have 1 GPU"),
        ("m5.xlarge", "m5.xlarge has no GPU"),
    ],
)
def test_a_machine_with_other_gpus_is_refused_before_anything_is_launched(running, machine, said, capsys):
    config = yaml.safe_load((CONFIGS / "aws-gpu-spot.yaml").read_text())["available_node_types"]["gpu"]["node_config"]
    with pytest.raises(Exception, match=r".*"):
        bootstrapped({"node_config": {**config, "fallback": [{"InstanceType": machine}]}})
    assert said in capsys.readouterr().err


def test_a_security_group_that_has_rules_stays_as_it_is(running, config):
    from raytf.cluster.providers.aws import Provider

    ec2 = running.client("ec2")
    (vpc,) = ec2.describe_vpcs()["Vpcs"]
    group = ec2.create_security_group(GroupName="mine", Description="mine", VpcId=vpc["VpcId"])["GroupId"]
    ec2.authorize_security_group_ingress(GroupId=group, IpProtocol="tcp", FromPort=22, ToPort=22, CidrIp="192.0.2.7/32")
    own = copy.deepcopy(config)
    own["provider"]["security_group"] = {"GroupName": "mine"}
    for node_type in own["available_node_types"].values():
        del node_type["node_config"]["SecurityGroupIds"]
    made = Provider.bootstrap_config(own)
    assert {tuple(t["node_config"]["SecurityGroupIds"]) for t in made["available_node_types"].values()} == {(group,)}
    (found,) = ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"]
    assert [rule["IpRanges"] for rule in found["IpPermissions"]] == [[{"CidrIp": "192.0.2.7/32"}]]
