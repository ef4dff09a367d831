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
#: Bytes from which a block has its own mapping, which ends when it is freed; number of heaps for smaller blocks.
_LARGE, _ARENAS = 1 << 20, 2
#: Bytes that each spool keeps in memory.
_IN_MEMORY = 16 << 10
#: A spool of this size is never refused for lack of room.
_SMALL = 128 << 10


class Refusal(Exception):
    """Raised to answer a request with an HTTP error."""

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
        header_bytes: size of a request's line and headers; a larger one gets a 431.
        header_seconds: time for the headers and for the first byte of a connection to arrive; then it gets a 408.
        connections: number of open connections; beyond it, an idle one is closed, if possible one without an answer.
        bodies: number of bodies that are still arriving after `patience_seconds`; beyond it, the slowest are refused.
            Younger bodies do not count, so that no client that sends without pauses is refused because of others.
        body_rate: bytes a second of a body, on average over each `grace_seconds`; a slower one gets a 408.
        body_seconds: time for a whole body.
        intake_rate: bytes a second, unpacked, to read from all large bodies together. Reading them faster would delay
            small bodies, and replicas could not keep up.
        framing_bytes: bytes that chunked coding may add to a body, in addition to as many bytes as the body has.
        stall_seconds: time for which a client may stop reading its answer.
        linger_seconds, linger_bytes: how long and how much to read from a refused client, so that it gets its answer.
        lingering: number of refused clients to read from at the same time.
        linger_rate: bytes a second to read from all of them together.
        small_bytes: size up to which a body is sent to a replica at once; a larger one waits on disk for its turn.
        memory_bytes: total size of the small bodies that replicas are answering.
        disk_bytes: total size of bodies and answers on disk.
        large: number of bodies above `small_bytes` that replicas are answering.
        turn_seconds: time for which a complete body waits for its turn; then it gets a 503.
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
        """Return whether a body that grew from `before` to `got` bytes in some seconds arrives too slowly.

        The more bytes it has, the less it may slow down.
        """
        return got - before < max(self.body_rate, got / self.body_seconds) * seconds


def return_freed_memory() -> None:
    """Configure this process's allocator to return large blocks at once, and to keep few heaps.

    When large blocks are freed, glibc raises the size (up to 32 MiB) from which a block has its own mapping, and each
    thread has its own heap. The process would keep memory for bodies of that size, once for each thread. Other C
    libraries are not configured.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)


class RoomQueue:
    """Grants bytes of memory or disk in the order of requests; a request for more than `capacity` gets all of it."""

    def __init__(self, capacity: int):
        self._free = self._capacity = max(1, capacity)
        self._turn, self._returned = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, size: int, seconds: float | None = None) -> AsyncIterator[None]:
        """Wait until this many bytes are free, and hold them until the end of the context.

        Raises:
            Refusal: the bytes are not free within this many seconds.
        """
        size = min(size, self._capacity)
        try:
            async with asyncio.timeout(seconds), self._turn:  # a lock is fair: it goes to the first waiter
                while self._free < size:
                    self._returned.clear()
                    await self._returned.wait()
                self._free -= size
        except TimeoutError:
            raise busy("The server is busy. Try again in a few seconds.") from None
        try:
            yield
        finally:
            self._free += size
            self._returned.set()


class DiskRoom:
    """The bytes on disk that all spools of a process share."""

    def __init__(self, capacity: int):
        self._capacity, self._used = capacity, 0

    def take(self, size: int, is_small: bool = False) -> None:
        """Take this many bytes; a negative number returns them.

        Raises:
            Refusal: the bytes are not free, and the spool is not small.
        """
        if size > 0 and not is_small and self._used + size > self._capacity:
            raise busy("Too many large requests at once. Try again in a second.")
        self._used += size


class Spool(tempfile.SpooledTemporaryFile[bytes]):
    """A waiting body or answer: a few KiB in memory, and the rest in an unnamed file. A context manager.

    It is written, then read from the beginning. At the end of the context, it is deleted.
    """

    def __init__(self, disk: DiskRoom):
        super().__init__(_IN_MEMORY, prefix="raytf-serve-")
        self._disk, self.size = disk, 0

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._disk.take(-self.size)

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Append data.

        Raises:
            Refusal: there is no room for the data.
        """
        self._disk.take(len(data), self.size + len(data) <= _SMALL)
        self.size += len(data)
        try:
            return super().write(data)
        except OSError as error:
            raise busy(f"The server cannot write to its disk: {error}") from error

    def clear(self) -> None:
        self.seek(0)
        self.truncate()
        self._disk.take(-self.size)
        self.size = 0
