"""The server of `raytf ui`: pages, JSON and server-sent events. It answers only GET, and writes nothing."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raytf.errors import ConfigError, RaytfError
from raytf.inference.serving import connections
from raytf.inference.serving.limits import ServingLimits
from raytf.runs.report.page import document
from raytf.storage.storage import Storage
from raytf.ui.gallery import Gallery, keep_fresh, settings

#: Seconds between two checks for changes, and between two keep-alive comments of a stream.
_POLL_SECONDS, _LIFE_SECONDS = 0.5, 15.0
_COOKIE = "raytf-ui"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def make(gallery: Gallery, token: str | None = None) -> Starlette:
    """Return the application.

    Args:
        token: the token that a browser must pass once, as `?token=`. Without a token, only requests to loopback host
            names are answered, which prevents DNS rebinding by other sites.
    """
    script = resources.files("raytf.ui").joinpath

    async def index(request: Request) -> Response:
        data = {"place": gallery.place, "runs": gallery.rows()}
        js = [script("index.js").read_text()]
        return _html(document(f"runs in {gallery.place}", script("index.html").read_text(), data, js))

    async def run(request: Request) -> Response:
        page = await run_in_threadpool(gallery.first_page, request.path_params["name"])
        main = f'<nav><a href="/">← all runs</a></nav>\n{page.main}'
        js = [script("run.js").read_text()]
        return _html(document(page.title, main, {**page.data, "mark": page.mark}, js))

    def parts(name: str) -> Any:
        page = gallery.page(name)
        return {"title": page.title, "main": page.main, "data": {**page.data, "mark": page.mark}}

    def head(name: str) -> Any:
        page = gallery.head(name)
        return {"title": page.title, "head": page.main, "mark": page.mark}

    def curves(name: str) -> Any:
        page = gallery.page(name)
        return {**page.data["curves"], "settings": {} if page.run is None else settings(page.run)}

    async def runs(request: Request) -> Response:
        return _json(gallery.rows())

    async def changes(request: Request) -> Response:
        return _stream(lambda: str(gallery.version))

    async def changes_of(request: Request) -> Response:
        name = request.path_params["name"]
        await run_in_threadpool(gallery.mark, name)  # fail now, not within the stream, if there is no such run
        return _stream(lambda: gallery.mark(name))

    routes = [
        Route("/", index),
        Route("/run/{name:path}", run),
        Route("/api/runs", runs),
        Route("/api/page/{name:path}", _answers(parts)),
        Route("/api/head/{name:path}", _answers(head)),
        Route("/api/curves/{name:path}", _answers(curves)),
        Route("/api/search/{name:path}", _answers(gallery.search)),
        Route("/events", changes),
        Route("/events/{name:path}", changes_of),
    ]
    handlers = {ConfigError: _refusal(404), RaytfError: _refusal(503)}
    return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(_Guard, token=token)])


class _Guard:
    """Admits requests with the token, or to a loopback host name if there is none, and adds security headers."""

    def __init__(self, app: ASGIApp, token: str | None):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        query_token = request.query_params.get("token")
        refusal = self._refusal(request, query_token)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                if self._token is not None and _is_equal(query_token, self._token):
                    cookie = Response()
                    cookie.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
                    headers.append("set-cookie", cookie.headers["set-cookie"])
            await send(message)

        await self._app(scope, receive, answer)

    def _refusal(self, request: Request, query_token: str | None) -> Response | None:
        if self._token is None:
            host = request.headers.get("host", "")
            name = host if host.endswith("]") else host.rpartition(":")[0] or host
            if name in _LOOPBACK:
                return None
            return PlainTextResponse("raytf ui answers only requests to localhost. Pass --token to allow others.", 403)
        if any(_is_equal(text, self._token) for text in (query_token, request.cookies.get(_COOKIE), _bearer(request))):
            return None
        return PlainTextResponse("The token is missing or wrong. Open the address that raytf ui printed.", 401)


def _bearer(request: Request) -> str | None:
    kind, _, text = request.headers.get("authorization", "").partition(" ")
    return text if kind.lower() == "bearer" else None


def _is_equal(candidate: str | None, token: str) -> bool:
    return candidate is not None and hmac.compare_digest(candidate.encode(), token.encode())


def _refusal(code: int) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def handle(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), code)

    return handle


def _answers(read: Callable[[str], Any]) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint that calls `read` for the run in the path, and responds with the result as JSON."""

    async def endpoint(request: Request) -> Response:
        return _json(await run_in_threadpool(read, request.path_params["name"]))

    return endpoint


def _html(text: str) -> Response:
    # Files of other programs may contain lone surrogates, which UTF-8 cannot encode.
    return HTMLResponse(text.encode(errors="backslashreplace"))


def _json(value: Any) -> Response:
    return Response(json.dumps(value, allow_nan=False), media_type="application/json")


def _stream(read_version: Callable[[], str]) -> StreamingResponse:
    """Return a stream of server-sent events, one for each new version. `read_version` may wait for storage."""

    async def events() -> AsyncIterator[str]:
        last, quiet = "", 0.0
        while True:
            try:
                now = await run_in_threadpool(read_version)
            except RaytfError:  # storage does not answer, or the run was deleted
                now = last
            if now != last:
                last, quiet = now, 0.0
                yield f"data: {json.dumps(now)}\n\n"
            elif quiet >= _LIFE_SECONDS:
                quiet = 0.0
                yield ": here\n\n"
            await asyncio.sleep(_POLL_SECONDS)
            quiet += _POLL_SECONDS

    return StreamingResponse(events(), media_type="text/event-stream")


#: Seconds that open streams have to end when the server stops.
_END_SECONDS = 1


def serve(
    storage: Storage, listener: socket.socket, token: str | None, list_seconds: float, over: threading.Event
) -> None:
    """Serve the runs of a storage.

    Args:
        list_seconds: seconds between two reads of the list.
        over: event that stops the reads when it is set.

    Raises:
        StorageError: storage refuses.
        KeyboardInterrupt: Ctrl-C.
    """
    gallery = Gallery(storage)
    gallery.refresh()
    threading.Thread(target=keep_fresh, args=(gallery, list_seconds, over), daemon=True, name="raytf-list").start()
    config = uvicorn.Config(
        make(gallery, token),
        http=connections.bounded(ServingLimits()),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_END_SECONDS,
    )
    _Server(config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """uvicorn's server, which does not report the streams of open pages as failed requests when it shuts down."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)
