"""Mistakes of AWS clusters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from raytf.doctor.check import field_types
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, refuses_nodes, stops_ray_up, warning, zone_not_in_region
from raytf.doctor.node_types import NodeType, node_types, small_disk, spot_head, stopped_nodes

_AMI = re.compile(r"ami-[0-9a-f]{8}([0-9a-f]{9})?|resolve:ssm:\S+|latest_dlami")
#: AWS's public parameter for the newest Ubuntu image with NVIDIA's driver, in each region.
GOOD_IMAGE = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
#: Canonical's public parameter for the newest Ubuntu image, for machines without GPUs.
_PLAIN_IMAGE = "resolve:ssm:/aws/service/canonical/ubuntu/server/22.04/stable/current/amd64/hvm/ebs-gp2/ami-id"
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
#: Least disk size in GiB without and with a GPU: for the image, TensorFlow, CUDA, logs and spilled objects.
_LEAST_GIB, _GPU_GIB = 20, 60


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find values that EC2 refuses or Ray ignores, and ports that are open to the world."""
    yield from _place(document)
    yield from _ports(document)
    own_key = "ssh_private_key" in document.mapping("auth")
    for t in node_types(document):
        path = (*t.path, "node_config")
        yield from field_types.check_node_config(t.config, path)
        for rule in (_machine, _image, _network, _market, _profile, _disk):
            yield from rule(t, path)
        yield from _key(t, path, own_key)
    provider = document.mapping("provider")
    if provider.get("type") == "aws" and "cache_stopped_nodes" not in provider:
        yield stopped_nodes("Nodes are stopped, not terminated: you pay for their disks after `ray down`.")


def _place(document: Document) -> Iterator[ConfigFinding]:
    region, zones = document.get("provider", "region"), document.get("provider", "availability_zone")
    if region is None and document.get("provider", "type") == "aws":
        fix = "Add `region: us-west-2`, or your own region."
        yield stops_ray_up("region", ("provider",), "provider.region is missing", fix, "KeyError: 'region'")
    if not isinstance(region, str):
        return
    if not _REGION.fullmatch(region):
        is_zone = _REGION.fullmatch(region[:-1]) is not None
        fix = f"Write {region[:-1]!r}; zones go into availability_zone." if is_zone else "Write one such as us-west-2."
        why = "boto3 cannot reach an endpoint of that name."
        yield error("region", ("provider", "region"), f"{region!r} is not a region", why, fix)
        return
    for zone in zones.split(",") if isinstance(zones, str) else ():
        if zone.strip() and not re.fullmatch(re.escape(region) + r"([a-z]|-.+)", zone.strip()):
            why = "Ray finds no subnet for it and exits; if other zones are listed, it continues without this one."
            fix = f"Write zones such as {region}a,{region}b, or change the region."
            yield zone_not_in_region(zone.strip(), region, why, fix)


def _ports(document: Document) -> Iterator[ConfigFinding]:
    path: Path = ("provider", "security_group", "IpPermissions")
    for i, rule in enumerate(document.sequence(*path)):
        if not isinstance(rule, dict):
            continue
        low, high = rule.get("FromPort"), rule.get("ToPort")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            what, fix = f"FromPort {low} is above ToPort {high}", "For one port, write the same number twice."
            yield error("port-range", (*path, i), what, "EC2 refuses the rule, and `ray up` exits.", fix)
        open_to = _open_to(rule)
        if open_to and (low, high) != (22, 22):
            ports = "all ports" if low in (None, -1, 0) and high in (None, -1, 65535) else f"ports {low}-{high}"
            yield error(
                "open-to-world",
                (*path, i),
                f"{ports} are open to {open_to[0]}",
                "Anyone who reaches the dashboard or the job server can run code with the cluster's rights.",
                "Delete the rule and use `ray dashboard CLUSTER.yaml` (a tunnel), or write your own address with /32.",
            )


def _open_to(rule: dict[str, Any]) -> list[str]:
    """Return the address ranges of a rule that include everyone."""
    open_ranges = []
    for key, inner in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6")):
        ranges = rule.get(key)
        for entry in ranges if isinstance(ranges, list) else ():
            cidr = entry.get(inner) if isinstance(entry, dict) else None
            if cidr in ("0.0.0.0/0", "::/0"):
                open_ranges.append(cidr)
    return open_ranges


def _machine(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    if not _has(t, "InstanceType"):
        yield error(
            "instance-type-missing",
            path,
            f"type {t.name!r} has no InstanceType",
            "Ray cannot know the resources of such a node, and EC2 uses a type from 2006 (m1.small).",
            "Add `InstanceType: g6.xlarge`, or the type that you want.",
        )


def _image(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    image = t.config.get("ImageId")
    if image == "latest_dlami" or not _has(t, "ImageId"):
        yield warning(
            "old-default-image",
            (*path, "ImageId") if image else path,
            "ImageId is latest_dlami" if image else "ImageId is missing",
            "Ray then uses a Deep Learning AMI with Ubuntu 18.04 (V71, 2023). It exists in only 15 regions, and its "
            "driver is too old for the CUDA of TensorFlow 2.21.",
            f"Write {GOOD_IMAGE if t.may_have_gpus else _PLAIN_IMAGE}, or the id of an image in your region.",
        )
    elif isinstance(image, str) and not _AMI.fullmatch(image):
        fix = "Write ami- and 8 or 17 hexadecimal digits, or resolve:ssm:PARAMETER."
        yield refuses_nodes("EC2", "image-id", (*path, "ImageId"), f"{image!r} is not an image id", fix)


def _network(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    keys = [k for k in ("SubnetId", "SubnetIds", "SecurityGroupIds") if k in t.config]
    if "NetworkInterfaces" in t.config and keys:
        what = f"NetworkInterfaces and {keys[0]} exclude each other"
        why = "Ray refuses the file, since each interface has its own subnets and groups."
        fix = f"Move {keys[0]} into NetworkInterfaces, or delete NetworkInterfaces."
        yield error("network-twice", (*path, keys[0]), what, why, fix)
    elif "SubnetId" in t.config:
        why = "Ray picks subnets itself and overwrites this one: the node starts in another network."
        fix = f"Write SubnetIds: [{t.config['SubnetId']}]."
        yield error("subnet-id", (*path, "SubnetId"), "Ray reads the list SubnetIds, not SubnetId", why, fix)
    if "SecurityGroups" in t.config:
        what = "Ray reads SecurityGroupIds, not SecurityGroups"
        why = "Ray adds its own group and a subnet, and EC2 refuses names of groups together with a subnet."
        yield error("security-groups", (*path, "SecurityGroups"), what, why, "Write SecurityGroupIds: [sg-...].")


def _market(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    options, path = t.config.get("InstanceMarketOptions"), (*path, "InstanceMarketOptions")
    if not isinstance(options, dict):
        return
    spot = options.get("SpotOptions")
    if "SpotOptions" in options and "MarketType" not in options:
        yield refuses_nodes("EC2", "market-type", path, "SpotOptions need a MarketType", "Add `MarketType: spot`.")
    if t.is_head:
        yield spot_head(path, "AWS", "InstanceMarketOptions")
    price = spot.get("MaxPrice") if isinstance(spot, dict) else None
    if isinstance(price, str) and not re.fullmatch(r"\d+(\.\d+)?", price):
        what = f"MaxPrice {price!r} is not a number"
        fix = 'Write US dollars an hour, such as "0.50", or delete it: a spot node never costs more than on demand.'
        yield refuses_nodes("EC2", "max-price", (*path, "SpotOptions", "MaxPrice"), what, fix)


def _profile(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    profile = t.config.get("IamInstanceProfile")
    arn = profile.get("Arn") if isinstance(profile, dict) else None
    if isinstance(arn, str) and (":instance-profile/" not in arn or not arn.startswith("arn:")):
        what = f"{arn!r} is {'a role' if ':role/' in arn else 'no instance profile'}"
        fix = "Write arn:aws:iam::ACCOUNT:instance-profile/NAME, or Name: NAME."
        where = (*path, "IamInstanceProfile", "Arn")
        yield refuses_nodes("EC2", "instance-profile", where, what, fix, "Invalid IAM Instance Profile")
    elif isinstance(profile, dict) and "Arn" in profile and "Name" in profile:
        where, what = (*path, "IamInstanceProfile"), "Arn and Name exclude each other"
        yield refuses_nodes("EC2", "instance-profile", where, what, "Keep one of them.")
    if not t.is_head and t.most > 0 and not _has(t, "IamInstanceProfile"):
        yield warning(
            "workers-without-profile",
            path,
            f"nodes of type {t.name!r} have no IamInstanceProfile",
            "Ray assigns its own role only to the head: workers cannot write to S3, and the first checkpoint fails.",
            "Add IamInstanceProfile: {Name: raytf-worker}; cluster-configs/iam/ has its policy.",
        )


def _has(t: NodeType, key: str) -> bool:
    """Return whether a key is set in any spelling (a typo has its own finding), or a launch template may set it."""
    return "LaunchTemplate" in t.config or any(str(name).casefold() == key.casefold() for name in t.config)


def _disk(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    disks = t.config.get("BlockDeviceMappings")
    for i, disk in enumerate(disks if isinstance(disks, list) else ()):
        ebs = disk.get("Ebs") if isinstance(disk, dict) else None
        if isinstance(ebs, dict) and disk.get("DeviceName") in ("/dev/sda1", "/dev/xvda"):
            where = (*path, "BlockDeviceMappings", i, "Ebs", "VolumeSize")
            yield from small_disk(t, where, ebs.get("VolumeSize"), (_LEAST_GIB, _GPU_GIB), "GiB", "EC2")


def _key(t: NodeType, path: Path, own_key: bool) -> Iterator[ConfigFinding]:
    if own_key and not {"KeyName", "UserData", "LaunchTemplate"} & t.config.keys():
        what = f"auth.ssh_private_key needs a KeyName, and type {t.name!r} has none"
        fix = "Add KeyName, the name of that key pair in EC2, or delete ssh_private_key to let Ray create a pair."
        yield stops_ray_up("key-name", path, what, fix, "an assertion: nobody could log in to the node")
    if not own_key and "KeyName" in t.config:
        what, why = "KeyName needs auth.ssh_private_key", "Ray overwrites it with a key pair that it creates."
        fix = "Add ssh_private_key: ~/.ssh/NAME.pem to auth, or delete KeyName."
        yield warning("key-name", (*path, "KeyName"), what, why, fix)
