"""Clients of the clouds' metadata services, which announce the preemption of an instance.

Sources: AWS, "Spot Instance interruption notices", "EC2 instance rebalance recommendations" and "Use the Instance
Metadata Service" (version 2); Google, "Spot VMs", "Live migration process" and "VM metadata"; Microsoft, "Scheduled
Events for Linux VMs" and "Azure Instance Metadata Service".
"""

from __future__ import annotations

import email.utils
import http.client
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

from raytf.errors import RaytfError, one_line

#: The address at which all three clouds serve an instance its own metadata.
LINK_LOCAL = "http://169.254.169.254"
#: Timeouts of a normal request, and of a request that only detects whether a service exists.
TIMEOUT_SECONDS, DETECT_SECONDS = 2.0, 0.5
#: Seconds from a notice until the instance stops, if the service does not report them: AWS 2 minutes, Google 30 s for
#: a preemption and 60 s for maintenance (an hour for some machines with GPUs).
AWS_SECONDS, GCP_SECONDS, GCP_MAINTENANCE_SECONDS = 120.0, 30.0, 60.0

#: The longest lifetime that AWS allows for a token, which is renewed a minute before it expires.
_TOKEN_SECONDS, _TOKEN_MARGIN_SECONDS = 21600, 60.0
_AZURE_EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
_AZURE_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_MOST_BYTES = 1 << 20


class MetadataError(RaytfError):
    """The metadata service cannot be reached, or its answer matches no cloud's documentation. Polling continues."""

    retryable = True


@dataclass(frozen=True)
class Notice:
    """A cloud's announcement about this instance.

    Attributes:
        cloud: aws, gcp or azure.
        kind: the announced event in the cloud's own words; identical in every answer about the same event.
        text: a description of the event for the user.
        seconds: from the answer until the event happens, if known.
        leaves: whether the instance, or everything that runs on it, will stop. If not, the notice is only a warning.
    """

    cloud: str
    kind: str
    text: str
    seconds: float | None
    leaves: bool = True


class NoticeSource(Protocol):
    """A cloud's metadata service."""

    cloud: str

    def is_here(self) -> bool:
        """Return whether the service at this address belongs to this cloud. Never raises."""
        ...

    def poll(self) -> Iterator[Notice]:
        """Yield all current notices, the most urgent first.

        Raises:
            MetadataError: the service did not answer as documented. Some notices may have been yielded before.
        """
        ...


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP answer: its status, headers by lower-case name, and body as text."""

    status: int
    headers: Mapping[str, str]
    text: str

    def seconds_until(self, at: float) -> float | None:
        """Return the seconds from this answer to a Unix time, or None if the answer has no date. Only the service's
        clock is used, since this machine's clock may be wrong."""
        sent = _http_time(self.headers.get("date"))
        return None if sent is None else max(0.0, at - sent)


class Endpoint:
    """A metadata service's address. Requests bypass the proxies that the environment sets.

    Args:
        url: http://HOST[:PORT][/PREFIX].
        timeout: seconds without an answer after which a request fails.
    """

    def __init__(self, url: str, timeout: float):
        parts = urllib.parse.urlsplit(url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port or 80, parts.path.rstrip("/")
        self._timeout = timeout

    def request(self, method: str, path: str, headers: Mapping[str, str]) -> HttpAnswer:
        """Send one request and return the answer.

        Raises:
            MetadataError: nothing answered in time, or the answer is not HTTP.
        """
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
            return HttpAnswer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, text)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise MetadataError(f"{method} {path}: {type(error).__name__} {one_line(error, 200)}") from None
        finally:
            connection.close()


class AwsNotices:
    """EC2's instance metadata service, version 2. Each request carries a token that the service issued before."""

    cloud = "aws"

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float] = time.monotonic):
        self._endpoint, self._clock = endpoint, clock
        self._token, self._renew_at = "", float("-inf")

    def is_here(self) -> bool:
        return _succeeds(self._new_token)

    def poll(self) -> Iterator[Notice]:
        answer = self._get("/latest/meta-data/spot/instance-action")
        if answer is not None:
            document = _document(answer.text, "spot/instance-action")
            action = str(document.get("action"))
            at = _iso_time(document.get("time"))
            known = None if at is None else answer.seconds_until(at)
            left = AWS_SECONDS if known is None else known
            yield Notice("aws", f"instance-action {action}", f"AWS will {action} it (spot interruption)", left)
        answer = self._get("/latest/meta-data/events/recommendations/rebalance")
        if answer is not None:
            _document(answer.text, "events/recommendations/rebalance")
            text = "AWS recommends leaving it (rebalance recommendation); it may run for hours"
            yield Notice("aws", "rebalance recommendation", text, None, leaves=False)

    def _get(self, path: str) -> HttpAnswer | None:
        """Return the answer for a path, or None if the service has nothing at that path yet."""
        for _ in range(2):
            if self._clock() >= self._renew_at:
                self._new_token()
            answer = self._endpoint.request("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if answer.status != 401:
                break
            self._renew_at = float("-inf")  # the service no longer knows the token, or counts its lifetime differently
        return None if answer.status == 404 else _ok(answer, path)

    def _new_token(self) -> None:
        path = "/latest/api/token"
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
        self._token = _ok(self._endpoint.request("PUT", path, headers), path).text.strip()
        if not re.fullmatch(r"[\w+/=-]+", self._token, re.ASCII):
            raise MetadataError(f"{path} returned no token")
        self._renew_at = self._clock() + _TOKEN_SECONDS - _TOKEN_MARGIN_SECONDS


class GcpNotices:
    """Compute Engine's metadata server."""

    cloud = "gcp"
    _flavor: Mapping[str, str] = {"Metadata-Flavor": "Google"}

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    def is_here(self) -> bool:
        return _succeeds(lambda: self._get("preempted"))

    def poll(self) -> Iterator[Notice]:
        preempted = self._get("preempted")
        if preempted not in ("TRUE", "FALSE"):
            raise MetadataError(f"instance/preempted is {preempted[:60]!r}, expected TRUE or FALSE")
        if preempted == "TRUE":
            yield Notice("gcp", "preempted", "Google Cloud preempts it", GCP_SECONDS)
        event = self._get("maintenance-event")
        if event.startswith("TERMINATE"):
            text = "Google Cloud stops it for maintenance of its host"
            yield Notice("gcp", f"maintenance-event {event}", text, GCP_MAINTENANCE_SECONDS)
        elif event.startswith("MIGRATE"):
            text = "Google Cloud moves it to another host, where it continues"
            yield Notice("gcp", f"maintenance-event {event}", text, None, leaves=False)
        elif event != "NONE":
            raise MetadataError(f"maintenance-event is {event[:60]!r}, expected NONE, MIGRATE... or TERMINATE...")

    def _get(self, key: str) -> str:
        path = f"/computeMetadata/v1/instance/{key}"
        answer = _ok(self._endpoint.request("GET", path, self._flavor), path)
        if answer.headers.get("metadata-flavor") != "Google":
            raise MetadataError(f"{path}: the answer is not from Google's metadata server")
        return answer.text.strip()


class AzureNotices:
    """Azure's scheduled events. raytf never acknowledges an event, because Azure would then start it at once."""

    cloud = "azure"
    _headers: Mapping[str, str] = {"Metadata": "true"}
    #: Event -> its description, and whether it stops everything that runs on the machine.
    _events: Mapping[str, tuple[str, bool]] = {
        "Preempt": ("Azure evicts it (spot)", True),
        "Terminate": ("Azure deletes it", True),
        "Reboot": ("Azure reboots it", True),
        "Redeploy": ("Azure moves it to another host and reboots it", True),
        "Freeze": ("Azure pauses it for some seconds", False),
    }

    def __init__(self, endpoint: Endpoint):
        self._endpoint = endpoint

    def is_here(self) -> bool:
        return _succeeds(self._own_name)

    def poll(self) -> Iterator[Notice]:
        name = self._own_name()
        answer = self._get(_AZURE_EVENTS)
        document = _document(answer.text, "scheduledevents")
        events = document.get("Events")
        if not isinstance(events, list):
            raise MetadataError("scheduledevents has no list Events")
        # The answer contains the events of all instances of a group.
        own = [
            self._notice(event, answer) for event in events if isinstance(event, dict) and self._concerns(event, name)
        ]
        yield from sorted(own, key=lambda notice: not notice.leaves)

    def _concerns(self, event: Mapping[str, Any], name: str) -> bool:
        resources = event.get("Resources")
        named = {str(resource).casefold() for resource in resources} if isinstance(resources, list) else set()
        is_open = event.get("EventStatus", "Scheduled") in ("Scheduled", "Started")
        return is_open and event.get("EventType") in self._events and name.casefold() in named

    def _notice(self, event: Mapping[str, Any], answer: HttpAnswer) -> Notice:
        kind = event["EventType"]
        text, leaves = self._events[kind]
        at = _http_time(event.get("NotBefore"))  # empty once the event has started
        left = 0.0 if at is None else answer.seconds_until(at)
        return Notice("azure", f"{kind} {event.get('EventId', '')}".strip(), text, left if leaves else None, leaves)

    def _own_name(self) -> str:
        name = self._get(_AZURE_NAME).text.strip()
        if not re.fullmatch(r"[\w.-]+", name):
            raise MetadataError(f"compute/name is {name[:60]!r}, expected the name of a machine")
        return name

    def _get(self, path: str) -> HttpAnswer:
        return _ok(self._endpoint.request("GET", path, self._headers), path)


def sources(url: str, timeout: float) -> dict[str, NoticeSource]:
    """Return a client for each cloud's metadata protocol at one address, by the cloud's name."""
    endpoint = Endpoint(url, timeout)
    return {"aws": AwsNotices(endpoint), "gcp": GcpNotices(endpoint), "azure": AzureNotices(endpoint)}


def detect(url: str, timeout: float = DETECT_SECONDS) -> str | None:
    """Return the name of the cloud whose metadata service answers at an address, or None."""
    return next((cloud for cloud, source in sources(url, timeout).items() if source.is_here()), None)


def _succeeds(request: Callable[[], object]) -> bool:
    try:
        request()
    except MetadataError:
        return False
    return True


def _ok(answer: HttpAnswer, path: str) -> HttpAnswer:
    if answer.status != 200:
        raise MetadataError(f"{path}: HTTP status {answer.status}")
    return answer


def _document(text: str, what: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise MetadataError(f"{what} is {text[:60]!r}, expected a JSON object")
    return document


def _iso_time(text: object) -> float | None:
    """Return the Unix time of a text such as `2017-09-18T08:22:00Z`, or None for anything else."""
    try:
        at = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _http_time(text: object) -> float | None:
    """Return the Unix time of a text such as `Mon, 19 Sep 2016 18:29:47 GMT`, or None for anything else."""
    try:
        return email.utils.parsedate_to_datetime(str(text)).timestamp()
    except ValueError:
        return None
