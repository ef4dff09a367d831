"""A worker's connection with the arbiter of its group (`raytf.driver.arbiter`): who is a member, and of what.

Lines of JSON over TCP. A worker joins, or has left a generation, and the arbiter answers with the next one; it asks for
a pause when somebody wants to join, and says why a worker has to end. Heartbeats are empty lines. Who loses the
connection is lost, whatever else it can reach: of a network that is cut in two, only the half with the arbiter goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.distributed.heartbeat_sender import SILENT_SECONDS, HeartbeatSender
from raytf.distributed.meeting import Meeting, parsed
from raytf.distributed.membership import Generation, node_of
from raytf.distributed.peer_connections import end
from raytf.errors import WorkerLostError

#: Seconds to connect.
_CONNECT_SECONDS = 30.0
#: Bytes of a line of the arbiter's, which may name thousands of workers.
_LINE_BYTES = 1 << 24
#: Seconds between two signs that a worker waits for the arbiter.
_WAIT_SECONDS = 1.0
_LOST = "the connection with the driver's arbiter is lost"


@dataclass(frozen=True)
class ArbiterAddress:
    """How workers reach the arbiter of their run.

    Attributes:
        address: HOST:PORT.
        key: 32 random bytes that the run's processes know, and nobody else.
    """

    address: str
    key: bytes = field(repr=False)


def _nothing() -> None:
    pass


def worker_name(node: str, pid: int) -> str:
    """The name under which a worker is known to the arbiter.

    Args:
        node: Ray's id of its node.
        pid: its process.
    """
    return f"{node}-{pid}"


def proof(key: bytes, role: str, name: str, challenge: str) -> str:
    """What only who knows the key can answer to a challenge, as the worker of a name or as the arbiter."""
    return hmac.new(key, json.dumps([role, name, challenge]).encode(), hashlib.sha256).hexdigest()


def encoded(message: dict[str, Any]) -> bytes:
    """A line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LeftBehindError(WorkerLostError):
    """The others go on without this worker, or have lost the driver."""


class UnreachableError(LeftBehindError):
    """This worker and others cannot reach each other, so the others continue without this worker.

    Args:
        message: the text for the user.
        node: Ray's id of this worker's node.
    """

    def __init__(self, message: str, node: str):
        super().__init__(message)
        self.node = node


class DismissedError(Exception):
    """This worker has done its part: the others go on without it, as planned."""


class RunOverError(Exception):
    """The run was over when this worker came.

    Args:
        result: of the run.
    """

    def __init__(self, result: dict[str, Any]):
        super().__init__("the run is over")
        self.result = result


class ArbiterLink:
    """A connection with the arbiter.

    Args:
        name: of this worker, different from all others of the run.
        peer: connected and greeted.
        lines: what comes from there.
        greeting: the arbiter's.
        waits: called again and again while this worker waits for the arbiter.
        left_behind: called once the connection is lost, in a thread of its own.

    Attributes:
        found_running: whether there was a generation of workers when this worker came.
        found_over: what the run has come to, if it was over then; None otherwise.
    """

    def __init__(
        self,
        name: str,
        peer: socket.socket,
        lines: Any,
        greeting: dict[str, Any],
        waits: Callable[[], None],
        left_behind: Callable[[], None],
    ):
        self._name, self._peer, self._lines, self._waits, self._left_behind = name, peer, lines, waits, left_behind
        self.found_running, self.found_over = bool(greeting.get("running")), greeting.get("over")
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._number = 0
        #: The numbers of the generation that pauses after a step, of the one that lost a member, and of the one that a
        #: member has left.
        self._paused = self._broken = self._left = -1
        self._is_lost = self._is_closed = False
        self._sender = HeartbeatSender([peer])
        threading.Thread(target=self._listen, daemon=True, name="raytf-arbiter").start()

    @classmethod
    def connect(
        cls,
        arbiter: ArbiterAddress,
        name: str,
        waits: Callable[[], None] = _nothing,
        left_behind: Callable[[], None] = _nothing,
    ) -> ArbiterLink:
        """Connect with an arbiter.

        Args:
            arbiter: to connect with.
            name: of this worker, different from all others of the run.
            waits: called again and again while this worker waits for the arbiter.
            left_behind: called once the connection is lost, in a thread of its own.

        Raises:
            WorkerLostError: it does not answer.
        """
        peer = None
        try:
            peer = socket.create_connection(parsed(arbiter.address), _CONNECT_SECONDS)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A driver that stands still answers nothing, but its kernel does.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * SILENT_SECONDS))
            lines = peer.makefile("rb")
            theirs = str(json.loads(lines.readline(_LINE_BYTES))["challenge"])
            mine = secrets.token_hex(16)
            own = proof(arbiter.key, "worker", name, theirs)
            peer.sendall(encoded({"name": name, "proof": own, "challenge": mine}))
            greeting = json.loads(lines.readline(_LINE_BYTES))
            if not hmac.compare_digest(
                str(greeting["proof"]).encode(), proof(arbiter.key, "arbiter", name, mine).encode()
            ):
                raise ConnectionError("it is not the arbiter of this run")
            peer.settimeout(None)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if peer is not None:
                peer.close()
            raise WorkerLostError(f"the driver's arbiter at {arbiter.address} does not answer: {error}") from None
        return cls(name, peer, lines, greeting, waits, left_behind)

    @property
    def is_member(self) -> bool:
        """Whether this worker has been in a generation."""
        return self._number > 0

    @property
    def is_pause_wanted(self) -> bool:
        """Whether the members should leave their generation between two steps, since somebody wants to join."""
        return self._number > 0 and self._paused == self._number

    @property
    def is_lost(self) -> bool:
        """Whether this worker is no longer a member, since the arbiter does not hear it."""
        return self._is_lost

    def join(self, address: str, wanted: int, order: int = 0) -> tuple[Generation, Meeting]:
        """Become a member of the next generation; waits for it.

        Args:
            address: HOST:PORT at which this worker listens.
            wanted: how many workers are started together, where nobody is left of a generation.
            order: of these workers.

        Raises:
            WorkerLostError: the arbiter is gone, or wants this worker to end.
        """
        return self._next({"join": {"address": address, "wanted": wanted, "order": order}})

    def leave(self, address: str, step: int, unreached: Collection[str] = ()) -> tuple[Generation, Meeting]:
        """Leave the present generation, and become a member of the next one; waits for it.

        Args:
            address: HOST:PORT at which this worker listens from now on.
            step: the last step that it has finished.
            unreached: members that did not answer this worker when the generation met.

        Raises:
            WorkerLostError: as `join`; or the generation has ended without this worker.
        """
        about = {"number": self._number, "address": address, "step": step, "unreached": sorted(unreached)}
        return self._next({"leave": about})

    def dismiss(self, names: Sequence[str], after: Sequence[str] = ()) -> None:
        """Have members leave for good at the end of a step, once others have come; see `Membership.dismiss`."""
        with contextlib.suppress(OSError):
            self._peer.sendall(encoded({"dismiss": list(names), "after": list(after)}))

    def want(self, wanted: int) -> None:
        """Another number of workers is started together, where nobody is left of a generation."""
        with contextlib.suppress(OSError):
            self._peer.sendall(encoded({"wanted": wanted}))

    def tell_over(self, result: Any) -> None:
        """The run is over: whoever comes now need not train.

        Args:
            result: what it has come to, as JSON can say it.
        """
        with contextlib.suppress(OSError):
            self._peer.sendall(encoded({"over": result}))

    def close(self) -> None:
        """End the connection: this worker is no longer a member."""
        self._is_closed = True
        self._sender.end()
        end(self._peer)

    def _next(self, message: dict[str, Any]) -> tuple[Generation, Meeting]:
        with contextlib.suppress(OSError):  # then the other thread says that it is lost
            self._peer.sendall(encoded(message))
        answer = self._answer()
        if "end" in answer:
            self._answers.put(answer)  # for whoever asks next
            if answer.get("unreachable"):
                raise UnreachableError(answer["end"], node_of(self._name))
            raise LeftBehindError(answer["end"])
        if "over" in answer:
            raise RunOverError(answer["over"])
        if "dismissed" in answer:
            raise DismissedError("the others go on without this worker, as planned")
        found = answer["generation"]
        self._number = found["number"]
        about = {name: tuple(found[name]) for name in ("members", "addresses", "steps")}
        generation = Generation(self._number, **about, lost=found["lost"])
        rank, number = generation.members.index(self._name), self._number

        def is_lost() -> bool:
            return self._is_lost or self._broken == number

        def is_over() -> bool:
            return is_lost() or self._left == number

        return generation, Meeting(rank, generation.addresses, bytes.fromhex(answer["key"]), is_over, is_lost)

    def _answer(self) -> dict[str, Any]:
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=_WAIT_SECONDS)
            self._waits()

    def _listen(self) -> None:
        why = _LOST
        try:
            for line in iter(lambda: self._lines.readline(_LINE_BYTES), b""):
                message = json.loads(line) if line.strip() else {}
                self._paused = message.get("pause", self._paused)
                self._broken = message.get("lost", self._broken)
                self._left = message.get("left", self._left)
                if message.keys() & {"generation", "end", "over", "dismissed"}:
                    self._answers.put(message)
        except Exception as error:
            why = f"{_LOST}: {error}"
        finally:
            self._is_lost = True
            self._answers.put({"end": why})
            if not self._is_closed:
                self._left_behind()
