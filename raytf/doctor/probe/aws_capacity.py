"""Checks what AWS offers in the region and zones of a cluster: instance types, spot, quotas and images."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from raytf.cluster.providers import fallback
from raytf.doctor.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error, listed, warning
from raytf.doctor.node_types import NodeType, most_used, most_workers, too_many_gpus
from raytf.doctor.probe import images

#: First letters of an instance type -> quota on demand, quota of spot, and its name in the console.
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
#: Words of an image's name that stand for a driver too old for the CUDA of TensorFlow 2.21.
_OLD = re.compile(r"ubuntu[ /-]*1[68]\.?04|bionic|xenial|cuda[ -]?(9|10|11)(\.|\b)", re.IGNORECASE)


def offers(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find instance types that the region or some of the zones do not have, and GPUs that a type does not have."""
    names = sorted({str(t.config["InstanceType"]) for t in types if t.config.get("InstanceType")})
    if not names:
        return
    pages = aws.client("ec2").get_paginator("describe_instance_type_offerings")
    where: dict[str, set[str]] = defaultdict(set)
    for page in pages.paginate(LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": names}]):
        for offer in page["InstanceTypeOfferings"]:
            where[offer["InstanceType"]].add(offer["Location"])
    wanted = fallback.zones_of(document.mapping("provider"))
    for t in types:
        name, path = t.config.get("InstanceType"), (*t.path, "node_config", "InstanceType")
        if not name:
            continue
        there = where[str(name)]
        missing = [zone for zone in wanted if zone not in there]
        if not there or (wanted and len(missing) == len(wanted)):
            yield error(
                "instance-type-not-offered",
                path,
                f"{name} is not offered in {listed(wanted) or aws.region}",
                "EC2 refuses each node of this type, which Ray repeats forever.",
                f"Take zones that have it ({listed(sorted(there))}), or another type."
                if there
                else "Take another type or region.",
            )
        elif missing:
            yield warning(
                "instance-type-not-offered",
                path,
                f"{name} is not offered in {listed(missing)}",
                "Ray tries these zones too, and each time waits for a refusal.",
                f"Leave them out; {listed(sorted(there))} have it.",
            )
        kind = machines.all().get(str(name), {}) if t.machine is None else {}
        has = sum(gpu["Count"] for gpu in kind.get("GpuInfo", {}).get("Gpus", []))
        if kind and t.resources.get("GPU", 0) > has:
            yield too_many_gpus(t, str(name), has, f"Write GPU: {has}, or take another type.")


def spot(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], prices: dict[str, float]
) -> Iterator[ConfigFinding]:
    """Find spot types that nobody sells, and the price now of those that are sold.

    Args:
        aws, document, types: the account, the cluster YAML and its node types.
        prices: filled in: node type -> US dollars an hour, in the cheapest of its zones.
    """
    wanted = fallback.zones_of(document.mapping("provider"))
    for t in types:
        if t.market != "spot" or not t.config.get("InstanceType"):
            continue
        history = aws.client("ec2").describe_spot_price_history(
            InstanceTypes=[t.config["InstanceType"]],
            ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            StartTime=datetime.now(UTC),
        )["SpotPriceHistory"]
        by_zone = {p["AvailabilityZone"]: float(p["SpotPrice"]) for p in history}
        here = {zone: price for zone, price in by_zone.items() if not wanted or zone in wanted}
        if not here:
            yield error(
                "spot-not-offered",
                (*t.path, "node_config", "InstanceMarketOptions"),
                f"{t.config['InstanceType']} has no spot price in {listed(wanted) or aws.region}",
                "It is not sold as spot there: each request is refused, which Ray repeats forever.",
                "Take another type or zone, or leave MarketType out."
                + (f" {listed(by_zone)} have it." if by_zone else ""),
            )
            continue
        price = min(here.values())
        prices.setdefault(t.name, price)  # of several choices, that of the first
        options = t.config.get("InstanceMarketOptions", {}).get("SpotOptions")
        most = options.get("MaxPrice") if isinstance(options, dict) else None
        if isinstance(most, str) and re.fullmatch(r"\d+(\.\d+)?", most) and float(most) < price:
            yield error(
                "max-price",
                (*t.path, "node_config", "InstanceMarketOptions", "SpotOptions", "MaxPrice"),
                f"MaxPrice {most} is below what spot costs now: {price:.4f}",
                "No node of this type starts until the price falls.",
                "Leave MaxPrice out: a spot node never costs more than on demand.",
            )


def quotas(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find quotas that have no room for a node, or not for all of them."""
    groups: dict[tuple[str, str], list[tuple[NodeType, int]]] = defaultdict(list)
    for t in types:
        quota, cpus = quota_of(str(t.config.get("InstanceType", "")), t.market), machines.cpus(t)
        if quota is not None and cpus:
            groups[quota].append((t, cpus))
    for (code, name), members in sorted(groups.items()):
        value = _quota(aws, code)
        ask = f"Ask for more: aws service-quotas request-service-quota-increase --service-code ec2 --quota-code {code}"
        small = [(t, cpus) for t, cpus in members if cpus > value]
        for t, cpus in small:
            yield error(
                "quota-too-small",
                (*t.path, "node_config", "InstanceType"),
                f"the quota {name!r} ({code}) is {value:g} vCPUs, and one {t.config['InstanceType']} has {cpus}",
                "No node of this type ever starts (VcpuLimitExceeded, MaxSpotInstanceCountExceeded).",
                f"{ask} --desired-value {cpus * max(1, t.most)} --region {aws.region}",
            )
        most = most_used(members, most_workers(document))
        if not small and most > value:
            yield warning(
                "quota-too-small",
                (*members[0][0].path, "max_workers"),
                f"the quota {name!r} ({code}) is {value:g} vCPUs, and the cluster may want {most}",
                "Beyond the quota nodes are refused, whatever max_workers says; other clusters count too.",
                f"{ask} --desired-value {most} --region {aws.region}, or lower max_workers.",
            )


def quota_of(instance_type: str, market: str) -> tuple[str, str] | None:
    """Return the code and name of the quota that a node counts on.

    Returns:
        None where it is not known here.
    """
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
    client = aws.client("service-quotas")
    try:
        return float(client.get_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])
    except Exception as problem:
        if trouble(problem) is not AwsTrouble.MISSING:
            raise
        # An account that never asked for more has no quota of its own, but AWS's.
        return float(client.get_aws_default_service_quota(ServiceCode="ec2", QuotaCode=code)["Quota"]["Value"])


class Machines:
    """EC2's descriptions of the instance types of a cluster, which are read once, when first needed."""

    def __init__(self, aws: AwsAccount, types: Sequence[NodeType]):
        self._aws = aws
        self._names = sorted({str(t.config["InstanceType"]) for t in types if t.config.get("InstanceType")})
        self._known: dict[str, dict[str, Any]] | None = None
        self._lock = threading.Lock()

    def all(self) -> dict[str, dict[str, Any]]:
        """Return the description of each instance type that the region has."""
        with self._lock:
            if self._known is None:
                pages = self._aws.client("ec2").get_paginator("describe_instance_types")
                # By a filter: one name that there is not would make InstanceTypes fail for all.
                answers = pages.paginate(Filters=[{"Name": "instance-type", "Values": self._names}])
                self._known = {kind["InstanceType"]: kind for page in answers for kind in page["InstanceTypes"]}
            return self._known

    def cpus(self, t: NodeType) -> int | None:
        """Return the vCPUs of a node type, which quotas count."""
        if t.machine is not None:
            return t.machine.cpus
        kind = self.all().get(str(t.config.get("InstanceType")))
        return kind["VCpuInfo"]["DefaultVCpus"] if kind else None


def check_images(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], machines: Machines
) -> Iterator[ConfigFinding]:
    """Find images that are not there, or do not fit the machine, its GPU or its disk."""
    seen: dict[str, dict[str, Any] | None] = {}
    for t in types:
        name, path = t.config.get("ImageId"), (*t.path, "node_config", "ImageId")
        if not isinstance(name, str) or name == "latest_dlami":
            continue
        if name not in seen:
            image = seen[name] = _image(aws, name)
            if image is None:
                yield _missing(name, path, aws.region)
        image = seen[name]
        if image is not None:
            yield from _fits(t, path, image, machines)
            yield from _driver(t, path, image, document, machines)


def _image(aws: AwsAccount, name: str) -> dict[str, Any] | None:
    try:
        if name.startswith(_PARAMETER):
            name = aws.client("ssm").get_parameter(Name=name.removeprefix(_PARAMETER))["Parameter"]["Value"]
        matches = aws.client("ec2").describe_images(ImageIds=[name])["Images"]
    except Exception as problem:
        if trouble(problem) is AwsTrouble.MISSING:
            return None
        raise
    return matches[0] if matches and matches[0].get("State", "available") == "available" else None


def _missing(name: str, path: Path, region: str) -> ConfigFinding:
    if name.startswith(_PARAMETER):
        what = f"the parameter {name.removeprefix(_PARAMETER)} leads to no image in {region}"
        fix = "See `aws ssm get-parameters-by-path --path /aws/service/deeplearning --recursive` for those there are."
    else:
        what = f"image {name} is not in {region}, or not for this account"
        fix = "Image ids differ from region to region: look the name up there, or give resolve:ssm:PARAMETER."
    return error("image-missing", path, what, "EC2 refuses each node of this type, which Ray repeats forever.", fix)


def _fits(t: NodeType, path: Path, image: dict[str, Any], machines: Machines) -> Iterator[ConfigFinding]:
    name = image.get("Name") or image["ImageId"]
    kind = machines.all().get(str(t.config.get("InstanceType")), {})
    takes = kind.get("ProcessorInfo", {}).get("SupportedArchitectures", [])
    built = image.get("Architecture")
    if takes and built and built not in takes:
        yield images.wrong_architecture(path, name, built, t.config["InstanceType"], ", ".join(takes), "EC2")
    root = image.get("RootDeviceName")
    least = next(
        (
            disk["Ebs"]["VolumeSize"]
            for disk in image.get("BlockDeviceMappings", [])
            if disk.get("DeviceName") == root and disk.get("Ebs", {}).get("VolumeSize")
        ),
        None,
    )
    disks = t.config.get("BlockDeviceMappings")
    mappings = [d for d in disks if isinstance(d, dict)] if isinstance(disks, list) else []
    where = (*path[:-1], "BlockDeviceMappings")
    for i, disk in enumerate(mappings):
        ebs = disk.get("Ebs")
        size = ebs.get("VolumeSize") if isinstance(ebs, dict) else None
        if disk.get("DeviceName") == root and least is not None and isinstance(size, int) and size < least:
            place = (*where, i, "Ebs", "VolumeSize")
            yield images.small_disk(place, f"a root disk of {size} GiB", name, f"{least} GiB", "EC2")
    names = [d.get("DeviceName") for d in mappings]
    if root and names and root not in names and {"/dev/sda1", "/dev/xvda"} & set(names):
        yield error(
            "image-root-device",
            (*where, 0, "DeviceName"),
            f"the disk is {names[0]}, and the root of image {name} is {root}",
            f"The node gets a second disk that nobody mounts, and a root of {least or '?'} GiB, which fills up.",
            f"Write DeviceName: {root}.",
        )


def _driver(
    t: NodeType, path: Path, image: dict[str, Any], document: Document, machines: Machines
) -> Iterator[ConfigFinding]:
    kind = machines.all().get(str(t.config.get("InstanceType")), {})
    if not (t.machine.gpus if t.machine else "GpuInfo" in kind) or image.get("OwnerId") == "self":
        return
    text = f"{image.get('Name', '')} {image.get('Description', '')}"
    if images.installs_driver(document, t):
        return
    if not images.DRIVER.search(text):
        yield warning(
            "image-no-driver",
            path,
            f"image {image.get('Name') or image['ImageId']} says nothing of NVIDIA's driver, and the node has a GPU",
            "Without the driver TensorFlow trains on the CPU, at the price of the GPU, or the job waits forever.",
            "Take resolve:ssm:/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-ubuntu-22.04/latest/"
            "ami-id, or install the driver in setup_commands.",
        )
    elif _OLD.search(text):
        yield warning(
            "image-old-driver",
            path,
            f"image {image.get('Name') or image['ImageId']} is of a time before CUDA 12",
            "TensorFlow 2.21 wants CUDA 12.5 and a driver of 525 or newer, else it finds no GPU.",
            "Take an image of Ubuntu 22.04 or newer with NVIDIA's driver.",
        )
