"""The table of a group's processes, for `--show-cluster`."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import ray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from raytf.config.terminal_text import visible

if TYPE_CHECKING:  # it loads TensorFlow
    from raytf.distributed.group import Ranks

_WIDTH = 200
_GIB = 2**30


def show(group: Ranks, strategy: str, local_rank: int, say: Callable[[str], None]) -> None:
    """Show a table of all workers to the user, by calling `say` on rank 0. Every rank must call this function."""
    me = {"local_rank": local_rank} | about_me()
    everyone = [json.loads(each) for each in gather(group, json.dumps(without_cluster(me)).encode())]
    if group.rank == 0:
        say(table(f"{count(len(everyone), 'worker')}, {strategy}", [me, *everyone[1:]]))


def count(number: int, what: str) -> str:
    """Return a number with its noun, such as "2 workers"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def gather(group: Ranks, data: bytes) -> list[bytes]:
    """Return each rank's bytes, on every rank."""
    longest = np.zeros(group.world_size, np.int32)
    longest[group.rank] = len(data)
    lengths = group.sum(longest)
    mine = np.zeros((group.world_size, int(lengths.max())), np.int32)
    mine[group.rank, : len(data)] = np.frombuffer(data, np.uint8)
    rows = group.sum(mine)
    return [row[:length].astype(np.uint8).tobytes() for row, length in zip(rows, lengths, strict=True)]


def table(title: str, processes: list[dict[str, Any]]) -> str:
    """Return a table of processes, described by `about_me`, as text for the terminal. If all have a `local_rank`, they
    must be all workers, in order of rank."""
    shown = Table(title=title, title_justify="left")
    has_ranks = all("local_rank" in process for process in processes)
    for name in (*(("rank", "local") if has_ranks else ()), "node", "address", "pid", "devices", "memory"):
        shown.add_column(name, overflow="fold")
    shown.add_column("TF_CONFIG task", overflow="fold")
    for rank, process in enumerate(processes):
        cells = [rank, process["local_rank"]] if has_ranks else []
        cells += [process["node"][:8], process["address"], process["pid"]]
        task = json.loads(process["tf_config"] or "{}").get("task")
        config = f"{task['type']} {task['index']}" if task else "none"
        devices = visible("\n".join(process["devices"]), lines=True)
        shown.add_row(*(Text(visible(c)) for c in cells), Text(devices), Text(visible(process["memory"])), config)
    out = io.StringIO()
    Console(file=out, width=_WIDTH).print(shown)
    cluster = json.loads(processes[0]["tf_config"] or "{}").get("cluster")
    config_line = (
        f"TF_CONFIG cluster: {json.dumps(cluster)}" if cluster else "TF_CONFIG is not set: there is one process"
    )
    return "\n".join(line.rstrip() for line in [*out.getvalue().splitlines(), config_line])


def without_cluster(process: dict[str, Any]) -> dict[str, Any]:
    """Return the facts about a process without the list of all other processes, which may be long."""
    config = json.loads(process["tf_config"] or "{}")
    return process | {"tf_config": json.dumps({"task": config["task"]}) if "task" in config else ""}


def about_me(serves: bool = False) -> dict[str, Any]:
    """Return facts about this process as JSON values. If the process has a TensorFlow server (`serves`), do not list
    logical devices, because that would initialize the devices a second time."""
    memory = psutil.virtual_memory()
    return {
        "node": ray.get_runtime_context().get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
        "devices": _devices(serves),
        "memory": f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB free",
        "tf_config": os.environ.get("TF_CONFIG", ""),
    }


def whereabouts() -> str:
    """Return this process's address and the devices that it computes on."""
    return f"{ray.util.get_node_ip_address()}, {', '.join(_devices(serves=False))}"


def _devices(serves: bool) -> list[str]:
    """Return the devices that compute: accelerators if there are any, otherwise CPUs."""
    import tensorflow as tf  # the driver, which prints the table, must not load it

    found_by = tf.config.list_physical_devices if serves else tf.config.list_logical_devices
    kinds = ("TPU", "GPU", "CPU")
    computing = next(devices for kind in kinds if (devices := found_by(kind)))
    return [f"{d.device_type}:{d.name.rpartition(':')[2]}{_details(d)}" for d in computing]


def _details(device: Any) -> str:
    if device.device_type != "GPU":
        return ""
    import tensorflow as tf

    physical = tf.config.list_physical_devices("GPU")[int(device.name.rpartition(":")[2])]
    return f" {tf.config.experimental.get_device_details(physical).get('device_name', '')}".rstrip()
