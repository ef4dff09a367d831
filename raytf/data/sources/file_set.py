"""The files below a URI, read in ranges: local files are mapped, and remote files requested."""

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
#: The most files that stay mapped.
_MAPPED = 64
#: Concurrent requests to an object store, where a response takes long and costs little.
_REQUESTS = 16
#: Prefixes of the names of files that belong to raytf, Spark or Hadoop and contain no records.
_HIDDEN = ("_", ".")


class Files:
    """Files with certain name endings, in a fixed order. It is pickled without open files; any thread may read.

    Args:
        uri: a file, or a folder with files at any depth.
        endings: endings of names, in lower case; if `uri` is a file, it may have any name.
        is_wanted: (name) -> whether to include the file; replaces `endings`.
        is_sorted_by: (name) -> sort key; by default the name.

    Attributes:
        names: relative to the folder.
        sizes: size of each file in bytes.
        is_single: whether the URI is not a folder, but a file.
        is_local: whether they are on a mounted disk.
        reads: ranges read so far.

    Raises:
        StorageError: storage refuses a request.
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
        # An absolute path: workers have another working directory.
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
        """Return bytes [offset, offset + length) of a file. A small local file read as a `whole` is not mapped.

        Raises:
            DataError: the file has become shorter.
            StorageError: storage refuses a request.
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
            raise DataError(f"{self.locate(i)} was cut off while it was read. Was it rewritten?")
        return data

    def map(self, function: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
        """Yield the function's result for each item in order; several items are processed concurrently."""
        if self._pool is None:
            threads = len(os.sched_getaffinity(0)) if self.is_local else _REQUESTS
            self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raytf-read")
        return self._pool.map(function, items)

    def _map(self, i: int) -> memoryview:
        view = self._mapped.get(i)
        if view is None:
            view = self._mapped[i] = memoryview(_mapped(self.locate(i), self.sizes[i]))
            if len(self._mapped) > _MAPPED:
                # Do not close it: its slices may be in use, and it closes with the last of them.
                self._mapped.popitem(last=False)
        return view


def _mapped(path: str, size: int) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            if (now := os.fstat(file.fileno()).st_size) != size:
                raise DataError(f"{path} has {now} bytes, but had {size}: it was rewritten.")
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
