"""The rendezvous of a generation: where each rank listens, which ranks it calls and answers, and when it gives up.

Each rank listens before anybody knows the addresses of all, so that nobody else can take its port; a server of
TensorFlow's takes it over (`MultiWorkerGroup`).
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from raytf.distributed.sockets import Callers, close_in_children

#: Connections that may wait to be accepted: two of each rank. Where it is less, a busy rank would seem to be cut off.
_BACKLOG = 4096

#: Sockets that listen and have not been taken yet, by their HOST:PORT.
_listening: dict[str, socket.socket] = {}
#: The purpose of a connection.
DATA, HEARTBEATS = 0, 1
#: Seconds for all ranks to connect, on a loaded machine.
MEET_SECONDS = 60.0
#: Seconds for another host to take a connection. A kernel takes connections also while its processes are busy or
#: stopped, so a host that takes none is cut off.
REACH_SECONDS = 10.0

#: A connection with another rank: the rank, and what the connection is for.
Link = tuple[int, int]

#: Seconds between two looks whether a rank that is waited for is lost.
_LOOK_SECONDS = 0.1
#: The header of a call: caller, callee, purpose, random bytes and proof. The answer is a proof.
_CALL = struct.Struct("<iii16s32s")
_PROOF_BYTES = 32

Connections = dict[int, dict[int, socket.socket]]


@dataclass(frozen=True)
class Meeting:
    """A rank's place in its group, and how it finds the others.

    Attributes:
        rank: this rank.
        addresses: HOST:PORT of each rank.
        key: 32 random bytes that the ranks of this group know, and nobody else.
        is_over: whether a rank is known to be lost or to have left; ends the meeting.
        is_lost: whether a rank is known to be lost. A rank that has left has finished its step with all others.
    """

    rank: int
    addresses: tuple[str, ...]
    key: bytes = field(repr=False)
    is_over: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)
    is_lost: Callable[[], bool] = field(default=lambda: False, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        return len(self.addresses)

    def server(self) -> socket.socket:
        """Return a socket that listens at this rank's address. The caller has to close it.

        Raises:
            OSError: another process listens there.
        """
        own = self.addresses[self.rank]
        return _listening.pop(own, None) or server_at(*parsed(own))

    def close(self) -> None:
        """Do not listen any more, if nobody has taken the socket."""
        server = _listening.pop(self.addresses[self.rank], None)
        if server is not None:
            server.close()


def listen(host: str) -> str:
    """Listen at a free port of this machine for a `Meeting` of this process; return HOST:PORT. An OSError says that
    none is free."""
    server = server_at(host)
    address = joined(host, server.getsockname()[1])
    _listening[address] = server
    return address


def joined(host: str, port: int) -> str:
    """Return HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(address: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def server_at(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a port of this machine, by default a free one, which others reach by the address
    `host`. An OSError says that the port is taken, or none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # An address that others translate to this machine's, as Ray's --node-ip-address may be.
        server = socket.create_server(("", port), family=family, backlog=_BACKLOG)
    close_in_children(server)
    return server


_mine: Meeting | None = None


def take(meeting: Meeting) -> None:
    """Give this process its place in a group."""
    global _mine
    _mine = meeting


def mine() -> Meeting:
    """Return this process's place in its group."""
    assert _mine is not None, "worker.set_up comes first"
    return _mine


# A rank calls all ranks before it, in their order, then answers all ranks after it, and then waits for the answers to
# its calls. Events go in, and the next thing to do comes out, or an error that ends the meeting. Nothing here knows
# sockets or clocks: whoever reports an event passes the time. `_Links` carries the decisions out,
# and `tests.stress.simulate` tries them in a simulated world.


class UnreachedError(ConnectionError):
    """Some ranks did not answer while the group met."""

    def __init__(self, message: str, ranks: Iterable[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)


class MeetingPoint:
    """One rank's meeting with the others. Times are seconds of any clock that only goes forward.

    Args:
        rank: this rank.
        addresses: HOST:PORT of each rank, for messages.
        deadline: the time at which the meeting has failed.
    """

    def __init__(self, rank: int, addresses: Sequence[str], deadline: float):
        self._rank, self._addresses, self._deadline = rank, addresses, deadline
        purposes = DATA, HEARTBEATS
        self._uncalled = [(other, purpose) for other in range(rank) for purpose in purposes]
        self._awaited = {(other, purpose) for other in range(rank + 1, len(addresses)) for purpose in purposes}
        self._unheard = list(self._uncalled)
        self._reach_until = deadline

    @property
    def to_call(self) -> Link | None:
        """The next connection to make; None once all were made."""
        return self._uncalled[0] if self._uncalled else None

    @property
    def awaits_calls(self) -> bool:
        """Whether ranks after this one have yet to call. This rank answers them once it has made its own calls."""
        return bool(self._awaited)

    @property
    def to_hear(self) -> Link | None:
        """The next connection on which an answer has to come; None once all have answered."""
        return self._unheard[0] if self._unheard else None

    def dial(self, now: float) -> None:
        self._reach_until = min(self._deadline, now + REACH_SECONDS)

    def called(self) -> None:
        """Note that the connection `to_call` was made, and the call sent."""
        del self._uncalled[0]

    def not_reached(self, error: OSError, now: float, is_over: bool) -> None:
        """Note that the connection `to_call` could not be made; it is tried again, unless this raises as `poll` does. A
        host that refuses may not listen yet."""
        self._check_over(is_over)
        if now >= self._deadline or not isinstance(error, ConnectionRefusedError):
            self._give_up({self._uncalled[0][0]}, f"cannot be reached: {error}")

    def answers(self, caller: Link, called: int, is_of_group: bool) -> bool:
        """Return whether to answer a caller. Otherwise it is a stranger, and this rank hangs up.

        Args:
            caller: the rank that the caller says it is, and what the connection is for.
            called: the rank that the caller wants.
            is_of_group: whether the caller has proved that it knows the group's key.
        """
        is_welcome = is_of_group and called == self._rank and caller in self._awaited
        if is_welcome:
            self._awaited.remove(caller)
        return is_welcome

    def heard(self, is_of_group: bool) -> None:
        """Note that an answer has come on the connection `to_hear`; raise a ConnectionError if it does not prove that
        the other rank knows the group's key."""
        rank, _ = self._unheard.pop(0)
        if not is_of_group:
            raise ConnectionError(f"{self._names({rank})} is not of this group")

    def lose(self, rank: int, text: str) -> NoReturn:
        """Raise a ConnectionError because the connection with a rank has ended, which counts as reached."""
        raise ConnectionError(f"{self._names({rank})} {text}")

    def poll(self, now: float, is_over: bool) -> None:
        """Check whether to wait any longer; to be called again and again while this rank waits.

        Args:
            now: the time.
            is_over: whether the generation is known to be over.

        Raises:
            ConnectionAbortedError: the generation is over.
            UnreachedError: ranks have not answered in time.
        """
        self._check_over(is_over)
        if self._uncalled:
            if now >= self._reach_until:
                self._give_up({self._uncalled[0][0]}, "cannot be reached: no answer")
        elif now >= self._deadline:
            if self._awaited:
                self._give_up({rank for rank, _ in self._awaited}, "did not connect in time")
            if self._unheard:
                self._give_up({self._unheard[0][0]}, "did not answer in time")

    def _check_over(self, is_over: bool) -> None:
        if is_over:
            raise ConnectionAbortedError("another rank is lost")

    def _give_up(self, ranks: set[int], text: str) -> NoReturn:
        raise UnreachedError(f"{self._names(ranks)} {text}", ranks)

    def _names(self, ranks: set[int]) -> str:
        return ", ".join(f"rank {rank} at {self._addresses[rank]}" for rank in sorted(ranks))


# A rank has met another one only when that one has answered, so none begins before all are there. Both sides prove that
# they know the group's key. It does not travel here: Ray has brought it, or the run's secret, from which each member
# derives it (`group_key`). What is sent later, gradients and heartbeats, is neither encrypted nor authenticated, since
# an HMAC of gradients takes longer than a fast network (docs/guides/recovery.md).


def connect_all(meeting: Meeting, silent_seconds: float, meet_seconds: float = MEET_SECONDS) -> Connections:
    """Return the connections with all other ranks: by what they are for, and by rank.

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
        for (_, purpose), peer in links.connections.items():
            close_in_children(peer)
            _watch(peer, silent_seconds if purpose == HEARTBEATS else None)
    except BaseException:
        for peer in links.connections.values():
            peer.close()
        raise
    return {
        kind: {rank: peer for (rank, purpose), peer in links.connections.items() if purpose == kind}
        for kind in (DATA, HEARTBEATS)
    }


def end(peer: socket.socket) -> None:
    """Close a connection for all processes that have it."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


class _Links:
    """The connections of a rank that meets the others until a deadline, by (rank, purpose), as its `MeetingPoint` wants
    them."""

    def __init__(self, meeting: Meeting, deadline: float):
        self._meeting, self._deadline = meeting, deadline
        self._point = MeetingPoint(meeting.rank, meeting.addresses, deadline)
        self.connections: dict[Link, socket.socket] = {}
        self._proofs: dict[Link, bytes] = {}

    def call(self) -> None:
        while (link := self._point.to_call) is not None:
            rank, purpose = link
            self.connections[link] = peer = self._dialed(rank)
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
                self._poll()
                for peer, call in callers.calls(self._patience()):
                    self._greet(peer, call)

    def hear(self) -> None:
        while (link := self._point.to_hear) is not None:
            peer, answer = self.connections[link], b""
            while len(answer) < _PROOF_BYTES:
                self._poll()
                peer.settimeout(max(0.001, self._patience()))
                try:
                    more = peer.recv(_PROOF_BYTES - len(answer))
                except TimeoutError:
                    continue
                except OSError as error:
                    self._point.lose(link[0], f"did not answer: {error}")
                if not more:
                    self._point.lose(link[0], "has hung up")
                answer += more
            self._point.heard(hmac.compare_digest(answer, self._proofs[link]))

    def _greet(self, peer: socket.socket, call: bytes) -> None:
        what = call[:-_PROOF_BYTES]
        rank, called, purpose, _, proof = _CALL.unpack(call)
        if not self._point.answers((rank, purpose), called, hmac.compare_digest(proof, self._proof(b"call", what))):
            peer.close()  # a stranger, such as who looks for open ports
            return
        self.connections[rank, purpose] = peer
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
                    self._poll()
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

    def _poll(self) -> None:
        self._point.poll(time.monotonic(), self._meeting.is_over())

    def _patience(self) -> float:
        return max(0.0, min(_LOOK_SECONDS, self._deadline - time.monotonic()))


def _watch(peer: socket.socket, silent_seconds: float | None) -> None:
    """Have the kernel find out that the other host is gone or cut off.

    Only where little is sent: where the other side takes nothing for a while, the kernel would end that, too.
    """
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if silent_seconds is not None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))
