"""Checks what AWS offers in the region and zones of a cluster: instance types, spot, quotas and images."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor.check.aws import GOOD_IMAGE
from raytf.doctor.clouds.aws import AwsAccount
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, refuses_nodes, warning
from raytf.doctor.node_types import NodeType, too_many_gpus
from raytf.doctor.probe.queries import lacks_driver, no_driver, over_quota, small_disk, wrong_architecture

#: First letters of an instance type -> on-demand quota, spot quota, and their name in the console.
_QUOTAS = {
    "g": ("L-DB2E81BA", "L-3819A6DF", "G and VT"),
    "vt": ("L-DB2E81BA", "L-3819A6DF", "G and VT"),
    "p": ("L-417A185B", "L-7212CCBC", "P"),
    "p5": ("L-417A185B", "L-C4BD4855", "P5"),
    "inf": ("L-1945791B", "L-B5D1601B", "Inf"),
    "trn": ("L-2C3B7624", "L-6B0D517C", "Trn"),
    "dl": ("L-6E869C2A", "L-85EED4F7", "DL"),
    "x": ("L-7295265B", "L-E3A00192", "X"),
    "f": ("L-74FC7D96", "L-88CF9481", "F"),
}
_STANDARD = ("L-1216C47A", "L-34B43A08", "Standard (A, C, D, H, I, M, R, T, Z)")
_IS_STANDARD = set("acdhimrtz")
_PARAMETER = "resolve:ssm:"
#: Words in an image's name that imply that its driver is too old for the CUDA of TensorFlow 2.21.
_OLD = re.compile(r"ubuntu[ /-]*1[68]\.?04|bionic|xenial|cuda[ -]?(9|10|11)(\.|\b)", re.IGNORECASE)


def offers(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find instance types that the region or some of the zones do not have, and GPUs that a type does not have."""
    if not machines.names:
        return
    where: dict[str, set[str]] = defaultdict(set)
    filters = [{"Name": "instance-type", "Values": machines.names}]
    in_zones = {"LocationType": "availability-zone", "Filters": filters}
    for offer in aws.pages("describe_instance_type_offerings", "InstanceTypeOfferings", **in_zones):
        where[offer["InstanceType"]].add(offer["Location"])
    wanted = fallback.zones_of(document.mapping("provider"))
    for t in types:
        name, path = t.config.get("InstanceType"), (*t.path, "node_config", "InstanceType")
        if not name:
            continue
        there = where[str(name)]
        missing = [zone for zone in wanted if zone not in there]
        if not there or (wanted and len(missing) == len(wanted)):
            what = f"{name} is not offered in {listed(wanted) or aws.region}"
            zones = f"Use zones that have it ({listed(sorted(there))}), or another type."
            fix = zones if there else "Use another type or region."
            yield refuses_nodes("EC2", "instance-type-not-offered", path, what, fix)
        elif missing:
            what = f"{name} is not offered in {listed(missing)}"
            why = "Ray tries these zones too, and waits each time until EC2 refuses."
            fix = f"Delete them; {listed(sorted(there))} have it."
            yield warning("instance-type-not-offered", path, what, why, fix)
        kind = machines.all().get(str(name), {}) if t.machine is None else {}
        has = sum(gpu["Count"] for gpu in kind.get("GpuInfo", {}).get("Gpus", []))
        if kind and t.resources.get("GPU", 0) > has:
            yield too_many_gpus(t, str(name), has, f"Write GPU: {has}, or use another type.")


def spot(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], prices: dict[str, float]
) -> Iterator[ConfigFinding]:
    """Find spot types that AWS does not sell, or sells only above the MaxPrice.

    Args:
        prices: receives, by node type, the current spot price in its cheapest zone, in US dollars per hour.
    """
    wanted = fallback.zones_of(document.mapping("provider"))
    for t in types:
        if t.market != "spot" or not t.config.get("InstanceType"):
            continue
        path = (*t.path, "node_config", "InstanceMarketOptions")
        history = aws.client("ec2").describe_spot_price_history(
            InstanceTypes=[t.config["InstanceType"]],
            ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            StartTime=datetime.now(UTC),
        )["SpotPriceHistory"]
        by_zone = {p["AvailabilityZone"]: float(p["SpotPrice"]) for p in history}
        here = {zone: price for zone, price in by_zone.items() if not wanted or zone in wanted}
        if not here:
            what = f"{t.config['InstanceType']} is not sold as spot in {listed(wanted) or aws.region}"
            zones = f" ({listed(by_zone)} have it)" if by_zone else ""
            fix = f"Use another type or zone{zones}, or delete MarketType."
            yield refuses_nodes("EC2", "spot-not-offered", path, what, fix)
            continue
        price = min(here.values())
        prices.setdefault(t.name, price)  # the first choice's price
        options = t.config.get("InstanceMarketOptions", {}).get("SpotOptions")
        most = options.get("MaxPrice") if isinstance(options, dict) else None
        if isinstance(most, str) and re.fullmatch(r"\d+(\.\d+)?", most) and float(most) < price:
            what = f"MaxPrice {most} is below the current spot price: {price:.4f}"
            why = "No node of this type starts until the price falls."
            fix = "Delete MaxPrice: a spot node never costs more than on demand."
            yield error("max-price", (*path, "SpotOptions", "MaxPrice"), what, why, fix)


def quotas(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find quotas that are too small for one node, or for all nodes."""
    groups: dict[tuple[str, str], list[tuple[NodeType, float]]] = defaultdict(list)
    for t in types:
        quota, cpus = quota_of(str(t.config.get("InstanceType", "")), t.market), machines.cpus(t)
        if quota is not None and cpus:
            groups[quota].append((t, cpus))
    for (code, name), members in sorted(groups.items()):
        value = _quota(aws, code)
        yield from over_quota(
            document,
            "aws",
            f"the quota {name!r} ({code}) is {value:g} vCPUs",
            members,
            value,
            "VcpuLimitExceeded, MaxSpotInstanceCountExceeded",
            partial(_ask_for, aws.region, code),
        )


def _ask_for(region: str, code: str, most: float) -> str:
    command = f"aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code}"
    return f"Run `{command} --desired-value {most:g} --region {region}`."


def quota_of(instance_type: str, market: str) -> tuple[str, str] | None:
    """Return the code and name of the quota that a node counts against, if known."""
    family = re.match(r"([a-z]+)(\d*)", instance_type)
    if not family:
        return None
    letters = family[1]
    if letters == "p" and family[2].isdigit() and int(family[2]) >= 5:
        letters = "p5"
    codes = _QUOTAS.get(letters) or (_STANDARD if letters[0] in _IS_STANDARD else None)
    if codes is None:
        return None
    on_demand, spot_code, name = codes
    if market == "spot":
        return spot_code, f"All {name} Spot Instance Requests"
    return on_demand, f"Running On-Demand {'P' if name == 'P5' else name} instances"


def _quota(aws: AwsAccount, code: str) -> float:
    query = {"ServiceCode": "ec2", "QuotaCode": code}
    # An account that never requested an increase has only AWS's default quota.
    answer = aws.find("service-quotas", "get_service_quota", **query)
    answer = answer or aws.client("service-quotas").get_aws_default_service_quota(**query)
    return float(answer["Quota"]["Value"])


class Machines:
    """EC2's descriptions of a cluster's instance types, which are read once, when first needed."""

    def __init__(self, aws: AwsAccount, types: Sequence[NodeType]):
        self._aws = aws
        self.names = sorted({str(t.config["InstanceType"]) for t in types if t.config.get("InstanceType")})
        self._known: dict[str, dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the description of each instance type that the region has."""
        with self._lock:
            if self._known is None:
                # With InstanceTypes instead of a filter, one unknown name would make the whole call fail.
                filters = [{"Name": "instance-type", "Values": self.names}]
                kinds = self._aws.pages("describe_instance_types", "InstanceTypes", Filters=filters)
                self._known = {kind["InstanceType"]: kind for kind in kinds}
            return self._known

    def of(self, t: NodeType) -> dict[str, Any]:
        """Return the description of a node type's machine, empty if the region does not have it."""
        return self.all().get(str(t.config.get("InstanceType")), {})

    def cpus(self, t: NodeType) -> int | None:
        """Return the vCPUs of a node type's machine, which quotas count, or None if they are unknown."""
        if t.machine is not None:
            return t.machine.cpus
        kind = self.of(t)
        return kind["VCpuInfo"]["DefaultVCpus"] if kind else None


def check_images(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find images that do not exist, or do not fit the machine, its GPU or its disk."""
    seen: dict[str, dict[str, Any] | None] = {}
    for t in types:
        name, path = t.config.get("ImageId"), (*t.path, "node_config", "ImageId")
        if not isinstance(name, str) or name == "latest_dlami":
            continue
        if name not in seen:
            seen[name] = _image(aws, name)
            if seen[name] is None:
                yield _missing(name, path, aws.region)
        image = seen[name]
        if image is not None:
            yield from _fits(t, path, image, machines)
            yield from _driver(t, path, image, document, machines)


def _image(aws: AwsAccount, name: str) -> dict[str, Any] | None:
    if name.startswith(_PARAMETER):
        parameter = aws.find("ssm", "get_parameter", Name=name.removeprefix(_PARAMETER))
        if parameter is None:
            return None
        name = parameter["Parameter"]["Value"]
    matches = (aws.find("ec2", "describe_images", ImageIds=[name]) or {}).get("Images")
    return matches[0] if matches and matches[0].get("State", "available") == "available" else None


def _missing(name: str, path: Path, region: str) -> ConfigFinding:
    if name.startswith(_PARAMETER):
        what = f"the parameter {name.removeprefix(_PARAMETER)} leads to no image in {region}"
        fix = "List them with `aws ssm get-parameters-by-path --path /aws/service/deeplearning --recursive`."
    else:
        what = f"image {name} is not in {region}, or this account cannot use it"
        fix = "Look up the image's id in that region, since ids differ, or write resolve:ssm:PARAMETER."
    return refuses_nodes("EC2", "image-missing", path, what, fix)


def _fits(t: NodeType, path: Path, image: dict[str, Any], machines: Machines) -> Iterator[ConfigFinding]:
    name = image.get("Name") or image["ImageId"]
    takes = machines.of(t).get("ProcessorInfo", {}).get("SupportedArchitectures", [])
    built = image.get("Architecture")
    if takes and built and built not in takes:
        yield wrong_architecture(path, name, built, t.config["InstanceType"], ", ".join(takes), "EC2")
    root, where = image.get("RootDeviceName"), (*path[:-1], "BlockDeviceMappings")
    sizes = {d.get("DeviceName"): d.get("Ebs", {}).get("VolumeSize") for d in image.get("BlockDeviceMappings", [])}
    least, disks = sizes.get(root), t.config.get("BlockDeviceMappings")
    mappings = [d for d in disks if isinstance(d, dict)] if isinstance(disks, list) else []
    for i, disk in enumerate(mappings):
        ebs = disk.get("Ebs")
        if disk.get("DeviceName") == root and isinstance(ebs, dict):
            yield from small_disk((*where, i, "Ebs", "VolumeSize"), ebs.get("VolumeSize"), least, "GiB", name, "EC2")
    names = [d.get("DeviceName") for d in mappings]
    if root and names and root not in names and {"/dev/sda1", "/dev/xvda"} & set(names):
        what = f"the disk is {names[0]}, but the root of image {name} is {root}"
        why = f"The node gets a second disk that nothing mounts, and a root of {least or '?'} GiB, which fills up."
        yield error("image-root-device", (*where, 0, "DeviceName"), what, why, f"Write DeviceName: {root}.")


def _driver(
    t: NodeType, path: Path, image: dict[str, Any], document: Document, machines: Machines
) -> Iterator[ConfigFinding]:
    has_gpu = t.machine.gpus if t.machine else "GpuInfo" in machines.of(t)
    if not has_gpu or image.get("OwnerId") == "self":
        return
    text, name = f"{image.get('Name', '')} {image.get('Description', '')}", image.get("Name") or image["ImageId"]
    if lacks_driver(document, t, text):
        yield no_driver(path, name, f"Use {GOOD_IMAGE}")
    elif _OLD.search(text) and lacks_driver(document, t, ""):
        what = f"image {name} is older than CUDA 12"
        why = "TensorFlow 2.21 needs CUDA 12.5 and driver 525 or newer; otherwise it finds no GPU."
        fix = "Use an image with Ubuntu 22.04 or newer and NVIDIA's driver."
        yield warning("image-old-driver", path, what, why, fix)
