"""Forked children of this process, such as those of data loaders, close its connections with the run at once.

A connection ends when the last process that holds it closes it. If a child held it, the others would not see that this
process is gone.
"""

from __future__ import annotations

import os
import socket
import weakref
from typing import IO, Any

_sockets = weakref.WeakSet[socket.socket]()
_pipes = weakref.WeakSet[IO[Any]]()


def close_in_children(connection: socket.socket | IO[Any]) -> None:
    """Have children that Python forks from now on close a connection. A child that C code forks keeps it open."""
    if isinstance(connection, socket.socket):
        _sockets.add(connection)
    else:
        _pipes.add(connection)


def _close_all() -> None:
    for each in list(_sockets):
        descriptor = each.detach()  # `close` would wait for files that were made of it
        if descriptor >= 0:
            os.close(descriptor)
    for pipe in list(_pipes):
        pipe.close()


os.register_at_fork(after_in_child=_close_all)
