"""Processes of Ray, found by their titles and ended without a trace."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable

import psutil

#: What Ray calls the processes of Ray Train.
WORKER, CONTROLLER, RAYLET = "RayTrainWorker", "TrainController", "raylet/raylet"


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it, those first that were started first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def titled(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Those whose command line holds a text."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def end(processes: Iterable[psutil.Process], seconds: float = 30.0) -> None:
    """SIGKILL, also to stopped ones, and wait until they are gone."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=seconds)


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Wait until something holds.

    Raises:
        TimeoutError: it does not after so many seconds.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {seconds:.0f} s in vain until {what}")
        time.sleep(0.05)


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(**extra: str) -> dict[str, str]:
    """The environment of a plain user: no trace of another cluster, storage or TensorFlow setting."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_", "TF_"))}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **extra}
