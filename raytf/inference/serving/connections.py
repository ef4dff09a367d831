"""Limits connections: large or slow headers, slow bodies, idle sockets, answers that the client does not read.

uvicorn's own protocol accepts headers of any size and waits for them forever, out of an ASGI application's sight.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http import auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from raytf.inference.serving.limits import ServingLimits

#: Seconds between two checks of all connections.
_CHECK_SECONDS = 0.5
_TOO_LARGE = "The headers are larger than {} KiB."
_SLOW_BODY = "The body arrived too slowly. Send it without pauses."


def install(limits: ServingLimits) -> None:
    """Make uvicorn servers that this process starts from now on use bounded connections.

    Ray Serve creates its uvicorn server itself, without a setting for the protocol, so it uses uvicorn's default.
    """
    auto.AutoHTTPProtocol = bounded(limits)


def bounded(limits: ServingLimits) -> type[Connection]:
    """Return the class of one server's connections, which share the limits."""
    return type("BoundedProtocol", (Connection,), {"crowd": Connections(limits), "limits": limits})


def least_missed(connections: Iterable[Connection]) -> Connection | None:
    """Return the connection to close for a new one, or None if all have requests in progress."""
    idle = (connection for connection in connections if connection.is_idle)
    return min(idle, key=lambda connection: (connection.is_known, connection.since), default=None)


def in_the_way(connections: Iterable[Connection], now: float, limits: ServingLimits) -> list[Connection]:
    """Return the connections with the slowest bodies, beyond those that may arrive at the same time."""
    old = [one for one in connections if one.is_receiving and now - one.since >= limits.patience_seconds]
    old.sort(key=lambda connection: (connection.received / (now - connection.since), connection.since))
    return old[: max(0, len(old) - limits.bodies)]


class Connections:
    """All connections of a server."""

    def __init__(self, limits: ServingLimits):
        self._limits = limits
        self._all: set[Connection] = set()
        self._lingering: set[Connection] = set()
        self._is_checking = False

    def add(self, connection: Connection) -> None:
        """Add a new connection, and close another one if there are too many."""
        self._all.add(connection)
        if len(self._all) > self._limits.connections:
            victim = least_missed(self._all) or connection
            self._all.discard(victim)
            victim.abort()
        if not self._is_checking:
            self._check_later()

    def remove(self, connection: Connection) -> None:
        self._all.discard(connection)
        self._lingering.discard(connection)

    def linger(self, connection: Connection) -> bool:
        """Return whether a refused connection may still be read from; if so, count it."""
        if len(self._lingering) >= self._limits.lingering:
            return False
        self._lingering.add(connection)
        return True

    def pause(self, size: int) -> float:
        """Return how many seconds to pause a refused connection after `size` bytes: all of them share one rate."""
        return size * len(self._lingering) / self._limits.linger_rate

    def _check_later(self) -> None:
        self._is_checking = bool(self._all)
        if self._is_checking:
            asyncio.get_running_loop().call_later(_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        now = time.monotonic()
        for connection in in_the_way(self._all, now, self._limits):
            connection.refuse(HTTPStatus.REQUEST_TIMEOUT, _SLOW_BODY)
        for connection in list(self._all):
            connection.check(now)
        self._check_later()


class Connection(HttpToolsProtocol):
    """A connection within the limits.

    Attributes:
        since: time of the latest of: first byte of the headers, end of the headers, end of the answer.
        received: bytes of the body so far.
        is_known: whether it has received an answer.
    """

    crowd: Connections
    limits: ServingLimits

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._real = transport
        self.since = self._checked_at = time.monotonic()
        self.is_known, self._is_in_headers = False, True
        self.received = self._checked = self._taken = self._lingered = 0
        self._stalled_at: float | None = None
        self._ended_at: float | None = None
        self._is_lingering = False
        super().connection_made(_LingeringTransport(transport, self))  # type: ignore[arg-type]
        self.crowd.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.crowd.remove(self)
        super().connection_lost(exc)

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def is_receiving(self) -> bool:
        """Whether the server waits for the client to send more of a body."""
        is_paused = self.flow.read_paused or self.pipeline  # by this server
        return not (self._is_in_headers or self.is_idle or self.is_ended or is_paused)

    @property
    def is_ended(self) -> bool:
        return self._ended_at is not None

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            self._lingered += len(data)
            if self._lingered > self.limits.linger_bytes:
                self.abort()
            else:
                self._real.pause_reading()
                self.loop.call_later(self.crowd.pause(len(data)), self._listen)
            return
        limit = self.limits.header_bytes
        while data and not self.is_ended and self.parser is not None:
            # The parser keeps whole headers, so it never gets more than the limit.
            some = data[: max(1, limit + 1 - self._taken)] if self._is_in_headers else data
            data = data[len(some) :]
            if self._is_in_headers and not self._taken:
                self.since = time.monotonic()
            self._taken += len(some)
            super().data_received(some)
            if self.is_ended or self.parser is None:
                return
            if self._is_in_headers and self._taken > limit:
                self.refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _TOO_LARGE.format(limit >> 10))
            elif self._taken - 2 * self.received > limit + self.limits.framing_bytes:
                self.refuse(HTTPStatus.BAD_REQUEST, "The chunks of this body are too small, or its trailers too large.")

    def eof_received(self) -> None:
        if self._is_lingering:
            self._real.close()

    # Callbacks of the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_headers:  # not trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_headers = False
        self.since, self._checked_at, self._checked = time.monotonic(), time.monotonic(), 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_headers, self._taken, self.received = True, 0, 0  # headers come next
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self.is_known, self.since = True, time.monotonic()
        super().on_response_complete()

    def _should_upgrade(self) -> bool:
        return False  # the application answers WebSocket requests, too

    def send_400_response(self, msg: str) -> None:
        self.refuse(HTTPStatus.BAD_REQUEST, "This is not an HTTP/1.1 request.")

    # Limits
    def check(self, now: float) -> None:
        """Close the connection if the client is too slow."""
        limits = self.limits
        if self._stalled_at is not None and now - self._stalled_at > limits.stall_seconds:
            self.abort()
        elif self._ended_at is not None:
            wait = limits.linger_seconds if self._is_lingering else limits.stall_seconds
            if now - self._ended_at > wait:
                self.abort()
        elif self.is_idle and now - self.since > limits.header_seconds:
            if not self._is_in_headers:
                self.abort()  # the answer was sent long ago, but the body still arrives
            elif self._taken:
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, f"Headers incomplete after {limits.header_seconds:g} s.")
            elif not self.is_known:  # after an answer, uvicorn's own timeout applies
                self.end()
        elif not self.is_receiving:  # while the server does not read, the client is not slow
            self._checked_at, self._checked = now, self.received
        elif now - self._checked_at > limits.grace_seconds:
            is_slow = limits.is_too_slow(self.received, self._checked, now - self._checked_at)
            if is_slow or now - self.since > limits.body_seconds:
                self.refuse(HTTPStatus.REQUEST_TIMEOUT, _SLOW_BODY)
            self._checked_at, self._checked = now, self.received

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer instead of the application, and close the connection."""
        body = json.dumps({"error": message}).encode()
        if self.is_idle or not self.cycle.response_started:
            lines = (
                f"HTTP/1.1 {status.value} {status.phrase}",
                "content-type: application/json",
                f"content-length: {len(body)}",
                "connection: close",
            )
            self.transport.write("\r\n".join((*lines, "", "")).encode() + body)
        self.end()
        if self.cycle is not None and not self.cycle.response_complete:  # tell the application
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def end(self) -> None:
        """Close, but keep reading for a while if the client still sends, so that it receives its answer."""
        if self._ended_at is not None:
            return
        self._ended_at = time.monotonic()
        is_sending = (self._is_in_headers and self._taken > 0) or (self.cycle is not None and self.cycle.more_body)
        if self._real.is_closing() or not (is_sending and self._real.can_write_eof() and self.crowd.linger(self)):
            self._real.close()
            return
        self._is_lingering = True
        self.flow.resume_reading()
        self._real.write_eof()

    def _listen(self) -> None:
        if not self._real.is_closing():
            self._real.resume_reading()

    def abort(self) -> None:
        self._ended_at = self._ended_at or time.monotonic()
        self._real.abort()

    def pause_writing(self) -> None:
        self._stalled_at = time.monotonic()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_at = None
        super().resume_writing()


class _LingeringTransport:
    """A transport that leaves closing to the connection, which may linger, and ignores writes after that."""

    def __init__(self, real: asyncio.Transport, connection: Connection):
        self._real, self._connection = real, connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def write(self, data: bytes) -> None:
        if not self._connection.is_ended:
            self._real.write(data)

    def close(self) -> None:
        self._connection.end()

    def is_closing(self) -> bool:
        return self._connection.is_ended or self._real.is_closing()
