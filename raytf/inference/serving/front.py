"""What stands before Ray Serve's HTTP proxy, in its process: who may ask, and how much.

A replica sees a request when its body is whole: one that dribbles holds none of them. Bodies that are not small wait on
disk and go to a replica in pieces, a few at a time, so that neither process holds many.
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

#: Where Ray Serve's proxies look for `middlewares`; the environment variable that tells them so.
VARIABLE, PLACE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "raytf.inference.serving.front.middlewares"
#: Seconds for which what is known of the served model is not asked again, and for which it is good when nobody answers.
_FRESH_SECONDS, _STALE_SECONDS = 1.0, 10.0
#: Longest wait for a replica to report it.
_ASK_SECONDS = 2.0
#: Bytes of a body that are unpacked, and of an answer that are given to a connection, at once.
_PART = 64 << 10
#: Headers of a replica's answer that reach the client, and the one after which it is asked again.
_SHOWN = ("content-type", "www-authenticate", "retry-after", "x-request-id", AGAIN)
#: Answers after which the connection ends: what the client still sends is not read.
_CLOSING = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UPGRADE_REQUIRED,
}
#: What a refusal adds to the headers of its answer.
_REFUSED = {
    HTTPStatus.UNAUTHORIZED: {"www-authenticate": "Bearer"},
    HTTPStatus.SERVICE_UNAVAILABLE: {"retry-after": "1"},
    HTTPStatus.UPGRADE_REQUIRED: {"upgrade": "HTTP/1.1"},
}


#: A request of the proxy itself.
_OWN_REQUEST: Scope = {
    "scheme": "http", "path": SETTINGS, "raw_path": SETTINGS.encode(), "root_path": "", "headers": [],
    "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
}  # fmt: skip


def middlewares() -> list[Middleware]:
    """Return the middleware for an HTTP proxy of Ray Serve, which calls this when it starts, before it listens."""
    return_freed_memory()
    limits = ServingLimits()
    connections.install(limits)
    return [Middleware(Front, limits=limits)]


@dataclass(frozen=True)
class ServedModel:
    """What is to be known of the served model before a body is read.

    Attributes:
        at: when it was learned.
        name: of the model; empty where no replica has said it yet.
    """

    at: float = -1e9
    name: str = ""
    max_body_bytes: int = 32 << 20
    token_sha256: str | None = None
    health: str = ""


class Front:
    """An ASGI application before another one, that of Ray Serve."""

    def __init__(self, app: ASGIApp, limits: ServingLimits):
        self._app, self._limits = app, limits
        self._intake = 0.0  # when what was taken of large bodies was due
        self._disk = DiskRoom(limits.disk_bytes)
        self._memory = RoomQueue(limits.memory_bytes)
        self._large = RoomQueue(limits.large)
        self._served = ServedModel()
        self._learning: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no WebSockets, see connections
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
        body.rewind()
        if body.size <= self._limits.small_bytes:
            async with self._memory.hold(body.size, self._limits.turn_seconds):
                response = await self._ask(scope, receive, method, kept, body.read())
            if AGAIN not in response.headers:
                return response
            body.rewind()
        answer = spools.enter_context(Spool(self._disk))
        async with self._large.hold(1, self._limits.turn_seconds):
            return await self._exchange(scope, receive, kept, body, answer)

    # What is served
    async def _known(self, authorization: str | None) -> ServedModel:
        """Return what is known of the served model, which replicas are asked for in time."""
        age = time.monotonic() - self._served.at
        is_refused = not rest_api.is_allowed(authorization, self._served.token_sha256)
        if age > _FRESH_SECONDS or (is_refused and age > _FRESH_SECONDS / 4):
            learning = self._learn()
            # Who has waited before need not wait again: replicas may be busy, or on their way.
            if age > _STALE_SECONDS or is_refused:
                await asyncio.wait({learning}, timeout=_ASK_SECONDS)
        return self._served

    async def _health(self) -> Response:
        """Return what a replica reports now, or what one reported a moment ago where they are busy."""
        await asyncio.wait({self._learn()}, timeout=_ASK_SECONDS)
        if time.monotonic() - self._served.at > _STALE_SECONDS:
            raise busy("No replica answers. Try again in some seconds.")
        return Response(self._served.health, media_type="application/json")

    def _learn(self) -> asyncio.Task[None]:
        """Ask a replica what it serves, unless one is being asked."""
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
            pass  # what was known stays
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
            for part in unpack(message.get("body", b"")):  # a little of it may be much, unpacked
                rest_api.check_size(into.size + len(part), limit)
                into.write(part)
                if into.size > self._limits.small_bytes:
                    await self._pause(len(part))
            is_whole = not message.get("more_body")

    async def _pause(self, size: int) -> None:
        """Wait until this many bytes more of a large body may be taken."""
        now = asyncio.get_running_loop().time()
        self._intake = max(now, self._intake) + size / self._limits.intake_rate
        await asyncio.sleep(self._intake - now)

    # Replicas
    async def _ask(
        self, scope: Scope, receive: Receive, method: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Response:
        """Pass on a request that is small, and whose answer is."""
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
        """Pass on a request that is large, or whose answer is."""
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
            raise busy("The replica has ended. Try again in some seconds.")
        answer.rewind()
        return _response(sender.status, answer, {"content-type": "application/json"})


def _response(status: int, content: bytes | Spool, headers: Mapping[str, str]) -> Response:
    """Return an answer for a client; a part of its bytes at a time where it is not small."""
    headers = {**headers, "connection": "close"} if status in _CLOSING else headers
    if isinstance(content, bytes):
        return Response(content, status, headers)

    async def parts() -> AsyncIterator[bytes]:
        while part := content.read(_PART):
            yield part

    return StreamingResponse(parts(), status, {**headers, "content-length": str(content.size)})


def _unpacker(encoding: str) -> Callable[[bytes], Iterable[bytes]]:
    """Return what makes a part of a body what it was before it was compressed, a little at a time.

    Raises:
        Refusal: it is compressed in another way than by gzip.
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
    """Return a request for Ray Serve, which takes orders from headers: no client's own get there."""
    passed = {**headers, "content-length": str(size), FRONT: "1"}
    name = Headers(scope=scope).get("x-request-id", "")
    if 0 < len(name) <= 128 and name.isascii() and name.isprintable():
        passed["x-request-id"] = name
    return {
        "type": "http",
        # From 2.4 on, Starlette leaves the messages of a request to who reads its body.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": method,
        "query_string": b"",
        "headers": [(key.encode("latin-1"), value.encode("latin-1")) for key, value in passed.items()],
        **{key: scope[key] for key in ("scheme", "path", "raw_path", "root_path", "client", "server")},
    }


async def _until_gone(receive: Receive) -> Message:
    """Wait until the client has gone; return the message that says so."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


async def _never() -> Message:
    """Receive nothing, as a request of the proxy itself does."""
    return await asyncio.get_running_loop().create_future()
