"""Azure Blob Storage by Microsoft's library: a file system for pyarrow, and writes by version.

The account is in the URI (`account_name`) or in AZURE_STORAGE_ACCOUNT. Credentials come from the environment
(AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN), or else from what `azure.identity` finds:
the machine's identity, a pod's, `az login`.

pyarrow has a file system for Azure, too. It is not used: it writes an empty blob before the bytes come, so a file would
not appear whole, and its recursive list has ended the process (pyarrow 26.0.1 against Azurite).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

from raytf.errors import ConfigError, not_installed
from raytf.storage.azure_errors import ContainerMissingError, explained
from raytf.storage.azure_files import BlobFileSystem

_CONNECT_SECONDS, _READ_SECONDS, _RETRIES = 5, 20, 2
_DELETES_AT_ONCE = 8
_ACCOUNT = ("AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_ACCOUNT_NAME")
_KEY = ("AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT_KEY")
_TOKEN = ("AZURE_STORAGE_SAS_TOKEN",)
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"


@dataclass(frozen=True)
class Azure:
    """How to reach an account of Azure Blob Storage.

    Attributes:
        account: its name; empty where a connection string in the environment has it.
        endpoint: HOST:PORT of a server that is not Microsoft's; empty for Microsoft's.
        scheme: http or https.
    """

    account: str
    endpoint: str = ""
    scheme: str = "https"

    @classmethod
    def of(cls, options: dict[str, str]) -> Azure:
        """From a URI's options and the environment.

        Raises:
            ConfigError: no account is given, or Azure's libraries are not installed.
        """
        for package in ("azure.identity", "azure.storage.blob"):
            if not _is_there(package):
                raise not_installed("storage az://...", "azure", package)
        account = options.get("account_name") or _from_environment(_ACCOUNT)
        if not account and not os.environ.get(_CONNECTION):
            raise ConfigError(
                "storage az://...: the account is missing. Set AZURE_STORAGE_ACCOUNT, or add ?account_name=NAME."
            )
        scheme, mark, host = options.get("endpoint_override", "").rpartition("://")
        return cls(account, host.rstrip("/"), options.get("scheme") or (scheme if mark else "https"))

    def file_system(self) -> pafs.FileSystem:
        """A file system that reads the credentials at its first request."""
        return pafs.PyFileSystem(BlobFileSystem(self))

    def objects(self) -> AzureObjects:
        """Blobs by version, by a client that has read the credentials just now."""
        with explained("the configuration"):
            return AzureObjects(self.client())

    def client(self) -> Any:
        """A `BlobServiceClient` with the credentials of the environment."""
        from azure.storage.blob import BlobServiceClient

        settings: dict[str, Any] = {
            "connection_timeout": _CONNECT_SECONDS,
            "read_timeout": _READ_SECONDS,
            "retry_total": _RETRIES,
        }
        connection = os.environ.get(_CONNECTION)
        if connection and not self.endpoint:
            return BlobServiceClient.from_connection_string(connection, **settings)
        plain = f"{self.scheme}://{self.endpoint}/{self.account}"
        url = plain if self.endpoint else f"https://{self.account}.blob.core.windows.net"
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
    """Reads and writes of blobs by version; paths are CONTAINER/NAME.

    Args:
        client: a `BlobServiceClient`.

    Raises:
        OSError: from every method, in words that `refusals.classify` knows.
    """

    def __init__(self, client: Any):
        self._client = client

    def get(self, path: str) -> tuple[bytes, str] | None:
        """The bytes and the version of a blob.

        Returns:
            None where it is not there.
        """
        try:
            with explained("GetBlob", path):
                answer = self._blob(path).download_blob()
                return answer.readall(), answer.properties.etag
        except FileNotFoundError:
            return None

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write a blob where it is of a version, or where it is not there for None; whether it was written.

        A write whose answer was lost counts as refused, since it is tried again and meets itself: read what is there.
        """
        from azure.core import MatchConditions
        from azure.core.exceptions import ResourceExistsError, ResourceModifiedError

        condition: dict[str, Any] = {"overwrite": False}
        if version is not None:
            condition = {"overwrite": True, "etag": version, "match_condition": MatchConditions.IfNotModified}
        try:
            with explained("PutBlob", path, hand_on=(ResourceExistsError, ResourceModifiedError)):
                self._blob(path).upload_blob(data, **condition)
        except (ResourceExistsError, ResourceModifiedError, FileNotFoundError):
            return False
        return True

    def write(self, path: str, data: bytes) -> None:
        """Write a blob, whatever is there; it appears whole."""
        with explained("PutBlob", path):
            self._blob(path).upload_blob(data, overwrite=True)

    def delete(self, path: str) -> None:
        """Delete CONTAINER/NAME and all below CONTAINER/NAME/; nothing happens where nothing is."""
        container, _, name = path.partition("/")
        prefix = f"{name}/" if name else ""
        try:
            with explained("ListBlobs", path):
                below = list(self._client.get_container_client(container).list_blob_names(name_starts_with=prefix))
        except ContainerMissingError:
            return
        self.delete_keys(container, [*([name] if name else []), *below])

    def delete_keys(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete blobs of a container; those that are not there are no error."""
        with ThreadPoolExecutor(_DELETES_AT_ONCE) as pool:
            list(pool.map(lambda key: self._delete_one(f"{bucket}/{key}"), keys))

    def _delete_one(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), explained("DeleteBlob", path):
            self._blob(path).delete_blob(delete_snapshots="include")

    def abort_uploads(self, path: str, is_dead: Callable[[str], bool]) -> int:
        """Nothing: Azure forgets blocks that were never committed by itself, after a week."""
        return 0

    def _blob(self, path: str) -> Any:
        container, _, name = path.partition("/")
        return self._client.get_blob_client(container, name)


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:  # not even the one that it is in
        return False


def _from_environment(names: Sequence[str]) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")
