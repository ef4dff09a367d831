"""Connects each rank of a group with each other one, over TCP.

Each rank calls all ranks before it, and answers all that come after it. A rank has met another one only when that one
has answered, so none begins before all are there. Both sides prove that they know the group's key. It does not travel
here: Ray has brought it, or the run's secret, from which each member derives it (`sealed_lines.group_key`). What is
sent later, gradients and heartbeats, is neither encrypted nor authenticated, since an HMAC of gradients takes longer
than a fast network (docs/guides/recovery.md).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable

from raytf.distributed.callers import Callers
from raytf.distributed.forked_children import close_in_children
from raytf.distributed.meeting import Meeting, parsed

#: What a connection is for.
DATA, HEARTBEATS = 0, 1
#: Seconds for all ranks to connect, on a loaded machine.
MEET_SECONDS = 60.0
#: Seconds for another host to take a connection. Its kernel does that also while its processes are busy or stopped, so
#: a host that does not is cut off.
REACH_SECONDS = 10.0
#: Seconds between two looks whether a rank that is waited for is lost.
_LOOK_SECONDS = 0.1
#: What a call begins with: who calls, whom, what for, random bytes, and the proof; the answer is a proof.
_CALL = struct.Struct("<iii16s32s")
_PROOF_BYTES = 32

Connections = dict[int, dict[int, socket.socket]]


def connect_all(meeting: Meeting, silent_seconds: float, meet_seconds: float = MEET_SECONDS) -> Connections:
    """Connections with all other ranks: by what they are for, and by rank.

    Args:
        meeting: of this rank.
        silent_seconds: after which the kernel ends a connection for heartbeats whose other side does not answer.
        meet_seconds: how long the others may take.

    Raises:
        OSError: not all have connected; says who is missing.
    """
    meeting_point = _MeetingPoint(meeting, time.monotonic() + meet_seconds)
    try:
        with meeting.server() as server:
            meeting_point.call()
            meeting_point.answer(server)
        meeting_point.hear()
        for (_, purpose), peer in meeting_point.found.items():
            close_in_children(peer)
            _watch(peer, silent_seconds if purpose == HEARTBEATS else None)
    except BaseException:
        for peer in meeting_point.found.values():
            peer.close()
        raise
    return {
        kind: {rank: peer for (rank, purpose), peer in meeting_point.found.items() if purpose == kind}
        for kind in (DATA, HEARTBEATS)
    }


def end(peer: socket.socket) -> None:
    """Close a connection for all processes that have it."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


class UnreachedError(ConnectionError):
    """Some ranks did not answer while the group met.

    Attributes:
        ranks: the ranks that did not answer.
    """

    def __init__(self, message: str, ranks: Iterable[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)


class _MeetingPoint:
    """One rank's meeting with the others.

    Args:
        meeting: of this rank.
        deadline: until when, by the monotonic clock.

    Attributes:
        found: connections by (rank, purpose).
    """

    def __init__(self, meeting: Meeting, deadline: float):
        self._meeting, self._deadline = meeting, deadline
        self.found: dict[tuple[int, int], socket.socket] = {}
        self._proofs: dict[tuple[int, int], bytes] = {}

    def call(self) -> None:
        """Call the ranks before this one."""
        own = self._meeting.rank
        for rank in range(own):
            for purpose in (DATA, HEARTBEATS):
                self.found[rank, purpose] = peer = self._dialed(rank)
                what = struct.pack("<iii16s", own, rank, purpose, secrets.token_bytes(16))
                try:
                    peer.sendall(what + self._proof(b"call", what))
                except OSError as error:
                    raise ConnectionError(f"{self._names({rank})} has hung up: {error}") from None
                self._proofs[rank, purpose] = self._proof(b"answer", what)

    def answer(self, server: socket.socket) -> None:
        """Answer the ranks after this one. Who does not say at once who it is holds up nobody."""
        own, size = self._meeting.rank, self._meeting.world_size
        awaited = {(rank, purpose) for rank in range(own + 1, size) for purpose in (DATA, HEARTBEATS)}
        with Callers(server, _CALL.size) as callers:
            while awaited:
                self._check_time({rank for rank, _ in awaited}, "did not connect in time")
                for peer, call in callers.calls(min(_LOOK_SECONDS, self._left())):
                    self._greet(peer, call, awaited)

    def hear(self) -> None:
        """Wait until the ranks before this one have answered."""
        for (rank, purpose), proof in self._proofs.items():
            peer, found = self.found[rank, purpose], b""
            while len(found) < _PROOF_BYTES:
                self._check_time({rank}, "did not answer in time")
                peer.settimeout(max(0.001, min(_LOOK_SECONDS, self._left())))
                try:
                    more = peer.recv(_PROOF_BYTES - len(found))
                except TimeoutError:
                    continue
                except OSError as error:
                    raise ConnectionError(f"{self._names({rank})} did not answer: {error}") from None
                if not more:
                    raise ConnectionError(f"{self._names({rank})} has hung up")
                found += more
            if not hmac.compare_digest(found, proof):
                raise ConnectionError(f"{self._names({rank})} is not of this group")

    def _greet(self, peer: socket.socket, call: bytes, awaited: set[tuple[int, int]]) -> None:
        who = self._caller(call)
        if who is None or who not in awaited:
            peer.close()  # a stranger, such as who looks for open ports
            return
        self.found[who] = peer
        try:
            peer.sendall(self._proof(b"answer", call[:-_PROOF_BYTES]))
        except OSError as error:
            raise ConnectionError(f"{self._names({who[0]})} has hung up: {error}") from None
        awaited.remove(who)

    def _caller(self, told: bytes) -> tuple[int, int] | None:
        rank, called, purpose, _, proof = _CALL.unpack(told)
        is_known = hmac.compare_digest(proof, self._proof(b"call", told[:-_PROOF_BYTES]))
        return (rank, purpose) if is_known and called == self._meeting.rank else None

    def _dialed(self, rank: int) -> socket.socket:
        while True:
            try:
                return self._connected(rank)
            except UnreachedError:
                raise
            except OSError as error:
                self._check_time({rank}, f"cannot be reached: {error}")
                if not isinstance(error, ConnectionRefusedError):
                    raise UnreachedError(f"{self._names({rank})} cannot be reached: {error}", {rank}) from None
                time.sleep(0.01)

    def _connected(self, rank: int) -> socket.socket:
        """Return a connection with a rank. A host that is cut off never answers, so the generation's end is polled."""
        host, port = parsed(self._meeting.addresses[rank])
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        peer, until = socket.socket(family, kind, protocol), min(self._deadline, time.monotonic() + REACH_SECONDS)
        try:
            peer.setblocking(False)
            failed = peer.connect_ex(address)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
            with selectors.DefaultSelector() as selector:
                selector.register(peer, selectors.EVENT_WRITE)
                while not selector.select(min(_LOOK_SECONDS, self._left())):
                    self._check_time({rank}, "cannot be reached: no answer", until)
            failed = peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            peer.setblocking(True)
            return peer
        except BaseException:
            peer.close()
            raise

    def _proof(self, role: bytes, what: bytes) -> bytes:
        return hmac.new(self._meeting.key, role + what, hashlib.sha256).digest()

    def _check_time(self, ranks: set[int], text: str, until: float | None = None) -> None:
        if self._meeting.is_over():
            raise ConnectionAbortedError("another rank is lost")
        if time.monotonic() >= (self._deadline if until is None else until):
            raise UnreachedError(f"{self._names(ranks)} {text}", ranks)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _names(self, ranks: set[int]) -> str:
        return ", ".join(f"rank {rank} at {self._meeting.addresses[rank]}" for rank in sorted(ranks))


def _watch(peer: socket.socket, silent_seconds: float | None) -> None:
    """Have the kernel find out that the other host is gone or cut off.

    Only where little is sent: where the other side takes nothing for a while, the kernel would end that, too.
    """
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if silent_seconds is not None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))
