"""ASGI messages between a client, the front and Ray Serve: replies, requests that the front passes on, unpacking."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from raytf.inference.serving import rest_api
from raytf.inference.serving.errors import Refusal
from raytf.inference.serving.exchange import FRONT
from raytf.inference.serving.spool import Spool

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]
#: Bytes of an answer that are given to a connection at once.
_PART = 64 << 10
#: Headers of an answer that reach the client.
_SHOWN = (b"content-type", b"www-authenticate", b"retry-after", b"x-request-id")
JSON = (b"content-type", b"application/json")


@dataclass
class Reply:
    """An answer; `spool` has it where it is not small."""

    status: int
    data: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    spool: Spool | None = None


async def give(reply: Reply, send: Send) -> None:
    """Send a reply to a client, a part of its bytes at a time."""
    size = reply.spool.size if reply.spool is not None else len(reply.data)
    headers = [(name, value) for name, value in reply.headers if name in _SHOWN]
    if reply.status in _CLOSING:
        headers.append((b"connection", b"close"))
    if reply.status == HTTPStatus.UPGRADE_REQUIRED:
        headers.append((b"upgrade", b"HTTP/1.1"))
    headers.append((b"content-length", str(size).encode()))
    await send({"type": "http.response.start", "status": int(reply.status), "headers": headers})
    if reply.spool is None:
        for at in range(0, size, _PART):
            await send({"type": "http.response.body", "body": reply.data[at : at + _PART], "more_body": True})
    else:
        while part := reply.spool.read(_PART):
            await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


#: Answers after which the connection ends: what the client still sends is not read.
_CLOSING = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
    HTTPStatus.UPGRADE_REQUIRED,
}


def refused(refusal: Refusal) -> Reply:
    """The reply that says why a request is refused."""
    headers = [JSON]
    if refusal.status == HTTPStatus.UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if refusal.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers.append((b"retry-after", b"1"))
    return Reply(refusal.status, rest_api.failure(str(refusal)), headers)


def unpacker(encoding: bytes | None, limit: int) -> Callable[[bytes], Iterable[bytes]]:
    """What makes a part of a body what it was before it was compressed, a little at a time.

    Raises:
        Refusal: it is compressed in another way than by gzip.
    """
    if encoding in (None, b"", b"identity"):
        return lambda data: (data[at : at + _PART] for at in range(0, len(data), _PART))
    if encoding != b"gzip":
        shown = encoding.decode("latin-1")[:80]
        raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding {shown} is not known. Expected gzip.")
    unzip = zlib.decompressobj(31)

    def unpack(data: bytes) -> Iterable[bytes]:
        while not unzip.eof:
            try:
                part = unzip.decompress(data, _PART)
            except zlib.error as error:
                raise Refusal(HTTPStatus.BAD_REQUEST, f"The body is not gzip: {error}") from error
            yield part
            data = unzip.unconsumed_tail
            if len(part) < _PART:
                break

    return unpack


def inner_request(scope: dict[str, Any], method: str, headers: dict[bytes, bytes], size: int) -> dict[str, Any]:
    """A request for Ray Serve, which takes orders from headers: no client's own get there."""
    given = dict(headers)
    given[b"content-length"] = str(size).encode()
    given[FRONT.encode()] = b"1"
    name = first_values(scope["headers"]).get(b"x-request-id", b"")
    if 0 < len(name) <= 128 and name.isascii() and name.decode().isprintable():
        given[b"x-request-id"] = name
    return {
        "type": "http",
        # From 2.4 on, Starlette leaves the messages of a request to who reads its body.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "scheme": scope["scheme"],
        "method": method,
        "path": scope["path"],
        "raw_path": scope["raw_path"],
        "query_string": b"",
        "root_path": scope["root_path"],
        "headers": list(given.items()),
        "client": scope["client"],
        "server": scope["server"],
    }


def own_request(path: str) -> dict[str, Any]:
    """A request of the proxy itself."""
    return {
        "scheme": "http", "path": path, "raw_path": path.encode(), "root_path": "", "headers": [],
        "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip


def first_values(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """The first value of each header: of one that is given twice, no later one counts."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        found.setdefault(name, value)
    return found


def decoded(header: bytes | None) -> str | None:
    """A header as text."""
    return None if header is None else header.decode("latin-1")


async def until_gone(receive: Receive) -> dict[str, Any]:
    """Wait until the client has gone; the message that says so."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return message


async def nothing() -> dict[str, Any]:
    """What a request of the proxy itself receives: nothing, ever."""
    return await asyncio.get_running_loop().create_future()
