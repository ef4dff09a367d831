"""A worker's connection to the arbiter of its group (`raytf.driver.arbiter`), which decides on the members.

Worker and arbiter exchange lines of JSON over TCP (`arbiter_messages`). When a worker joins, or leaves a generation,
the arbiter replies with the next generation. The arbiter requests a pause when a worker wants to join or should leave,
and reports why a worker has to stop. A worker that loses this connection is lost, even if it can reach others: if the
network is cut in two, only the half with the arbiter continues. Heartbeats use a separate connection, because another
process sends them, which would write into the middle of long lines.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raytf.distributed.membership.arbiter_messages import (
    ARBITER,
    HEARTBEATS,
    WORKER,
    Seal,
    connection_key,
    encoded,
    group_key,
    of_arbiter,
    proof,
)
from raytf.distributed.membership.generations import Generation
from raytf.distributed.membership.member import LeftBehindError, Member
from raytf.distributed.membership.peer_liveness import SILENT_SECONDS, HeartbeatSender
from raytf.distributed.membership.rendezvous import Meeting, end, parsed
from raytf.distributed.sockets import close_in_children
from raytf.errors import WorkerLostError

__all__ = ["ArbiterAddress", "ArbiterLink", "LeftBehindError", "watch", "worker_name"]

#: Seconds in which a connection must be made.
_CONNECT_SECONDS = 30.0
#: Bytes of the longest line from the arbiter, which may name thousands of workers.
_LINE_BYTES = 1 << 24
#: Seconds between two calls of `waits` while a worker waits for the arbiter.
_WAIT_SECONDS = 1.0
#: Seconds before each retry, if the arbiter closed the connection before the worker identified itself.
_AGAIN_SECONDS = (0.1, 0.3, 0.9)
_LOST = "the connection with the driver's arbiter is lost"


@dataclass(frozen=True)
class ArbiterAddress:
    """The address and the secret with which workers reach the arbiter of their run.

    Attributes:
        address: HOST:PORT.
        key: the run's secret, 32 random bytes that Ray sends to the run's processes and that nobody else knows.
    """

    address: str
    key: bytes = field(repr=False)


def worker_name(node: str, pid: int) -> str:
    """Return the name by which the arbiter identifies a worker, made of Ray's id of its node and its process id."""
    return f"{node}-{pid}"


def watch(peer: socket.socket, silent_seconds: float) -> None:
    """Make the kernel close a connection if the other host is gone or cut off (not if only the process is stopped)."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        peer.setsockopt(socket.IPPROTO_TCP, option, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))


class _Dialed:
    """A connection to the arbiter in one role, on which this worker has proved that it knows a secret.

    Attributes:
        peer: the socket, which has a timeout.
        lines: the stream of lines from the arbiter.
        theirs, own: challenges of the arbiter and of this worker.
    """

    def __init__(self, arbiter: ArbiterAddress, role: str, name: str, secret: bytes):
        self.peer = socket.create_connection(parsed(arbiter.address), _CONNECT_SECONDS)
        close_in_children(self.peer)
        try:
            self.peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.lines, self.own = self.peer.makefile("rb"), secrets.token_hex(16)
            self.theirs = str(json.loads(self.line())["challenge"])
            own = proof(secret, role, name, self.theirs)
            self.peer.sendall(encoded({"role": role, "name": name, "proof": own, "challenge": self.own}))
        except BaseException:
            self.peer.close()
            raise

    def line(self) -> bytes:
        """Return the next line; raise a ConnectionResetError if the arbiter has closed the connection."""
        line = self.lines.readline(_LINE_BYTES)
        if not line:
            raise ConnectionResetError("it closed the connection")
        return line


@dataclass(frozen=True)
class _Session:
    """The connections to an arbiter that has accepted this worker."""

    control: _Dialed
    beats: socket.socket
    secret: bytes
    incoming: Seal
    outgoing: Seal
    greeting: dict[str, Any]

    @classmethod
    def begin(cls, arbiter: ArbiterAddress, name: str) -> _Session:
        """Connect. Raise OSError, ValueError, KeyError or TypeError if the peer is no arbiter or does not respond."""
        with contextlib.ExitStack() as undo:
            control = _Dialed(arbiter, WORKER, name, arbiter.key)
            undo.callback(control.peer.close)
            key = connection_key(arbiter.key, name, control.theirs, control.own)
            incoming = Seal(key, ARBITER)
            greeting = json.loads(incoming.opened(control.line()))
            # This keeps the connection to a stopped driver, whose kernel still answers.
            watch(control.peer, SILENT_SECONDS)
            beats = _Dialed(arbiter, HEARTBEATS, name, key)
            undo.callback(beats.peer.close)
            beats.line()  # the arbiter has accepted the connection
            for dialed in (control, beats):
                dialed.peer.settimeout(None)
            undo.pop_all()
        return cls(control, beats.peer, arbiter.key, incoming, Seal(key, WORKER), greeting)


class ArbiterLink:
    """A connection to the arbiter.

    Args:
        name: this worker's name, unique in the run.
        session: the open connections to the arbiter, which `connect` opens.
        waits: called repeatedly while this worker waits for the arbiter.
        left_behind: called in the listening thread when the connection is lost, but not after `close`.

    Attributes:
        member: this worker's view of its group.
        found_running: whether a generation of workers existed when this worker connected.
        found_over: the run's result, if the run was over when this worker connected; None otherwise.
    """

    def __init__(
        self,
        name: str,
        session: _Session,
        waits: Callable[[], None],
        left_behind: Callable[[], None],
    ):
        self._session, self._waits, self._left_behind = session, waits, left_behind
        self.member = Member(name)
        self._peer, self._sending = session.control.peer, threading.Lock()
        self.found_running, self.found_over = bool(session.greeting.get("running")), session.greeting.get("over")
        self._answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._is_closed = False
        self._sender = HeartbeatSender([session.beats])
        session.beats.close()  # the heartbeat process has its own descriptor
        threading.Thread(target=self._listen, daemon=True, name="raytf-arbiter").start()

    @classmethod
    def connect(
        cls,
        arbiter: ArbiterAddress,
        name: str,
        waits: Callable[[], None] = lambda: None,
        left_behind: Callable[[], None] = lambda: None,
    ) -> ArbiterLink:
        """Connect to an arbiter; the class describes the other arguments.

        Raises:
            WorkerLostError: the arbiter does not respond.
        """
        for seconds in (*_AGAIN_SECONDS, None):
            try:
                return cls(name, _Session.begin(arbiter, name), waits, left_behind)
            except (OSError, ValueError, KeyError, TypeError) as error:
                # If strangers crowd its port, the arbiter closes the oldest unproven connection, which may be this one.
                if seconds is None or not isinstance(error, (ConnectionResetError, BrokenPipeError)):
                    lost = f"the driver's arbiter at {arbiter.address} does not answer: {error}"
                    raise WorkerLostError(lost) from None
            time.sleep(seconds)
        raise AssertionError("unreachable")

    def join(self, address: str, wanted: int, order: int = 0) -> tuple[Generation, Meeting]:
        """Request to join the next generation, and wait until it starts; see `Member.joining`.

        Raises:
            WorkerLostError: the arbiter is gone, or has told this worker to stop.
        """
        return self._next(self.member.joining(address, wanted, order))

    def leave(self, address: str, step: int) -> tuple[Generation, Meeting]:
        """Leave the current generation, and wait until the next one starts; see `Member.leaving`.

        Raises:
            WorkerLostError: as for `join`, or the others continue without this worker.
        """
        return self._next(self.member.leaving(address, step))

    def dismiss(self, names: Sequence[str], after: Sequence[str] = ()) -> None:
        """Dismiss members after a step, once the workers `after` have joined; see `Membership.dismiss`."""
        self._send({"dismiss": list(names), "after": list(after)})

    def want(self, wanted: int) -> None:
        """Set how many workers start together if no generation is left to continue."""
        self._send({"wanted": wanted})

    def tell_over(self, result: Any) -> None:
        """Report that the run is over, with its result (JSON), so that workers that join later do not train."""
        self._send({"over": result})

    def close(self) -> None:
        """Close the connection, so that this worker is no longer a member."""
        self._is_closed = True
        self._sender.end()
        end(self._peer)

    def _next(self, message: dict[str, Any]) -> tuple[Generation, Meeting]:
        self._send(message)
        answer = self._answer()
        if "end" in answer:
            self._answers.put(answer)  # the next call must fail, too
        generation = self.member.take(answer)
        rank, number = generation.members.index(self.member.name), generation.number
        key = group_key(self._session.secret, number, generation.members, answer["nonce"])
        is_over, is_lost = partial(self.member.is_over, number), partial(self.member.is_broken, number)
        return generation, Meeting(rank, generation.addresses, key, is_over, is_lost)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError), self._sending:  # the listening thread notices a lost connection
            self._peer.sendall(self._session.outgoing.sealed(encoded(message)))

    def _answer(self) -> Mapping[str, Any]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_WAIT_SECONDS)
            self._waits()

    def _listen(self) -> None:
        why = _LOST
        try:
            for line in iter(lambda: self._session.control.lines.readline(_LINE_BYTES), b""):
                news = of_arbiter(self._session.incoming.opened(line), self.member.name)
                self.member.hear(news)
                if news.answer:
                    self._answers.put(news.answer)
        except Exception as error:
            why = f"{_LOST}: {error}"
        finally:
            self.member.is_lost = True
            self._answers.put({"end": why})
            if not self._is_closed:
                self._left_behind()
