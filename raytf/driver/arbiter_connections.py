"""Connections with the arbiter, in asyncio's loop: of strangers at first, which are few, short and read little.

Whoever reaches the arbiter's port can connect with it. Until a connection has proved that it belongs to the run, it is
one of a limited number, of which the oldest is closed first; it has some seconds, and a few kilobytes are read of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable
from typing import Protocol, cast

from raytf.distributed.callers import CALL_SECONDS, most_callers
from raytf.distributed.forked_children import close_in_children
from raytf.distributed.sealed_lines import ARBITER, Seal, encoded

#: Bytes that are read of who has not proved who it is.
_GREETING_BYTES = 1 << 12
#: Seconds until the next connection is accepted where this process can open no further file.
_FULL_SECONDS = 0.5


class Peer(Protocol):
    """What the arbiter needs of the connection with a worker."""

    def write(self, line: bytes) -> None: ...

    def close(self) -> None: ...


class Connection(asyncio.Protocol):
    """A connection with the arbiter.

    Args:
        door: has accepted it.
        greet: called with the first line; calls `let_in`, or raises ValueError for a stranger.

    Attributes:
        challenge: random; who knows the run's secret answers it with a proof.
        key: of this connection, once it was let in.
        beside: the connection for heartbeats of the same worker.
    """

    def __init__(self, door: Door, greet: Callable[[Connection, bytes], None]):
        self.challenge, self.key = secrets.token_hex(16), b""
        self.beside: Connection | None = None
        self._door, self._hear, self._most_bytes = door, lambda line: greet(self, line), _GREETING_BYTES
        self._gone: Callable[[], None] | None = None
        self._seal: Seal | None = None
        self._read = bytearray()

    def let_in(
        self, hear: Callable[[bytes], None], gone: Callable[[], None], most_bytes: int, key: bytes = b""
    ) -> None:
        """This connection is not a stranger's any more.

        Args:
            hear: called with each further line; raises ValueError if it is none that can be understood.
            gone: called when the connection has ended.
            most_bytes: of a line.
            key: seals what is written from now on.
        """
        self._hear, self._gone, self._most_bytes, self.key = hear, gone, most_bytes, key
        self._seal = Seal(key, ARBITER) if key else None
        self._door.forget(self)

    def write(self, line: bytes) -> None:
        """Send a line."""
        self._transport.write(line if self._seal is None else self._seal.sealed(line))

    def close(self) -> None:
        """End the connection once what was written has been sent."""
        self._transport.close()
        if self.beside is not None:
            self.beside.abort()

    def abort(self) -> None:
        """End the connection now."""
        self._transport.abort()

    @property
    def socket(self) -> socket.socket:
        found: socket.socket = self._transport.get_extra_info("socket")
        return found

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._door.note(self)
        self.write(encoded({"challenge": self.challenge}))

    def data_received(self, data: bytes) -> None:
        begin = len(self._read)
        self._read += data
        while not self._transport.is_closing():
            end = self._read.find(b"\n", begin)
            if (end if end >= 0 else len(self._read)) > self._most_bytes:
                self.abort()
                return
            if end < 0:
                return
            line, begin = bytes(self._read[: end + 1]), 0
            del self._read[: end + 1]
            try:
                self._hear(line)
            except ValueError:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.ended(self)
        if self.beside is not None:
            self.beside.abort()
        if self._gone is not None:
            self._gone()


class Door:
    """Accepts connections with the arbiter; used within asyncio's loop alone.

    Args:
        listening: accepts connections; closed in the end.
        greet: as of `Connection`.
        seconds: for a connection to prove that it belongs to the run.
    """

    def __init__(
        self, listening: socket.socket, greet: Callable[[Connection, bytes], None], seconds: float = CALL_SECONDS
    ):
        self._listening, self._greet, self._seconds = listening, greet, seconds
        self._most = most_callers()
        self._loop = asyncio.get_running_loop()
        #: Connections that have not proved who they are, the oldest first, and what closes them.
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._all: set[Connection] = set()
        self._starting: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept connections from now on."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Accept no further connection, and end all."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for end in (Connection.close, Connection.abort):  # first send what was written, if that needs no waiting
            for connection in list(self._all):
                end(connection)
            await asyncio.sleep(0)

    def note(self, connection: Connection) -> None:
        """A connection begins, as a stranger's."""
        self._all.add(connection)
        self._strangers[connection] = self._loop.call_later(self._seconds, connection.abort)
        if len(self._strangers) > self._most:
            self._drop_oldest()

    def forget(self, connection: Connection) -> None:
        """A connection is not a stranger's any more."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def ended(self, connection: Connection) -> None:
        """A connection has ended."""
        self.forget(connection)
        self._all.discard(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError:  # mostly, this process has too many open files
            self._make_room()
            return
        close_in_children(peer)
        task = self._loop.create_task(self._begin(peer))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has hung up
            peer.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: Connection(self, self._greet), peer)

    def _make_room(self) -> None:
        if self._strangers:
            self._drop_oldest()
            return
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_FULL_SECONDS, self._open_again)

    def _drop_oldest(self) -> None:
        connection = next(iter(self._strangers))
        self.forget(connection)
        connection.abort()

    def _open_again(self) -> None:
        if self._listening.fileno() >= 0:
            self.open()
