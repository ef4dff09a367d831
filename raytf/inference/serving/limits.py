"""Limits of a server: the numbers, room in memory and on disk, and refusals of requests beyond them."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

#: Parameters of mallopt(3), from glibc's <malloc.h>.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
#: Bytes from which a block is mapped by itself and unmapped when it is freed; heaps for smaller blocks.
_LARGE, _ARENAS = 1 << 20, 2
#: Bytes of each spool that are in memory.
_IN_MEMORY = 16 << 10
#: A spool of this size is never refused for lack of room.
_SMALL = 128 << 10


class Refusal(Exception):
    """Raised for a request that is answered with an HTTP error."""

    def __init__(self, status: HTTPStatus, message: str):
        super().__init__(message)
        self.status = status


def bad(message: str) -> Refusal:
    """Return the refusal of a bad request."""
    return Refusal(HTTPStatus.BAD_REQUEST, message)


def busy(message: str) -> Refusal:
    """Return the refusal of a request that the client should send again later."""
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, message)


@dataclass(frozen=True)
class ServingLimits:
    """Limits of one HTTP proxy.

    Attributes:
        header_bytes: of a request's line and headers; more is a 431.
        header_seconds: for them to arrive, and for the first byte of a connection; later is a 408.
        connections: at the same time; beyond, an idle one is closed, those that never asked anything first.
        bodies: that are still arriving after `patience_seconds`, at the same time; beyond, the slowest are refused.
            Younger ones do not count, so that nobody who sends all at once is ever refused for others.
        body_rate: bytes a second that a body must arrive with, on average of each `grace_seconds`; slower is a 408.
        body_seconds: for a whole body.
        intake_rate: bytes a second, unpacked, that are read of all large bodies together: small bodies would wait if
            these were read faster, and replicas take no more.
        framing_bytes: that chunked coding may add to a body, beside as many bytes as the body has.
        stall_seconds: for which a client may stop reading its answer.
        linger_seconds, linger_bytes: for which a refused client is still read from, so that it gets its answer.
        lingering: refused clients that are read from at the same time.
        linger_rate: bytes a second that are read of all of them together.
        small_bytes: a body up to this size is sent to a replica at once; a larger one waits on disk for its turn.
        memory_bytes: of small bodies that replicas are answering, in all.
        disk_bytes: of bodies and answers on disk, in all.
        large: bodies above `small_bytes` that replicas are answering, at the same time.
        turn_seconds: for which a complete body waits for its turn; later is a 503.
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

    def is_too_slow(self, got: int, before: int, seconds: float) -> bool:
        """Whether a body that had `before` bytes some seconds ago and has `got` bytes now arrives too slowly.

        The more bytes it has, the less it may slow down.
        """
        return got - before < max(self.body_rate, got / self.body_seconds) * seconds


def return_freed_memory() -> None:
    """Configure this process's allocator to return large blocks at once, and to keep few heaps.

    When blocks are freed, glibc raises the size from which it maps a block by itself to up to 32 MiB, and each thread
    has a heap of its own. Memory for bodies of that size would stay with the process, once for each thread. Other C
    libraries are not changed.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)


class RoomQueue:
    """Bytes of memory or disk, granted in the order of the requests; one for more than `capacity` gets all of it."""

    def __init__(self, capacity: int):
        self._free = self._capacity = max(1, capacity)
        self._turn, self._returned = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, size: int, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait until this many bytes are free, and hold them until the end of the context.

        Raises:
            Refusal: they are not free within this many seconds.
        """
        size = min(size, self._capacity)
        try:
            async with asyncio.timeout(seconds), self._turn:  # a lock is fair: the first that waits gets it
                while self._free < size:
                    self._returned.clear()
                    await self._returned.wait()
                self._free -= size
        except TimeoutError:
            raise busy("The server is busy. Try again in some seconds.") from None
        try:
            yield
        finally:
            self._free += size
            self._returned.set()


class DiskRoom:
    """Bytes that all spools of a process may take."""

    def __init__(self, capacity: int):
        self._capacity, self._used = capacity, 0

    def take(self, size: int, is_small: bool = False) -> None:
        """Take this many bytes; a negative number returns them.

        Raises:
            Refusal: they are not free, and the spool is not small.
        """
        if size > 0 and not is_small and self._used + size > self._capacity:
            raise busy("Too many large requests at once. Try again in a second.")
        self._used += size


class Spool(tempfile.SpooledTemporaryFile[bytes]):
    """A body or an answer that waits, a few KiB in memory and the rest in a file without a name; a context manager.

    It is written, then read from the beginning. At the end of the context its bytes are deleted.
    """

    def __init__(self, disk: DiskRoom):
        super().__init__(_IN_MEMORY, prefix="raytf-serve-")
        self._disk, self.size = disk, 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._disk.take(-self.size)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append.

        Raises:
            Refusal: there is no room for it.
        """
        self._disk.take(len(data), self.size + len(data) <= _SMALL)
        self.size += len(data)
        try:
            return super().write(data)
        except OSError as error:
            raise busy(f"The server's disk takes no more: {error}") from error

    def clear(self) -> None:
        self.seek(0)
        self.truncate()
        self._disk.take(-self.size)
        self.size = 0
