"""Connects to Ray: to the cluster at RAY_ADDRESS (with a token), or to a new Ray on this machine."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ray

from raytf import _process
from raytf._ray import worker_process
from raytf.cluster import local_ray
from raytf.cluster.local_ray import OwnRay
from raytf.cluster.ray_watch import RayWatch
from raytf.errors import ClusterError, one_line

_THERE = "the head's token into ~/.ray/auth_token, or name its file in RAY_AUTH_TOKEN_PATH"
_FIX = f"Run `export RAY_AUTH_MODE=token`, and put {_THERE}."


def check_address(address: str, seconds: float = 5.0) -> None:
    """Refuse an address at which no Ray answers; Ray's own client would try for more than a minute.

    Raises:
        ClusterError: nothing listens at the address.
    """
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not (port.isascii() and port.isdecimal()):
        return  # auto, or another form that only Ray knows
    try:
        socket.create_connection((host, int(port)), timeout=seconds).close()
    except OSError as error:
        raise ClusterError(
            f"No Ray answers at RAY_ADDRESS={address} ({error}). Start it with `ray start --head`, correct the "
            "address, or unset RAY_ADDRESS to train on this machine alone."
        ) from error


def is_connected() -> bool:
    """Return whether there is a Ray to use, so that no new one is started on this machine."""
    return ray.is_initialized() or bool(os.environ.get("RAY_ADDRESS"))


@dataclass(frozen=True)
class Connection:
    """This process's connection to Ray.

    Attributes:
        own: the Ray that this process started, or None.
        is_shared: whether other code in this process has connected, and will disconnect.
        node: Ray's object for the node that this process is connected through.
    """

    own: OwnRay | None
    is_shared: bool = False
    node: Any = None

    def is_current(self) -> bool:
        """Return whether this is still the connection: the program may have connected to another Ray."""
        return ray.is_initialized() and worker_process.this_node() is self.node

    def watched(self) -> contextlib.AbstractContextManager[Any]:
        """Exit the process with code 75 and one line if Ray is lost while the `with` statement lasts."""
        if self.is_shared:
            return contextlib.nullcontext()
        return RayWatch(self.own.signs() if self.own else local_ray.signs_of_cluster())


#: Whether this process has started the Ray that it is connected to.
_is_own = False


def is_own() -> bool:
    """Return whether this process has started the Ray that it is connected to, so that nobody else uses it."""
    return _is_own


@contextlib.contextmanager
def reached(cpus: Callable[[], float], verbose: bool) -> Iterator[Connection]:
    """Connect to Ray for a `with` statement, and disconnect at its end unless other code had connected.

    Args:
        cpus: returns the number of CPUs to declare at least if Ray is started here: a machine may run more processes
            than it has cores, only more slowly.
        verbose: show Ray's messages, and keep the logs of a Ray that is started here even without an error.

    Raises:
        ClusterError: Ray does not answer, or rejects this user.
    """
    global _is_own
    if ray.is_initialized():
        yield Connection(None, True, worker_process.this_node())
        return
    chatter: dict[str, Any] = {"logging_level": "INFO" if verbose else "ERROR", "log_to_driver": verbose}
    address = os.environ.get("RAY_ADDRESS")  # `ray job submit` sets it
    own = None if address else OwnRay()
    if address:
        check_address(address)
        let_in(address)
    else:
        chatter |= {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus())),
            # The dashboard would start a dozen processes, and shows nothing about a run of Ray Train.
            "include_dashboard": False,
            "_system_config": worker_process.SYSTEM_CONFIG,
        }
    connection = Connection(own)
    try:
        _init(chatter, own, address)
        connection = Connection(own, node=worker_process.this_node())
        _is_own = own is not None
        if own is not None:
            own.begun()
        yield connection
        if own is not None and not verbose:
            own.forget_logs()
    finally:
        _is_own = False
        if connection.node is None or connection.is_current():  # the program opened any other connection itself
            ray.shutdown()
        if own:
            own.over()


@contextlib.contextmanager
def ray_for(cpus: Callable[[], float], verbose: bool) -> Iterator[bool]:
    """Connect as `reached` does, watch Ray until the end, and yield whether a Ray was started here."""
    with reached(cpus, verbose) as connection, connection.watched():
        yield connection.own is not None


def _init(chatter: dict[str, Any], own: OwnRay | None, address: str | None) -> None:
    """Connect to Ray, or start it. A signal that arrives in the meantime takes effect afterwards.

    Raises:
        ClusterError: Ray cannot be reached or started.
    """
    silent = contextlib.nullcontext() if chatter["log_to_driver"] else _process.no_stderr()
    starting = own.starting() if own else local_ray.reaching(address or "")
    lean = worker_process.without_helpers(chatter["log_to_driver"]) if own else contextlib.nullcontext()
    try:
        with _process.held_back(), worker_process.no_signal_handlers(), silent, starting, lean:
            ray.init(**chatter)
            if not chatter["log_to_driver"]:
                (worker_process.show_no_errors if own else worker_process.show_no_deaths)()
    except Exception as error:  # on a machine that is too slow, Ray raises a plain Exception
        where = (
            f"cannot connect to Ray at RAY_ADDRESS={address}" if address else "Ray cannot be started on this machine"
        )
        raise ClusterError(f"{where}: {one_line(error, 300)}", passes=True) from error


def needs_token(address: str, mode: str | None, token: str, is_let_in: Callable[[str], bool | None]) -> bool:
    """Return whether to connect with the user's token although the environment does not say so.

    Args:
        address: address of the cluster, for messages.
        mode: RAY_AUTH_MODE; None if it is not set.
        token: the user's token; empty if there is none.
        is_let_in: checks access with a token (empty for none); see `worker_process.is_let_in`.

    Raises:
        ClusterError: the cluster needs a token, or another one than the user's.
    """
    is_on = (mode or "").lower() == "token"
    if is_let_in(token if is_on else "") is not False:
        return False
    if is_on:
        why = "does not accept this token" if token else "needs a token, and there is none here"
        raise ClusterError(f"The Ray at {address} {why}. Put {_THERE}.")
    if mode is not None:
        raise ClusterError(f"The Ray at {address} needs a token, and RAY_AUTH_MODE is {mode}. {_FIX}")
    if not token or is_let_in(token) is False:
        why = "the one here differs" if token else "there is none here"
        raise ClusterError(f"The Ray at {address} needs a token, and {why}. {_FIX}")
    return True


def let_in(address: str) -> None:
    """Use this user's token if the Ray at an address needs one and RAY_AUTH_MODE is not set.

    Args:
        address: an address for `ray.init`.

    Raises:
        ClusterError: see `needs_token`.
    """
    gcs = worker_process.gcs_of(address)
    if gcs is None:
        return
    mode = os.environ.get(worker_process.AUTH_MODE)
    if needs_token(address, mode, local_ray.token(), lambda token: worker_process.is_let_in(gcs, token)):
        worker_process.use_token()
