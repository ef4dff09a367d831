"""The rendezvous of a generation: where each rank listens, which ranks it calls and answers, and when it gives up.

Each rank starts to listen before the addresses of all ranks are known, so that no other process can take its port. A
TensorFlow server can take over the port (`MultiWorkerGroup`).
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

#: Connections that may wait to be accepted, two from each rank. With fewer, a busy rank would seem to be cut off.
_BACKLOG = 4096

#: Listening sockets that no meeting has used yet, by HOST:PORT.
_listening: dict[str, socket.socket] = {}
#: The purposes of connections.
DATA, HEARTBEATS = 0, 1
#: Seconds for all ranks to connect, on a loaded machine.
MEET_SECONDS = 60.0
#: Seconds for another host to accept a connection. A kernel accepts connections even while its processes are busy or
#: stopped, so a host that accepts none is cut off.
REACH_SECONDS = 10.0

#: A connection to another rank: the rank and the purpose of the connection.
Link = tuple[int, int]

#: Seconds between two checks whether an awaited rank is lost.
_LOOK_SECONDS = 0.1
#: The header of a call: caller, callee, purpose, random bytes and proof. The answer is a proof.
_CALL = struct.Struct("<iii16s32s")
_PROOF_BYTES = 32

Connections = dict[int, dict[int, socket.socket]]


@dataclass(frozen=True)
class Meeting:
    """A rank's place in its group, and the addresses of all ranks.

    Attributes:
        rank: this rank.
        addresses: HOST:PORT of each rank.
        key: 32 random bytes that the ranks of this group know, and nobody else.
        is_over: returns whether a rank is known to be lost or to have left, which ends the meeting.
        is_lost: returns whether a rank is known to be lost. A rank that has left finished its step with all others.
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
        """Return a socket that listens at this rank's address. The caller must close it.

        Raises:
            OSError: another process listens at this address.
        """
        own = self.addresses[self.rank]
        return _listening.pop(own, None) or server_at(*parsed(own))

    def close(self) -> None:
        """Stop listening, unless the socket is already in use."""
        server = _listening.pop(self.addresses[self.rank], None)
        if server is not None:
            server.close()


def listen(host: str) -> str:
    """Listen at a free port of this machine, for a `Meeting` of this process, and return HOST:PORT. Raise an OSError if
    no port is free."""
    server = server_at(host)
    address = joined(host, server.getsockname()[1])
    _listening[address] = server
    return address


def joined(host: str, port: int) -> str:
    """Return the address HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parsed(address: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def server_at(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens at a port of this machine, by default a free one; others reach it at the address
    `host`. Raise an OSError if the port is taken or none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        server = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        # The address may be one that others translate to this machine's address, such as Ray's --node-ip-address.
        server = socket.create_server(("", port), family=family, backlog=_BACKLOG)
    close_in_children(server)
    return server


_mine: Meeting | None = None


def take(meeting: Meeting) -> None:
    """Set this process's place in a group."""
    global _mine
    _mine = meeting


def mine() -> Meeting:
    """Return this process's place in its group."""
    assert _mine is not None, "call worker.set_up first"
    return _mine


# A rank calls all lower ranks in order, then answers all higher ranks, and then waits for the answers to its calls.
# `MeetingPoint` takes events and returns the next action, or raises an error that ends the meeting. It uses neither
# sockets nor clocks: the time is passed with each event. `_Links` carries out the actions. `tests.stress.simulate` runs
# `MeetingPoint` in a simulated world.


class UnreachedError(ConnectionError):
    """Some ranks did not answer at the rendezvous."""

    def __init__(self, message: str, ranks: Iterable[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)


class MeetingPoint:
    """One rank's meeting with the others. Times are seconds of a monotonic clock.

    Args:
        rank: this rank.
        addresses: HOST:PORT of each rank, for messages.
        deadline: time after which the meeting fails.
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
        """The next connection to make, or None after the last one."""
        return self._uncalled[0] if self._uncalled else None

    @property
    def awaits_calls(self) -> bool:
        """Whether higher ranks have yet to call. This rank answers them after it has made its own calls."""
        return bool(self._awaited)

    @property
    def to_hear(self) -> Link | None:
        """The next connection on which an answer must arrive, or None after the last one."""
        return self._unheard[0] if self._unheard else None

    def dial(self, now: float) -> None:
        self._reach_until = min(self._deadline, now + REACH_SECONDS)

    def called(self) -> None:
        """Record that the connection `to_call` was made and the call was sent."""
        del self._uncalled[0]

    def not_reached(self, error: OSError, now: float, is_over: bool) -> None:
        """Record that the connection `to_call` failed, or raise an error as `poll` does. Without an error, the caller
        retries, because a host that refuses connections may not listen yet."""
        self._check_over(is_over)
        if now >= self._deadline or not isinstance(error, ConnectionRefusedError):
            self._give_up({self._uncalled[0][0]}, f"cannot be reached: {error}")

    def answers(self, caller: Link, called: int, is_of_group: bool) -> bool:
        """Return whether to answer a caller. If not, the caller is a stranger, and this rank closes the connection.

        Args:
            caller: the rank that the caller claims to be, and the purpose of the connection.
            called: the rank that the caller wants to reach.
            is_of_group: whether the caller has proved that it knows the group's key.
        """
        is_welcome = is_of_group and called == self._rank and caller in self._awaited
        if is_welcome:
            self._awaited.remove(caller)
        return is_welcome

    def heard(self, is_of_group: bool) -> None:
        """Record an answer on the connection `to_hear`. Raise a ConnectionError if it does not prove that the other
        rank knows the group's key."""
        rank, _ = self._unheard.pop(0)
        if not is_of_group:
            raise ConnectionError(f"{self._names({rank})} is not of this group")

    def lose(self, rank: int, text: str) -> NoReturn:
        """Raise a ConnectionError because the connection to a rank has ended. The rank counts as reached."""
        raise ConnectionError(f"{self._names({rank})} {text}")

    def poll(self, now: float, is_over: bool) -> None:
        """Check whether to keep waiting; call this repeatedly while this rank waits.

        Args:
            now: the current time.
            is_over: whether the generation is known to be over.

        Raises:
            ConnectionAbortedError: the generation is over.
            UnreachedError: some ranks did not answer in time.
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


# A rank has met another rank only when that rank has answered, so no rank starts before all are present. Both sides
# prove that they know the group's key, which is never sent here: Ray sends it, or the run's secret, from which each
# member derives it (`group_key`). Gradients and heartbeats are neither encrypted nor authenticated, because an HMAC of
# gradients takes longer than a fast network (docs/guides/recovery.md).


def connect_all(meeting: Meeting, silent_seconds: float, meet_seconds: float = MEET_SECONDS) -> Connections:
    """Connect to all other ranks, and return the connections by purpose and rank.

    Args:
        meeting: meeting of this rank.
        silent_seconds: time after which the kernel ends a heartbeat connection whose other side does not respond.
        meet_seconds: time for all ranks to connect.

    Raises:
        OSError: not all ranks have connected. The message names the missing ones.
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
    """Close a connection, even if other processes also hold it open."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)
    peer.close()


class _Links:
    """Makes the connections of a rank, by (rank, purpose), as its `MeetingPoint` decides, until a deadline."""

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
        """Answer the higher ranks. A caller that does not identify itself at once delays nobody."""
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
            peer.close()  # a stranger, such as a port scanner
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
        """Return a connection to a rank. Poll meanwhile, because a host that is cut off never answers."""
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
    """Make the kernel notice that the other host is gone or cut off, if `silent_seconds` is set.

    Set it only if little is sent: the kernel also ends a connection whose other side reads nothing for a while.
    """
    peer.setblocking(False)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if silent_seconds is not None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))
