"""`--show-cluster`: who the workers of a group are, as a table."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import psutil
import ray
import tensorflow as tf
from rich.console import Console
from rich.table import Table

_WIDTH = 200
_GIB = 2**30


class Ranks(Protocol):
    """The part of a strategy's Group that is needed here."""

    rank: int
    world_size: int

    def sum(self, values: np.ndarray) -> np.ndarray: ...


def show(group: Ranks, strategy: str, local_rank: int, say: Callable[[str], None]) -> None:
    """Tell the user of all workers; every rank must call it.

    Args:
        group: of all ranks.
        strategy: its name.
        local_rank: of this worker.
        say: for the user, as a whole.
    """
    everyone = gather(group, json.dumps(_about_me(local_rank)).encode())
    say(table(strategy, [json.loads(each) for each in everyone]))


def gather(group: Ranks, data: bytes) -> list[bytes]:
    """Each rank's bytes, on every rank."""
    longest = np.zeros(group.world_size, np.int32)
    longest[group.rank] = len(data)
    lengths = group.sum(longest)
    mine = np.zeros((group.world_size, int(lengths.max())), np.int32)
    mine[group.rank, : len(data)] = np.frombuffer(data, np.uint8)
    rows = group.sum(mine)
    return [row[:length].astype(np.uint8).tobytes() for row, length in zip(rows, lengths, strict=True)]


def table(strategy: str, workers: list[dict[str, Any]]) -> str:
    """Lines for the terminal.

    Args:
        workers: what `_about_me` says, by rank.
    """
    count = f"{len(workers)} worker{'s' if len(workers) > 1 else ''}"
    shown = Table(title=f"{count}, {strategy}", title_justify="left")
    for name in ("rank", "local", "node", "address", "pid", "devices", "memory", "TF_CONFIG task"):
        shown.add_column(name, overflow="fold")
    for rank, worker in enumerate(workers):
        cells = [rank, worker["local_rank"], worker["node"][:8], worker["address"], worker["pid"]]
        task = json.loads(worker["tf_config"] or "{}").get("task")
        config = f"{task['type']} {task['index']}" if task else "none"
        shown.add_row(*map(str, cells), "\n".join(worker["devices"]), worker["memory"], config)
    out = io.StringIO()
    Console(file=out, width=_WIDTH).print(shown)
    cluster = json.loads(workers[0]["tf_config"] or "{}").get("cluster")
    told = f"TF_CONFIG cluster: {json.dumps(cluster)}" if cluster else "TF_CONFIG is not set: there is one process"
    return "\n".join(line.rstrip() for line in [*out.getvalue().splitlines(), told])


def _about_me(local_rank: int) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "local_rank": local_rank,
        "node": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
        "devices": _devices(),
        "memory": f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free",
        "tf_config": os.environ.get("TF_CONFIG", ""),
    }


def _devices() -> list[str]:
    """Those that compute: accelerators where there are any, else CPUs."""
    kinds = ("TPU", "GPU", "CPU")
    found = next(devices for kind in kinds if (devices := tf.config.list_logical_devices(kind)))
    return [f"{d.device_type}:{d.name.rpartition(':')[2]}{_details(d)}" for d in found]


def _details(device: Any) -> str:
    if device.device_type != "GPU":
        return ""
    physical = tf.config.list_physical_devices("GPU")[int(device.name.rpartition(":")[2])]
    return f" {tf.config.experimental.get_device_details(physical).get('device_name', '')}".rstrip()
