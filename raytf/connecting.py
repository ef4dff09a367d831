"""A connection to Ray: the one there is, the cluster of RAY_ADDRESS, or a Ray of this machine's own."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import ray

from raytf import checks, own_ray, quiet, signals
from raytf.errors import ClusterError, one_line
from raytf.own_ray import OwnRay
from raytf.vigil import Vigil


def is_connected() -> bool:
    """Whether there is a Ray to use, so that none is started on this machine."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


@contextlib.contextmanager
def ray_for(cpus: Callable[[], float], verbose: bool, dashboard: bool = False) -> Iterator[bool]:
    """Connect; what was connected is disconnected at the end. Yields whether a Ray was started here.

    When the Ray that this connects to is lost, the process ends with exit code 75 and one line; see `vigil`.

    Args:
        cpus: tells how many are needed, where Ray is started here: a machine may run more processes than it has cores,
            more slowly.
        verbose: show Ray's messages.
        dashboard: start it with Ray.

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
        checks.check_address(address)
    else:
        chatter |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus())),
            "include_dashboard": dashboard,
        }
    try:
        silent = contextlib.nullcontext() if verbose else quiet.no_stderr()
        with silent, signals.kept(), own.starting() if own else own_ray.reaching(address or ""):
            ray.init(**chatter)
    except Exception as error:  # of a plain Exception it makes the one about a machine that is too slow
        where = (
            f"cannot connect to Ray at RAY_ADDRESS={address}" if address else "Ray cannot be started on this machine"
        )
        if own:
            own.over()
        raise ClusterError(f"{where}: {one_line(error, 300)}", passes=True) from error
    try:
        with Vigil(own.begun() if own else own_ray.signs_of_cluster()):
            yield own is not None
    finally:
        ray.shutdown()
        if own:
            own.over()
