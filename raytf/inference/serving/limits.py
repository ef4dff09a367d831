"""Limits on what clients may take of the server: the numbers, and who is too slow. Pure functions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ServingLimits:
    """Limits of one HTTP proxy.

    Attributes:
        header_bytes: of a request's line and headers; more is a 431.
        header_seconds: for them to arrive, and for the first byte of a connection; later is a 408.
        connections: at the same time; beyond, one that asks nothing is closed, those that never asked anything first.
        bodies: that are still arriving after `patience_seconds`, at the same time; beyond, the slowest of them are
            refused. Younger ones do not count, so that nobody who sends all at once is ever refused for others; there
            are no more of them than `connections`.
        body_rate: bytes a second that a body must arrive with, on average of each `grace_seconds`; slower is a 408.
        body_seconds: for a whole body.
        intake_rate: bytes a second, unpacked, that are taken of all bodies together that are not small: reading them at
            once would keep small ones waiting, and replicas read no faster.
        framing_bytes: that chunked coding may add to a body, beside as many bytes as the body has.
        stall_seconds: for which a client may take nothing of its answer.
        linger_seconds, linger_bytes: that a refused client may still send, so that it sees why.
        lingering: refused clients that are listened to so.
        linger_rate: bytes a second that are read of all of them together.
        small_bytes: a body up to that is given to a replica as it is; a larger one waits on disk for its turn.
        memory_bytes: of small bodies on their way, in all.
        disk_bytes: of bodies and answers on disk, in all.
        large: bodies above `small_bytes` on their way to replicas, at the same time.
        turn_seconds: for which a body that has arrived waits for its turn; later is a 503.
    """

    header_bytes: int = 64 << 10
    header_seconds: float = 10.0
    connections: int = 1024
    bodies: int = 256
    patience_seconds: float = 1.0
    grace_seconds: float = 5.0
    body_rate: float = 1024.0
    body_seconds: float = 300.0
    intake_rate: float = 32e6
    framing_bytes: int = 64 << 10
    stall_seconds: float = 20.0
    linger_seconds: float = 5.0
    linger_bytes: int = 64 << 20
    lingering: int = 32
    linger_rate: float = 32e6
    small_bytes: int = 128 << 10
    memory_bytes: int = 8 << 20
    disk_bytes: int = 512 << 20
    large: int = 16
    turn_seconds: float = 30.0


@dataclass(eq=False)
class ArrivingBody:
    """A body that is on its way.

    Attributes:
        began: when its first byte was expected.
        seen_at, seen: when its speed was checked last, and how many bytes there were.
        got: bytes that have arrived.
        timeout: ends the request.
    """

    began: float
    seen_at: float
    got: int = 0
    seen: int = 0
    timeout: asyncio.Timeout | None = None

    def is_too_slow(self, now: float, limits: ServingLimits) -> bool:
        """Whether the body has come too slowly since the last check: the more there is, the less it may slow down.

        To be asked when `grace_seconds` have gone by since then.
        """
        least = max(limits.body_rate, self.got / limits.body_seconds)
        return self.got - self.seen < least * (now - self.seen_at)


def in_the_way(bodies: Iterable[ArrivingBody], now: float, limits: ServingLimits) -> list[ArrivingBody]:
    """Return the slowest bodies, which make room for another one; none as long as there is some."""
    old = [body for body in bodies if now - body.began >= limits.patience_seconds]
    old.sort(key=lambda body: (body.got / (now - body.began), body.began))
    return old[: max(0, len(old) - limits.bodies + 1)]
