"""Sends a large body and its answer between proxy and replica in pieces, each only when the receiver asks for it.

Ray Serve forwards messages as fast as they arrive and queues them in memory, so the receiver must set the pace. The
replica sends a `+` for each piece of the body that it can take, then a line of JSON (status and length of the answer),
then the answer in pieces. For each piece of the answer that it receives, the proxy adds a byte to its request's body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.types import Message

from raytf.inference.serving.limits import Spool

#: Header of a large request from proxy to replica: the number of bytes of the body.
LARGE = "x-raytf-large"
#: Header of an answer: the real answer is too large for one message, so ask again with `LARGE`.
AGAIN = "x-raytf-again"
#: Header that the proxy adds to each request.
FRONT = "x-raytf-front"
#: Path of the settings for proxies, which no client can reach.
SETTINGS = "/.raytf/settings"
#: Bytes of a piece.
PIECE = 256 << 10
_TAKE = b"+"


class Sender:
    """The proxy's side.

    Args:
        body: the request's body, at its beginning.
        answer: receives the answer.

    Attributes:
        status: the answer's status; None until the answer is complete.
        failed: status and text of an error that Ray Serve itself returned.
    """

    def __init__(self, body: Spool, answer: Spool):
        self._body, self._left = body, body.size
        self._answer, self._expected = answer, -1
        self._credit = asyncio.Semaphore(0)
        self._line = b""
        self.failed: tuple[int, bytes] | None = None
        self._status: int | None = None

    @property
    def status(self) -> int | None:
        return self._status if self._answer.size == self._expected else None

    async def receive(self) -> Message:
        """Return the next message for the replica."""
        await self._credit.acquire()
        piece = self._body.read(min(PIECE, self._left)) if self._left else _TAKE
        self._left -= min(len(piece), self._left)
        return {"type": "http.request", "body": piece, "more_body": True}

    async def send(self, message: Message) -> None:
        """Receive a message from the replica."""
        if message["type"] == "http.response.start":
            if message["status"] != 200:
                self.failed = (message["status"], b"")
            return
        data = message.get("body", b"")
        if not data:
            return
        if self.failed is not None:
            self.failed = (self.failed[0], (self.failed[1] + data)[:PIECE])
        elif self._expected >= 0:
            self._answer.write(data)
            self._credit.release()
        else:
            self._begin(data)

    def _begin(self, data: bytes) -> None:
        rest = data.lstrip(_TAKE) if not self._line else data
        for _ in range(len(data) - len(rest)):
            self._credit.release()
        line, end, rest = (self._line + rest).partition(b"\n")
        if not end:
            self._line = line
            return
        head = json.loads(line)
        self._status, self._expected = int(head["status"]), int(head["length"])
        if rest:
            self._answer.write(rest)
            self._credit.release()


async def take_body(stream: AsyncIterator[bytes], size: int, body: bytearray) -> AsyncIterator[bytes]:
    """Read a body of this size into `body`, on the replica's side; the caller sends the bytes that this yields."""
    while len(body) < size:
        yield _TAKE
        body += await anext(stream)


async def give_answer(stream: AsyncIterator[bytes], status: int, answer: Spool) -> AsyncIterator[bytes]:
    """Yield an answer for the caller to send, on the replica's side, one piece per message in `stream`."""
    yield json.dumps({"status": status, "length": answer.size}).encode() + b"\n"
    answer.seek(0)
    while piece := answer.read(PIECE):
        yield piece
        await anext(stream)
