"""Finds how far the autoscaler on this machine may grow its cluster, from the autoscaler's configuration.

Ray Train could read this limit from Ray, but neither of Ray's autoscalers stores it there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from raytf.storage import untrusted_yaml

#: Ends of the script's path in the command line of Ray's two autoscalers.
_MONITORS = ("autoscaler/_private/monitor.py", "autoscaler/v2/monitor.py")
_CONFIG, _GCS = "--autoscaling-config=", "--gcs-address="


class Growth(enum.Enum):
    """A cluster's growth, if no limits are known."""

    NO = "no"
    UNKNOWN = "unknown"  # an autoscaler may run elsewhere, like KubeRay's


def find(port: int, command_lines: Iterable[list[str]] | None = None) -> Growth | dict[str, float]:
    """Return the most of each resource that an autoscaler may add to the cluster whose GCS listens on `port`, from
    the command lines of processes (by default of this machine)."""
    for words in _command_lines() if command_lines is None else command_lines:
        if not any(word.endswith(_MONITORS) for word in words):
            continue
        addresses = [word.removeprefix(_GCS) for word in words if word.startswith(_GCS)]
        if not any(address.rpartition(":")[2] == str(port) for address in addresses):
            continue
        files = [word.removeprefix(_CONFIG) for word in words if word.startswith(_CONFIG)]
        if not any(files):
            return Growth.NO
        try:
            return most(untrusted_yaml.load(Path(files[0]).expanduser().read_text(encoding="utf-8")))
        except (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError, KeyError):
            return Growth.UNKNOWN
    return Growth.UNKNOWN


def most(config: Mapping[str, Any]) -> Growth | dict[str, float]:
    """Return the most of each resource that all worker nodes of a cluster's configuration may have together.

    Return UNKNOWN if the configuration does not list the resources of a machine, as for existing hosts.
    """
    head, limit = config.get("head_node_type"), int(config.get("max_workers", 2))
    counts: dict[str, list[tuple[float, int]]] = {}
    for name, kind in config["available_node_types"].items():
        workers = int(kind.get("max_workers", 0 if name == head else limit))
        if workers and not kind.get("resources"):
            return Growth.UNKNOWN
        for resource, amount in (kind.get("resources") or {}).items():
            counts.setdefault(resource, []).append((float(amount), workers))
    limits = {}
    for resource, amounts in counts.items():
        left, limits[resource] = limit, 0.0
        for amount, workers in sorted(amounts, reverse=True):
            limits[resource] += amount * min(workers, left)
            left -= min(workers, left)
    return limits


def _command_lines() -> Iterable[list[str]]:
    for process in psutil.process_iter(["cmdline"]):
        yield process.info["cmdline"] or []
