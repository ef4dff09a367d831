"""What an object store offers to `Storage`: a file system of pyarrow, and objects that are written by version."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from raytf.storage import local_files
from raytf.storage.azure import Azure, AzureObjects
from raytf.storage.local_files import StoredFile
from raytf.storage.s3 import S3, Conditional
from raytf.storage.uris import StorageUri

#: Files that are deleted at the same time where each deletion is a request.
_DELETES = 8


@dataclass(frozen=True)
class Gcs:
    """How to reach Google Cloud Storage, which is not asked for conditional writes.

    Attributes:
        options: of the URI.
    """

    options: dict[str, str]

    def file_system(self) -> pafs.FileSystem:
        arguments: dict[str, Any] = dict(self.options)
        if "anonymous" in arguments:
            arguments["anonymous"] = arguments["anonymous"].lower() in ("1", "true", "yes")
        return pafs.GcsFileSystem(**arguments)

    def objects(self) -> VersionedObjects | None:
        """Return None: nothing here writes by version."""
        return None


#: How to reach a store. Its methods read the credentials when they are called.
ObjectStore = S3 | Azure | Gcs
#: Reads and writes by version, and does what else pyarrow cannot do; every method may raise OSError.
VersionedObjects = Conditional | AzureObjects


def of(place: StorageUri) -> ObjectStore:
    """Return the store of a URI that is not a folder.

    Raises:
        ConfigError: something that is needed to reach it is missing.
    """
    if place.scheme == "s3":
        return S3.of(place.options)
    return Azure.of(place.options) if place.scheme == "az" else Gcs(place.options)


def read(system: pafs.FileSystem, path: str, most: int | None) -> bytes:
    """Return the bytes of an object.

    Args:
        most: the largest size; a larger object is damaged, and is not read.

    Raises:
        OSError: it is too large.
    """
    with system.open_input_stream(path, buffer_size=1 << 20) as stream:
        if most is None:
            return stream.read()
        try:
            data = stream.read(most + 1)
        except MemoryError:  # a manifest may promise more bytes than there is memory
            raise local_files.too_large(most, most - 1, path) from None
    if len(data) > most:
        raise local_files.too_large(len(data), most, path)
    return data


def files(system: pafs.FileSystem, base: str) -> list[StoredFile]:
    """Return all objects below BUCKET/PREFIX; none if there is no such folder."""
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=True)
    infos = [info for info in system.get_file_info(selector) if info.type == pafs.FileType.File]
    return [StoredFile(_relative(i.path, base), i.size, (i.mtime_ns or 0) / 1e9) for i in infos]


def names(system: pafs.FileSystem, base: str, recursive: bool) -> list[str]:
    """Return the names below BUCKET/PREFIX, relative to it and sorted; folders end with '/'."""
    # On GCS, pyarrow lists no folder that exists only through the objects in it, so these are inferred.
    infer = not recursive and isinstance(system, pafs.GcsFileSystem)
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=recursive or infer)
    listed = set()
    for info in system.get_file_info(selector):
        short = _relative(info.path, base)
        if short and ".tmp-" not in short:
            listed.add(short + ("/" if info.type == pafs.FileType.Directory else ""))
    if infer:
        listed = {first + mark for first, mark, _ in (name.partition("/") for name in listed)}
    return sorted(listed)


def delete(system: pafs.FileSystem, path: str) -> None:
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
    """Return a path below a folder without the folder's."""
    # Only one slash is cut: a key such as `base//etc` has a name of its own, which begins with a slash.
    return path[len(base.rstrip("/")) + 1 :].removesuffix("/")
