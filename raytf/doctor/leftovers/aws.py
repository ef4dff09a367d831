"""What is left of a cluster on AWS: by Ray's tags, by the tags of the config, and by the groups that Ray made."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from raytf.doctor import machines
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, account_of, right, trouble
from raytf.doctor.document import Document
from raytf.doctor.leftovers.resource import ADDRESS_USD, CLUSTER_TAG, Leftovers, LeftResource, disk_usd, gather
from raytf.doctor.local_environment import Surroundings
from raytf.doctor.node_types import node_types
from raytf.errors import ConfigError, one_line

_ALIVE = ["pending", "running", "stopping", "stopped", "shutting-down"]


def find(document: Document, here: Surroundings) -> Leftovers:
    """Find everything that `ray up` of this file has made.

    Raises:
        ConfigError: there are no credentials.
    """
    region, name = document.get("provider", "region"), document.get("cluster_name", default="default")
    if not isinstance(region, str):
        raise ConfigError("the file has no provider.region. Expected the region that the cluster was in.")
    aws = account_of(document, region)
    if not aws.has_credentials():
        raise ConfigError("there are no credentials for AWS. Run `aws configure`, or set AWS_PROFILE.")
    left = Leftovers(place=f"AWS, {region}, clusters named {name}")
    search = _Search(aws, str(name), document)
    return gather(
        left,
        [
            ("instances", search.instances),
            ("volumes", search.volumes),
            ("addresses", search.addresses),
            ("security groups", search.groups),
            ("spot requests", search.spot_requests),
            ("key pairs", search.key_pairs),
        ],
        _explain,
    )


def _explain(problem: Exception) -> str:
    if trouble(problem) is AwsTrouble.DENIED:
        return f"these credentials lack {right(problem, 'ec2')}"
    return one_line(problem, 200)


class _Search:
    """A search whose later questions build on the answers to earlier ones."""

    def __init__(self, aws: AwsAccount, name: str, document: Document):
        self._aws, self._name, self._document = aws, name, document
        self._by_tag = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [name]}]
        self._instances: list[dict[str, Any]] = []
        self._group_ids: set[str] = set()

    def _all(self, operation: str, key: str, filters: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        ask = partial(self._aws.client("ec2").get_paginator(operation).paginate, Filters=filters)
        for page in ask():
            yield from page[key]

    def _command(self, words: str) -> str:
        return f"aws ec2 {words} --region {self._aws.region}"

    def instances(self) -> Iterator[LeftResource]:
        """Find instances of the cluster in any state but terminated."""
        states = [{"Name": "instance-state-name", "Values": _ALIVE}]
        for reservation in self._all("describe_instances", "Reservations", self._by_tag + states):
            self._instances += reservation["Instances"]
        for i in self._instances:
            state, machine = i["State"]["Name"], machines.machine("aws", {"InstanceType": i["InstanceType"]})
            usd = 0.0 if state in ("stopped", "stopping", "shutting-down") else machine.usd if machine else None
            tags = {t["Key"]: t["Value"] for t in i.get("Tags", ())}
            about = f"{i['InstanceType']}, {tags.get('ray-node-type', 'node')}"
            if i.get("InstanceLifecycle") == "spot":
                about += ", spot: at most this"
            remove = self._command(f"terminate-instances --instance-ids {i['InstanceId']}")
            if usd == 0:
                # Its disks are listed beside it; the instance itself must go for them to go.
                usd = None if state == "stopped" else 0.0
                about += "; its disks are paid for" if state == "stopped" else "; is on its way out"
            yield LeftResource("instance", i["InstanceId"], state, usd, remove, about)

    def volumes(self) -> Iterator[LeftResource]:
        """Find volumes of stopped instances, those with Ray's tag, and loose ones with the tags of the config."""
        stopped = {
            d["Ebs"]["VolumeId"]
            for i in self._instances
            if i["State"]["Name"] in ("stopped", "stopping")
            for d in i.get("BlockDeviceMappings", ())
            if "Ebs" in d
        }
        volumes: dict[str, tuple[dict[str, Any], str]] = {}
        if stopped:
            for v in self._all("describe_volumes", "Volumes", [{"Name": "volume-id", "Values": sorted(stopped)}]):
                volumes[v["VolumeId"]] = v, "of a stopped instance"
        for v in self._all("describe_volumes", "Volumes", self._by_tag):
            if v["State"] == "available":
                volumes.setdefault(v["VolumeId"], (v, "attached to nothing"))
        for key, value in sorted(self._own_tags()):
            filters = [{"Name": f"tag:{key}", "Values": [value]}, {"Name": "status", "Values": ["available"]}]
            for v in self._all("describe_volumes", "Volumes", filters):
                text = f"attached to nothing; tag {key}={value}, which other clusters may have too"
                volumes.setdefault(v["VolumeId"], (v, text))
        for name, (v, note) in sorted(volumes.items()):
            usd = disk_usd(v.get("VolumeType", "gp2"), v["Size"])
            remove = self._command(f"delete-volume --volume-id {name}")
            yield LeftResource(
                "volume", name, v["State"], usd, remove, f"{v['Size']} GiB {v.get('VolumeType', '')}, {note}"
            )

    def _own_tags(self) -> set[tuple[str, str]]:
        """Return the tags that the config gives to volumes."""
        return {
            (str(tag["Key"]), str(tag["Value"]))
            for t in node_types(self._document)
            for spec in _dicts(t.config.get("TagSpecifications"))
            if spec.get("ResourceType") == "volume"
            for tag in _dicts(spec.get("Tags"))
            if "Key" in tag and "Value" in tag
        }

    def addresses(self) -> Iterator[LeftResource]:
        """Find Elastic IPs of the cluster's instances, or with Ray's tag."""
        mine = {i["InstanceId"] for i in self._instances}
        for a in self._aws.client("ec2").describe_addresses()["Addresses"]:
            tags = {t["Key"]: t["Value"] for t in a.get("Tags", ())}
            if tags.get(CLUSTER_TAG) == self._name or a.get("InstanceId") in mine:
                name = a.get("AllocationId", a["PublicIp"])
                remove = self._command(f"release-address --allocation-id {name}")
                yield LeftResource("address", name, "allocated", ADDRESS_USD, remove, a["PublicIp"])

    def groups(self) -> Iterator[LeftResource]:
        """Find security groups that Ray made: they cost nothing and serve the next `ray up`."""
        named = self._document.get("provider", "security_group", "GroupName")
        names = [f"ray-autoscaler-{self._name}", *([named] if isinstance(named, str) else [])]
        groups = {g["GroupId"]: g for g in self._all("describe_security_groups", "SecurityGroups", self._by_tag)}
        for g in self._all("describe_security_groups", "SecurityGroups", [{"Name": "group-name", "Values": names}]):
            groups[g["GroupId"]] = g
        self._group_ids = set(groups)
        for name, g in sorted(groups.items()):
            remove = self._command(f"delete-security-group --group-id {name}")
            yield LeftResource("security group", name, "there", 0.0, remove, g["GroupName"])

    def spot_requests(self) -> Iterator[LeftResource]:
        """Find spot requests; an open one starts an instance when there is capacity again."""
        mine = {i["InstanceId"] for i in self._instances}
        filters = [{"Name": "state", "Values": ["open", "active"]}]
        for r in self._all("describe_spot_instance_requests", "SpotInstanceRequests", filters):
            groups = {g.get("GroupId") for g in r.get("LaunchSpecification", {}).get("SecurityGroups", ())}
            tags = {t["Key"]: t["Value"] for t in r.get("Tags", ())}
            if r.get("InstanceId") in mine or groups & self._group_ids or tags.get(CLUSTER_TAG) == self._name:
                name, kind = r["SpotInstanceRequestId"], r.get("LaunchSpecification", {}).get("InstanceType")
                machine = machines.machine("aws", {"InstanceType": kind})
                usd = machine.usd if machine else None
                if r["State"] == "open":
                    note = "starts an instance as soon as there is one"
                elif r.get("InstanceId") in mine:
                    usd, note = 0.0, "of an instance above"
                else:
                    note = f"of instance {r.get('InstanceId')}, which has no tag of this cluster: end it too"
                remove = self._command(f"cancel-spot-instance-requests --spot-instance-request-ids {name}")
                yield LeftResource("spot request", name, r["State"], usd, remove, note)

    def key_pairs(self) -> Iterator[LeftResource]:
        """Find key pairs that Ray made in this region; all its clusters share them."""
        if self._document.get("auth", "ssh_private_key"):
            return
        for pair in self._aws.client("ec2").describe_key_pairs()["KeyPairs"]:
            name = pair["KeyName"]
            if name.startswith("ray-autoscaler_") and name.endswith(self._aws.region):
                remove = self._command(f"delete-key-pair --key-name {name}")
                yield LeftResource(
                    "key pair", name, "there", 0.0, remove, "shared by all clusters of Ray in this region"
                )


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
