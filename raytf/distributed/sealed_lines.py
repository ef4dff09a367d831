"""Lines of JSON between a worker and the arbiter that nobody else can write, change, repeat or leave out.

Both sides know the run's secret, which Ray has brought to the workers; it does not travel here. Each side sends random
bytes (a challenge) when they connect. The connection's key is derived from the secret and both challenges, so what was
recorded on another connection is of no use. Each line begins with a tag: an HMAC of who sent it, how many lines came
before it, and what it says. Lines can be read by whoever sees the network; they contain no key.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

#: Hexadecimal digits of a tag: 128 bits.
_TAG_DIGITS = 32
#: The two sides of a connection.
WORKER, ARBITER = "worker", "arbiter"
#: What a connection for heartbeats proves to be.
HEARTBEATS = "heartbeats"


def encoded(message: dict[str, Any]) -> bytes:
    """Return a message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def proof(key: bytes, role: str, name: str, challenge: str) -> str:
    """Return what only who knows the key can answer to a challenge, as the worker of a name or as the arbiter."""
    return _derived(key, role, name, challenge).hex()


def connection_key(secret: bytes, name: str, theirs: str, own: str) -> bytes:
    """Return the key of a connection between a worker and the arbiter.

    Args:
        secret: of the run.
        name: of the worker.
        theirs: the challenge of the arbiter.
        own: the challenge of the worker.
    """
    return _derived(secret, "connection", name, theirs, own)


def group_key(secret: bytes, number: int, members: Sequence[str], nonce: str) -> bytes:
    """Return the key of a generation, which each of its members derives.

    Args:
        secret: of the run.
        number: of the generation.
        members: names of its workers, by rank.
        nonce: random, from the arbiter, for this generation.
    """
    return _derived(secret, "group", number, *members, nonce)


def _derived(key: bytes, *what: str | int) -> bytes:
    return hmac.digest(key, json.dumps(what).encode(), hashlib.sha256)


class Seal:
    """Tags of the lines that one side of a connection sends, in their order.

    Args:
        key: of the connection.
        sender: the side that sends these lines, so that a line cannot be sent back.
    """

    def __init__(self, key: bytes, sender: str):
        self._key, self._sender, self._lines = key, sender, 0

    def sealed(self, line: bytes) -> bytes:
        """Return the next line with its tag."""
        return self._tag(line) + line

    def opened(self, sealed: bytes) -> bytes:
        """Return the next line without its tag.

        Raises:
            ValueError: the other side has not sent this line, or not as the next one.
        """
        tag, line = sealed[:_TAG_DIGITS], sealed[_TAG_DIGITS:]
        if not hmac.compare_digest(tag, self._tag(line)):
            raise ValueError("a message was changed, repeated or left out on its way")
        return line

    def _tag(self, line: bytes) -> bytes:
        what = f"{self._sender} {self._lines} ".encode() + _digest(line)
        self._lines += 1
        return hmac.digest(self._key, what, hashlib.sha256).hex()[:_TAG_DIGITS].encode()


@functools.lru_cache(maxsize=1)
def _digest(line: bytes) -> bytes:
    """Return the hash of a line. The arbiter sends each generation to all of its members, so the last one is kept."""
    return hashlib.sha256(line).digest()
