"""Blobs of Azure as a file system of pyarrow: for `Storage`, and for libraries that read with pyarrow."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.fs as pafs

from raytf.storage.azure_errors import ContainerMissingError, explained


class Account(Protocol):
    """Something that can be pickled and makes a `BlobServiceClient`."""

    def client(self) -> Any: ...


class BlobFileSystem(pafs.FileSystemHandler):
    """Blobs as files, for `Storage` and for libraries that read with pyarrow; made again where it is unpickled."""

    def __init__(self, store: Account):
        self._store = store
        self._made: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_store": self._store, "_made": None}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlobFileSystem) and self._store == other._store

    def __hash__(self) -> int:
        return hash(self._store)

    def _client(self) -> Any:
        if self._made is None:
            with explained("the configuration"):
                self._made = self._store.client()
        return self._made

    def _container(self, path: str) -> tuple[Any, str]:
        container, _, name = path.partition("/")
        return self._client().get_container_client(container), name

    def get_type_name(self) -> str:
        return "az"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        return [self._look(path) for path in paths]

    def _look(self, path: str) -> pafs.FileInfo:
        container, name = self._container(path)
        try:
            with explained("GetBlobProperties", path):
                if not name:
                    container.get_container_properties()
                    return pafs.FileInfo(path, pafs.FileType.Directory)
                return _info(path, container.get_blob_client(name).get_blob_properties())
        except FileNotFoundError:
            pass
        except ContainerMissingError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        if not name:
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        with explained("ListBlobs", path):
            below = next(iter(container.list_blob_names(name_starts_with=f"{name.rstrip('/')}/")), None)
        return pafs.FileInfo(path, pafs.FileType.NotFound if below is None else pafs.FileType.Directory)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        container, name = self._container(selector.base_dir)
        base = selector.base_dir.partition("/")[0]
        prefix = f"{name.rstrip('/')}/" if name else ""
        found = []
        try:
            with explained("ListBlobs", selector.base_dir):
                if selector.recursive:
                    listed = container.list_blobs(name_starts_with=prefix, include=["metadata"])
                else:
                    listed = container.walk_blobs(name_starts_with=prefix, include=["metadata"], delimiter="/")
                for blob in listed:
                    if blob.name.endswith("/") or _is_folder(blob):
                        found.append(pafs.FileInfo(f"{base}/{blob.name.rstrip('/')}", pafs.FileType.Directory))
                    else:
                        found.append(_info(f"{base}/{blob.name}", blob))
        except ContainerMissingError:
            if not selector.allow_not_found:
                raise
        if not found and not selector.allow_not_found:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", selector.base_dir)
        return found

    def open_input_stream(self, path: str) -> pa.NativeFile:
        container, name = self._container(path)
        with explained("GetBlob", path):
            return pa.PythonFile(_Download(container.get_blob_client(name).download_blob(), path), mode="r")

    def open_input_file(self, path: str) -> pa.NativeFile:
        container, name = self._container(path)
        blob = container.get_blob_client(name)
        with explained("GetBlobProperties", path):
            return pa.PythonFile(_Ranges(blob, blob.get_blob_properties().size, path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        container, name = self._container(path)
        return pa.PythonFile(_Upload(container.get_blob_client(name), path), mode="w")

    def delete_file(self, path: str) -> None:
        container, name = self._container(path)
        with explained("DeleteBlob", path):
            container.get_blob_client(name).delete_blob(delete_snapshots="include")

    def create_dir(self, path: str, recursive: bool) -> None:
        """Nothing: a folder is there as long as there are blobs below it."""

    def delete_dir(self, path: str) -> None:
        raise NotImplementedError

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        raise NotImplementedError

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def move(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def copy_file(self, src: str, dest: str) -> None:
        raise NotImplementedError

    def open_append_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        raise NotImplementedError


class _Download(io.RawIOBase):
    """A blob, from its beginning to its end."""

    def __init__(self, answer: Any, path: str):
        self._answer, self._path = answer, path

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with explained("GetBlob", self._path):
            return self._answer.read(size)


class _Ranges(io.RawIOBase):
    """A blob that is read here and there, each time by a request."""

    def __init__(self, blob: Any, size: int, path: str):
        self._blob, self._size, self._path = blob, size, path
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        size = left if size is None or size < 0 else min(size, left)
        if not size:
            return b""
        with explained("GetBlob", self._path):
            data = self._blob.download_blob(offset=self._at, length=size).readall()
        self._at += len(data)
        return data


class _Upload(io.BytesIO):
    """Bytes that become a blob, whole, when they are closed."""

    def __init__(self, blob: Any, path: str):
        super().__init__()
        self._blob, self._path = blob, path

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        with explained("PutBlob", self._path):
            self._blob.upload_blob(data, overwrite=True)


def _info(path: str, blob: Any) -> pafs.FileInfo:
    return pafs.FileInfo(path, pafs.FileType.File, size=blob.size, mtime=blob.last_modified)


def _is_folder(blob: Any) -> bool:
    """Whether it stands for a folder, as in accounts with a hierarchical namespace."""
    return (getattr(blob, "metadata", None) or {}).get("hdi_isfolder") == "true"
