"""What a client may take of the server: the numbers, who is too slow, who goes when there is no more room.

Pure but for `RoomQueue`, which hands out a number of bytes in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class ServingLimits:
    """Of one HTTP proxy.

    Attributes:
        header_bytes: of a request's line and headers; more is a 431.
        header_seconds: for them to arrive, and for the first byte of a connection; later is a 408.
        connections: at the same time; beyond, one that asks nothing is closed, those that never asked anything first.
        bodies: that are still arriving after `patience_seconds`, at the same time; beyond, the slowest of them are
            refused. Younger ones do not count, so that nobody who sends all at once is ever refused for others; there
            are no more of them than `connections`.
        body_rate: bytes a second that a body must arrive with, on average of each `grace_seconds`; slower is a 408.
        body_seconds: for a whole body.
        intake_rate: bytes a second, unpacked, that are taken of all bodies together that are not small: reading them at
            once would keep small ones waiting, and replicas read no faster.
        framing_bytes: that chunked coding may add to a body, beside as many bytes as the body has.
        stall_seconds: for which a client may take nothing of its answer.
        linger_seconds, linger_bytes: that a refused client may still send, so that it sees why.
        lingering: refused clients that are listened to so.
        linger_rate: bytes a second that are read of all of them together.
        small_bytes: a body up to that is given to a replica as it is; a larger one waits on disk for its turn.
        memory_bytes: of small bodies on their way, in all.
        disk_bytes: of bodies and answers on disk, in all.
        large: bodies above `small_bytes` on their way to replicas, at the same time.
        turn_seconds: for which a body that has arrived waits for its turn; later is a 503.
    """

    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    connections: int = 1024
    bodies: int = 256
    patience_seconds: float = 1.0
    grace_seconds: float = 5.0
    body_rate: float = 1024.0
    body_seconds: float = 300.0
    intake_rate: float = 32e6
    framing_bytes: int = 64 << 10
    stall_seconds: float = 20.0
    linger_seconds: float = 5.0
    linger_bytes: int = 64 << 20
    lingering: int = 32
    linger_rate: float = 32e6
    small_bytes: int = 128 << 10
    memory_bytes: int = 8 << 20
    disk_bytes: int = 512 << 20
    large: int = 16
    turn_seconds: float = 30.0


class ArrivingBody(Protocol):
    """A body that is on its way: when it began, how much of it there is; when it was looked at, how much there was."""

    began: float
    got: int
    seen_at: float
    seen: int


class IdleConnection(Protocol):
    """A connection: whether it asks nothing now, whether it has ever got an answer, since when it is as it is."""

    @property
    def is_idle(self) -> bool: ...

    @property
    def is_known(self) -> bool: ...

    @property
    def since(self) -> float: ...


A = TypeVar("A", bound=ArrivingBody)
W = TypeVar("W", bound=IdleConnection)


def is_too_slow(body: ArrivingBody, now: float, limits: ServingLimits) -> bool:
    """Whether a body has come too slowly since it was looked at: the more there is, the less it may slow down.

    To be asked when `grace_seconds` have gone by since then.
    """
    least = max(limits.body_rate, body.got / limits.body_seconds)
    return body.got - body.seen < least * (now - body.seen_at)


def in_the_way(bodies: Iterable[A], now: float, limits: ServingLimits) -> list[A]:
    """The slowest bodies, which make room for another one; none as long as there is some."""
    old = [body for body in bodies if now - body.began >= limits.patience_seconds]
    old.sort(key=lambda body: (body.got / (now - body.began), body.began))
    return old[: max(0, len(old) - limits.bodies + 1)]


def least_missed(connections: Iterable[W]) -> W | None:
    """The connection that makes room for another one.

    Returns:
        None where all are being answered.
    """
    idle = (connection for connection in connections if connection.is_idle)
    return min(idle, key=lambda connection: (connection.is_known, connection.since), default=None)


class RoomQueue:
    """Bytes of memory or of disk for those who ask, in the order in which they do.

    Args:
        capacity: in all; who asks for more has it alone.
    """

    def __init__(self, capacity: int):
        self._free = self._capacity = max(1, capacity)
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """So many bytes, as soon as there are, until the end."""
        size = min(size, self._capacity)
        await self._take(size)
        try:
            yield
        finally:
            self._free += size
            self._admit()

    async def _take(self, size: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._free += size
            else:
                self._queue = deque(entry for entry in self._queue if entry[1] is not turn)
            self._admit()
            raise

    def _admit(self) -> None:
        while self._queue and self._queue[0][0] <= self._free:
            size, turn = self._queue.popleft()
            if not turn.done():
                self._free -= size
                turn.set_result(None)
