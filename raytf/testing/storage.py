"""A forwarder in front of an S3-protocol server, which fails, delays or cuts off requests when it is told to."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Headers that belong to one connection and are not forwarded.
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
#: How long an object that could not be written cannot be written again.
HOLD_SECONDS = 20.0
_FAILURE = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>injected fault</Message></Error>'


class StorageProxy:
    """Forwards requests to an S3-protocol server; a context manager.

        with StorageProxy("127.0.0.1:9000") as proxy:
            uri = f"s3://bucket/runs?endpoint_override={proxy.endpoint}&scheme=http&region=us-east-1"
            proxy.fail_writes(2, after=5)

    An object's write is its PUT, or the completion of its upload in parts. Clients of object stores hide single
    failures by trying again, so an object whose write fails cannot be written for the next `HOLD_SECONDS`.

    Args:
        target: HOST:PORT of the server.

    Attributes:
        endpoint: HOST:PORT of the forwarder.
        writes: of objects so far, those that failed too.
    """

    def __init__(self, target: str):
        self._target = target
        self._lock = threading.Lock()
        self._failing: dict[str, float] = {}
        self._to_skip = self._to_fail = 0
        self._delay, self._is_down = 0.0, False
        self.writes = 0
        self.endpoint = ""

    def __enter__(self) -> StorageProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def _forward(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()
        self.endpoint = f"127.0.0.1:{self._server.server_address[1]}"
        return self

    def __exit__(self, *exc: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail_writes(self, count: int, after: int = 0) -> None:
        """Fail `count` objects' writes after the next `after` ones; then all is well again."""
        with self._lock:
            self._to_skip, self._to_fail = after, count

    def delay(self, seconds: float) -> None:
        """Let every request wait so long, from now on."""
        self._delay = seconds

    def down(self) -> None:
        """Close every connection without an answer, until `up`."""
        self._is_down = True

    def up(self) -> None:
        self._is_down = False

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = _body(request)
        time.sleep(self._delay)
        if self._is_down:
            request.close_connection = True
            request.connection.close()
            return
        if self._fails(request):
            _answer(request, 500, [("Content-Type", "application/xml")], _FAILURE)
            return
        connection = http.client.HTTPConnection(self._target, timeout=120)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
            # Not `request`, which would add headers that were not signed.
            connection.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body or None)
            answer = connection.getresponse()
            data = answer.read()
            _answer(request, answer.status, answer.getheaders(), data)
        except OSError:
            request.close_connection = True
        finally:
            connection.close()

    def _fails(self, request: BaseHTTPRequestHandler) -> bool:
        address = urlsplit(request.path)
        query = parse_qs(address.query, keep_blank_values=True)
        is_write = (request.command == "PUT" and "partNumber" not in query) or (
            request.command == "POST" and "uploadId" in query
        )
        if not is_write:
            return False
        with self._lock:
            if time.monotonic() - self._failing.get(address.path, float("-inf")) < HOLD_SECONDS:
                return True
            self.writes += 1
            if self._to_skip:
                self._to_skip -= 1
            elif self._to_fail:
                self._to_fail -= 1
                self._failing[address.path] = time.monotonic()
                return True
            return False


def _body(request: BaseHTTPRequestHandler) -> bytes:
    if "chunked" in request.headers.get("Transfer-Encoding", ""):
        parts = []
        while size := int(request.rfile.readline().split(b";")[0], 16):
            parts.append(request.rfile.read(size))
            request.rfile.readline()
        request.rfile.readline()
        return b"".join(parts)
    return request.rfile.read(int(request.headers.get("Content-Length") or 0))


def _answer(request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
    request.send_response_only(status)
    for name, value in headers:
        if name.lower() not in _HOP_BY_HOP and not (name.lower() == "content-length" and request.command != "HEAD"):
            request.send_header(name, value)
    if request.command != "HEAD":
        request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(data)
