"""A client of AWS for read-only checks: one session, timeouts of seconds, and the kinds of AWS's errors.

Only this module and `raytf.storage.s3` use boto3. Storage writes runs and must retry; this module queries control
planes and must not wait. boto3 is imported on first use, since the import takes half a second.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

from raytf.doctor.document import Document

_CONNECT_SECONDS, _READ_SECONDS = 3.0, 8.0
_DENIED = {"AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403", "Forbidden"}
_REFUSED = {
    "AuthFailure",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidAccessKeyId",
    "InvalidClientTokenId",
    "RequestExpired",
    "SignatureDoesNotMatch",
    "UnrecognizedClientException",
}
#: Operation -> its right, if the right has another name.
_RIGHTS = {"s3:HeadBucket": "s3:ListBucket"}


class AwsTrouble(StrEnum):
    """The kind of an AWS error.

    Attributes:
        DENIED: these credentials lack the right.
        REFUSED: AWS does not accept these credentials at all.
        MISSING: the requested resource does not exist.
        SILENT: there was no answer in time.
    """

    DENIED = "denied"
    REFUSED = "refused"
    MISSING = "missing"
    SILENT = "silent"
    OTHER = "other"


class AwsAccount:
    """An account in one region. Without `keys` (`provider.aws_credentials`) it has the environment's credentials."""

    def __init__(self, region: str, keys: dict[str, str] | None = None):
        import boto3
        from botocore.exceptions import BotoCoreError

        self.region = region
        try:
            self._session: Any = boto3.session.Session(region_name=region, **(keys or {}))
        except BotoCoreError:  # AWS_PROFILE names no profile, or ~/.aws/config cannot be read
            self._session = None
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    def has_credentials(self) -> bool:
        """Return whether there are credentials. On a machine with a role this queries the metadata service."""
        from botocore.exceptions import BotoCoreError

        try:
            return self._session is not None and self._session.get_credentials() is not None
        except BotoCoreError:  # an expired sign-on, or a role whose source does not exist
            return False

    def client(self, name: str) -> Any:
        """Return a client with timeouts of seconds. Several threads may call this."""
        from botocore.config import Config

        with self._lock:  # a session can create only one client at a time
            if name not in self._clients:
                self._clients[name] = self._session.client(
                    name,
                    config=Config(
                        connect_timeout=_CONNECT_SECONDS,
                        read_timeout=_READ_SECONDS,
                        retries={"mode": "standard", "total_max_attempts": 2},
                    ),
                )
            return self._clients[name]

    def find(self, service: str, operation: str, **wanted: Any) -> dict[str, Any] | None:
        """Return the answer to an operation, or None if the requested resource does not exist."""
        try:
            answer: dict[str, Any] = getattr(self.client(service), operation)(**wanted)
        except Exception as problem:
            if trouble(problem) is not AwsTrouble.MISSING:
                raise
            return None
        return answer

    def pages(self, operation: str, key: str, **wanted: Any) -> Iterator[dict[str, Any]]:
        """Yield all entries of a paged list of EC2."""
        for page in self.client("ec2").get_paginator(operation).paginate(**wanted):
            yield from page[key]


def account_of(document: Document, region: str) -> AwsAccount:
    """Return the account that a cluster YAML uses, with the YAML's own keys if it has some."""
    keys = document.mapping("provider", "aws_credentials").items()
    return AwsAccount(region, {key: str(value) for key, value in keys if key.startswith("aws_")})


def code(error: Exception) -> str:
    """Return the code of an error that AWS returned, or an empty string for other errors."""
    response = getattr(error, "response", None) or {}  # a timeout has None
    return str(response.get("Error", {}).get("Code", ""))


def trouble(error: Exception) -> AwsTrouble:
    """Return the kind of a boto3 exception."""
    from botocore import exceptions

    refusal = code(error)
    if refusal in _DENIED:
        return AwsTrouble.DENIED
    if refusal in _REFUSED or isinstance(error, exceptions.NoCredentialsError | exceptions.CredentialRetrievalError):
        return AwsTrouble.REFUSED
    if re.search(r"NotFound|NoSuch|Malformed|^404$", refusal):
        return AwsTrouble.MISSING
    if isinstance(error, exceptions.HTTPClientError | exceptions.EndpointConnectionError):
        return AwsTrouble.SILENT
    return AwsTrouble.OTHER


def right(error: Exception, service: str) -> str:
    """Return the right that a denied call needs, such as `ec2:DescribeImages`."""
    name = f"{service}:{getattr(error, 'operation_name', '')}"
    return _RIGHTS.get(name, name)
