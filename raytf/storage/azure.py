"""Azure Blob Storage through Microsoft's library: a file system for pyarrow, and conditional writes by version.

The account is in the URI (`account_name`) or in AZURE_STORAGE_ACCOUNT. Credentials come from the environment
(AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN), or else from `azure.identity`, such as
the identity of the machine or pod, or `az login`.

pyarrow's own file system for Azure is not used. It writes an empty blob before the data, so readers could see an
incomplete file, and its recursive listing crashed the process (pyarrow 26.0.1 against Azurite).
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from raytf.errors import ConfigError, not_installed

_CONNECT_SECONDS, _READ_SECONDS, _RETRIES = 5, 20, 2
_DELETES_AT_ONCE = 8
_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
_TOKEN = ("AZURE_STORAGE_SAS_TOKEN",)
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


@dataclass(frozen=True)
class Azure:
    """The address of an Azure Blob Storage account.

    Attributes:
        account: its name; empty if a connection string in the environment contains it.
        endpoint: HOST:PORT of a server that is not Microsoft's; empty for Microsoft's.
        scheme: http or https.
    """

    account: str
    endpoint: str = ""
    scheme: str = "https"

    @classmethod
    def of(cls, options: dict[str, str]) -> Azure:
        """Return the address from a URI's options and the environment.

        Raises:
            ConfigError: the account is missing, or Azure's libraries are not installed.
        """
        for package in ("azure.identity", "azure.storage.blob"):
            if not _is_installed(package):
                raise not_installed("storage az://...", "azure", package)
        account = options.get("account_name") or _from_environment(_ACCOUNT)
        if not account and not os.environ.get(_CONNECTION):
            raise ConfigError(
                "storage az://...: the account is missing. Set AZURE_STORAGE_ACCOUNT, or add ?account_name=NAME."
            )
        scheme, mark, host = options.get("endpoint_override", "").rpartition("://")
        return cls(account, host.rstrip("/"), options.get("scheme") or (scheme if mark else "https"))

    def file_system(self) -> pafs.FileSystem:
        """Make a file system that reads the credentials at its first request."""
        return pafs.PyFileSystem(BlobFileSystem(self))

    def objects(self) -> AzureObjects:
        """Make a client that reads and writes blobs by version. It reads the credentials now."""
        with _explained("the configuration"):
            return AzureObjects(self.client())

    def client(self) -> Any:
        """Make a `BlobServiceClient` with the credentials of the environment."""
        from azure.storage.blob import BlobServiceClient

        settings: dict[str, Any] = {
            "connection_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retry_total": _RETRIES,
        }
        connection = os.environ.get(_CONNECTION)
        if connection and not self.endpoint:
            return BlobServiceClient.from_connection_string(connection, **settings)
        url = f"https://{self.account}.blob.core.windows.net"
        if self.endpoint:
            url = f"{self.scheme}://{self.endpoint}/{self.account}"
        return BlobServiceClient(url, credential=self._credential(), **settings)

    def _credential(self) -> Any:
        if key := _from_environment(_KEY):
            return {"account_name": self.account, "account_key": key}
        if token := _from_environment(_TOKEN):
            from azure.core.credentials import AzureSasCredential

            return AzureSasCredential(token)
        from azure.identity import DefaultAzureCredential

        return DefaultAzureCredential()


class AzureObjects:
    """Reads and writes blobs by version; paths are CONTAINER/NAME.

    Args:
        client: a `BlobServiceClient`.

    Raises:
        OSError: from every method, with a text that `refusals.classify` knows.
    """

    def __init__(self, client: Any):
        self._client = client

    def get(self, path: str) -> tuple[bytes, str] | None:
        """Return the bytes and the version of a blob, or None if it does not exist."""
        try:
            with _explained("GetBlob", path):
                answer = self._blob(path).download_blob()
                return answer.readall(), answer.properties.etag
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write a blob if it has this version (for None: if it does not exist). Return whether it was written.

        False may also mean that a response was lost and the retry found the blob written: read it to find out.
        """
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError

        condition: dict[str, Any] = {"overwrite": False}
        if version is not None:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        try:
            with _explained("PutBlob", path, hand_on=(ResourceExistsError, ResourceModifiedError)):
                self._blob(path).upload_blob(data, **condition)
        except (ResourceExistsError, ResourceModifiedError, FileNotFoundError):
            return False
        return True

    def write(self, path: str, data: bytes) -> None:
        """Write a blob unconditionally; it appears whole."""
        with _explained("PutBlob", path):
            self._blob(path).upload_blob(data, overwrite=True)

    def delete(self, path: str) -> None:
        """Delete CONTAINER/NAME and everything below CONTAINER/NAME/, if it exists."""
        container, _, name = path.partition("/")
        prefix = f"{name}/" if name else ""
        try:
            with _explained("ListBlobs", path):
                below = list(self._client.get_container_client(container).list_blob_names(name_starts_with=prefix))
        except ContainerMissingError:
            return
        self.delete_keys(container, [*([name] if name else []), *below])

    def delete_keys(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete blobs of a container, ignoring missing ones."""
        with ThreadPoolExecutor(_DELETES_AT_ONCE) as pool:
            list(pool.map(lambda key: self._delete_one(f"{bucket}/{key}"), keys))

    def _delete_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), _explained("DeleteBlob", path):
            self._blob(path).delete_blob(delete_snapshots="include")

    def abort_uploads(self, path: str, is_dead: Callable[[str], bool]) -> int:
        """Do nothing: Azure itself discards uncommitted blocks after a week."""
        return 0

    def _blob(self, path: str) -> Any:
        container, _, name = path.partition("/")
        return self._client.get_blob_client(container, name)


class BlobFileSystem(pafs.FileSystemHandler):
    """Blobs as files, for `Storage` and for libraries that read with pyarrow.

    It is pickled without its client, and makes a new one after it is unpickled.
    """

    def __init__(self, store: Azure):
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
            with _explained("the configuration"):
                self._made = self._store.client()
        return self._made

    def _container(self, path: str) -> tuple[Any, str]:
        container, _, name = path.partition("/")
        return self._client().get_container_client(container), name

    def _blob(self, path: str) -> Any:
        container, _, name = path.partition("/")
        return self._client().get_blob_client(container, name)

    def get_type_name(self) -> str:
        return "az"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[pafs.FileInfo]:
        return [self._info_of(path) for path in paths]

    def _info_of(self, path: str) -> pafs.FileInfo:
        container, name = self._container(path)
        try:
            with _explained("GetBlobProperties", path):
                if not name:
                    container.get_container_properties()
                    return pafs.FileInfo(path, pafs.FileType.Directory)
                return _file_info(path, container.get_blob_client(name).get_blob_properties())
        except ContainerMissingError:
            return pafs.FileInfo(path, pafs.FileType.NotFound)
        except FileNotFoundError:
            with _explained("ListBlobs", path):
                below = next(iter(container.list_blob_names(name_starts_with=f"{name.rstrip('/')}/")), None)
        return pafs.FileInfo(path, pafs.FileType.NotFound if below is None else pafs.FileType.Directory)

    def get_file_info_selector(self, selector: pafs.FileSelector) -> list[pafs.FileInfo]:
        container, name = self._container(selector.base_dir)
        base = selector.base_dir.partition("/")[0]
        prefix = f"{name.rstrip('/')}/" if name else ""
        infos = []
        try:
            with _explained("ListBlobs", selector.base_dir):
                if selector.recursive:
                    blobs = container.list_blobs(name_starts_with=prefix, include=["metadata"])
                else:
                    blobs = container.walk_blobs(name_starts_with=prefix, include=["metadata"], delimiter="/")
                for blob in blobs:
                    if blob.name.endswith("/") or _is_folder(blob):
                        infos.append(pafs.FileInfo(f"{base}/{blob.name.rstrip('/')}", pafs.FileType.Directory))
                    else:
                        infos.append(_file_info(f"{base}/{blob.name}", blob))
        except ContainerMissingError:
            if not selector.allow_not_found:
                raise
        if not infos and not selector.allow_not_found:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", selector.base_dir)
        return infos

    def open_input_stream(self, path: str) -> pa.NativeFile:
        with _explained("GetBlob", path):
            return pa.PythonFile(_Download(self._blob(path).download_blob(), path), mode="r")

    def open_input_file(self, path: str) -> pa.NativeFile:
        blob = self._blob(path)
        with _explained("GetBlobProperties", path):
            return pa.PythonFile(_Ranges(blob, blob.get_blob_properties().size, path), mode="r")

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        return pa.PythonFile(_Upload(self._blob(path), path), mode="w")

    def delete_file(self, path: str) -> None:
        with _explained("DeleteBlob", path):
            self._blob(path).delete_blob(delete_snapshots="include")

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing: a folder exists as long as there are blobs below it."""

    def _refuse(self, *arguments: Any, **options: Any) -> Any:
        raise NotImplementedError

    delete_dir = delete_dir_contents = delete_root_dir_contents = _refuse
    move = copy_file = open_append_stream = _refuse


class _Download(io.RawIOBase):
    """A blob as a sequential stream."""

    def __init__(self, answer: Any, path: str):
        self._answer, self._path = answer, path

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        with _explained("GetBlob", self._path):
            return self._answer.read(size)


class _Ranges(io.RawIOBase):
    """A blob with random access: each read is a request."""

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
        with _explained("GetBlob", self._path):
            data = self._blob.download_blob(offset=self._at, length=size).readall()
        self._at += len(data)
        return data


class _Upload(io.BytesIO):
    """A buffer that is uploaded as a whole blob when it is closed."""

    def __init__(self, blob: Any, path: str):
        super().__init__()
        self._blob, self._path = blob, path

    def close(self) -> None:
        if self.closed:
            return
        data = self.getvalue()
        super().close()
        with _explained("PutBlob", self._path):
            self._blob.upload_blob(data, overwrite=True)


class ContainerMissingError(OSError):
    """The account has no such container."""


@contextlib.contextmanager
def _explained(operation: str, path: str = "", hand_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Convert errors of Azure's libraries to OSErrors with a text that `refusals.classify` knows.

    Args:
        operation: the service's name of the request.
        path: CONTAINER/NAME.
        hand_on: errors to raise unchanged.
    """
    from azure.core import exceptions

    try:
        yield
    except hand_on:
        raise
    except OSError:
        raise
    except exceptions.ResourceNotFoundError as error:
        container, _, name = path.partition("/")
        if not name or "ContainerNotFound" in _code(error):
            code = _code(error) or "ContainerNotFound"
            raise ContainerMissingError(f"Azure Error {code}: no container {container}") from error
        raise FileNotFoundError(errno.ENOENT, "there is no such blob", path) from error
    except exceptions.ClientAuthenticationError as error:
        raise OSError(f"No credentials that Azure accepts during {operation}: {error.message}") from error
    except exceptions.HttpResponseError as error:
        status = f"HTTP status {error.status_code}"
        raise OSError(f"Azure Error {_code(error)} during {operation}: {error.message} ({status})") from error
    except exceptions.AzureError as error:  # no response arrived
        raise OSError(f"Azure Error NETWORK_CONNECTION during {operation}: {error}") from error
    except ValueError as error:  # an invalid connection string or key
        raise OSError(f"No credentials that can be parsed during {operation}: {error}") from error


def _code(error: Any) -> str:
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


def _file_info(path: str, blob: Any) -> pafs.FileInfo:
    return pafs.FileInfo(path, pafs.FileType.File, size=blob.size, mtime=blob.last_modified)


def _is_folder(blob: Any) -> bool:
    """Return whether a blob represents a folder, as in accounts with a hierarchical namespace."""
    return (getattr(blob, "metadata", None) or {}).get("hdi_isfolder") == "true"


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # its parent package is missing as well
        return False


def _from_environment(names: Sequence[str]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
