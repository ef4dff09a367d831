"""Connects each rank of a group with each other one, over TCP.

Each rank calls all ranks before it, and answers all that come after it. A rank has met another one only when that one
has answered, so none begins before all are there. Both sides prove that they know the group's key. It does not travel
here: Ray has brought it, or the run's secret, from which each member derives it (`sealed_lines.group_key`). What is
sent later, gradients and heartbeats, is neither encrypted nor authenticated, since an HMAC of gradients takes longer
than a fast network (docs/guides/recovery.md). `meeting_point` decides whom to call and for how long to wait.
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

from raytf.distributed.callers import Callers
from raytf.distributed.forked_children import close_in_children
from raytf.distributed.meeting import Meeting, parsed
from raytf.distributed.meeting_point import DATA, HEARTBEATS, MEET_SECONDS, Link, MeetingPoint, UnreachedError

__all__ = ["DATA", "HEARTBEATS", "MEET_SECONDS", "UnreachedError", "connect_all", "end"]

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
    links = _Links(meeting, time.monotonic() + meet_seconds)
    try:
        with meeting.server() as server:
            links.call()
            links.answer(server)
        links.hear()
        for (_, purpose), peer in links.found.items():
            close_in_children(peer)
            _watch(peer, silent_seconds if purpose == HEARTBEATS else None)
    except BaseException:
        for peer in links.found.values():
            peer.close()
        raise
    return {
        kind: {rank: peer for (rank, purpose), peer in links.found.items() if purpose == kind}
        for kind in (DATA, HEARTBEATS)
    }


def end(peer: socket.socket) -> None:
    """Close a connection for all processes that have it."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


class _Links:
    """The connections of a rank that meets the others, as its `MeetingPoint` wants them.

    Args:
        meeting: of this rank.
        deadline: until when, by the monotonic clock.

    Attributes:
        found: connections by (rank, purpose).
    """

    def __init__(self, meeting: Meeting, deadline: float):
        self._meeting, self._deadline = meeting, deadline
        self._point = MeetingPoint(meeting.rank, meeting.addresses, deadline)
        self.found: dict[Link, socket.socket] = {}
        self._proofs: dict[Link, bytes] = {}

    def call(self) -> None:
        """Call the ranks before this one."""
        while (link := self._point.to_call) is not None:
            rank, purpose = link
            self.found[link] = peer = self._dialed(rank)
            what = struct.pack("<iii16s", self._meeting.rank, rank, purpose, secrets.token_bytes(16))
            try:
                peer.sendall(what + self._proof(b"call", what))
            except OSError as error:
                self._point.lose(rank, f"has hung up: {error}")
            self._proofs[link] = self._proof(b"answer", what)
            self._point.called()

    def answer(self, server: socket.socket) -> None:
        """Answer the ranks after this one. Who does not say at once who it is holds up nobody."""
        with Callers(server, _CALL.size) as callers:
            while self._point.awaits_calls:
                self._look()
                for peer, call in callers.calls(self._patience()):
                    self._greet(peer, call)

    def hear(self) -> None:
        """Wait until the ranks before this one have answered."""
        while (link := self._point.to_hear) is not None:
            peer, found = self.found[link], b""
            while len(found) < _PROOF_BYTES:
                self._look()
                peer.settimeout(max(0.001, self._patience()))
                try:
                    more = peer.recv(_PROOF_BYTES - len(found))
                except TimeoutError:
                    continue
                except OSError as error:
                    self._point.lose(link[0], f"did not answer: {error}")
                if not more:
                    self._point.lose(link[0], "has hung up")
                found += more
            self._point.heard(hmac.compare_digest(found, self._proofs[link]))

    def _greet(self, peer: socket.socket, call: bytes) -> None:
        what = call[:-_PROOF_BYTES]
        rank, called, purpose, _, proof = _CALL.unpack(call)
        if not self._point.answers((rank, purpose), called, hmac.compare_digest(proof, self._proof(b"call", what))):
            peer.close()  # a stranger, such as who looks for open ports
            return
        self.found[rank, purpose] = peer
        try:
            peer.sendall(self._proof(b"answer", what))
        except OSError as error:
            self._point.lose(rank, f"has hung up: {error}")

    def _dialed(self, rank: int) -> socket.socket:
        while True:
            self._point.dial(time.monotonic())
            try:
                return self._connected(rank)
            except UnreachedError:
                raise
            except OSError as error:
                self._point.not_reached(error, time.monotonic(), self._meeting.is_over())
                time.sleep(0.01)

    def _connected(self, rank: int) -> socket.socket:
        """Return a connection with a rank. A host that is cut off never answers, so the generation's end is polled."""
        host, port = parsed(self._meeting.addresses[rank])
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        peer = socket.socket(family, kind, protocol)
        try:
            peer.setblocking(False)
            failed = peer.connect_ex(address)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
            with selectors.DefaultSelector() as selector:
                selector.register(peer, selectors.EVENT_WRITE)
                while not selector.select(self._patience()):
                    self._look()
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

    def _look(self) -> None:
        self._point.look(time.monotonic(), self._meeting.is_over())

    def _patience(self) -> float:
        """Return for how many seconds to wait before the next look."""
        return max(0.0, min(_LOOK_SECONDS, self._deadline - time.monotonic()))


def _watch(peer: socket.socket, silent_seconds: float | None) -> None:
    """Have the kernel find out that the other host is gone or cut off.

    Only where little is sent: where the other side takes nothing for a while, the kernel would end that, too.
    """
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if silent_seconds is not None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))
