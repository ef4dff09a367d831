"""What stands before Ray Serve, on a real socket, before an application that stands for a replica: no Ray here."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import hashlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from raytf.inference.serving import connections, exchange
from raytf.inference.serving.front import Front
from raytf.inference.serving.limits import DiskRoom, Refusal, ServingLimits, Spool

TOKEN = "a token of the test"
PREDICT = "/v1/models/m:predict"
LIMITS = ServingLimits(
    header_bytes=4 << 10, header_seconds=2, connections=20, bodies=6, patience_seconds=0.2, grace_seconds=1.5,
    body_rate=1000, body_seconds=60, framing_bytes=1 << 10, stall_seconds=2, linger_seconds=3, small_bytes=10_000,
    turn_seconds=30,
)  # fmt: skip


class Replica:
    """Answers with how many bytes a body had, in the way in which it came; what it was asked is in `seen`."""

    def __init__(self, token: str | None):
        self.token, self.seen = token, []
        self.pause, self.is_gone = 0.0, False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request = Request(scope, receive)
        await (await self.answer(request))(scope, receive, send)

    async def answer(self, request: Request) -> Response:
        assert request.headers[exchange.FRONT] == "1"
        if request.url.path == exchange.SETTINGS:
            digest = None if self.token is None else hashlib.sha256(self.token.encode()).hexdigest()
            settings = {"name": "m", "max_body_bytes": 1 << 20, "token_sha256": digest, "health": "well"}
            await asyncio.sleep(self.pause)
            return Response(json.dumps(settings), 503 if self.is_gone else 200)
        if exchange.LARGE in request.headers:
            return StreamingResponse(self.in_pieces(request))
        body = await request.body()
        self.seen.append((request.method, len(body), dict(request.headers)))
        if body == b"much":
            return Response(b"", headers={exchange.AGAIN: "1"})
        return Response(json.dumps(len(body)), media_type="application/json")

    async def in_pieces(self, request: Request) -> Any:
        stream, body = request.stream(), bytearray()
        async for message in exchange.take_body(stream, int(request.headers[exchange.LARGE]), body):
            yield message
        self.seen.append(("large", len(body), dict(request.headers)))
        with Spool(DiskRoom(1 << 30)) as answer:
            answer.write(b"x" * (8 << 20) if body == b"much" else hashlib.sha256(body).hexdigest().encode())
            async for message in exchange.give_answer(stream, 200, answer):
                yield message


class Server:
    """A server on a port of its own."""

    def __init__(self, token: str | None):
        self.replica = Replica(token)
        self.front = Front(self.replica, LIMITS)
        self.protocol = connections.bounded(LIMITS)
        config = uvicorn.Config(
            self.front, http=self.protocol, lifespan="off", access_log=False, log_config=None, timeout_keep_alive=30
        )
        self.server = uvicorn.Server(config)
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self.socket]))

    def connect(self, data: bytes = b"") -> socket.socket:
        one = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        one.sendall(data)
        return one

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def begin(token: str | None = None) -> Server:
        servers.append(Server(token))
        servers[-1].thread.start()
        return servers[-1]

    yield begin
    for server in servers:
        server.server.should_exit = server.server.force_exit = True
        server.thread.join(60)


def status(one: socket.socket) -> int | None:
    """Of the answer; None where the connection was closed without one."""
    with one, contextlib.suppress(ConnectionError):
        line = one.makefile("rb").readline().split()
        return int(line[1]) if line else None
    return None


def head(*lines: str, method: str = "POST", path: str = PREDICT) -> bytes:
    return "\r\n".join((f"{method} {path} HTTP/1.1", "Host: x", *lines, "", "")).encode()


def test_requests_reach_the_replica_and_their_headers_do_not(start):
    server = start()
    assert server.ask("POST", PREDICT, b"12345", x_request_timeout_seconds="0.0001", x_raytf_large="7") == (200, b"5")
    assert server.ask("GET", "/v1/models/m") == (200, b"0")
    assert server.ask("GET", "/healthz") == (200, b"well")
    seen = server.replica.seen[0][2]
    assert set(seen) == {"content-length", exchange.FRONT}
    for path in (exchange.SETTINGS, "/nothing", "/v1/models/other"):
        assert server.ask("GET", path)[0] == 404


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
@pytest.mark.parametrize("size", [9_999, 10_001, 1 << 20])
def test_bodies_of_all_sizes_arrive_whole(start, size, encoding):
    server, body = start(), bytes(range(256)) * 4096
    body = body[:size]
    given = gzip.compress(body) if encoding == "gzip" else body
    expected = str(size) if size < 10_000 else hashlib.sha256(body).hexdigest()
    for data in (given, iter([given[: len(given) // 2], given[len(given) // 2 :]])):
        assert server.ask("POST", PREDICT, data, Content_Encoding=encoding) == (200, expected.encode())


def test_an_answer_that_is_large_comes_in_pieces(start):
    server = start()
    assert server.ask("POST", PREDICT, b"much") == (200, b"x" * (8 << 20))


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (head()[:-2] + b"X: " + b"a" * 5000, 431),
        (b"POST /" + b"a" * 5000, 431),
        (head(method="GET", path="/healthz") + head()[:-2] + b"X: " + b"a" * 5000, 200),
        (head()[:-2] + b"X: a", 408),
        (head("Content-Length: 100") + b"a", 408),
        (head("Content-Length: 1048577"), 413),
        (head("Content-Length: 99999999999999999999999"), 400),
        (head("Content-Encoding: gzip", "Transfer-Encoding: chunked") + b"2\r\nno\r\n0\r\n\r\n", 400),
        (head("Content-Encoding: br", "Content-Length: 9"), 415),
        (head("Content-Length: 1", "Content-Length: 2") + b"{}", 400),
        (head("Content-Length: 1", "Transfer-Encoding: chunked") + b"0\r\n\r\n", 400),
        (head("Transfer-Encoding: chunked") + b"zz\r\n", 400),
        (head("Transfer-Encoding: chunked") + b"1\r\n{\r\n" * 10_000, 400),
        (head("Transfer-Encoding: chunked") + b"1\r\n{\r\n0\r\nX: " + b"a" * 20_000, 400),
        (head("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA==", method="GET"), 426),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00", 400),
        (b"CONNECT x:1 HTTP/1.1\r\n\r\n", 400),
        (b"", None),
    ],
)
def test_what_is_no_request_within_limits_is_refused(start, data, code):
    server = start()
    assert status(server.connect(data)) == code
    assert server.ask("GET", "/healthz")[0] == 200


def test_without_the_token_nothing_is_read(start):
    server = start(TOKEN)
    for token, code in ((None, 401), ("wrong", 401), (TOKEN, 200)):
        lines = [] if token is None else [f"Authorization: Bearer {token}"]
        upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: eA==")
        assert status(server.connect(head(*lines, *upgrade, method="GET"))) == (426 if code == 200 else 401)
        if code == 401:
            assert status(server.connect(head(*lines, "Content-Length: 100"))) == 401
            # A client that sends all before it reads sees the answer as well.
            headers = {} if token is None else {"Authorization": f"Bearer {token}"}
            assert server.ask("POST", PREDICT, b" " * (8 << 20), **headers)[0] == 401
        else:
            assert server.ask("POST", PREDICT, b"123", Authorization=f"Bearer {token}") == (200, b"3")
    assert len(server.replica.seen) == 1


def test_slow_bodies_and_idle_connections_make_room_for_others(start):
    server = start()
    slow = [server.connect(head("Content-Length: 100") + b"a") for _ in range(10)]
    time.sleep(0.3)
    idle = [server.connect() for _ in range(40)]
    for _ in range(20):
        assert server.ask("POST", PREDICT, b"1234") == (200, b"4")
    assert {status(one) for one in slow} == {408}
    for one in idle:
        one.close()


def test_a_client_that_sends_all_at_once_is_not_refused_for_a_crowd(start):
    server, stop = start(), threading.Event()

    def crowd() -> None:
        while not stop.is_set():
            slow = [server.connect(head("Content-Length: 100")) for _ in range(4)]
            time.sleep(0.05)
            for one in slow:
                one.close()

    threads = [threading.Thread(target=crowd) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(60):
            assert server.ask("POST", PREDICT, b"1234") == (200, b"4")
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_health_waits_for_nobody(start):
    server = start()
    assert server.ask("POST", PREDICT, b"1")[0] == 200  # it is known what is served
    server.replica.pause = 30
    began = time.monotonic()
    assert server.ask("GET", "/healthz") == (200, b"well")
    assert time.monotonic() - began < 20


def test_a_server_without_a_replica_is_not_healthy(start):
    server = start()
    assert server.ask("GET", "/healthz") == (200, b"well")
    server.replica.is_gone = True
    assert server.ask("GET", "/healthz")[0] == 503


def test_who_takes_nothing_of_an_answer_is_left(start):
    server = start()
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    one.settimeout(60)
    one.connect(("127.0.0.1", server.port))
    one.sendall(head("Content-Length: 4") + b"much")
    deadline = time.monotonic() + 60
    while server.front._disk._used == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    while server.front._disk._used and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.front._disk._used == 0, "what was kept for it is gone"
    one.close()


def test_small_bodies_have_room_when_large_ones_have_none():
    disk = DiskRoom(1 << 20)
    with Spool(disk) as large, Spool(disk) as small:
        large.write(b"x" * (1 << 20))
        with pytest.raises(Refusal, match="Too many large requests"):
            large.write(b"x")
        small.write(b"y" * (128 << 10))
        small.seek(0)
        assert small.read() == b"y" * (128 << 10)
        with pytest.raises(Refusal, match="Too many large requests"):
            small.write(b"y")
    assert disk._used == 0
