"""Autostop by raytf's provider for AWS, against an EC2 on the loopback, in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raytf.cluster import autostop
from raytf.cluster.autostop import Activity
from raytf.cluster.autostop_head import end_cluster
from raytf.commands.autostop import Watcher, set_deadline
from tests.cluster.cloud import IMAGE_PARAMETERS, REGION, Cloud

MINUTE, HOUR = 60, 3600
PERIOD = 15.0 * MINUTE
#: Seconds after the end of Ray on the head in which a worker's raylet ends: gcs_rpc_server_reconnect_timeout_s of Ray.
RAYLET_SECONDS = 60


@pytest.fixture(scope="module")
def cloud(tmp_path_factory) -> Iterator[Cloud]:
    with Cloud() as cloud, pytest.MonkeyPatch.context() as environment:
        for name, value in {**cloud.env, "HOME": str(tmp_path_factory.mktemp("home"))}.items():
            environment.setenv(name, value)
        yield cloud


@pytest.fixture(scope="module")
def node_config(cloud) -> dict[str, Any]:
    """What `ray up` makes of a small machine's node_config."""
    ec2 = cloud.client("ec2")
    return {
        "InstanceType": "m7i.large",
        "ImageId": f"resolve:ssm:{IMAGE_PARAMETERS[0]}",
        "SubnetIds": [ec2.describe_subnets()["Subnets"][0]["SubnetId"]],
        "SecurityGroupIds": [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
    }


def provider_of(name: str, **more: Any) -> Any:
    from raytf.cluster.providers.aws import Provider

    return Provider({"type": "external", "region": REGION, "cache_stopped_nodes": False, **more}, name)


class World:
    """A head and a worker on AWS, with their timers and the watcher, in a time that stands still unless it is run.

    Attributes:
        job_ends: when the job that runs from the start ends.
        has_ray, has_watcher, answers, has_python: whether these work on the head.
    """

    def __init__(self, cloud: Cloud, node_config: dict[str, Any], name: str, folder: Path, job: float):
        self.cloud, self.folder, self.name = cloud, folder, name
        self.provider = provider_of(name, autostop="15m")
        self.now = 1_800_000_000
        self.job_ends = self.now + job
        self.has_ray = self.has_watcher = self.answers = self.has_python = True
        self.ray_ended = float("inf")
        self.kinds: dict[str, str] = {}
        for kind in ("head", "worker"):
            tags = {"ray-node-type": kind, "ray-user-node-type": kind, "ray-node-name": kind}
            nodes = self.provider.create_node(node_config, tags, 1)
            self.kinds |= dict.fromkeys(nodes, kind)
        for node in self.kinds:
            (folder / node).mkdir()
            set_deadline(folder / node / "deadline", self.now + PERIOD + autostop.SPARE_SECONDS)
        (self.head,) = (node for node, kind in self.kinds.items() if kind == "head")
        self.watcher = self.new_watcher()
        self.count()

    def new_watcher(self) -> Watcher:
        return Watcher(self.poll, self.end, PERIOD, lambda: self.now, str(self.folder / self.head / "deadline"))

    def count(self) -> None:
        """Ask the cloud which machines of the cluster are paid for."""
        found = self.cloud.instances("pending", "running", "stopping", "stopped")
        self.runs = {i["InstanceId"] for i in found if i["Tags"].get("ray-cluster-name") == self.name}

    @property
    def has_job(self) -> bool:
        return self.now < self.job_ends and self.has_ray

    def poll(self) -> Activity:
        if not self.has_ray:
            return Activity.GONE
        if not self.answers:  # the process of a submitted job shows it
            return Activity.BUSY if self.has_job else Activity.UNKNOWN
        return Activity.BUSY if self.has_job else Activity.IDLE

    def stop_ray(self) -> None:
        self.has_ray, self.ray_ended = False, min(self.ray_ended, self.now)

    def end(self) -> None:
        self.stop_ray()
        end_cluster(self.provider, lambda line: None, sleep=lambda seconds: None)
        self.count()

    def end_machine(self, node: str) -> None:
        """Shut a machine down from the inside, or have it vanish."""
        how = self.cloud.client("ec2").describe_instance_attribute(
            InstanceId=node, Attribute="instanceInitiatedShutdownBehavior"
        )
        assert how["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"
        self.cloud.client("ec2").terminate_instances(InstanceIds=[node])
        self.count()
        if node == self.head:
            self.stop_ray()

    def minute(self) -> None:
        """One minute of all that lives: two looks of the watcher, and each machine's timer."""
        for _ in range(2):
            if self.has_watcher and self.has_python and self.head in self.runs:
                self.watcher.poll_once()
            self.now += int(autostop.POLL_SECONDS)
        for node in sorted(self.runs):
            self.timer(node)

    def timer(self, node: str) -> None:
        folder, kind = self.folder / node, self.kinds[node]
        sign = self.has_job if kind == "head" else self.now < self.ray_ended + RAYLET_SECONDS
        file = folder / "deadline"
        if sign:  # as autostop.guard_script, which tests/unit/cluster/test_autostop.py runs by a shell
            set_deadline(file, self.now + PERIOD + autostop.SPARE_SECONDS)
        if self.now < file.stat().st_mtime:
            return
        if kind == "head" and self.has_python:
            self.watcher.end_unless_busy()
        else:
            self.end_machine(node)

    def reboot(self) -> None:
        """A kernel panic: after a boot there are the timer and the deadline, and neither Ray nor the watcher."""
        self.stop_ray()
        self.has_watcher = False


def set_of(**values: Any) -> Callable[[World], None]:
    return lambda world: [setattr(world, name, value) for name, value in values.items()] and None


#: Seconds of a job, and what happens at which minute.
SCENARIOS: dict[str, tuple[int, dict[int, Callable[[World], None]]]] = {
    "a head that is idle": (0, {}),
    "a job of hours": (3 * HOUR, {}),
    "a job of a minute": (MINUTE, {}),
    "Ray crashes on the idle head": (0, {3: World.stop_ray}),
    "Ray crashes under a job": (HOUR, {20: World.stop_ray}),
    "the idle head boots again": (0, {3: World.reboot}),
    "the head boots again under a job": (HOUR, {20: World.reboot}),
    "the head vanishes": (HOUR, {20: lambda world: world.end_machine(world.head)}),
    "the watcher is killed on the idle head": (0, {3: set_of(has_watcher=False)}),
    "the watcher is killed under a job": (HOUR, {20: set_of(has_watcher=False)}),
    "the watcher starts again under a job": (
        HOUR,
        {20: set_of(has_watcher=False), 25: lambda world: set_of(has_watcher=True, watcher=world.new_watcher())(world)},
    ),
    "the job server never answers again": (HOUR, {20: set_of(answers=False)}),
    "the job server does not answer for a while": (
        HOUR,
        {20: set_of(answers=False), 50: set_of(answers=True)},
    ),
    "Python is broken on the idle head": (0, {3: set_of(has_python=False)}),
    "Python is broken under a job": (HOUR, {20: set_of(has_python=False)}),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_machine_is_left_twenty_minutes_after_the_last_job(cloud, node_config, tmp_path, name):
    job, events = SCENARIOS[name]
    world = World(cloud, node_config, f"raytf-{len(cloud.calls())}", tmp_path, job)
    last_job = world.now
    assert len(world.runs) == 2
    for number in range(4 * HOUR // MINUTE):
        events.get(number, lambda world: None)(world)
        if world.has_ray:
            last_job = min(world.now, world.job_ends)
        world.minute()
        if world.has_job:
            assert world.runs == set(world.kinds), (name, number)
        if not world.runs:
            break
    assert not world.runs
    # Without Python the head only shuts itself down. A worker that is still there counts from then.
    assert PERIOD <= world.now - last_job <= (20 if world.has_python else 40) * MINUTE


def test_a_stopped_machine_would_be_paid_for(cloud, node_config, tmp_path):
    """With cache_stopped_nodes Ray's provider stops machines; autostop deletes them."""
    world = World(cloud, node_config, "raytf-cached", tmp_path, 0)
    world.provider.cache_stopped_nodes = True
    world.end()
    assert world.runs == set()


def test_without_autostop_a_machine_that_shuts_down_is_kept_as_before(cloud, node_config):
    provider = provider_of("raytf-plain")
    (node,) = provider.create_node(node_config, {"ray-node-type": "head", "ray-node-name": "h"}, 1)
    how = cloud.client("ec2").describe_instance_attribute(
        InstanceId=node, Attribute="instanceInitiatedShutdownBehavior"
    )
    assert how["InstanceInitiatedShutdownBehavior"]["Value"] == "stop"
    provider.terminate_node(node)


class Recorder:
    """A provider whose workers cannot be ended."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def non_terminated_nodes(self, tags: dict[str, str]) -> list[str]:
        return [tags["ray-node-type"]]

    def end_workers(self, nodes: list[str]) -> None:
        self.calls.append("workers")

    def end_head(self, node: str) -> None:
        self.calls.append(node)


def test_workers_that_stay_do_not_keep_the_head():
    provider, clock, lines = Recorder(), iter(range(0, 1000, 50)), list[str]()
    end_cluster(
        provider, lines.append, lambda: provider.calls.append("look"), lambda: next(clock), lambda seconds: None
    )
    assert provider.calls[-2:] == ["look", "head"]
    assert lines == ["cannot end the workers: 1 still run", "ending the head head"]
