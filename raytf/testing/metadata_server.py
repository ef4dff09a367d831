"""The metadata services of three clouds, as instances see them, with notices of preemption on demand.

This replaces services that only machines of a cloud have. Like the clouds, it refuses requests without their headers
or a valid token, requests with other methods, paths or API versions, and requests through a proxy.
"""

from __future__ import annotations

import email.utils
import json
import secrets
import threading
import time
import urllib.parse
import uuid
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_AZURE_EVENTS = {"2019-01-01", "2019-04-01", "2019-08-01", "2020-07-01"}
_AZURE_INSTANCE = {"2020-09-01", "2020-12-01", "2021-01-01", "2021-02-01"}
_MOST_TOKEN_SECONDS = 21600


class _Answer(NamedTuple):
    status: int
    body: str
    headers: Mapping[str, str]


class Instance:
    """One machine and its metadata service, returned by `MetadataServer.add`.

    Attributes:
        name: name of the machine.
        url: base URL of its service.
        requests: the requests so far, as (method, path, status).
        delay_seconds: delay before each answer; may be set at any time.
        garbage: if set, the body of every answer; may be set at any time.
    """

    def __init__(self, name: str, url: str):
        self.name, self.url = name, url
        self.requests: list[tuple[str, str, int]] = []
        self.delay_seconds = 0.0
        self.garbage: str | None = None

    def notice(self, seconds: float) -> None:
        """Announce a preemption after this many seconds; nothing is killed."""
        raise NotImplementedError

    def _answer(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> _Answer:
        raise NotImplementedError


class AwsInstance(Instance):
    """A machine of EC2, which requires version 2 of the metadata service."""

    def __init__(self, name: str, url: str):
        super().__init__(name, url)
        self._tokens: dict[str, float] = {}
        self._action: dict[str, str] | None = None
        self._rebalance: dict[str, str] | None = None

    def notice(self, seconds: float, action: str = "terminate") -> None:
        """Announce a spot interruption: terminate, stop or hibernate."""
        self._action = {"action": action, "time": _iso(time.time() + seconds)}

    def recommend_rebalance(self) -> None:
        """Announce a rebalance recommendation: EC2 sees a higher risk of interruption."""
        self._rebalance = {"noticeTime": _iso(time.time())}

    def expire_tokens(self) -> None:
        """Make all tokens invalid that the service has issued."""
        self._tokens.clear()

    def _answer(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> _Answer:
        if path == "/latest/api/token":
            if method != "PUT":
                return _Answer(405, "", {"Allow": "OPTIONS, PUT"})
            if "X-Forwarded-For" in headers:
                return _Answer(403, "", {})
            wanted = headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            if not wanted.isdigit() or not 1 <= int(wanted) <= _MOST_TOKEN_SECONDS:
                return _Answer(400, "", {})
            token = secrets.token_urlsafe(40) + "=="
            self._tokens[token] = time.monotonic() + int(wanted)
            return _Answer(200, token, {"X-Aws-Ec2-Metadata-Token-Ttl-Seconds": wanted})
        if method != "GET":
            return _Answer(405, "", {"Allow": "OPTIONS, GET"})
        if self._tokens.get(headers.get("X-aws-ec2-metadata-token", ""), 0.0) < time.monotonic():
            return _Answer(401, "", {})
        document = {
            "/latest/meta-data/spot/instance-action": self._action,
            "/latest/meta-data/events/recommendations/rebalance": self._rebalance,
        }.get(path)
        if document is None:
            return _Answer(404, "<html><head><title>404 - Not Found</title></head></html>", {})
        return _Answer(200, json.dumps(document), {})


class GcpInstance(Instance):
    """A machine of Compute Engine. Google preempts a machine 30 s after the notice, which does not contain a time."""

    def __init__(self, name: str, url: str):
        super().__init__(name, url)
        self._preempted, self._event = False, "NONE"

    def notice(self, seconds: float = 30.0) -> None:
        """Announce a preemption; `seconds` is ignored, because the notice does not contain a time."""
        self._preempted = True

    def maintain(self, event: str) -> None:
        """Announce maintenance of the host: MIGRATE_ON_HOST_MAINTENANCE, TERMINATE_ON_HOST_MAINTENANCE, or NONE."""
        self._event = event

    def _answer(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> _Answer:
        own = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM", "Content-Type": "application/text"}
        if method != "GET":
            return _Answer(405, "", own)
        if headers.get("Metadata-Flavor") != "Google" or "X-Forwarded-For" in headers:
            return _Answer(403, "Missing Metadata-Flavor:Google header.", own)
        value = {
            "/computeMetadata/v1/instance/name": self.name,
            "/computeMetadata/v1/instance/preempted": "TRUE" if self._preempted else "FALSE",
            "/computeMetadata/v1/instance/maintenance-event": self._event,
        }.get(path)
        return _Answer(404, "", own) if value is None else _Answer(200, value, own)


class AzureInstance(Instance):
    """A machine of Azure, which sees the events of its whole group."""

    def __init__(self, name: str, url: str):
        super().__init__(name, url)
        self._events: list[dict[str, Any]] = []
        self._incarnation = 1

    def notice(
        self, seconds: float, kind: str = "Preempt", resources: tuple[str, ...] = (), status: str = "Scheduled"
    ) -> None:
        """Announce an event.

        Args:
            seconds: time until the event may start.
            kind: Preempt, Terminate, Reboot, Redeploy or Freeze.
            resources: names of the affected machines; by default this one.
            status: Scheduled; or Started, for an event without a start time.
        """
        self._incarnation += 1
        starts = email.utils.formatdate(time.time() + seconds, usegmt=True)
        self._events.append(
            {
                "EventId": str(uuid.uuid4()).upper(),
                "EventStatus": status,
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(resources or (self.name,)),
                "NotBefore": starts if status == "Scheduled" else "",
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": 5 if kind == "Freeze" else -1,
            }
        )

    def _answer(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> _Answer:
        if headers.get("Metadata", "").casefold() != "true" or "X-Forwarded-For" in headers:
            return _refusal("Required metadata header not specified")
        if method != "GET":
            return _Answer(405, "", {})  # an event is acknowledged by POST, which raytf must never do
        versions = {
            "/metadata/scheduledevents": _AZURE_EVENTS,
            "/metadata/instance/compute/name": _AZURE_INSTANCE,
        }.get(path)
        if versions is None:
            return _Answer(404, json.dumps({"error": "Not found"}), {})
        if "api-version" not in query:
            return _refusal("api-version was not specified in the request")
        if query["api-version"] not in versions:
            return _refusal("api-version is invalid")
        if path == "/metadata/scheduledevents":
            document = {"DocumentIncarnation": self._incarnation, "Events": self._events}
            return _Answer(200, json.dumps(document), {"Content-Type": "application/json"})
        if query.get("format") != "text":  # a single value is not a JSON document
            return _refusal("Leaf nodes are only available with format=text")
        return _Answer(200, self.name, {"Content-Type": "text/plain"})


_KINDS = {"aws": AwsInstance, "gcp": GcpInstance, "azure": AzureInstance}


class MetadataServer:
    """Serves the metadata of any number of machines, each at /NAME; a context manager.

        with MetadataServer() as server:
            machine = server.add("aws", "a")
            ...  # raytf node --notice-url {machine.url} -- ...
            machine.notice(120)

    In a run, name machines by Ray's ids of their nodes, and pass `--notice-url http://HOST:PORT/{node_id}`.

    Args:
        address: the address to listen on.

    Attributes:
        url: URL of the server, set on entry.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self.url = ""
        self._machines: dict[str, Instance] = {}

    def __enter__(self) -> MetadataServer:
        machines = self._machines

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: Any) -> None:
                pass

            def _serve(self) -> None:
                address = urllib.parse.urlsplit(self.path)
                _, name, *rest = address.path.split("/")
                machine, path = machines.get(name), "/" + "/".join(rest)
                if machine is None:
                    return self._send(_Answer(404, "", {}))
                time.sleep(machine.delay_seconds)
                query = dict(urllib.parse.parse_qsl(address.query))
                answer = machine._answer(self.command, path, query, self.headers)  # type: ignore[arg-type]
                machine.requests.append((self.command, path, answer.status))
                if machine.garbage is not None:
                    answer = _Answer(200, machine.garbage, {})
                self._send(answer)

            def _send(self, answer: _Answer) -> None:
                body = answer.body.encode()
                self.send_response_only(answer.status)
                self.send_header("Date", self.date_time_string())  # as the clouds do
                for key, value in answer.headers.items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = _serve

        self._server = ThreadingHTTPServer((self._address, 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False  # a client may disconnect before its delayed answer
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.url = f"http://{self._address}:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exc: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def add(self, cloud: str, name: str) -> Any:
        """Add a machine, whose service answers from now on.

        Args:
            cloud: aws, gcp or azure.
            name: letters, digits, '-' and '_'.

        Returns:
            An AwsInstance, GcpInstance or AzureInstance.

        Raises:
            ValueError: there is no such cloud.
        """
        if cloud not in _KINDS:
            raise ValueError(f"cloud {cloud!r}: expected one of {', '.join(_KINDS)}")
        self._machines[name] = _KINDS[cloud](name, f"{self.url}/{name}")
        return self._machines[name]


def _refusal(why: str) -> _Answer:
    return _Answer(400, json.dumps({"error": f"Bad request. {why}"}), {"Content-Type": "application/json"})


def _iso(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
