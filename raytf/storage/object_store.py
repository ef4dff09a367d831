"""What an object store offers to `Storage`: a file system of pyarrow, and objects that are written by version."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pyarrow.fs as pafs

from raytf.storage import conditional_writes
from raytf.storage.azure import Azure
from raytf.storage.gcs import Gcs
from raytf.storage.s3 import S3
from raytf.storage.uris import StorageUri


class VersionedObjects(conditional_writes.Objects, Protocol):
    """Reads and writes by version, and what else pyarrow cannot do; every method may raise OSError."""

    def delete(self, path: str) -> None: ...
    def delete_keys(self, bucket: str, keys: Sequence[str]) -> None: ...
    def abort_uploads(self, path: str, is_dead: Callable[[str], bool]) -> int: ...


class ObjectStore(Protocol):
    """How to reach a store. Both methods read the credentials when they are called."""

    def file_system(self) -> pafs.FileSystem: ...
    def objects(self) -> VersionedObjects | None: ...


def of(place: StorageUri) -> ObjectStore:
    """The store of a URI that is not a folder.

    Raises:
        ConfigError: it cannot be reached without something that is not given.
    """
    if place.scheme == "s3":
        return S3.of(place.options)
    return Azure.of(place.options) if place.scheme == "az" else Gcs(place.options)
