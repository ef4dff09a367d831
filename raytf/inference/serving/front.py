"""What stands before Ray Serve's HTTP proxy, in its process: who may ask, how much, how slowly.

A replica sees a request when its body is whole: one that dribbles holds none of them. Bodies that are not small wait on
disk and go to a replica in pieces, a few at a time, so that neither process holds many.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from starlette.middleware import Middleware

from raytf.inference.serving import asgi, connections, memory, rest_api
from raytf.inference.serving.asgi import App, Receive, Send
from raytf.inference.serving.errors import Refusal
from raytf.inference.serving.exchange import AGAIN, LARGE, SETTINGS, Sender
from raytf.inference.serving.limits import RoomQueue, ServingLimits, in_the_way, is_too_slow
from raytf.inference.serving.spool import DiskRoom, Spool

#: Where Ray Serve's proxies look for `middlewares`; the environment variable that tells them so.
VARIABLE, PLACE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "raytf.inference.serving.front.middlewares"
#: Seconds for which what is known of the served model is not asked again, and for which it is good when nobody answers.
_FRESH_SECONDS, _STALE_SECONDS = 1.0, 10.0
#: Longest wait for a replica that is asked for what it has in memory.
_ASK_SECONDS = 2.0
_LOOK_SECONDS = 0.5


def middlewares() -> list[Middleware]:
    """Called by each of Ray Serve's HTTP proxies when it starts, before it listens."""
    memory.settle()
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
    health: bytes = b""


@dataclass(eq=False)
class _Body:
    """One that is arriving."""

    began: float
    timeout: asyncio.Timeout
    seen_at: float
    got: int = 0
    seen: int = 0


class _Gone(Exception):
    """The client has."""


class Front:
    """An ASGI application before another one, that of Ray Serve.

    Args:
        clock: injected by tests.
    """

    def __init__(self, app: App, limits: ServingLimits, clock: Callable[[], float] = time.monotonic):
        self._app, self._limits, self._clock = app, limits, clock
        self._bodies: set[_Body] = set()
        self._is_looking = False
        self._intake = 0.0  # when what was taken of large bodies was due
        self._disk = DiskRoom(limits.disk_bytes)
        self._memory = RoomQueue(limits.memory_bytes)
        self._large = RoomQueue(limits.large)
        self._served = ServedModel()
        self._learning: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[asgi.Reply] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # there are no WebSockets, see wire
            raise ValueError(f"{scope['type']} is not served")
        with contextlib.ExitStack() as spools:
            try:
                reply = await self._reply(scope, receive, spools)
            except Refusal as refusal:
                reply = asgi.refused(refusal)
            except _Gone:
                return
            await asgi.give(reply, send)

    async def _reply(self, scope: dict[str, Any], receive: Receive, spools: contextlib.ExitStack) -> asgi.Reply:
        method, path = scope["method"], scope["path"]
        headers = asgi.first_values(scope["headers"])
        if path.startswith("/-/"):  # Ray Serve's own
            return await self._ask(scope, receive, "GET", {})
        if path == rest_api.HEALTH:
            return await self._health()
        served = await self._known(headers.get(b"authorization"))
        if not rest_api.is_allowed(asgi.decoded(headers.get(b"authorization")), served.token_sha256):
            raise Refusal(
                HTTPStatus.UNAUTHORIZED, "Expected the header Authorization: Bearer TOKEN, with the right token."
            )
        if headers.get(b"upgrade", b"").lower() == b"websocket":
            raise Refusal(HTTPStatus.UPGRADE_REQUIRED, "There are no WebSockets here. Send a plain HTTP/1.1 request.")
        route = rest_api.route(method, path)
        if served.name and route.model != served.name:
            raise rest_api.no_such_model(route.model, served.name)
        kept = {name: headers[name] for name in (b"authorization",) if name in headers}
        if method != "POST":
            return await self._ask(scope, receive, method, kept)
        body = spools.enter_context(Spool(self._disk))
        await self._read(receive, headers, served.max_body_bytes, body)
        body.rewind()
        if body.size <= self._limits.small_bytes:
            async with _turn(self._memory, body.size, self._limits):
                reply = await self._ask(scope, receive, method, kept, body.read())
            if (AGAIN.encode(), b"1") not in reply.headers:
                return reply
            body.rewind()
        answer = spools.enter_context(Spool(self._disk))
        async with _turn(self._large, 1, self._limits):
            return await self._exchange(scope, receive, kept, body, answer)

    # What is served
    async def _known(self, token: bytes | None) -> ServedModel:
        now = self._clock()
        age = now - self._served.at
        wrong = not rest_api.is_allowed(asgi.decoded(token), self._served.token_sha256)
        if age > _FRESH_SECONDS or (wrong and age > _FRESH_SECONDS / 4):
            if self._learning is None:
                self._learning = asyncio.create_task(self._learn())
            # Who has waited before need not wait again: replicas may be busy, or on their way.
            if age > _STALE_SECONDS or wrong:
                await asyncio.wait({self._learning}, timeout=_ASK_SECONDS)
        return self._served

    async def _learn(self) -> None:
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                reply = await self._ask(asgi.own_request(SETTINGS), asgi.nothing, "GET", {})
            if reply.status == HTTPStatus.OK:
                told = json.loads(reply.data)
                health = told.pop("health").encode()
                self._served = ServedModel(at=self._clock(), health=health, **told)
        except (TimeoutError, ValueError, KeyError, TypeError, Refusal):
            pass  # what was known stays
        finally:
            self._learning = None

    async def _health(self) -> asgi.Reply:
        """What a replica says; who asks while another one waits for it gets the same answer."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(asgi.own_request(rest_api.HEALTH), asgi.nothing, "GET", {}))
            self._asking.add_done_callback(self._asked)
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                return await asyncio.shield(self._asking)
        except TimeoutError:
            if self._served.health and self._clock() - self._served.at < _STALE_SECONDS:
                return asgi.Reply(HTTPStatus.OK, self._served.health, [asgi.JSON])
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "No replica answers. Try again in some seconds.") from None

    def _asked(self, task: asyncio.Task[asgi.Reply]) -> None:
        self._asking = None

    # Bodies
    async def _read(self, receive: Receive, headers: dict[bytes, bytes], limit: int, into: Spool) -> None:
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            rest_api.check_size(int(length) if len(length) < 20 else limit + 1, limit)
        unpack = asgi.unpacker(headers.get(b"content-encoding"), limit)
        try:
            async with asyncio.timeout(self._limits.body_seconds) as timeout, self._arriving(timeout) as body:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    data = message.get("body", b"")
                    body.got += len(data)
                    for part in unpack(data):  # a little of it may be much, unpacked
                        rest_api.check_size(into.size + len(part), limit)
                        into.write(part)
                        if into.size > self._limits.small_bytes:
                            await self._pause(len(part))
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            raise Refusal(HTTPStatus.REQUEST_TIMEOUT, "The body came too slowly. Send it at once.") from None

    async def _pause(self, size: int) -> None:
        """Wait until this many bytes more of a large body may be taken."""
        now = asyncio.get_running_loop().time()
        self._intake = max(now, self._intake) + size / self._limits.intake_rate
        await asyncio.sleep(self._intake - now)

    @contextlib.asynccontextmanager
    async def _arriving(self, timeout: asyncio.Timeout) -> AsyncIterator[_Body]:
        now = self._clock()
        for victim in in_the_way(self._bodies, now, self._limits):
            self._end(victim)
        body = _Body(now, timeout, now)
        self._bodies.add(body)
        if not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        try:
            yield body
        finally:
            self._bodies.discard(body)

    def _look(self) -> None:
        now = self._clock()
        for victim in in_the_way(self._bodies, now, self._limits):
            self._end(victim)
        for body in [body for body in self._bodies if now - body.seen_at > self._limits.grace_seconds]:
            if is_too_slow(body, now, self._limits):
                self._end(body)
            body.seen_at, body.seen = now, body.got
        self._is_looking = bool(self._bodies)
        if self._is_looking:
            asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)

    def _end(self, body: _Body) -> None:
        self._bodies.discard(body)
        body.timeout.reschedule(asyncio.get_running_loop().time())

    # Replicas
    async def _ask(
        self, scope: dict[str, Any], receive: Receive, method: str, headers: dict[bytes, bytes], body: bytes = b""
    ) -> asgi.Reply:
        """A request that is small, and whose answer is."""
        told, reply = False, asgi.Reply(HTTPStatus.SERVICE_UNAVAILABLE)
        parts: list[bytes] = []

        async def give() -> dict[str, Any]:
            nonlocal told
            if not told:
                told = True
                return {"type": "http.request", "body": body, "more_body": False}
            return await asgi.until_gone(receive)

        async def take(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = [(name.lower(), value) for name, value in message["headers"]]
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(asgi.inner_request(scope, method, headers, len(body)), give, take)
        reply.data = b"".join(parts)
        return reply

    async def _exchange(
        self, scope: dict[str, Any], receive: Receive, headers: dict[bytes, bytes], body: Spool, answer: Spool
    ) -> asgi.Reply:
        """A request that is large, or whose answer is."""
        sender = Sender(body, answer)
        large = {**headers, LARGE.encode(): str(body.size).encode()}
        inner = asyncio.ensure_future(
            self._app(asgi.inner_request(scope, "POST", large, body.size), sender.receive, sender.send)
        )
        gone = asyncio.ensure_future(asgi.until_gone(receive))
        try:
            await asyncio.wait({inner, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not inner.done():
                raise _Gone
            await inner
        finally:
            for task in (inner, gone):
                task.cancel()
            await asyncio.gather(inner, gone, return_exceptions=True)
        if sender.failed is not None:
            return asgi.Reply(sender.failed[0], sender.failed[1])
        if sender.status is None:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The replica has ended. Try again in some seconds.")
        answer.rewind()
        return asgi.Reply(sender.status, headers=[asgi.JSON], spool=answer)


@contextlib.asynccontextmanager
async def _turn(room: RoomQueue, size: int, limits: ServingLimits) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(limits.turn_seconds):
                await stack.enter_async_context(room.hold(size))
        except TimeoutError:
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "The server is busy. Try again in some seconds.") from None
        yield
