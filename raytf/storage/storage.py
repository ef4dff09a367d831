"""One interface to local folders, S3, GCS and Azure: put, get, list and delete, with errors that explain the fix.

A URI is a folder, `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX` or `az://CONTAINER/PREFIX`. Options follow a question
mark, as in `s3://bucket/runs?endpoint_override=127.0.0.1:9000&scheme=http&region=us-east-1`. The default S3 endpoint
is AWS_ENDPOINT_URL. Credentials come from the environment, the cloud's files or the machine's role, never from the URI
(see `uris`). When S3 or Azure refuses the credentials, they are read again, so that a run continues after keys are
renewed in a file.

A put is atomic: the object or file appears whole or not at all. All bytes are ready before the first one is sent,
because an object store commits a partial write when its stream is closed, even by an exception.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import pyarrow.fs as pafs

from raytf._process import in_thread
from raytf.errors import StorageError
from raytf.storage import conditional_writes, local_files, s3, uris
from raytf.storage.azure import Azure, AzureObjects
from raytf.storage.local_files import StoredFile
from raytf.storage.refusals import FIX, PROBE, classify, explain, is_unsupported
from raytf.storage.s3 import S3, Conditional

T = TypeVar("T")

#: An endpoint that accepts a connection and never responds blocks pyarrow for 25 to 35 s, too long for a preflight.
PREFLIGHT_SECONDS = 15.0
#: The least time between two reloads of credentials that a store refused.
_RENEW_SECONDS = 5.0
#: Held while the process's checksum setting changes.
_CHECKSUMS = threading.Lock()
#: The largest size of a file that can be swapped.
_VERSIONED_BYTES = 1 << 20
#: Concurrent deletions on a store that needs a request for each file.
_DELETES = 8


#: A client that reads and writes by version, which pyarrow cannot do; every method may raise OSError.
VersionedObjects = Conditional | AzureObjects


def _gcs(options: dict[str, str]) -> pafs.FileSystem:
    """Return the file system of Google Cloud Storage, which is used without conditional writes."""
    arguments: dict[str, Any] = dict(options)
    if "anonymous" in arguments:
        arguments["anonymous"] = arguments["anonymous"].lower() in ("1", "true", "yes")
    return pafs.GcsFileSystem(**arguments)


def _read(system: pafs.FileSystem, path: str, most: int | None) -> bytes:
    """Return the bytes of an object.

    Args:
        most: the largest size; a larger object counts as damaged, and is not read.

    Raises:
        OSError: the object is too large.
    """
    with system.open_input_stream(path, buffer_size=1 << 20) as stream:
        if most is None:
            return stream.read()
        try:
            data = stream.read(most + 1)
        except MemoryError:  # the size in a manifest may exceed the memory
            raise local_files.too_large(most, most - 1, path) from None
    if len(data) > most:
        raise local_files.too_large(len(data), most, path)
    return data


def _files(system: pafs.FileSystem, base: str) -> list[StoredFile]:
    """Return all objects below BUCKET/PREFIX; none if there is no such folder."""
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=True)
    infos = [info for info in system.get_file_info(selector) if info.type == pafs.FileType.File]
    return [StoredFile(_relative(i.path, base), i.size, (i.mtime_ns or 0) / 1e9) for i in infos]


def _names(system: pafs.FileSystem, base: str) -> list[str]:
    """Return the names in BUCKET/PREFIX, sorted; folders end with '/'."""
    # On GCS, pyarrow lists no folder that exists only through the objects in it, so these are inferred.
    infer = isinstance(system, pafs.GcsFileSystem)
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=infer)
    listed = set()
    for info in system.get_file_info(selector):
        short = _relative(info.path, base)
        if short and ".tmp-" not in short:
            listed.add(short + ("/" if info.type == pafs.FileType.Directory else ""))
    if infer:
        listed = {first + mark for first, mark, _ in (name.partition("/") for name in listed)}
    return sorted(listed)


def _delete(system: pafs.FileSystem, path: str) -> None:
    """Delete an object, or everything below a folder, if it exists."""
    info = system.get_file_info(path)
    if info.type == pafs.FileType.File:
        system.delete_file(path)
        return
    # File by file: `delete_dir` fails on some GCS implementations.
    selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
    inner = [info.path for info in system.get_file_info(selector) if info.type == pafs.FileType.File]
    with ThreadPoolExecutor(_DELETES) as pool:
        list(pool.map(system.delete_file, inner))


def _relative(path: str, base: str) -> str:
    # Remove only one slash: a key such as `base//etc` is another object, whose name begins with a slash.
    return path[len(base.rstrip("/")) + 1 :].removesuffix("/")


class Storage:
    """Files below a root. Names are relative and use '/'.

    Args:
        uri: as in the module's docstring.
        clock: injected by tests.

    Raises:
        ConfigError: the URI is invalid.
        StorageError: from every method, when storage refuses a request; its `kind` is the reason.
    """

    def __init__(self, uri: str, clock: Callable[[], float] = time.monotonic):
        self.uri, self._clock = uri, clock
        #: Reads the credentials when its methods are called; None for a folder and for Google Cloud Storage.
        self._store: S3 | Azure | None = None
        self._objects: VersionedObjects | None = None
        #: Whether one of several writers wins, for `create` and for `swap`; a key is missing until it is known.
        self._one_wins: dict[str, bool] = {}
        self._renewed_at = float("-inf")
        place = uris.parse(uri)
        self.is_local = not place.scheme
        self.root = os.path.abspath(os.path.expanduser(uri)) if self.is_local else place.location
        self._fs: pafs.FileSystem = pafs.LocalFileSystem()
        if place.scheme == "s3":
            self._store = S3.of(place.options)
        elif place.scheme == "az":
            self._store = Azure.of(place.options)
        elif place.scheme == "gs":
            self._fs = _gcs(place.options)
        #: Whether objects can be written by version. For the other stores, the library manages credentials.
        self._has_versions = self._store is not None
        if self._has_versions:
            self._build()

    def arrow(self, name: str = "") -> tuple[pafs.FileSystem, str]:
        """Return the pyarrow file system and the path on it, for libraries that take them."""
        return self._fs, self._path(name)

    def child(self, name: str) -> Storage:
        self._path(name)  # raises for a name that leads elsewhere
        base, mark, query = (self.uri, "", "") if self.is_local else self.uri.partition("?")
        return Storage(f"{base.rstrip('/')}/{name}{mark}{query}", self._clock)

    def locate(self, name: str) -> str:
        base, _, _ = self.uri.partition("?")
        return self._path(name) if self.is_local else f"{base.rstrip('/')}/{name}".rstrip("/")

    def put(self, name: str, data: bytes | memoryview | Sequence[memoryview]) -> None:
        """Write a whole file from its data or its pieces; it appears only when it is complete."""
        if self.is_local:
            self._do("write", name, lambda: local_files.put(self._path(name), data))
            return

        def write() -> None:
            with self._fs.open_output_stream(self._path(name)) as out:
                for piece in [data] if isinstance(data, (bytes, memoryview)) else data:
                    out.write(piece)

        used = self._fs
        try:
            self._do("write", name, write)
        except StorageError as error:
            if not isinstance(self._store, S3) or not s3.is_about_checksums(error):
                raise
            self._put_without_checksums(name, write, error, used)

    def _put_without_checksums(
        self, name: str, write: Callable[[], None], refusal: StorageError, used: pafs.FileSystem
    ) -> None:
        """Write again without checksums, and leave them off if that works; see `s3.is_about_checksums`."""
        with _CHECKSUMS:
            is_first = self._fs is used  # no other thread was faster
            if is_first and not self._has_checksums:
                raise refusal
            before = s3.set_checksums(s3.WITHOUT_CHECKSUMS)
            if is_first:
                self._build()
        try:
            self._do("write", name, write)
        except StorageError:
            with _CHECKSUMS:
                s3.set_checksums(before)
                self._build()
            raise refusal from None

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists. Return whether it was written. Atomic if `is_conditional`.

        On an object store, False may also mean that the response to the write was lost: read the file to find out.
        """
        if self.is_local:
            return self._do("create", name, lambda: local_files.create(self._path(name), data))
        return self._write_if("create", name, data, None)

    def get_version(self, name: str) -> tuple[bytes, str] | None:
        """Return a file's bytes and the version that identifies them; None if the file is missing."""
        if self._has_versions:
            return self._do("read", name, lambda: self._versioned().get(self._path(name)))
        data = self.get_or_none(name, _VERSIONED_BYTES)
        return None if data is None else (data, local_files.version(data))

    def swap(self, name: str, data: bytes, version: str) -> bool:
        """Write a file if it still has this version. Return whether it was written. Atomic if `is_conditional`.

        On an object store, False may also mean that the response to the write was lost: read the file to find out.
        """
        if self.is_local:
            return self._do("write", name, lambda: local_files.swap(self._path(name), data, version))
        return self._write_if("swap", name, data, version)

    def _write_if(self, what: str, name: str, data: bytes, version: str | None) -> bool:
        if self._has_versions and self._one_wins.get(what, True):
            # A store that was not tested yet may ignore the condition.
            if what not in self._one_wins and self._version_of(name) != version:
                return False
            try:
                return self._do(
                    "create" if version is None else "write",
                    name,
                    lambda: self._versioned().put(self._path(name), data, version),
                )
            except StorageError as error:
                if error.kind != "unsupported":
                    raise
                self._one_wins[what] = False  # only this condition: the store may know the other one
        if self._version_of(name) != version:
            return False
        self.put(name, data)
        return True

    def _version_of(self, name: str) -> str | None:
        present = self.get_version(name)
        return present and present[1]

    def is_conditional(self, what: str | None = None) -> bool:
        """Return whether one of several writers wins, for `create`, `swap`, or both; races test S3 and Azure once."""
        if not self._has_versions:
            return self.is_local
        if {"create", "swap"} - self._one_wins.keys():
            probe = f"{PROBE}{uuid.uuid4().hex[:8]}"
            try:
                path = self._path(probe)
                tried = self._do(
                    "write", probe, lambda: conditional_writes.try_out(self._versioned(), path, is_unsupported)
                )
            finally:
                bucket, _, key = self._path(probe).partition("/")
                keys = conditional_writes.leftovers(key)
                self._do("delete", probe, lambda: self._versioned().delete_keys(bucket, keys))
            # A condition that the store refused earlier stays refused.
            self._one_wins = tried | self._one_wins
        return all(self._one_wins[write] for write in ([what] if what else ["create", "swap"]))

    def _versioned(self) -> VersionedObjects:
        if self._objects is None:
            assert self._store is not None
            self._objects = self._store.objects()
        return self._objects

    def get(self, name: str, most: int | None = None) -> bytes:
        """Return the bytes of a file. For a missing file, raise a StorageError of kind `missing`.

        Args:
            most: the largest size; a larger file counts as damaged, and is not read.

        Raises:
            DamagedFileError: it is too large, or not a regular file.
        """

        def read() -> bytes:
            if self.is_local:
                return local_files.get(self._path(name), most)
            return _read(self._fs, self._path(name), most)

        return self._do("read", name, read)

    def get_range(self, name: str, offset: int, length: int) -> bytes:
        """Return bytes [offset, offset + length) of a file; fewer if the file ends earlier."""

        def read() -> bytes:
            with self._fs.open_input_file(self._path(name)) as file:
                return file.read_at(length, offset)

        return self._do("read", name, read)

    def get_or_none(self, name: str, most: int | None = None) -> bytes | None:
        """Return the bytes of a file as `get` does, or None if it is missing; a folder raises, as in `get`."""
        try:
            return self.get(name, most)
        except StorageError as error:
            if error.kind == "missing":
                return None
            raise

    def exists(self, name: str) -> bool:
        if self.is_local:
            return self._do("look up", name, lambda: local_files.exists(self._path(name)))
        info = self._do("look up", name, lambda: self._fs.get_file_info(self._path(name)))
        return info.type == pafs.FileType.File

    def files(self, name: str = "", skipped: list[str] | None = None) -> list[StoredFile]:
        """Return all files below a folder, at any depth, sorted by name.

        A missing folder is empty, and so is a root that is a file.

        Args:
            skipped: receives the names of subfolders that cannot be read; if it is None, the first one raises.
        """
        base = self._path(name)
        if self.is_local and not name and self.exists(""):
            return []

        def read() -> Sequence[StoredFile]:
            return local_files.files(base, skipped) if self.is_local else _files(self._fs, base)

        files = self._do("list", name, read)
        return sorted((file for file in files if ".tmp-" not in file.name), key=lambda file: file.name)

    def entries(self, name: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
        """Yield the entries below a local folder, without following links."""
        return local_files.walk(self._path(name))

    def list(self, name: str = "") -> list[str]:
        """Return the names in a folder, sorted; folders end with '/'. A missing folder is empty."""
        base = self._path(name)
        if self.is_local:
            return self._do("list", name, lambda: local_files.names(base))
        return self._do("list", name, lambda: _names(self._fs, base))

    def abort_uploads(self, name: str, is_dead: Callable[[str], bool]) -> int:
        """Abort incomplete uploads, which cost money although no listing shows them. Return their number.

        Args:
            name: a folder; empty for all.
            is_dead: returns whether no process continues a file's upload, by its name relative to the folder.
        """
        if not self._has_versions:
            return 0
        base = f"{self._path(name)}/"
        return self._do("list uploads of", name, lambda: self._versioned().abort_uploads(base, is_dead))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with everything in it, if it exists."""
        path = self._path(name)

        def remove() -> None:
            if self.is_local:
                local_files.delete(self.root, name)
                return
            if self._has_versions:
                self._versioned().delete(path)
                return
            _delete(self._fs, path)

        self._do("delete", name, remove)

    def get_tree(self, name: str, folder: str) -> None:
        """Copy the files below `name` into a local folder.

        Raises:
            StorageError: also if a name leads out of the folder; nothing is written then.
        """
        self.download(name, [file.name for file in self.files(name)], folder)

    def download(self, name: str, files: Collection[str], folder: str, at_once: int = 1) -> None:
        """Copy some of the files below `name` into a local folder, as `get_tree` does."""
        for relative in files:
            local_files.check_plain(relative, self.locate(name))

        def fetch(relative: str) -> None:
            data = self.get(f"{name}/{relative}")
            try:
                local_files.put_inside(folder, relative, data)
            except OSError as error:
                raise explain("write", os.path.join(folder, relative), error) from error

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(fetch, files))

    def preflight(self, seconds: float = PREFLIGHT_SECONDS) -> None:
        """Write, list and delete a small file, so that mistakes show before money is spent.

        Raises:
            StorageError: storage refuses a request, or does not respond within `seconds`.
        """
        probe = f"{PROBE}{uuid.uuid4().hex[:8]}"

        def check() -> None:
            self.put(probe, b"raytf")
            self.list("")  # after the put, because only the put detects a missing bucket
            self.delete(probe)

        within(seconds, check, self.locate(""))

    def _path(self, name: str) -> str:
        name = name.rstrip("/")
        if name and local_files.leads_elsewhere(name):
            raise local_files.refused_name(name, self.locate(""))
        return f"{self.root.rstrip('/')}/{name}" if name else self.root

    def _do(self, what: str, name: str, call: Callable[[], T]) -> T:
        used = self._fs
        try:
            try:
                return call()
            except OSError as error:
                if not self._renew(error, used):
                    raise
            return call()
        except OSError as error:
            raise explain(what, self.locate(name), error) from error

    def _renew(self, error: OSError, used: pafs.FileSystem) -> bool:
        """Return whether to retry with reloaded credentials: a file system keeps those with which it was made."""
        # Reload after any denial: the response to a HEAD does not show that a key has expired.
        if not self._has_versions or classify(error) != "denied":
            return False
        if self._fs is used:
            if self._clock() - self._renewed_at < _RENEW_SECONDS:
                return False
            self._renewed_at = self._clock()
            self._build()
        return True

    def _build(self) -> None:
        """Make new clients, which read the credentials and the environment at that moment."""
        assert self._store is not None
        self._has_checksums = s3.has_checksums()
        self._fs, self._objects = self._store.file_system(), None


def within(seconds: float, call: Callable[[], T], where: str) -> T:
    """Return the result of `call`, run in a thread with a time limit, because pyarrow's calls cannot be interrupted.

    Raises:
        StorageError: storage did not respond in time.
    """
    answer = in_thread(call, "storage-preflight")
    wait([answer], seconds)
    if not answer.done():
        raise StorageError(f"{where} did not answer within {seconds:.0f} s. {FIX['unreachable']}", "unreachable")
    return answer.result()
