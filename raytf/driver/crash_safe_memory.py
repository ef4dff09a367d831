"""Bytes that outlive the process that writes them, in files without a name (memfd) that another process holds open.

There are two files, written in turn, and only a complete one counts. So a process that is killed while it writes leaves
what it wrote before.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

#: Number of the write, number of bytes, and a checksum of both and of the bytes that follow.
_HEAD = struct.Struct("<QQI")


class CrashSafeMemory:
    """Holds what a process writes, for another process or its own successor to read. Can be sent to other processes.

    Args:
        paths: of two files that exist; see `held`.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths, self._number = tuple(paths), 0

    def read(self) -> bytes | None:
        """The bytes that were written last.

        Returns:
            None if nothing was written.

        Raises:
            OSError: the process that held the files is gone, or they are another user's.
        """
        found = [_parse(_whole(path)) for path in self._paths]
        self._number, data = max((one for one in found if one is not None), default=(0, None))
        return data

    def write(self, data: bytes) -> None:
        """Replace the older of the last two writes.

        Raises:
            OSError: see `read`.
        """
        self._number += 1
        file = os.open(self._paths[self._number % len(self._paths)], os.O_WRONLY)
        try:
            piece = memoryview(_head(self._number, data) + data)
            while piece:
                piece = piece[os.write(file, piece) :]
        finally:
            os.close(file)


@contextmanager
def held() -> Iterator[CrashSafeMemory]:
    """A memory that other processes of this machine and user may read and write during the `with` statement."""
    files = [os.memfd_create("raytf-memo") for _ in range(2)]
    try:
        yield CrashSafeMemory([f"/proc/{os.getpid()}/fd/{file}" for file in files])
    finally:
        for file in files:
            os.close(file)


def _head(number: int, data: bytes) -> bytes:
    check = zlib.crc32(data, zlib.crc32(_HEAD.pack(number, len(data), 0)))
    return _HEAD.pack(number, len(data), check)


def _parse(content: bytes) -> tuple[int, bytes] | None:
    if len(content) < _HEAD.size:
        return None
    number, size, _ = _HEAD.unpack_from(content)
    data = content[_HEAD.size : _HEAD.size + size]
    return (number, data) if len(data) == size and content.startswith(_head(number, data)) else None


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
