"""Sockets of this process: forked children close them at once, and callers that have not said who they are get little
of it.

Whoever reaches a port can connect with it, as often as it likes. The files that this process may open and its time are
needed for others, so the oldest connection is closed where there are too many.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import stat
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import IO, Any

#: Seconds for a caller to say who it is.
CALL_SECONDS = 10.0
#: Callers at a time, if this process may open many files: workers of a large run connect at the same moment.
_MOST = 1024
#: Seconds to wait where this process can open no further file, and no caller's can be closed.
_FULL_SECONDS = 0.05
_connections = weakref.WeakSet[socket.socket | IO[Any]]()
_servers = set[str]()


def most_callers() -> int:
    """Return how many connections of callers may be open at a time: a quarter of the files that this process may open.

    Other files of this process and connections of the run's own need the rest.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(_MOST, files // 4))


class Callers:
    """Accepts connections at a socket, which it closes in the end with all callers that have not said who they are.

    Args:
        server: listens.
        size: bytes of what a caller says.
        most: callers at a time.
        seconds: for a caller to say who it is.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        server: socket.socket,
        size: int,
        most: int | None = None,
        seconds: float = CALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._server, self._size, self._seconds, self._clock = server, size, seconds, clock
        self._most = most_callers() if most is None else most
        #: Bytes received from each stranger so far, and when it connected; the oldest first.
        self._received: dict[socket.socket, tuple[bytes, float]] = {}
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> Callers:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for peer in self._received:
            peer.close()
        self._server.close()

    def calls(self, seconds: float) -> Iterator[tuple[socket.socket, bytes]]:
        """Wait until somebody calls, or for so many seconds.

        Yields:
            Connections, and what their other sides have said. They block, and the caller of this method closes them.
        """
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._server:
                self._accept()
            elif key.fileobj in self._received:
                message = self._hear(key.fileobj)
                if message is not None:
                    yield key.fileobj, message
        while self._received and self._clock() - next(iter(self._received.values()))[1] > self._seconds:
            self._drop_oldest()

    def _accept(self) -> None:
        try:
            peer, _ = self._server.accept()
        except BlockingIOError:
            return
        except OSError:  # mostly, this process has too many open files
            if self._received:
                self._drop_oldest()
            else:
                time.sleep(_FULL_SECONDS)
            return
        peer.setblocking(False)
        self._received[peer] = b"", self._clock()
        self._selector.register(peer, selectors.EVENT_READ)
        if len(self._received) > self._most:
            self._drop_oldest()

    def _hear(self, peer: Any) -> bytes | None:
        """Return what a caller has said, if that is all; one that has hung up is forgotten."""
        before, began = self._received[peer]
        try:
            more = peer.recv(self._size - len(before))
        except BlockingIOError:
            return None
        except OSError:
            more = b""
        received = before + more
        if more and len(received) < self._size:
            self._received[peer] = received, began
            return None
        self._selector.unregister(peer)
        del self._received[peer]
        if not more:
            peer.close()
            return None
        peer.setblocking(True)
        return received

    def _drop_oldest(self) -> None:
        peer = next(iter(self._received))
        del self._received[peer]
        with contextlib.suppress(KeyError):
            self._selector.unregister(peer)
        peer.close()


# A connection ends when the last process that holds it closes it. If a child held it, the others would not see that
# this process is gone.


def close_in_children(connection: socket.socket | IO[Any]) -> None:
    """Have children that Python forks from now on close a connection. A child that C code forks keeps it open."""
    _connections.add(connection)


def close_connections_with(paths: Collection[str]) -> None:
    """Have children that Python forks from now on close connections with these Unix sockets, those of libraries too.

    When Ray's connection with its raylet ends, Ray knows that this process is gone.
    """
    _servers.update(paths)


def _close_all() -> None:
    for each in sorted(_connections, key=lambda one: not isinstance(one, socket.socket)):  # a pipe may fail to close
        if not isinstance(each, socket.socket):
            each.close()
        elif (descriptor := each.detach()) >= 0:  # `close` would wait for files that were made of it
            os.close(descriptor)
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
    """Return the address of a socket's other end: of a Unix socket, the path that it is bound to."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()


os.register_at_fork(after_in_child=_close_all)
