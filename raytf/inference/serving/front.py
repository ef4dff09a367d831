"""Middleware in the process of Ray Serve's HTTP proxy: checks tokens, and limits bodies.

A replica gets a request only when its body is complete, so that a slow client occupies no replica. Large bodies wait on
disk, and a few at a time are sent to replicas in pieces, so that neither process holds many bodies in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytf.inference.serving import connections, rest_api
from raytf.inference.serving.exchange import AGAIN, FRONT, LARGE, SETTINGS, Sender
from raytf.inference.serving.limits import (
    DiskRoom,
    Refusal,
    RoomQueue,
    ServingLimits,
    Spool,
    bad,
    busy,
    return_freed_memory,
)

#: The environment variable from which Ray Serve's proxies read the import path of `middlewares`, and that path.
VARIABLE, PLACE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "raytf.inference.serving.front.middlewares"
#: Seconds for which settings of the served model are fresh, and may be used while no replica answers.
_FRESH_SECONDS, _STALE_SECONDS = 1.0, 10.0
#: The most seconds to wait for the settings from a replica.
_ASK_SECONDS = 2.0
#: Bytes of a body to unpack, and of an answer to send to a connection, at a time.
_PART = 64 << 10
#: Headers of a replica's answer that are forwarded to the client or to `_respond`.
_SHOWN = ("content-type", "www-authenticate", "retry-after", "x-request-id", AGAIN)
#: Statuses of answers after which the connection is closed, because the rest of the body is not read.
_CLOSING = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UPGRADE_REQUIRED,
}
#: Status of a refusal -> headers of its answer.
_REFUSED = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UPGRADE_REQUIRED: {"upgrade": "HTTP/1.1"},
}


#: A request from the proxy itself.
_OWN_REQUEST: Scope = {
    "scheme": "http", "path": SETTINGS, "raw_path": SETTINGS.encode(), "root_path": "", "headers": [],
    "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
}  # fmt: skip


def middlewares() -> list[Middleware]:
    """Return the middleware of an HTTP proxy. Ray Serve calls this when the proxy starts, before it listens."""
    return_freed_memory()
    limits = ServingLimits()
    connections.install(limits)
    return [Middleware(Front, limits=limits)]


@dataclass(frozen=True)
class ServedModel:
    """Settings of the served model that are needed before a body is read.

    Attributes:
        at: time of the last report from a replica.
        name: name of the model; empty before the first report.
        health: answer to a health check.
    """

    at: float = -1e9
    name: str = ""
    max_body_bytes: int = 32 << 20
    token_sha256: str | None = None
    health: str = ""


class Front:
    """An ASGI application in front of Ray Serve's."""

    def __init__(self, app: ASGIApp, limits: ServingLimits):
        self._app, self._limits = app, limits
        self._intake = 0.0  # time from which more of large bodies may be read
        self._disk = DiskRoom(limits.disk_bytes)
        self._memory = RoomQueue(limits.memory_bytes)
        self._large = RoomQueue(limits.large)
        self._served = ServedModel()
        self._learning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no WebSockets: see connections
            raise ValueError(f"{scope['type']} is not served")
        with contextlib.ExitStack() as spools, contextlib.suppress(ClientDisconnect):
            try:
                response = await self._respond(scope, receive, spools)
            except Refusal as refusal:
                headers = {"content-type": "application/json", **_REFUSED.get(refusal.status, {})}
                response = _response(refusal.status, rest_api.failure(str(refusal)), headers)
            await response(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, spools: contextlib.ExitStack) -> Response:
        method, path = scope["method"], scope["path"]
        headers = Headers(scope=scope)
        if path.startswith("/-/"):  # Ray Serve's own
            return await self._ask(scope, receive, "GET")
        if path == rest_api.HEALTH:
            return await self._health()
        authorization = headers.get("authorization")
        served = await self._known(authorization)
        rest_api.check_token(authorization, served.token_sha256)
        if headers.get("upgrade", "").lower() == "websocket":
            raise Refusal(HTTPStatus.UPGRADE_REQUIRED, "There are no WebSockets here. Send a plain HTTP/1.1 request.")
        route = rest_api.route(method, path)
        if served.name:
            rest_api.check_model(route.model, served.name)
        kept = {} if authorization is None else {"authorization": authorization}
        if method != "POST":
            return await self._ask(scope, receive, method, kept)
        body = spools.enter_context(Spool(self._disk))
        await self._read(receive, headers, served.max_body_bytes, body)
        body.seek(0)
        if body.size <= self._limits.small_bytes:
            async with self._memory.hold(body.size, self._limits.turn_seconds):
                response = await self._ask(scope, receive, method, kept, body.read())
            if AGAIN not in response.headers:
                return response
            body.seek(0)
        answer = spools.enter_context(Spool(self._disk))
        async with self._large.hold(1, self._limits.turn_seconds):
            return await self._exchange(scope, receive, kept, body, answer)

    # The served model
    async def _known(self, authorization: str | None) -> ServedModel:
        """Return the settings of the served model, and ask a replica for them again if they are not fresh."""
        age = time.monotonic() - self._served.at
        is_refused = not rest_api.is_allowed(authorization, self._served.token_sha256)
        if age > _FRESH_SECONDS or (is_refused and age > _FRESH_SECONDS / 4):
            learning = self._learn()
            # Settings that are not too old are used without waiting: replicas may be busy, or starting.
            if age > _STALE_SECONDS or is_refused:
                await asyncio.wait({learning}, timeout=_ASK_SECONDS)
        return self._served

    async def _health(self) -> Response:
        """Return the health that a replica reports now, or the last report while replicas are busy."""
        await asyncio.wait({self._learn()}, timeout=_ASK_SECONDS)
        if time.monotonic() - self._served.at > _STALE_SECONDS:
            raise busy("No replica answers. Try again in a few seconds.")
        return Response(self._served.health, media_type="application/json")

    def _learn(self) -> asyncio.Task[None]:
        """Start to request the settings from a replica, unless a request is in progress."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._ask_settings())
        return self._learning

    async def _ask_settings(self) -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                response = await self._ask(_OWN_REQUEST, _never, "GET")
            if response.status_code == HTTPStatus.OK:
                self._served = ServedModel(at=time.monotonic(), **json.loads(bytes(response.body)))
            else:  # there is no replica
                self._served = replace(self._served, at=ServedModel.at)
        except (TimeoutError, ValueError, TypeError, Refusal):
            pass  # the last report stays
        finally:
            self._learning = None

    # Bodies
    async def _read(self, receive: Receive, headers: Headers, limit: int, into: Spool) -> None:
        length = headers.get("content-length", "")
        if length.isdecimal():
            rest_api.check_size(int(length) if len(length) < 20 else limit + 1, limit)
        unpack = _unpacker(headers.get("content-encoding", ""))
        is_whole = False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            for part in unpack(message.get("body", b"")):  # a few bytes may unpack to many more
                rest_api.check_size(into.size + len(part), limit)
                into.write(part)
                if into.size > self._limits.small_bytes:
                    await self._pause(len(part))
            is_whole = not message.get("more_body")

    async def _pause(self, size: int) -> None:
        """Wait until this many more bytes of large bodies may be read."""
        now = asyncio.get_running_loop().time()
        self._intake = max(now, self._intake) + size / self._limits.intake_rate
        await asyncio.sleep(self._intake - now)

    # Replicas
    async def _ask(
        self, scope: Scope, receive: Receive, method: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Response:
        """Forward a small request with a small answer."""
        is_sent, status = False, int(HTTPStatus.SERVICE_UNAVAILABLE)
        shown: dict[str, str] = {}
        parts: list[bytes] = []

        async def give() -> Message:
            nonlocal is_sent
            if is_sent:
                return await _until_gone(receive)
            is_sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def take(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                shown.update((name, text) for name, text in Headers(scope=message).items() if name in _SHOWN)
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(_inner_scope(scope, method, headers or {}, len(body)), give, take)
        return _response(status, b"".join(parts), shown)

    async def _exchange(
        self, scope: Scope, receive: Receive, headers: Mapping[str, str], body: Spool, answer: Spool
    ) -> Response:
        """Forward a request that is large or has a large answer."""
        sender = Sender(body, answer)
        large = {**headers, LARGE: str(body.size)}
        inner = asyncio.ensure_future(
            self._app(_inner_scope(scope, "POST", large, body.size), sender.receive, sender.send)
        )
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({inner, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not inner.done():
                raise ClientDisconnect
            await inner
        finally:
            for task in (inner, gone):
                task.cancel()
            await asyncio.gather(inner, gone, return_exceptions=True)
        if sender.failed is not None:
            return _response(sender.failed[0], sender.failed[1], {})
        if sender.status is None:
            raise busy("The replica stopped. Try again in a few seconds.")
        answer.seek(0)
        return _response(sender.status, answer, {"content-type": "application/json"})


def _response(status: int, content: bytes | Spool, headers: Mapping[str, str]) -> Response:
    """Return the answer for the client; the content of a spool is sent in parts."""
    headers = {**headers, "connection": "close"} if status in _CLOSING else headers
    if isinstance(content, bytes):
        return Response(content, status, headers)

    async def parts() -> AsyncIterator[bytes]:
        while part := content.read(_PART):
            yield part

    return StreamingResponse(parts(), status, {**headers, "content-length": str(content.size)})


def _unpacker(encoding: str) -> Callable[[bytes], Iterable[bytes]]:
    """Return a function that decompresses a part of a body, a little at a time.

    Raises:
        Refusal: the encoding is not gzip.
    """
    if encoding in ("", "identity"):
        return lambda data: (data[at : at + _PART] for at in range(0, len(data), _PART))
    if encoding != "gzip":
        raise Refusal(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {encoding[:80]} is not known. Expected gzip."
        )
    unzip = zlib.decompressobj(31)

    def unpack(data: bytes) -> Iterable[bytes]:
        while not unzip.eof:
            try:
                part = unzip.decompress(data, _PART)
            except zlib.error as error:
                raise bad(f"The body is not gzip: {error}") from error
            yield part
            data = unzip.unconsumed_tail
            if len(part) < _PART:
                break

    return unpack


def _inner_scope(scope: Scope, method: str, headers: Mapping[str, str], size: int) -> Scope:
    """Return a request for Ray Serve, without headers of the client that would change how Ray Serve handles it."""
    passed = {**headers, "content-length": str(size), FRONT: "1"}
    name = Headers(scope=scope).get("x-request-id", "")
    if 0 < len(name) <= 128 and name.isascii() and name.isprintable():
        passed["x-request-id"] = name
    return {
        "type": "http",
        # From version 2.4 on, Starlette itself does not listen for a disconnect, so the replica can read the body.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "query_string": b"",
        "headers": [(key.encode("latin-1"), value.encode("latin-1")) for key, value in passed.items()],
        **{key: scope[key] for key in ("scheme", "path", "raw_path", "root_path", "client", "server")},
    }


async def _until_gone(receive: Receive) -> Message:
    """Wait until the client disconnects, and return the disconnect message."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


async def _never() -> Message:
    """Wait forever: a request of the proxy has no client that could send a message."""
    return await asyncio.get_running_loop().create_future()
