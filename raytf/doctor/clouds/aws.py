"""boto3 for checks that only read: one session, timeouts of seconds, and the meaning of AWS's refusals.

The only module besides `raytf.storage.s3` that knows boto3: that one writes runs and must retry, this one asks control
planes and must not wait. boto3 is imported when it is first used, since that takes half a second.
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
#: Operations whose right has another name.
_RIGHTS = {"s3:HeadBucket": "s3:ListBucket"}


class AwsTrouble(StrEnum):
    """The kind of an error of AWS.

    Attributes:
        DENIED: these credentials lack the right.
        REFUSED: AWS does not accept these credentials at all.
        MISSING: what was asked for does not exist.
        SILENT: there was no answer in time.
    """

    DENIED = "denied"
    REFUSED = "refused"
    MISSING = "missing"
    SILENT = "silent"
    OTHER = "other"


class AwsAccount:
    """An account in one region, with the `provider.aws_credentials` of a cluster YAML; empty for the environment's."""

    def __init__(self, region: str, keys: dict[str, str] | None = None):
        import boto3
        from botocore.exceptions import BotoCoreError

        self.region = region
        try:
            self._session: Any = boto3.session.Session(region_name=region, **(keys or {}))
        except BotoCoreError:  # AWS_PROFILE names none, or ~/.aws/config cannot be read
            self._session = None
        self._lock = threading.Lock()
        self._clients: dict[str, Any] = {}

    def has_credentials(self) -> bool:
        """Return whether there are any; on a machine with a role, its metadata service is asked."""
        from botocore.exceptions import BotoCoreError

        try:
            return self._session is not None and self._session.get_credentials() is not None
        except BotoCoreError:  # a sign-on that has ended, a role whose source is not there
            return False

    def client(self, name: str) -> Any:
        """Return a client with timeouts of seconds; several threads may call this."""
        from botocore.config import Config

        with self._lock:  # a session makes one client at a time
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
        """Call an operation; None if what it asks for does not exist."""
        try:
            answer: dict[str, Any] = getattr(self.client(service), operation)(**wanted)
        except Exception as problem:
            if trouble(problem) is not AwsTrouble.MISSING:
                raise
            return None
        return answer

    def pages(self, operation: str, key: str, **wanted: Any) -> Iterator[dict[str, Any]]:
        """Yield all entries of a list of EC2 that comes in pages."""
        for page in self.client("ec2").get_paginator(operation).paginate(**wanted):
            yield from page[key]


def account_of(document: Document, region: str) -> AwsAccount:
    """Return the account that a cluster YAML uses, by its own keys if it has some."""
    keys = document.mapping("provider", "aws_credentials").items()
    return AwsAccount(region, {key: str(value) for key, value in keys if key.startswith("aws_")})


def code(error: Exception) -> str:
    """Return AWS's code of a refusal; empty for other errors."""
    response = getattr(error, "response", None) or {}  # a timeout has None
    return str(response.get("Error", {}).get("Code", ""))


def trouble(error: Exception) -> AwsTrouble:
    """Classify an exception of boto3."""
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
