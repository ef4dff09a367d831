"""A body or an answer while it is not needed: a few KiB in memory, the rest in a file without a name."""

from __future__ import annotations

import tempfile
from http import HTTPStatus
from types import TracebackType

from raytf.inference.serving.errors import Refusal

#: Of each, in memory.
_IN_MEMORY = 16 << 10
#: One of that size never waits for the room that large ones take.
_SMALL = 128 << 10


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
    """Bytes that are written, then read from the beginning; closing it removes them."""

    def __init__(self, disk: DiskRoom):
        self._disk = disk
        self._file = tempfile.SpooledTemporaryFile(_IN_MEMORY, prefix="raytf-serve-")  # noqa: SIM115
        self.size = 0

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        self._file.seek(0)

    def read(self, size: int = -1) -> bytes:
        """The next bytes, none at the end."""
        return self._file.read(size)

    def close(self) -> None:
        """Remove what was written; once is enough, twice does no harm."""
        self._file.close()
        self._disk.take(-self.size)
        self.size = 0
