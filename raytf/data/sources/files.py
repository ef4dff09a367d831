"""The files below a URI, read in ranges: mapped where they are local, requested where they are not."""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from raytf.errors import DataError, StorageError

T = TypeVar("T")
U = TypeVar("U")

#: Local files of up to so many bytes that are read as a whole are not mapped.
_WHOLE = 1 << 20
#: Files that stay mapped.
_MAPPED = 64
#: Requests at a time to an object store, whose answers take long and cost little.
_REQUESTS = 16
#: Names that begin like this belong to raytf, Spark or Hadoop and hold no records.
_HIDDEN = ("_", ".")


class Files:
    """Files by the ends of their names, in a fixed order. It travels without what is open; any thread may read.

    Args:
        uri: a file, or a folder with files at any depth.
        endings: of names, in lower case; a `uri` that is a file is taken whatever its name.
        is_sorted_by: what the order goes by; the name by default.

    Attributes:
        names: relative to the folder.
        sizes: bytes of each.
        is_local: whether they lie on a mounted disk.
        reads: ranges read so far.

    Raises:
        StorageError: storage refuses, or there is no such file or folder.
    """

    def __init__(self, uri: str, endings: Sequence[str], is_sorted_by: Callable[[str], Any] | None = None):
        from raytf.storage import Storage

        self.uri = uri
        storage = Storage(uri)
        self.is_local = storage.is_local
        found = [f for f in storage.files() if f.name.lower().endswith(tuple(endings)) and not _is_hidden(f.name)]
        if not found:
            found, self.uri = _single(storage, uri)
        found.sort(key=lambda f: f.name if is_sorted_by is None else is_sorted_by(f.name))
        self.names: list[str] = [f.name for f in found]
        self.sizes: list[int] = [f.bytes for f in found]
        self._forget()

    def _forget(self) -> None:
        self._storage: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._mapped: OrderedDict[int, memoryview] = OrderedDict()
        self.reads = 0

    def __getstate__(self) -> dict:
        return {"uri": self.uri, "is_local": self.is_local, "names": self.names, "sizes": self.sizes}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def storage(self) -> Any:
        """The `Storage` that they lie on."""
        if self._storage is None:
            from raytf.storage import Storage

            self._storage = Storage(self.uri)
        return self._storage

    def locate(self, i: int) -> str:
        """A file as a person would look for it."""
        return self.storage.locate(self.names[i])

    def read(self, i: int, offset: int, length: int) -> memoryview:
        """Bytes [offset, offset + length) of a file.

        Raises:
            DataError: the file has become shorter.
            StorageError: storage refuses.
        """
        self.reads += 1
        if offset + length > self.sizes[i]:
            raise DataError(f"{self.locate(i)} ends at byte {self.sizes[i]}; {offset + length} were expected.")
        if not length:
            return memoryview(b"")
        if not self.is_local:
            data = memoryview(self.storage.get_range(self.names[i], offset, length))
        elif length == self.sizes[i] and length <= _WHOLE:
            data = memoryview(self.storage.get(self.names[i]))
        else:
            data = self._map(i)[offset : offset + length]
        if len(data) != length:
            raise DataError(f"{self.locate(i)} was cut off while it was read. Was it written anew?")
        return data

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """What a function gives for each item, in their order, several at a time."""
        if self._pool is None:
            threads = len(os.sched_getaffinity(0)) if self.is_local else _REQUESTS
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raytf-read")
        return self._pool.map(function, items)

    def _map(self, i: int) -> memoryview:
        found = self._mapped.get(i)
        if found is None:
            found = memoryview(_mapped(self.locate(i), self.sizes[i]))
            self._mapped[i] = found
            if len(self._mapped) > _MAPPED:
                # Not closed: slices of it may be in use; the last one of them closes it.
                self._mapped.popitem(last=False)
        return found


def _mapped(path: str, size: int) -> mmap.mmap:
    from raytf.refusal import explain

    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != size:
                raise DataError(
                    f"{path} has {os.fstat(file.fileno()).st_size} bytes, and had {size}: it was written anew."
                )
            return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        raise explain("read", path, error) from error


def _is_hidden(name: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in name.split("/"))


def _single(storage: Any, uri: str) -> tuple[list[Any], str]:
    """The one file that a URI names, and the URI of its folder."""
    base, mark, query = (uri, "", "") if storage.is_local else uri.partition("?")
    folder, _, name = base.rstrip("/").rpartition("/")
    if not name or folder.endswith(":/") or not storage.exists(""):
        if storage.is_local and not os.path.exists(storage.root):
            raise StorageError(f"{uri}: {os.strerror(errno.ENOENT)}. Expected a file or a folder.", "missing")
        return [], uri
    from raytf.storage import Storage

    above = f"{folder or ('' if storage.is_local and not base.startswith('/') else '/')}{mark}{query}" or "."
    return [f for f in Storage(above).files() if f.name == name], above
