"""Machines of the clouds: CPUs, GPUs, memory and list price, in a small table with a date.

`machines.csv` holds the list prices of Linux on demand, without tax, disks and traffic, of us-east-1 (AWS), us-central1
(Google Cloud) and East US (Azure), as of the month in `PRICES_OF`; other regions differ by up to a third. An
empty price is not known.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from raytf.doctor.finding import Path

#: Month of the prices in machines.csv and below.
PRICES_OF = "2025-06"
#: GPUs that are attached to a machine on Google Cloud -> US dollars an hour each.
_ATTACHED = {"T4": 0.35, "P4": 0.60, "P100": 1.46, "V100": 2.48, "K80": 0.45}
#: TPU generation -> US dollars an hour and chip, and cores that the name counts for each chip.
_TPUS = {"v2": (1.125, 2), "v3": (2.0, 2), "v4": (3.22, 2), "v5p": (4.2, 2), "v5litepod": (1.2, 1), "v6e": (2.7, 1)}
TPU_GENERATIONS = frozenset(_TPUS)
#: Cloud -> keys of a node_config that lead to the name of its machine.
_KEYS = {"aws": ("InstanceType",), "gcp": ("machineType",), "azure": ("azure_arm_parameters", "vmSize")}
#: GPUs that the CUDA of TensorFlow 2.21 does not run on, or that its wheels have no kernels for.
TOO_OLD = {"K80", "M60", "K520", "M40"}


@dataclass(frozen=True)
class Machine:
    """The resources of a machine, and its price an hour; `usd` is None if the price is not known."""

    name: str
    cpus: int
    memory_gib: float
    gpus: int = 0
    gpu: str = ""
    usd: float | None = None
    tpus: int = 0


@cache
def _table() -> dict[str, dict[str, Machine]]:
    text = resources.files("raytf.doctor").joinpath("machines.csv").read_text(encoding="utf-8")
    table: dict[str, dict[str, Machine]] = {}
    for row in csv.DictReader(text.splitlines()):
        usd = float(row["usd_per_hour"]) if row["usd_per_hour"] else None
        machine = Machine(row["name"], int(row["cpus"]), float(row["memory_gib"]), int(row["gpus"]), row["gpu"], usd)
        table.setdefault(row["provider"], {})[row["name"].casefold()] = machine
    return table


def names(provider: str) -> list[str]:
    """Return all instance types of a provider that the table has."""
    return [m.name for m in _table().get(_cloud(provider), {}).values()]


def family_known(provider: str, name: str) -> bool:
    """Return whether the table has the family of an instance type, and so would have this size."""
    cut = {"aws": r"\..*", "gcp": r"-[^-]*$"}.get(_cloud(provider))
    if cut is None:
        return False
    families = {re.sub(cut, "", known.casefold()) for known in names(provider)}
    return re.sub(cut, "", name.casefold()) in families


def instance_type(provider: str, config: dict[str, Any]) -> str | None:
    """Return the name of the machine in a node_config."""
    value: Any = config
    for key in _KEYS.get(_cloud(provider), ()):
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, str):
        return None
    if _cloud(provider) == "gcp":
        value = value.rsplit("/", 1)[-1]
        return None if re.match(r"custom-|.*-custom-", value) else value
    return value


def instance_path(provider: str, path: Path) -> Path:
    """Return the path at which a node type names its machine."""
    return (*path, "node_config", *_KEYS.get(_cloud(provider), ()))


def machine(provider: str, config: dict[str, Any]) -> Machine | None:
    """Return the machine of a node_config, or None if the table does not have it."""
    cloud = _cloud(provider)
    if cloud == "gcp" and "machineType" not in config:
        return _tpu(config)
    name = instance_type(provider, config)
    known = _table().get(cloud, {}).get(name.casefold()) if name else None
    if known is None or cloud != "gcp":
        return known
    return _with_attached(known, config)


def _with_attached(machine: Machine, config: dict[str, Any]) -> Machine:
    gpus, kind, usd = machine.gpus, machine.gpu, machine.usd
    attached = config.get("guestAccelerators")
    for entry in attached if isinstance(attached, list) and not machine.gpus else ():
        if isinstance(entry, dict) and isinstance(entry.get("acceleratorCount"), int):
            count = entry["acceleratorCount"]
            kind = str(entry.get("acceleratorType", "")).rsplit("-", 1)[-1].upper()
            price = _ATTACHED.get(kind)
            usd = None if usd is None or price is None else usd + count * price
            gpus += count
    return Machine(machine.name, machine.cpus, machine.memory_gib, gpus, kind, usd)


def _tpu(config: dict[str, Any]) -> Machine | None:
    name = config.get("acceleratorType")
    match = re.fullmatch(r"(v\d\w*)-(\d+)", name) if isinstance(name, str) else None
    if not match or match[1] not in _TPUS:
        return None
    price, cores = _TPUS[match[1]]
    chips = max(1, int(match[2]) // cores)
    return Machine(match[0], 0, 0, usd=price * chips, tpus=chips)


def _cloud(provider: str) -> str:
    # raytf's own providers are of type external and take EC2's node_config.
    return "aws" if provider == "external" else provider
