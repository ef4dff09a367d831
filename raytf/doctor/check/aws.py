"""Mistakes of AWS clusters."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, instead, warning, zone_not_in_region
from raytf.doctor.local_environment import package_file
from raytf.doctor.node_types import NodeType, node_types, spot_head, stopped_nodes

_AMI = re.compile(r"ami-[0-9a-f]{8}([0-9a-f]{9})?|resolve:ssm:\S+|latest_dlami")
#: A public parameter of AWS: the newest Ubuntu with NVIDIA's driver, in each region.
_GOOD_IMAGE = "resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/ami-id"
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
#: GiB that TensorFlow, its CUDA libraries and a GPU image take together, with room for logs and spilled objects.
_LEAST_GIB, _GPU_GIB = 20, 60
_MODEL = "data/ec2/2016-11-15/service-2.json.gz"
#: Ray's own key of a node_config, which it turns into SubnetId.
_RAYS = {"SubnetIds"}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "boolean": (bool,),
    "double": (int, float),
    "float": (int, float),
    "structure": (dict,),
    "list": (list,),
    "map": (dict,),
}
_NAMES = {"string": "a text", "integer": "a whole number", "long": "a whole number", "boolean": "true or false"}
_NAMES |= {"structure": "a mapping", "list": "a list", "map": "a mapping", "double": "a number", "float": "a number"}


def check(document: Document) -> Iterator[ConfigFinding]:
    """Find what EC2 refuses, what Ray overlooks, and what is open to the world."""
    yield from _place(document)
    yield from _ports(document)
    types = node_types(document)
    for t in types:
        path = (*t.path, "node_config")
        yield from check_fields(t.config, path)
        yield from _machine(t, path)
        yield from _image(t, path)
        yield from _network(t, path)
        yield from _market(t, path)
        yield from _profile(t, path)
        yield from _disk(t, path)
    yield from _keys(document, types)
    yield from _workers_profile(types)
    yield from _reuse(document)


def _place(document: Document) -> Iterator[ConfigFinding]:
    region, zones = document.get("provider", "region"), document.get("provider", "availability_zone")
    if region is None and document.get("provider", "type") == "aws":
        yield error(
            "region",
            ("provider",),
            "provider.region is missing",
            "Ray has no default once `provider` is given: it ends with KeyError: 'region'.",
            "Add `region: us-west-2`, or yours.",
        )
        return
    if isinstance(region, str) and not _REGION.fullmatch(region):
        is_zone = _REGION.fullmatch(region[:-1]) is not None
        yield error(
            "region",
            ("provider", "region"),
            f"{region!r} is not a region",
            "boto3 cannot reach an endpoint of that name.",
            f"Write {region[:-1]!r}; zones go to availability_zone." if is_zone else "Write one such as us-west-2.",
        )
        return
    for zone in str(zones).split(",") if isinstance(zones, str) and isinstance(region, str) else ():
        if zone.strip() and not re.fullmatch(re.escape(region) + r"([a-z]|-.+)", zone.strip()):
            why = "Ray finds no subnet for it and ends; with other zones beside it, it goes on without this one."
            fix = f"Write zones such as {region}a,{region}b, or another region."
            yield zone_not_in_region(zone.strip(), region, why, fix)


def _ports(document: Document) -> Iterator[ConfigFinding]:
    path: Path = ("provider", "security_group", "IpPermissions")
    for i, rule in enumerate(document.sequence(*path)):
        if not isinstance(rule, dict):
            continue
        open_to = _open_to(rule)
        low, high = rule.get("FromPort"), rule.get("ToPort")
        if isinstance(low, int) and isinstance(high, int) and low > high:
            yield error(
                "port-range",
                (*path, i),
                f"FromPort {low} is above ToPort {high}",
                "EC2 refuses the rule, and `ray up` ends.",
                "Give the same number twice for one port.",
            )
        is_ssh = (low, high) == (22, 22)
        if open_to and not is_ssh:
            ports = "all ports" if low in (None, -1, 0) and high in (None, -1, 65535) else f"ports {low}-{high}"
            yield error(
                "open-to-world",
                (*path, i),
                f"{ports} are open to {open_to[0]}",
                "Whoever reaches the dashboard or the job server runs code with the cluster's rights.",
                "Leave the rule out and use `ray dashboard CLUSTER.yaml` (a tunnel), or give your own address /32.",
            )


def _open_to(rule: dict[str, Any]) -> list[str]:
    """Return the ranges of a rule that are everybody."""
    open_ranges = []
    for key, inner in (("IpRanges", "CidrIp"), ("Ipv6Ranges", "CidrIpv6")):
        ranges = rule.get(key)
        for entry in ranges if isinstance(ranges, list) else ():
            cidr = entry.get(inner) if isinstance(entry, dict) else None
            if cidr in ("0.0.0.0/0", "::/0"):
                open_ranges.append(cidr)
    return open_ranges


def _machine(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    if "LaunchTemplate" not in t.config and not _has(t, "InstanceType"):
        yield error(
            "instance-type-missing",
            path,
            f"type {t.name!r} has no InstanceType",
            "Ray does not find out what such a node has, and EC2 takes a type of 2006 (m1.small).",
            "Add InstanceType: g6.xlarge, or the one that you want.",
        )


def _image(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    image = t.config.get("ImageId")
    if image is None and ("LaunchTemplate" in t.config or _has(t, "ImageId")):
        return
    if image is None or image == "latest_dlami":
        yield warning(
            "old-default-image",
            (*path, "ImageId") if image else path,
            "ImageId is not given" if image is None else "ImageId is latest_dlami",
            "Ray then takes a Deep Learning AMI of Ubuntu 18.04 (V71, 2023), whose driver is too old for the CUDA of "
            "TensorFlow 2.21, and which exists in 15 regions only.",
            f"Give {_GOOD_IMAGE} or the id of an image in your region.",
        )
    elif isinstance(image, str) and not _AMI.fullmatch(image):
        yield error(
            "image-id",
            (*path, "ImageId"),
            f"{image!r} is not an image id",
            "EC2 refuses it, and no node of this type starts.",
            "Write ami- and 8 or 17 hexadecimal digits, or resolve:ssm:PARAMETER.",
        )


def _network(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    keys = [k for k in ("SubnetId", "SubnetIds", "SecurityGroupIds") if k in t.config]
    if "NetworkInterfaces" in t.config and keys:
        yield error(
            "network-twice",
            (*path, keys[0]),
            f"NetworkInterfaces and {keys[0]} are both given",
            "Ray refuses the file: subnets and groups then belong into each interface.",
            f"Move {keys[0]} into NetworkInterfaces, or leave those out.",
        )
    elif "SubnetId" in t.config:
        yield error(
            "subnet-id",
            (*path, "SubnetId"),
            "Ray reads SubnetIds, a list",
            "It picks subnets by itself and overwrites this one: the node comes up in another network.",
            f"Write SubnetIds: [{t.config['SubnetId']}].",
        )
    if "SecurityGroups" in t.config:
        yield error(
            "security-groups",
            (*path, "SecurityGroups"),
            "Ray reads SecurityGroupIds; with SecurityGroups it adds a group of its own",
            "EC2 refuses names of groups together with a subnet, which Ray always gives.",
            "Write SecurityGroupIds: [sg-...].",
        )


def _market(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    options = t.config.get("InstanceMarketOptions")
    if not isinstance(options, dict):
        return
    spot = options.get("SpotOptions")
    if "SpotOptions" in options and "MarketType" not in options:
        yield error(
            "market-type",
            (*path, "InstanceMarketOptions"),
            "SpotOptions are given without MarketType",
            "EC2 refuses the call.",
            "Add `MarketType: spot`.",
        )
    if t.is_head:
        yield spot_head((*path, "InstanceMarketOptions"), "AWS", "InstanceMarketOptions")
    price = spot.get("MaxPrice") if isinstance(spot, dict) else None
    if isinstance(price, str) and not re.fullmatch(r"\d+(\.\d+)?", price):
        yield error(
            "max-price",
            (*path, "InstanceMarketOptions", "SpotOptions", "MaxPrice"),
            f"MaxPrice {price!r} is not a number",
            "EC2 refuses each request for a node, which Ray repeats forever.",
            'Write US dollars an hour, such as "0.50", or leave it out: a node never costs more than on demand.',
        )


def _profile(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    profile = t.config.get("IamInstanceProfile")
    if not isinstance(profile, dict):
        return
    arn = profile.get("Arn")
    if isinstance(arn, str) and (":instance-profile/" not in arn or not arn.startswith("arn:")):
        role = ":role/" in arn
        yield error(
            "instance-profile",
            (*path, "IamInstanceProfile", "Arn"),
            f"{arn!r} is {'a role' if role else 'no instance profile'}",
            "EC2 refuses it (Invalid IAM Instance Profile), and no node of this type starts.",
            "Give arn:aws:iam::ACCOUNT:instance-profile/NAME, or Name: NAME.",
        )
    elif "Arn" in profile and "Name" in profile:
        yield error(
            "instance-profile",
            (*path, "IamInstanceProfile"),
            "Arn and Name are both given",
            "EC2 refuses the call.",
            "Give one of them.",
        )


def _workers_profile(types: list[NodeType]) -> Iterator[ConfigFinding]:
    for t in types:
        if not t.is_head and t.most > 0 and "LaunchTemplate" not in t.config and not _has(t, "IamInstanceProfile"):
            yield warning(
                "workers-without-profile",
                (*t.path, "node_config"),
                f"nodes of type {t.name!r} have no IamInstanceProfile",
                "Ray gives its own role to the head alone: workers cannot write to S3, and the first checkpoint fails.",
                "Give IamInstanceProfile: {Name: raytf-worker}; cluster-configs/iam/ has its policy.",
            )


def _has(t: NodeType, key: str) -> bool:
    """Return whether a key is there in any spelling: a typo is reported as such, not as a missing key."""
    return any(str(name).casefold() == key.casefold() for name in t.config)


def _disk(t: NodeType, path: Path) -> Iterator[ConfigFinding]:
    least = _GPU_GIB if t.machine is not None and t.machine.gpus else _LEAST_GIB
    disks = t.config.get("BlockDeviceMappings")
    for i, disk in enumerate(disks if isinstance(disks, list) else ()):
        size = (
            disk.get("Ebs", {}).get("VolumeSize")
            if isinstance(disk, dict) and isinstance(disk.get("Ebs"), dict)
            else None
        )
        if isinstance(size, int) and size < least and disk.get("DeviceName") in ("/dev/sda1", "/dev/xvda"):
            yield error(
                "disk-too-small",
                (*path, "BlockDeviceMappings", i, "Ebs", "VolumeSize"),
                f"a root disk of {size} GiB",
                "EC2 refuses less than the image has (a GPU image 35 to 75 GiB); else pip runs out of space.",
                f"Give {least} or more.",
            )


def _keys(document: Document, types: list[NodeType]) -> Iterator[ConfigFinding]:
    own_key = "ssh_private_key" in document.mapping("auth")
    for t in types:
        if own_key and not {"KeyName", "UserData", "LaunchTemplate"} & t.config.keys():
            yield error(
                "key-name",
                (*t.path, "node_config"),
                f"auth.ssh_private_key is given, and type {t.name!r} has no KeyName",
                "`ray up` ends with an assertion: without KeyName nobody could log in to the node.",
                "Add KeyName: the name of that key pair in EC2; or leave out ssh_private_key, and Ray makes one.",
            )
        if not own_key and "KeyName" in t.config:
            yield warning(
                "key-name",
                (*t.path, "node_config", "KeyName"),
                "KeyName is given without auth.ssh_private_key",
                "Ray overwrites it by a key pair that it makes itself.",
                "Add ssh_private_key: ~/.ssh/NAME.pem to auth, or leave KeyName out.",
            )


def _reuse(document: Document) -> Iterator[ConfigFinding]:
    provider: dict[str, Any] = document.mapping("provider")
    if provider.get("type") == "aws" and "cache_stopped_nodes" not in provider:
        why = "Nodes are stopped, not terminated: their disks are paid for after `ray down`, and old set-ups come back."
        yield stopped_nodes(why)


@cache
def _shapes() -> dict[str, Any]:
    path = package_file("botocore", _MODEL)
    return json.loads(gzip.decompress(path.read_bytes()))["shapes"] if path is not None else {}


def check_fields(config: dict[str, Any], path: Path) -> Iterator[ConfigFinding]:
    """Find keys, types and values of a node_config that RunInstances refuses."""
    shapes = _shapes()
    if shapes:
        fields = {k: v for k, v in config.items() if k not in _RAYS}
        yield from _check_field(fields, "RunInstancesRequest", path, shapes, _RAYS)


def _check_field(
    value: Any, name: str, path: Path, shapes: dict[str, Any], more: frozenset[str] | set[str] = frozenset()
) -> Iterator[ConfigFinding]:
    shape = shapes[name]
    kind = shape["type"]
    fits = _TYPES.get(kind)
    if path[-2:] == ("LaunchTemplate", "Version") and isinstance(value, int):
        return  # Ray makes a text of it
    if fits and (not isinstance(value, fits) or (isinstance(value, bool) and kind != "boolean")):
        quotes = kind == "string" and isinstance(value, int | float)
        yield error(
            "ec2-type",
            path,
            f"{path[-1]!r} is {value!r}, expected {_NAMES[kind]}",
            "boto3 refuses the call: `ray up` shows a traceback, or no worker ever starts.",
            f'Put it in quotes: "{value}".' if quotes else f"Give {_NAMES[kind]}.",
        )
    elif kind == "structure":
        members = shape["members"]
        for key, inner in value.items():
            if key in members:
                yield from _check_field(inner, members[key]["shape"], (*path, key), shapes)
            else:
                known = sorted({*members, *more})
                yield error(
                    "ec2-unknown-key",
                    (*path, str(key)),
                    f"EC2 takes no {key!r} here",
                    "boto3 refuses the call: `ray up` shows a traceback, or no worker ever starts.",
                    instead(key, known),
                )
    elif kind == "list":
        for i, item in enumerate(value):
            yield from _check_field(item, shape["member"]["shape"], (*path, i), shapes)
    elif "enum" in shape and value not in shape["enum"] and name != "InstanceType":
        yield error(
            "ec2-value",
            path,
            f"{path[-1]!r} is {value!r}",
            "EC2 refuses the call: `ray up` fails, or no worker ever starts.",
            instead(value, shape["enum"], "Give one of"),
        )
