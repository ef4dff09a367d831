"""Sockets of this process: forked children close them, and unidentified callers cannot exhaust its resources.

Anybody who reaches a port can connect to it any number of times. To keep file descriptors and time for the callers that
belong to the run, the oldest unidentified caller is disconnected if there are too many.
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

#: Seconds for a caller to identify itself.
CALL_SECONDS = 10.0
#: Most callers at once, if this process may open many files: the workers of a large run connect at the same time.
_MOST = 1024
#: Seconds to wait if this process cannot open another file and there is no caller to disconnect.
_FULL_SECONDS = 0.05
_connections = weakref.WeakSet[socket.socket | IO[Any]]()
_servers = set[str]()


def most_callers() -> int:
    """Return how many callers may be connected at once: at most a quarter of the files that this process may open.

    The other files and the run's own connections need the rest.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if files == resource.RLIM_INFINITY else max(1, min(_MOST, files // 4))


class Callers:
    """Accepts connections at a socket. On exit, closes the socket and all callers that have not identified themselves.

    Args:
        server: the listening socket.
        size: length of a caller's first message in bytes.
        most: most callers at once.
        seconds: time for a caller to identify itself.
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
        #: Bytes received from each unidentified caller so far, and when it connected; the oldest first.
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
        """Wait up to `seconds` for callers.

        Yields:
            Blocking connections, which the caller of this method must close, and the first message received on each.
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
        """Return a caller's first message if it is complete, else None. Forget a caller that has disconnected."""
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


# A connection ends when the last process that holds it closes it. If a child held it, peers would not notice that this
# process is gone.


def close_in_children(connection: socket.socket | IO[Any]) -> None:
    """Close a connection in every child that Python forks from now on. Children that C code forks keep it open."""
    _connections.add(connection)


def close_connections_with(paths: Collection[str]) -> None:
    """Close connections to these Unix sockets, even those of libraries, in every child that Python forks from now on.

    Ray notices that this process is gone when the connection to its raylet ends.
    """
    _servers.update(paths)


def _close_all() -> None:
    for each in sorted(_connections, key=lambda one: not isinstance(one, socket.socket)):  # a pipe may fail to close
        if not isinstance(each, socket.socket):
            each.close()
        elif (descriptor := each.detach()) >= 0:  # `close` would wait for file objects of this socket
            os.close(descriptor)
    if _servers:
        _end_connections_with(_servers)


def _end_connections_with(paths: Collection[str]) -> None:
    with open(os.devnull, "r+b") as nothing:
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the descriptor of listdir is closed, and a socket may have no peer
                descriptor = int(name)
                if stat.S_ISSOCK(os.fstat(descriptor).st_mode) and _peer_of(descriptor) in paths:
                    os.dup2(nothing.fileno(), descriptor)  # no other file must get this number


def _peer_of(descriptor: int) -> Any:
    """Return the address of a socket's peer; for a Unix socket, the path to which the peer is bound."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        return connection.getpeername()


os.register_at_fork(after_in_child=_close_all)
