"""What AWS offers in the region and zones of a cluster: instance types, spot, and the account's quotas."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from raytf.cluster.check.document import Document
from raytf.cluster.check.finding import ConfigFinding, error, listed, warning
from raytf.cluster.check.node_types import NodeType, most_used
from raytf.cluster.clouds.aws import AwsAccount, AwsTrouble, trouble
from raytf.cluster.probe.aws_images import Machines

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


def zones(document: Document) -> list[str]:
    """The zones of the config, in order; none stands for all of the region."""
    given = document.get("provider", "availability_zone")
    return [zone.strip() for zone in given.split(",") if zone.strip()] if isinstance(given, str) else []


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
    wanted = zones(document)
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
            yield error(
                "gpu-count",
                (*t.path, "resources", "GPU"),
                f"GPU: {t.resources['GPU']:g} on {name}, which has {has}",
                "Ray starts nodes for jobs that then find no GPU there, and the job waits forever.",
                f"Write GPU: {has}, or take another type.",
            )


def spot(
    aws: AwsAccount, document: Document, types: Sequence[NodeType], prices: dict[str, float]
) -> Iterator[ConfigFinding]:
    """Find spot types that nobody sells, and the price now of those that are sold.

    Args:
        aws, document, types: see the module.
        prices: filled in: node type -> US dollars an hour, in the cheapest of its zones.
    """
    wanted = zones(document)
    for t in types:
        if t.market != "spot" or not t.config.get("InstanceType"):
            continue
        history = aws.client("ec2").describe_spot_price_history(
            InstanceTypes=[t.config["InstanceType"]],
            ProductDescriptions=["Linux/UNIX", "Linux/UNIX (Amazon VPC)"],
            StartTime=datetime.now(UTC),
        )["SpotPriceHistory"]
        found = {p["AvailabilityZone"]: float(p["SpotPrice"]) for p in history}
        here = {zone: price for zone, price in found.items() if not wanted or zone in wanted}
        if not here:
            yield error(
                "spot-not-offered",
                (*t.path, "node_config", "InstanceMarketOptions"),
                f"{t.config['InstanceType']} has no spot price in {listed(wanted) or aws.region}",
                "It is not sold as spot there: each request is refused, which Ray repeats forever.",
                "Take another type or zone, or leave MarketType out." + (f" {listed(found)} have it." if found else ""),
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
    limit = document.get("max_workers", default=2)
    limit = limit if isinstance(limit, int) else 2
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
        most = most_used(members, limit)
        if not small and most > value:
            yield warning(
                "quota-too-small",
                (*members[0][0].path, "max_workers"),
                f"the quota {name!r} ({code}) is {value:g} vCPUs, and the cluster may want {most}",
                "Beyond the quota nodes are refused, whatever max_workers says; other clusters count too.",
                f"{ask} --desired-value {most} --region {aws.region}, or lower max_workers.",
            )


def quota_of(instance_type: str, market: str) -> tuple[str, str] | None:
    """Code and name of the quota that a node counts on.

    Returns:
        None where it is not known here.
    """
    family = re.match(r"([a-z]+)(\d*)", instance_type)
    if not family:
        return None
    letters = family[1]
    if letters == "p" and family[2].isdigit() and int(family[2]) >= 5:
        letters = "p5"
    found = _QUOTAS.get(letters) or (_STANDARD if letters[0] in _IS_STANDARD else None)
    if found is None:
        return None
    on_demand, spot_code, name = found
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
