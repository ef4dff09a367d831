"""A proxy in front of an S3-protocol server, which can fail, delay or cut off requests."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Headers that belong to one connection, and are not forwarded.
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"}
_BLOCK_BYTES = 1 << 18


class StorageProxy:
    """Forwards requests to an S3-protocol server; a context manager.

        with StorageProxy("127.0.0.1:9000") as proxy:
            uri = f"s3://bucket/runs?endpoint_override={proxy.endpoint}&scheme=http&region=us-east-1"
            proxy.fail_writes(2, after=5)

    Bodies are forwarded in blocks, and headers unchanged, so that signatures stay valid. A write of an object is its
    PUT, or the completion of its multipart upload. Since retries of clients would hide single failures, an object whose
    write failed cannot be written for a while.

    Args:
        target: HOST:PORT of the server, which uses plain HTTP.
        hold_seconds: time for which an object cannot be written after its write failed.

    Attributes:
        endpoint: HOST:PORT of the proxy, set on entry.
        writes: number of writes so far; a failed write counts once, however often it is retried.
        requests, failed: number of requests, and of failed ones, while `fail_share` is in effect.
    """

    def __init__(self, target: str, hold_seconds: float = 20.0):
        self._target, self._hold_seconds = target, hold_seconds
        self._lock = threading.Lock()
        self._failed_at: dict[str, float] = {}
        self._to_skip = self._to_fail = 0
        self._delay, self._is_down = 0.0, False
        self._share, self._draw, self._tries = 0.0, random.Random(), 1
        self._left: dict[tuple[str, str], int] = {}
        self._access_key: str | None = None
        self._refusal, self._is_read_only = "", False
        self._create = self._swap = "atomic"
        self._knows_chunks = self._knows_batches = True
        self.writes = self.requests = self.failed = 0
        self.endpoint = ""

    def __enter__(self) -> StorageProxy:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

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
        self.down()  # clients keep connections open
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail_writes(self, count: int, after: int = 0) -> None:
        """Answer 500 to the `count` writes of objects that follow the next `after` ones."""
        with self._lock:
            self._to_skip, self._to_fail = after, count

    def fail_share(self, share: float, seed: int = 0, tries: int = 1) -> None:
        """Answer 500 to a random share of all requests from now on.

        Args:
            share: in [0, 1]; 0 ends the failures.
            tries: how often the same request (method and path) fails in a row. Clients retry a few times, and report
                a failure only if all tries fail.
        """
        with self._lock:
            self._share, self._draw, self._tries = share, random.Random(seed), tries
            self._left.clear()

    def delay(self, seconds: float) -> None:
        """Delay every request by this time, from now on."""
        self._delay = seconds

    def accept_only(self, access_key: str | None, code: str = "InvalidAccessKeyId") -> None:
        """From now on, answer 403 and an S3 error code to requests signed with another key; None accepts all keys."""
        self._access_key, self._refusal = access_key, code

    def refuse_writes(self) -> None:
        """Answer 403 to every request except GET and HEAD from now on."""
        self._is_read_only = True

    def lack(self, create: str = "atomic", swap: str = "atomic", chunks: bool = True, batches: bool = True) -> None:
        """Behave like a store that supports less than Amazon S3 from now on.

        Args:
            create: how to handle a write with If-None-Match: `atomic`, by the server behind the proxy; `refused`, with
                501 (OpenStack Swift 2.30, and `swap` in 2.38); `overlooked`, as if there were no condition; or `racy`,
                first check, then write (`create` in OpenStack Swift 2.38).
            swap: how to handle a write with If-Match.
            chunks: support uploads in chunks with a trailing checksum (aws-chunked); otherwise answer 501.
            batches: support lists of objects to delete; otherwise answer 501.
        """
        self._create, self._swap, self._knows_chunks, self._knows_batches = create, swap, chunks, batches

    def down(self) -> None:
        """Close the connection of every request without an answer until `up` is called."""
        self._is_down = True

    def up(self) -> None:
        """Answer requests again after `down`."""
        self._is_down = False

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        time.sleep(self._delay)
        if self._is_down:
            request.close_connection = True
        elif self._access_key is not None and f"Credential={self._access_key}/" not in request.headers.get(
            "Authorization", ""
        ):
            _refuse(request, 403, self._refusal, "refused by StorageProxy")
        elif self._is_read_only and request.command not in ("GET", "HEAD"):
            _refuse(request, 403, "AccessDenied", "refused by StorageProxy")
        elif self._fails(request) or self._is_unlucky(request):
            _refuse(request, 500, "InternalError", "injected fault")
        elif why := self._unknown(request):
            _refuse(request, 501, "NotImplemented", why)
        elif not self._holds(request):
            _refuse(request, 412, "PreconditionFailed", "At least one of the preconditions did not hold.")
        else:
            connection = http.client.HTTPConnection(self._target, timeout=120)
            try:
                _send(request, connection)
                _answer(request, connection.getresponse())
            except (OSError, http.client.HTTPException):
                request.close_connection = True  # as when a server dies
            finally:
                connection.close()

    def _unknown(self, request: BaseHTTPRequestHandler) -> str:
        """Return why the store does not support a request, or an empty text if it does."""
        conditions = ((self._create, "If-None-Match"), (self._swap, "If-Match"))
        if request.command == "PUT" and any(
            how == "refused" and header in request.headers for how, header in conditions
        ):
            return "Conditional object PUTs are not supported."
        if not self._knows_chunks and "aws-chunked" in request.headers.get("Content-Encoding", ""):
            return "Transferring payloads in multiple chunks using aws-chunked is not supported."
        if not self._knows_batches and request.command == "POST" and urlsplit(request.path).query == "delete":
            return "DeleteObjects is not supported."
        return ""

    def _holds(self, request: BaseHTTPRequestHandler) -> bool:
        """Remove the conditions that the server must not check, and return whether they hold."""
        holds = True
        for how, header in ((self._create, "If-None-Match"), (self._swap, "If-Match")):
            wanted = request.headers.get(header)
            if request.command != "PUT" or wanted is None or how not in ("overlooked", "racy"):
                continue
            del request.headers[header]
            if how == "racy":
                version = self._version(request.path, request.headers.get("Authorization", ""))
                holds = version is None if header == "If-None-Match" else version == wanted
        return holds

    def _version(self, path: str, authorization: str) -> str | None:
        connection = http.client.HTTPConnection(self._target, timeout=120)
        try:
            # With the other request's signature, which a server that checks signatures would refuse.
            connection.request("HEAD", path, headers={"Authorization": authorization})
            return connection.getresponse().getheader("ETag")
        finally:
            connection.close()

    def _is_unlucky(self, request: BaseHTTPRequestHandler) -> bool:
        with self._lock:
            if not self._share:
                return False
            self.requests += 1
            key = (request.command, request.path)
            left = self._left.pop(key, 0)
            if not left and self._draw.random() < self._share:
                left = self._tries
            if left > 1:
                self._left[key] = left - 1
            self.failed += left > 0
            return left > 0

    def _fails(self, request: BaseHTTPRequestHandler) -> bool:
        address = urlsplit(request.path)
        query = parse_qs(address.query, keep_blank_values=True)
        is_object = "/" in address.path.strip("/")
        is_write = (request.command == "PUT" and "partNumber" not in query) or (
            request.command == "POST" and "uploadId" in query
        )
        if not (is_object and is_write):
            return False
        with self._lock:
            if time.monotonic() - self._failed_at.get(address.path, float("-inf")) < self._hold_seconds:
                return True
            if self._failed_at.pop(address.path, None) is not None:
                return False  # a retry of a write that was counted already
            self.writes += 1
            if self._to_skip:
                self._to_skip -= 1
            elif self._to_fail:
                self._to_fail -= 1
                self._failed_at[address.path] = time.monotonic()
                return True
            return False


def _refuse(request: BaseHTTPRequestHandler, status: int, code: str, message: str) -> None:
    for _ in _body(request):
        pass
    text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
    request.send_response_only(status)
    request.send_header("Content-Type", "application/xml")
    request.send_header("Content-Length", str(len(text)))
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(text)


def _is_chunked(request: BaseHTTPRequestHandler) -> bool:
    return "chunked" in request.headers.get("Transfer-Encoding", "")


def _body(request: BaseHTTPRequestHandler) -> Iterator[bytes]:
    if _is_chunked(request):
        while left := int(request.rfile.readline().split(b";")[0], 16):
            yield from _blocks(request, left)
            request.rfile.readline()
        while request.rfile.readline().strip():
            pass
    else:
        yield from _blocks(request, int(request.headers.get("Content-Length") or 0))


def _blocks(request: BaseHTTPRequestHandler, left: int) -> Iterator[bytes]:
    while left:
        block = request.rfile.read(min(left, _BLOCK_BYTES))
        if not block:
            raise ConnectionError("the client closed the connection within a body")
        left -= len(block)
        yield block


def _send(request: BaseHTTPRequestHandler, connection: http.client.HTTPConnection) -> None:
    # A client that expects "100 Continue" has been answered already.
    dropped = _HOP_BY_HOP | {"expect"}
    headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
    has_body = _is_chunked(request) or "Content-Length" in request.headers
    connection.request(request.command, request.path, _body(request) if has_body else None, headers)


def _answer(request: BaseHTTPRequestHandler, answer: http.client.HTTPResponse) -> None:
    request.send_response_only(answer.status, answer.reason)
    for name, value in answer.getheaders():
        if name.lower() not in _HOP_BY_HOP:
            request.send_header(name, value)
    has_body = request.command != "HEAD" and answer.status not in (204, 304)
    is_chunked = has_body and answer.getheader("Content-Length") is None
    if is_chunked:
        request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    while has_body and (block := answer.read(_BLOCK_BYTES)):
        request.wfile.write(b"%x\r\n%b\r\n" % (len(block), block) if is_chunked else block)
    if is_chunked:
        request.wfile.write(b"0\r\n\r\n")
    if has_body and answer.length:
        request.close_connection = True  # cut off, which only closing the connection shows
