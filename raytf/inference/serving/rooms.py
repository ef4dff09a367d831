"""Memory and disk of a process that serves: who may take how much, in which order, and how it is given back."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import tempfile
from collections.abc import AsyncIterator
from http import HTTPStatus
from types import TracebackType

from raytf.inference.serving.errors import Refusal

#: Of mallopt(3), in <malloc.h> of glibc.
_MMAP_THRESHOLD, _ARENA_MAX = -3, -8
#: Bytes from which a block is mapped by itself and unmapped when it is freed.
_LARGE = 1 << 20
#: Heaps from which threads take what is smaller.
_ARENAS = 2
#: Bytes of each spool that are in memory.
_IN_MEMORY = 16 << 10
#: A spool of that size never waits for the room that large ones take.
_SMALL = 128 << 10


def return_freed_memory() -> None:
    """Have this process's allocator give large blocks back at once, and keep few heaps.

    glibc lets the size from which it maps a block by itself grow to 32 MiB as such blocks are freed, and gives each
    thread a heap of its own: what bodies of that size took would stay with the process, once for each thread. Another
    C library is left as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGE)
        libc.mallopt(_ARENA_MAX, _ARENAS)


class RoomQueue:
    """Bytes of memory or of disk, handed out in the order in which they were asked for.

    Args:
        capacity: in all; who asks for more has it alone.
    """

    def __init__(self, capacity: int):
        self._free = self._capacity = max(1, capacity)
        self._turn, self._returned = asyncio.Lock(), asyncio.Event()

    @contextlib.asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold this many bytes, as soon as they are free, until the end of the context."""
        size = min(size, self._capacity)
        async with self._turn:  # a lock is given in the order of those who wait
            while self._free < size:
                self._returned.clear()
                await self._returned.wait()
            self._free -= size
        try:
            yield
        finally:
            self._free += size
            self._returned.set()


class DiskRoom:
    """Room for all spools of a process.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: int):
        self._capacity, self._used = capacity, 0

    def take(self, size: int, is_small: bool = False) -> None:
        """Count this many bytes more; negative ones are given back.

        Raises:
            Refusal: there is no room for them now, and the spool is not small.
        """
        if size > 0 and not is_small and self._used + size > self._capacity:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "Too many large requests at once. Try again in a second.")
        self._used += size


class Spool:
    """A body or an answer while it is not needed: a few KiB in memory, the rest in a file without a name.

    It is written, then read from the beginning. Its bytes are gone at the end of the context.
    """

    def __init__(self, disk: DiskRoom):
        self._disk = disk
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY, prefix="raytf-serve-")  # noqa: SIM115
        self.size = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._disk.take(-self.size)
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append.

        Raises:
            Refusal: there is no room for it.
        """
        self._disk.take(len(data), self.size + len(data) <= _SMALL)
        self.size += len(data)
        try:
            self._file.write(data)
        except OSError as error:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, f"The server's disk takes no more: {error}") from error

    def clear(self) -> None:
        """Forget what was written."""
        self._file.seek(0)
        self._file.truncate()
        self._disk.take(-self.size)
        self.size = 0

    def rewind(self) -> None:
        """Read from the beginning."""
        self._file.seek(0)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes, none at the end."""
        return self._file.read(size)
