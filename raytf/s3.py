"""S3: pyarrow's file system, and boto3 for what that lacks (conditional writes), both made from one URI's options.

A conditional write is refused by the store itself where the object is not as expected, so that of several writers one
wins: PutObject with If-None-Match or If-Match (Amazon S3 User Guide, "Conditional requests").
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow.fs as pafs

_CONNECT_SECONDS, _REQUEST_SECONDS, _ATTEMPTS = 5.0, 20.0, 3
#: Tries of a conditional write that met another one under way.
_CONFLICTS = 5
_REFUSED = ("PreconditionFailed", "412")
_CONFLICT = ("ConditionalRequestConflict", "409")
_MISSING = ("NoSuchKey", "404")
#: Somebody else has aborted an upload, or the store knows of none.
_GONE = ("NoSuchUpload", "NotImplemented")


@dataclass(frozen=True)
class S3:
    """How to reach an S3 store.

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
        """From a URI's options; an endpoint that is not among them is taken from AWS_ENDPOINT_URL."""
        scheme, mark, host = (options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL", "")).rpartition(
            "://"
        )
        region = options.get("region")
        if host and region is None:
            # An endpoint of one's own has no regions; without one pyarrow asks the network for the bucket's.
            region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        return cls(host.rstrip("/"), options.get("scheme") or (scheme if mark else "https"), region)

    def file_system(self) -> pafs.S3FileSystem:
        """A file system that has read the credentials just now."""
        return pafs.S3FileSystem(
            endpoint_override=self.endpoint or None,
            scheme=self.scheme,
            region=self.region,
            connect_timeout=_CONNECT_SECONDS,
            request_timeout=_REQUEST_SECONDS,
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=_ATTEMPTS),
        )

    def client(self) -> Any:
        """boto3's client, likewise."""
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
                # As pyarrow does, which knows no other variable for it either.
                s3={"addressing_style": "path"} if self.endpoint else None,
                ignore_configured_endpoint_urls=True,
            ),
        )


class Conditional:
    """Reads and writes of objects by version.

    Args:
        store: where.

    Raises:
        OSError: from every method, in words as pyarrow's.
    """

    def __init__(self, store: S3):
        try:
            self._client = store.client()
        except Exception as error:  # a profile that there is not, a file that cannot be read
            raise _explained(error, "the configuration") from error

    def get(self, path: str) -> tuple[bytes, str] | None:
        """The bytes and the version of BUCKET/KEY; None where it is not there."""
        bucket, _, key = path.partition("/")
        try:
            answer = self._client.get_object(Bucket=bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]
        except Exception as error:
            if _code(error) in _MISSING:
                return None
            raise _explained(error, "GetObject") from error

    def put(self, path: str, data: bytes, version: str | None) -> bool:
        """Write BUCKET/KEY where it is of a version, or where it is not there for None; whether it was written.

        A write whose answer was lost counts as refused, since it is tried again and meets itself: read what is there.
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
                raise _explained(error, "PutObject") from error
        raise AssertionError

    def abort_uploads(self, path: str, is_dead: Callable[[str], bool]) -> int:
        """Abort uploads in parts below BUCKET/PREFIX; see Storage."""
        bucket, _, prefix = path.partition("/")
        aborted = 0
        try:
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
                for upload in page.get("Uploads", ()):
                    if is_dead(upload["Key"][len(prefix) :]):
                        self._client.abort_multipart_upload(
                            Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                        )
                        aborted += 1
        except Exception as error:
            if _code(error) not in _GONE:
                raise _explained(error, "ListMultipartUploads") from error
        return aborted


def _code(error: Exception) -> str:
    return str(getattr(error, "response", {}).get("Error", {}).get("Code", ""))


def _explained(error: Exception, what: str) -> OSError:
    """A boto3 error in the words that `storage.classify` knows from pyarrow."""
    from botocore import exceptions

    if isinstance(error, (exceptions.NoCredentialsError, exceptions.CredentialRetrievalError)):
        return OSError(f"No credentials: {error}")
    if isinstance(error, exceptions.HTTPClientError):
        return OSError(f"AWS Error NETWORK_CONNECTION during {what} operation: {error}")
    if isinstance(error, exceptions.ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return OSError(f"AWS Error {_code(error)} during {what} operation: {error} (HTTP status {status})")
    if isinstance(error, (OSError, exceptions.BotoCoreError)):
        return OSError(f"AWS Error during {what} operation: {error}")
    return OSError(f"{type(error).__name__} during {what} operation: {error}")
