"""A connection to Ray: the one there is, the cluster of RAY_ADDRESS, or a Ray of this machine's own."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import ray

from raytf import _process
from raytf._ray import worker_process
from raytf.cluster import local_ray
from raytf.cluster.local_ray import OwnRay
from raytf.cluster.ray_watch import RayWatch
from raytf.errors import ClusterError, one_line


def check_address(address: str, seconds: float = 5.0) -> None:
    """Refuse a Ray that does not answer; Ray's own client tries for more than a minute.

    Raises:
        ClusterError: nothing listens there.
    """
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not (port.isascii() and port.isdecimal()):
        return  # auto, or a way to connect of Ray's own
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except OSError as error:
        raise ClusterError(
            f"no Ray answers at RAY_ADDRESS={address} ({error}). Start it with `ray start --head`, correct the "
            "address, or unset RAY_ADDRESS to train on this machine alone."
        ) from error


def is_connected() -> bool:
    """Whether there is a Ray to use, so that none is started on this machine."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_for(cpus: Callable[[], float], verbose: bool) -> Iterator[bool]:
    """Connect; what was connected is disconnected at the end. Yields whether a Ray was started here.

    When the Ray that this connects to is lost, the process ends with exit code 75 and one line; see `vigil`.

    Args:
        cpus: tells how many are needed, where Ray is started here: a machine may run more processes than it has cores,
            more slowly.
        verbose: show Ray's messages.

    Raises:
        ClusterError: Ray does not answer.
    """
    if ray.is_initialized():
        yield False
        return
    chatter: dict[str, Any] = {"logging_level": "INFO" if verbose else "ERROR", "log_to_driver": verbose}
    address = os.environ.get("RAY_ADDRESS")  # `ray job submit` sets it
    own = None if address else OwnRay()
    if address:
        check_address(address)
    else:
        chatter |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus())),
            # A dozen processes, which start before anything else, for a page that has nothing about a run of Ray Train.
            "include_dashboard": False,
        }
    try:
        _init(chatter, own, address)
        with RayWatch(own.begun() if own else local_ray.signs_of_cluster()):
            yield own is not None
    finally:
        ray.shutdown()
        if own:
            own.over()


def _init(chatter: dict[str, Any], own: OwnRay | None, address: str | None) -> None:
    """Connect, or start a Ray. A signal that comes meanwhile is raised when that is done.

    Raises:
        ClusterError: neither could be done.
    """
    silent = contextlib.nullcontext() if chatter["log_to_driver"] else _process.no_stderr()
    starting = own.starting() if own else local_ray.reaching(address or "")
    try:
        with _process.held_back(), worker_process.no_signal_handlers(), silent, starting:
            ray.init(**chatter)
    except Exception as error:  # of a plain Exception it makes the one about a machine that is too slow
        where = (
            f"cannot connect to Ray at RAY_ADDRESS={address}" if address else "Ray cannot be started on this machine"
        )
        raise ClusterError(f"{where}: {one_line(error, 300)}", passes=True) from error
