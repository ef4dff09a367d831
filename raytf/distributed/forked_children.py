"""Forked children of this process, such as those of data loaders, close its connections with the run at once.

A connection ends when the last process that holds it closes it. If a child held it, the others would not see that this
process is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Collection
from typing import IO, Any

_sockets = weakref.WeakSet[socket.socket]()
_pipes = weakref.WeakSet[IO[Any]]()
_servers = set[str]()


def close_in_children(connection: socket.socket | IO[Any]) -> None:
    """Have children that Python forks from now on close a connection. A child that C code forks keeps it open."""
    if isinstance(connection, socket.socket):
        _sockets.add(connection)
    else:
        _pipes.add(connection)


def close_connections_with(paths: Collection[str]) -> None:
    """Have children that Python forks from now on close connections with these Unix sockets, those of libraries too.

    When Ray's connection with its raylet ends, Ray knows that this process is gone.
    """
    _servers.update(paths)


def _close_all() -> None:
    for each in list(_sockets):
        descriptor = each.detach()  # `close` would wait for files that were made of it
        if descriptor >= 0:
            os.close(descriptor)
    for pipe in list(_pipes):
        pipe.close()
    if _servers:
        _end_connections_with(_servers)


def _end_connections_with(paths: Collection[str]) -> None:
    with open(os.devnull, "r+b") as nothing:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the list's own is closed, and a socket may have no peer
                descriptor = int(name)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _peer_of(descriptor) in paths:
                    os.dup2(nothing.fileno(), descriptor)  # the library must not find something else there


def _peer_of(descriptor: int) -> Any:
    """The address of a socket's other end: of a Unix socket, the path that it is bound to."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()


os.register_at_fork(after_in_child=_close_all)
