"""The files below a URI, read in ranges: mapped where they are local, requested where they are not."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from raytf.errors import DataError
from raytf.storage.local_files import StoredFile
from raytf.storage.refusals import explain
from raytf.storage.storage import Storage

T = TypeVar("T")
U = TypeVar("U")

#: Local files of up to this many bytes that are read as a whole are not mapped.
_WHOLE = 1 << 20
#: Files that stay mapped.
_MAPPED = 64
#: Requests at a time to an object store, where an answer takes long and costs little.
_REQUESTS = 16
#: The beginnings of names of files that belong to raytf, Spark or Hadoop and hold no records.
_HIDDEN = ("_", ".")


class Files:
    """Files by the ends of their names, in a fixed order. It is pickled without open files; any thread may read.

    Args:
        uri: a file, or a folder with files at any depth.
        endings: of names, in lower case; a `uri` that is a file is taken with any name.
        is_wanted: (name) -> whether to take the file, in place of `endings`.
        is_sorted_by: (name) -> key of the order; the name by default.

    Attributes:
        names: relative to the folder.
        sizes: bytes of each.
        is_single: whether the URI named a file and no folder.
        is_local: whether they lie on a mounted disk.
        reads: ranges read so far.

    Raises:
        StorageError: storage refuses.
    """

    def __init__(
        self,
        uri: str,
        endings: Sequence[str] = (),
        is_sorted_by: Callable[[str], Any] | None = None,
        is_wanted: Callable[[str], bool] | None = None,
    ):
        storage = Storage(uri)
        self.is_local = storage.is_local
        wanted = is_wanted or (lambda name: name.lower().endswith(tuple(endings)))
        files = [f for f in storage.files() if wanted(f.name) and not _is_hidden(f.name)]
        # Workers have another working directory.
        self.uri = storage.root if storage.is_local else uri
        self.is_single = not files
        if not files:
            files, self.uri = _single(storage, uri)
        files.sort(key=lambda f: f.name if is_sorted_by is None else is_sorted_by(f.name))
        self.names: list[str] = [f.name for f in files]
        self.sizes: list[int] = [f.bytes for f in files]
        self._forget()

    def _forget(self) -> None:
        self._storage: Any = None
        self._pool: ThreadPoolExecutor | None = None
        self._mapped: OrderedDict[int, memoryview] = OrderedDict()
        self.reads = 0

    def __getstate__(self) -> dict:
        own = ("_storage", "_pool", "_mapped", "reads")
        return {k: v for k, v in self.__dict__.items() if k not in own}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    @property
    def storage(self) -> Any:
        if self._storage is None:
            self._storage = Storage(self.uri)
        return self._storage

    def locate(self, i: int) -> str:
        return self.storage.locate(self.names[i])

    def read(self, i: int, offset: int, length: int, whole: bool = True) -> memoryview:
        """Return bytes [offset, offset + length) of a file. Unless it is read as a `whole`, a local file is mapped.

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
        elif whole and length == self.sizes[i] <= _WHOLE:
            data = memoryview(self.storage.get(self.names[i]))
        else:
            data = self._map(i)[offset : offset + length]
        if len(data) != length:
            raise DataError(f"{self.locate(i)} was cut off while it was read. Was it written again?")
        return data

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """Yield the function's result for each item, in their order, several at a time."""
        if self._pool is None:
            threads = len(os.sched_getaffinity(0)) if self.is_local else _REQUESTS
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raytf-read")
        return self._pool.map(function, items)

    def _map(self, i: int) -> memoryview:
        view = self._mapped.get(i)
        if view is None:
            view = self._mapped[i] = memoryview(_mapped(self.locate(i), self.sizes[i]))
            if len(self._mapped) > _MAPPED:
                # Not closed: slices of it may be in use; it is closed with the last of them.
                self._mapped.popitem(last=False)
        return view


def _mapped(path: str, size: int) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if (now := os.fstat(file.fileno()).st_size) != size:
                raise DataError(f"{path} has {now} bytes, and had {size}: it was written again.")
            return mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        raise explain("read", path, error) from error


def _is_hidden(name: str) -> bool:
    return any(part.startswith(_HIDDEN) for part in name.split("/"))


def _single(storage: Any, uri: str) -> tuple[list[StoredFile], str]:
    """Return the one file that a URI names, and the URI of its folder; no file if there is none."""
    base, mark, query = (storage.root, "", "") if storage.is_local else uri.partition("?")
    folder, _, name = base.rstrip("/").rpartition("/")
    if folder.endswith(":/") or not storage.exists(""):
        return [], uri
    filesystem, path = storage.arrow()
    return [StoredFile(name, filesystem.get_file_info(path).size, 0.0)], f"{folder or '/'}{mark}{query}"
