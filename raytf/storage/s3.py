"""S3 through pyarrow's file system, and through boto3 for conditional writes, which pyarrow lacks.

A conditional write is a PutObject with If-None-Match or If-Match (Amazon S3 User Guide, "Conditional requests"). The
store refuses it if the object is not as expected, so that one of several writers wins.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

_CONNECT_SECONDS, _REQUEST_SECONDS, _ATTEMPTS = 5.0, 20.0, 3
#: Attempts at a conditional write that conflicts with another one in progress.
_CONFLICTS = 5
_REFUSED = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "409")
_MISSING = ("NoSuchKey", "404")
#: Another process has aborted the upload, or the store does not know uploads.
_GONE = ("NoSuchUpload", "NotImplemented")
#: Error codes of various stores for a condition that they do not know. A request that is wrong for another reason also
#: fails without the condition, and then reports that reason.
_UNKNOWN = ("NotImplemented", "InvalidRequest", "InvalidArgument", "MethodNotAllowed", "UnsupportedOperation")
_UNKNOWN_STATUS = (405, 501)
#: Error codes of various stores that do not know DeleteObjects, or expect another form of it.
_NO_BATCH = (*_UNKNOWN, "MalformedXML", "MissingContentMD5", "InvalidDigest", "BadDigest", "XAmzContentSHA256Mismatch")
#: Some stores delete the objects of a batch one by one, which must not exceed the request timeout.
_BATCH, _BATCHES_AT_ONCE, _SINGLES_AT_ONCE = 50, 4, 8
_NOT_IN_XML = re.compile(r"[\x00-\x1f\ufffe\uffff]")
#: Both libraries read this variable when they make a client; they have no common argument for it.
_CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION"
WITHOUT_CHECKSUMS = "when_required"
#: Since 2025, AWS's libraries upload in chunks with a trailing checksum (aws-chunked), which other stores may refuse.
_SIGNS_OF_CHECKSUMS = (
    "NotImplemented",
    "NOT_IMPLEMENTED",
    "HTTP status 501",
    "HTTP status 411",
    "MissingContentLength",
    "aws-chunked",
    "x-amz-checksum",
    "x-amz-trailer",
    "x-amz-sdk-checksum",
    "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
    "XAmzContentSHA256Mismatch",
)


def is_about_checksums(error: Exception) -> bool:
    """Return whether an upload may have been refused because of the checksum that AWS's libraries add."""
    return any(sign in str(error) for sign in _SIGNS_OF_CHECKSUMS)


def has_checksums() -> bool:
    """Return whether clients that are made now add checksums to uploads."""
    return os.environ.get(_CHECKSUMS, "").lower() != WITHOUT_CHECKSUMS


def set_checksums(value: str | None) -> str | None:
    """Set AWS's checksum variable for clients that are made from now on. Return its previous value.

    It is an environment variable, so that child processes (Ray, workers) inherit it.
    """
    before = os.environ.get(_CHECKSUMS)
    if value is None:
        os.environ.pop(_CHECKSUMS, None)
    else:
        os.environ[_CHECKSUMS] = value
    return before


@dataclass(frozen=True)
class S3:
    """The address of an S3 store.

    Attributes:
        endpoint: HOST:PORT; empty for Amazon's.
        scheme: http or https.
        region: None leaves it to the libraries.
    """

    endpoint: str = ""
    scheme: str = "https"
    region: str | None = None

    @classmethod
    def of(cls, options: dict[str, str]) -> S3:
        """Return the address from a URI's options, with AWS_ENDPOINT_URL as the default endpoint."""
        endpoint = options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL", "")
        scheme, mark, host = endpoint.rpartition("://")
        region = options.get("region")
        if host and region is None:
            # A private endpoint has no regions; without a region pyarrow asks the network for the bucket's.
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        return cls(host.rstrip("/"), options.get("scheme") or (scheme if mark else "https"), region)

    def file_system(self) -> pafs.S3FileSystem:
        """Make a file system. It reads the credentials now."""
        return pafs.S3FileSystem(
            endpoint_override=self.endpoint or None,
            scheme=self.scheme,
            region=self.region,
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_REQUEST_SECONDS,
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        )

    def objects(self) -> Conditional:
        """Make a client that reads and writes objects by version. It reads the credentials now."""
        return Conditional(self)

    def client(self) -> Any:
        """Make boto3's client. It reads the credentials now."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=f"{self.scheme}://{self.endpoint}" if self.endpoint else None,
            region_name=self.region or self.file_system().region,
            config=Config(
                connect_timeout=_CONNECT_SECONDS,
                read_timeout=_REQUEST_SECONDS,
                retries={"mode": "standard", "total_max_attempts": _ATTEMPTS},
                # The same style as pyarrow, which has no setting for it.
                s3={"addressing_style": "path"} if self.endpoint else None,
                ignore_configured_endpoint_urls=True,
            ),
        )


class Conditional:
    """Reads and writes objects by version, deletes in batches and aborts uploads, which pyarrow cannot do.

    Raises:
        OSError: from every method, with a text like pyarrow's.
    """

    def __init__(self, store: S3):
        try:
            self._client = store.client()
        except Exception as error:  # a missing profile, a file that cannot be read
            raise _os_error(error, "the configuration") from error
        # Some stores other than Amazon's require the older of two checksums.
        self._client.meta.events.register("before-call.s3.DeleteObjects", _add_md5)
        self._has_batches = True

    def get(self, path: str) -> tuple[bytes, str] | None:
        """Return the bytes and the version of BUCKET/KEY, or None if it does not exist."""
        bucket, _, key = path.partition("/")
        with _explained("GetObject", suppress=_MISSING):
            answer = self._client.get_object(Bucket=bucket, Key=key)
            data = answer["Body"].read()
            return data, answer.get("ETag") or hashlib.sha256(data).hexdigest()
        return None

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write BUCKET/KEY if it has this version (for None: if it does not exist). Return whether it was written.

        False may also mean that a response was lost and the retry found the object written: read it to find out.
        If the store does not know the condition, the error contains the word NotImplemented.
        """
        bucket, _, key = path.partition("/")
        condition = {"IfNoneMatch": "*"} if version is None else {"IfMatch": version}
        for last in [False] * (_CONFLICTS - 1) + [True]:
            try:
                self._client.put_object(Bucket=bucket, Key=key, Body=data, **condition)
                return True
            except Exception as error:
                code = _code(error)
                if code in _CONFLICT and not last:
                    continue
                if code in (*_REFUSED, *_CONFLICT, *_MISSING):
                    return False
                if code in _UNKNOWN or _status(error) in _UNKNOWN_STATUS:
                    text = f"AWS Error NotImplemented during conditional PutObject operation: {error}"
                    raise OSError(text) from error
                raise _os_error(error, "PutObject") from error
        raise AssertionError

    def write(self, path: str, data: bytes) -> None:
        """Write BUCKET/KEY unconditionally."""
        bucket, _, key = path.partition("/")
        with _explained("PutObject"):
            self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def delete(self, path: str) -> None:
        """Delete BUCKET/KEY and everything below BUCKET/KEY/, if it exists."""
        bucket, _, key = path.partition("/")
        prefix, keys = f"{key}/" if key else "", []
        with _explained("DeleteObject", suppress=(*_MISSING, "NoSuchBucket")):
            if key:
                self._client.delete_object(Bucket=bucket, Key=key)
            pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
            keys = [item["Key"] for page in pages for item in page.get("Contents", ())]
        self.delete_keys(bucket, keys)

    def delete_keys(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete objects, in batches if the store supports them."""
        listable = [key for key in keys if not _NOT_IN_XML.search(key)]
        batches = [listable[i : i + _BATCH] for i in range(0, len(listable), _BATCH)]
        left = [key for key in keys if _NOT_IN_XML.search(key)]
        if batches:
            with ThreadPoolExecutor(min(len(batches), _BATCHES_AT_ONCE)) as pool:
                for rest in pool.map(lambda batch: self._delete_batch(bucket, batch), batches):
                    left += rest
        if left:
            with ThreadPoolExecutor(min(len(left), _SINGLES_AT_ONCE)) as pool:
                list(pool.map(lambda key: self._delete_one(bucket, key), left))

    def _delete_batch(self, bucket: str, keys: Sequence[str]) -> Sequence[str]:
        """Delete objects with one request. Return the keys that must be deleted one by one."""
        if not self._has_batches or len(keys) == 1:
            return keys
        try:
            wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
            failed = self._client.delete_objects(Bucket=bucket, Delete=wanted).get("Errors", ())
        except Exception as error:
            if _code(error) in _NO_BATCH or _status(error) in _UNKNOWN_STATUS:
                self._has_batches = False
                return keys
            raise _os_error(error, "DeleteObjects") from error
        # Delete each failed object again by itself, so that its own error is reported.
        return [error["Key"] for error in failed if error.get("Code") not in _MISSING]

    def _delete_one(self, bucket: str, key: str) -> None:
        with _explained(f"DeleteObject of {key}", suppress=_MISSING):
            self._client.delete_object(Bucket=bucket, Key=key)

    def abort_uploads(self, path: str, is_dead: Callable[[str], bool]) -> int:
        """Abort multipart uploads below BUCKET/PREFIX, as in `Storage.abort_uploads`."""
        bucket, _, prefix = path.partition("/")
        aborted = 0
        with _explained("ListMultipartUploads", suppress=_GONE):
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    if upload["Key"].startswith(prefix) and is_dead(upload["Key"][len(prefix) :]):
                        aborted += self._abort_upload(bucket, upload)
        return aborted

    def _abort_upload(self, bucket: str, upload: dict[str, Any]) -> bool:
        """Abort an upload. Return False if it no longer exists."""
        try:
            self._client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        except Exception as error:
            if _code(error) != "NoSuchUpload":
                raise
            return False
        return True


def _add_md5(params: dict[str, Any], **_: Any) -> None:
    body = params["body"]
    digest = hashlib.md5(body if isinstance(body, bytes) else body.encode(), usedforsecurity=False).digest()
    params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()


def _status(error: Exception) -> int | None:
    return _answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode")


def _code(error: Exception) -> str:
    return str(_answer(error).get("Error", {}).get("Code", ""))


def _answer(error: Exception) -> dict[str, Any]:
    """Return the store's response; empty if there was none, as after a closed connection."""
    return getattr(error, "response", None) or {}


@contextlib.contextmanager
def _explained(operation: str, suppress: Sequence[str] = ()) -> Iterator[None]:
    """Convert boto3's errors with `_os_error`; ignore errors whose code is in `suppress`."""
    try:
        yield
    except Exception as error:
        if _code(error) not in suppress:
            raise _os_error(error, operation) from error


def _os_error(error: Exception, what: str) -> OSError:
    """Return a boto3 error as an OSError with a text like pyarrow's, which `refusals.classify` knows."""
    from botocore import exceptions

    if isinstance(error, (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError)):
        return OSError(f"No credentials: {error}")
    if isinstance(error, exceptions.HTTPClientError):
        return OSError(f"AWS Error NETWORK_CONNECTION during {what} operation: {error}")
    if isinstance(error, exceptions.ClientError):
        return OSError(f"AWS Error {_code(error)} during {what} operation: {error} (HTTP status {_status(error)})")
    if isinstance(error, (OSError, exceptions.BotoCoreError)):
        return OSError(f"AWS Error during {what} operation: {error}")
    return OSError(f"{type(error).__name__} during {what} operation: {error}")
