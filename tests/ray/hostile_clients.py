"""Clients that want to stop a server for all others: `python -m tests.ray.hostile_clients KIND PORT PATH SECONDS`.

All attacks of a kind go on at once, only to this machine's loopback, until the time is up; then it prints as JSON how
often each got which status.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable

#: Bytes of large bodies: the most that a server takes by default.
LARGE = 32 << 20
#: Clients: slow bodies, idle connections, slow headers, of each kind with a large body, and of any other kind.
SLOW, IDLE, DRIBBLING, FAT, EACH = 300, 1000, 100, 1, 2
_HOST = "127.0.0.1"
#: What a client sends, part by part.
Parts = Callable[[], AsyncIterator[bytes]]


def at_once(*parts: bytes) -> Parts:
    """All as fast as it is taken."""

    async def give() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    return give


def dribble(head: bytes, pause: float) -> Parts:
    """A byte now and then, for ever."""

    async def give() -> AsyncIterator[bytes]:
        yield head
        while True:
            await asyncio.sleep(pause)
            yield b"a"

    return give


def flood(head: bytes) -> Parts:
    """200 MiB of one header."""
    return at_once(head + b"X-Long: ", *[b"a" * (1 << 20)] * 200)


def large_body(kind: str) -> bytes:
    """A body within the limit of which much is to be made."""
    row = b"[" + b",".join([b"[" + b",".join([b"[0]"] * 8) + b"]"] * 8) + b"]"
    unit = {
        "rows": row + b",",
        "zeros": b"0,",
        "lists": b"[],",
        "deep": b"[",
        "objects": b'{"a":1},',
        "large": b"1e400,",
    }
    end = {"rows": row, "deep": b"", "lists": b"[]", "objects": b"{}"}.get(kind, b"0") + b"]}"
    return b'{"instances":[' + unit[kind] * ((LARGE - 1000) // len(unit[kind])) + end


class Attack:
    """What is attacked, and what came back."""

    def __init__(self, port: int, path: str, token: str | None):
        self.port, self.path, self.token = port, path, token
        self.until = 0.0
        self.said: Counter[str] = Counter()

    def head(self, *lines: str, token: str | None = None, method: str = "POST", path: str | None = None) -> bytes:
        """A request without its body."""
        known = [f"Authorization: Bearer {token}"] if token else []
        return "\r\n".join((f"{method} {path or self.path} HTTP/1.1", "Host: x", *known, *lines, "", "")).encode()

    def slow(self) -> dict[str, tuple[int, Parts]]:
        """Name -> how many, and what each sends."""
        known = self.head("Content-Length: 100000", token=self.token)
        return {
            "idle": (IDLE, at_once()),
            "slow body": (SLOW // 2, dribble(known, 0.5)),
            "slow body without token": (SLOW // 2, dribble(self.head("Content-Length: 100000"), 0.5)),
            "slow header": (DRIBBLING, dribble(self.head()[:-2] + b"X: ", 1)),
        }

    def large(self) -> dict[str, tuple[int, Parts]]:
        """Likewise: as much as is allowed, and more."""
        found = {}
        for kind in ("rows", "zeros", "lists", "deep", "objects", "large"):
            body = large_body(kind)
            head = self.head(f"Content-Length: {len(body)}", token=self.token)
            found[f"32 MiB of {kind}"] = (FAT, at_once(head, body))
            if kind == "rows":
                found["reads nothing"] = (FAT, at_once(head, body))
                found["wrong token"] = (EACH, at_once(self.head(f"Content-Length: {len(body)}", token="wrong"), body))
        bomb = gzip.compress(b"[" * (LARGE + 1), 1)
        head = self.head("Content-Encoding: gzip", f"Content-Length: {len(bomb)}", token=self.token)
        found["gzip"] = (EACH, at_once(head + bomb))
        found["too large"] = (EACH, at_once(self.head(f"Content-Length: {1 << 40}", token=self.token)))
        found["200 MiB of header"] = (EACH, flood(self.head()[:-2]))
        chunked = self.head("Transfer-Encoding: chunked", token=self.token)
        found["200 MiB of trailer"] = (EACH, flood(chunked + b"1\r\n{\r\n0\r\n"))
        return found

    def odd(self) -> dict[str, tuple[int, Parts]]:
        """Likewise: what is not a plain request."""
        token = self.token
        socket = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: eA==")
        chunked = self.head("Transfer-Encoding: chunked", token=token)
        texts = {
            "websocket": self.head(*socket, method="GET"),
            "websocket with token": self.head(*socket, method="GET", token=token),
            "bad chunks": chunked + b"zz\r\n",
            "small chunks": chunked + b"1;" + b"x" * 20 + b"\r\n[\r\n" + b"1\r\n[\r\n" * 500_000,
            "pipeline": self.head(method="GET", path="/healthz") * 2000,
            "two lengths": self.head("Content-Length: 1", "Content-Length: 9", token=token) + b"{" * 9,
            "length and chunks": self.head("Content-Length: 9", "Transfer-Encoding: chunked", token=token)
            + b"0\r\n\r\n",
            "http/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            "http/1.0": f"POST {self.path} HTTP/1.0\r\n\r\n".encode(),
            "deep": self.head("Content-Length: 50000", token=token) + b"[" * 50000,
        }
        return {name: (EACH, at_once(text)) for name, text in texts.items()}

    async def one(self, name: str, parts: Parts) -> None:
        """A connection; what the server says to it, or how it ended."""
        status = "waited"
        try:
            async with asyncio.timeout(max(0.1, self.until - time.monotonic())):
                reader, writer = await asyncio.open_connection(_HOST, self.port)
                answer = asyncio.ensure_future(reader.readline())
                sending = asyncio.ensure_future(self._send(writer, parts))
                try:
                    line = await answer
                    status = line.split()[1].decode() if line else "closed"
                    if name == "reads nothing":
                        writer.transport.pause_reading()  # type: ignore[attr-defined]
                        await asyncio.sleep(60)
                finally:
                    for task in (answer, sending):
                        task.cancel()
                    await asyncio.gather(answer, sending, return_exceptions=True)
                    writer.transport.abort()
        except TimeoutError:
            pass
        except (OSError, IndexError, asyncio.LimitOverrunError, ValueError) as error:
            status = type(error).__name__
        self.said[f"{name} {status}"] += 1

    async def _send(self, writer: asyncio.StreamWriter, parts: Parts) -> None:
        with contextlib.suppress(ConnectionError):  # it may be refused before all is sent
            async for part in parts():
                writer.write(part)
                await writer.drain()

    async def _again_and_again(self, name: str, parts: Parts) -> None:
        while time.monotonic() < self.until:
            await self.one(name, parts)
            await asyncio.sleep(0.2)

    async def run(self, kind: str, seconds: float) -> None:
        """All attacks of a kind at once."""
        kinds: dict[str, Callable[[], dict[str, tuple[int, Parts]]]] = {
            "slow": self.slow, "large": self.large, "odd": self.odd,
        }  # fmt: skip
        attacks = kinds[kind]()
        self.until = time.monotonic() + seconds
        tasks: list[Awaitable[None]] = [
            self._again_and_again(name, parts) for name, (count, parts) in attacks.items() for _ in range(count)
        ]
        await asyncio.gather(*tasks)


def main(kind: str, port: str, path: str, seconds: str, token: str | None = None) -> None:
    attack = Attack(int(port), path, token)
    asyncio.run(attack.run(kind, float(seconds)))
    print(json.dumps(dict(sorted(attack.said.items()))))


if __name__ == "__main__":
    main(*sys.argv[1:])
