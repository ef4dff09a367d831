"""The clouds' machines: a small, dated table of their CPUs, GPUs, memory and list prices.

`machines.csv` holds on-demand list prices for Linux, without tax, disks and traffic, in us-east-1 (AWS), us-central1
(Google Cloud) and East US (Azure). Other regions differ by up to a third. An empty price is unknown: a machine that is
sold for reserved hours alone, or one that its cloud has retired. The prices are those that three open-source
autoscalers fetched from the clouds' price lists:

- AWS, 20 July 2026: aws/karpenter-provider-aws 6fc13b5, pkg/providers/pricing/zz_generated.pricing_aws.go
- Azure, 18 June 2026: Azure/karpenter-provider-azure 2b431da, pkg/providers/pricing/zz_generated.pricing.go
  (its Standard_D2as_v5 is the price of Windows, and not taken)
- Google Cloud, 3 August 2026: cloudpilot-ai/karpenter-provider-gcp 373e2ba, pkg/providers/pricing/initial-prices.json

The prices of attached GPUs and of TPUs below are of June 2025.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from raytf.doctor.finding import Path

#: Month of the prices in machines.csv, within a month.
PRICES_OF = "2026-07"
#: GPU that Google Cloud attaches to a machine -> US dollars per GPU and hour.
_ATTACHED = {"T4": 0.35, "P4": 0.60, "P100": 1.46, "V100": 2.48, "K80": 0.45}
#: TPU generation -> US dollars per chip and hour, and how many cores the machine's name counts per chip.
_TPUS = {"v2": (1.125, 2), "v3": (2.0, 2), "v4": (3.22, 2), "v5p": (4.2, 2), "v5litepod": (1.2, 1), "v6e": (2.7, 1)}
TPU_GENERATIONS = frozenset(_TPUS)
#: Cloud -> path to the machine's name in a node_config.
_KEYS = {"aws": ("InstanceType",), "gcp": ("machineType",), "azure": ("azure_arm_parameters", "vmSize")}
#: GPUs on which the CUDA of TensorFlow 2.21 does not run, or for which its wheels have no kernels.
TOO_OLD = {"K80", "M60", "K520", "M40"}


@dataclass(frozen=True)
class Machine:
    """The resources of a machine, and its price per hour; `usd` is None if the price is unknown."""

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
    """Return the names of a provider's machines in the table."""
    return [m.name for m in _table().get(_cloud(provider), {}).values()]


def family_known(provider: str, name: str) -> bool:
    """Return whether the table has an instance type's family, so that a size not in it is probably a typo."""
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
    """Return the path of the machine's name in a node type."""
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


def accelerator_type(config: dict[str, Any]) -> str | None:
    """Return a TPU's type, such as v4-8, which acceleratorType names or Ray derives from acceleratorConfig.

    See `tpu_accelerator_config_to_type` in ray/autoscaler/_private/gcp/config.py.
    """
    name, shape = config.get("acceleratorType"), config.get("acceleratorConfig")
    if name is not None or not isinstance(shape, dict):
        return name if isinstance(name, str) else None
    generation = str(shape.get("type")).lower().replace("v5lite_pod", "v5litepod")
    topology = str(shape.get("topology"))
    if not re.fullmatch(r"\d+x\d+(x\d+)?", topology):
        return None
    _, cores = _TPUS.get(generation, (0, 2))
    return f"{generation}-{math.prod(map(int, topology.split('x'))) * cores}"


def tpus_of_host(generation: str) -> int:
    """Return the most chips of one host (`get_num_tpu_visible_chips_per_host` in ray/_private/accelerators/tpu.py)."""
    return 8 if generation in ("v5litepod", "v6e") else 4


def _tpu(config: dict[str, Any]) -> Machine | None:
    name = accelerator_type(config)
    match = re.fullmatch(r"(v\d\w*)-(\d+)", name) if name else None
    if not match or match[1] not in _TPUS:
        return None
    price, cores = _TPUS[match[1]]
    chips = max(1, int(match[2]) // cores)
    return Machine(match[0], 0, 0, usd=price * chips, tpus=chips)


def _cloud(provider: str) -> str:
    # An external provider that is not raytf's own (see fallbacks.as_cloud) may have EC2's node_config.
    return "aws" if provider == "external" else provider
