"""Where the ranks of a group meet. Each listens before anybody knows the addresses of all, so that nobody else can take
its port; a server of TensorFlow's takes it over (`MultiWorkerGroup`)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from raytf.distributed.forked_children import close_in_children

#: Connections that may wait to be accepted: two of each rank. Where it is less, a busy rank would seem to be cut off.
_BACKLOG = 4096

#: Sockets that listen and have not been taken yet, by their HOST:PORT.
_listening: dict[str, socket.socket] = {}


@dataclass(frozen=True)
class Meeting:
    """A rank's place in its group, and how it finds the others.

    Attributes:
        rank: this rank.
        addresses: HOST:PORT of each rank.
        key: 32 random bytes that the ranks of this group know, and nobody else.
        is_over: whether a rank is known to be lost or to have left; ends the meeting.
        is_lost: whether a rank is known to be lost. A rank that has left has finished its step with all others.
    """

    rank: int
    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    is_over: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    is_lost: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    def server(self) -> socket.socket:
        """A socket that listens at this rank's address; who takes it has to close it.

        Raises:
            OSError: another process listens there.
        """
        own = self.addresses[self.rank]
        return _listening.pop(own, None) or _listen(*parsed(own))

    def close(self) -> None:
        """Do not listen any more, if nobody has taken the socket."""
        server = _listening.pop(self.addresses[self.rank], None)
        if server is not None:
            server.close()


def listen(host: str) -> str:
    """Listen at a free port of this machine, which others reach by an address, for a `Meeting` of this process.

    Returns:
        HOST:PORT.

    Raises:
        OSError: no port is free.
    """
    server = server_at(host)
    address = joined(host, server.getsockname()[1])
    _listening[address] = server
    return address


def joined(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_at(host: str) -> socket.socket:
    """A socket that listens at a free port of this machine, which others reach by an address."""
    return _listen(host, 0)


def parsed(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # An address that others translate to this machine's, as Ray's --node-ip-address may be.
        server = socket.create_server(("", port), family=family, backlog=_BACKLOG)
    close_in_children(server)
    return server


_mine: Meeting | None = None


def take(meeting: Meeting) -> None:
    """Give this process its place in a group."""
    global _mine
    _mine = meeting


def mine() -> Meeting:
    """This process's place in its group."""
    assert _mine is not None, "worker.set_up comes first"
    return _mine
