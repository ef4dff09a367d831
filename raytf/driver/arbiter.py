"""The arbiter of a run: a thread of the driver that decides which workers belong to the run's group.

Each worker keeps a connection to the arbiter, which the kernel closes when the worker dies. A worker that is stopped or
cut off is silent. `raytf.driver.arbitration` makes the decisions, and `raytf.distributed.membership.arbiter_link`
describes the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import cast

import ray

from raytf.config.train_config import TrainConfig
from raytf.distributed.allreduce import routes
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.arbiter_link import ArbiterAddress, watch
from raytf.distributed.membership.arbiter_messages import (
    ARBITER,
    HEARTBEATS,
    WORKER,
    Greeting,
    Seal,
    connection_key,
    encoded,
    of_worker,
    proof,
)
from raytf.distributed.membership.peer_liveness import SILENT_SECONDS
from raytf.distributed.sockets import CALL_SECONDS, close_in_children, most_callers
from raytf.driver.arbitration import Arbitration, Commands, HangUp
from raytf.driver.supervision.liveness import ALL_SILENT_SECONDS, Silence

#: Seconds between two checks for silent workers.
_LOOK_SECONDS = 0.5
#: How long newcomers from a node that members did not reach are refused: each newcomer that members cannot reach costs
#: them about ten seconds.
_REFUSE_SECONDS = 60.0
#: Seconds that members may take to leave a generation after the first one has: a step, a callback, or a save.
_LEAVE_SECONDS = 300.0
#: The most bytes of a worker's line; the longest line is a run's result.
_LINE_BYTES = 1 << 24
#: The most bytes of a heartbeat's line.
_BEATS_BYTES = 1
#: The most bytes that are read from a connection that has not proved that it belongs to the run.
_GREETING_BYTES = 1 << 12
#: Seconds until the next connection is accepted if this process cannot open another file.
_FULL_SECONDS = 0.5


class ArbiterServer:
    """Answers the workers of one run, in a thread, at its `address`.

    Args:
        host: address of this machine at which workers reach it.
        silent_seconds: how long a worker may be silent before it counts as lost.
        all_silent_seconds: the same for the members of a generation if all of them are silent.
        leave_seconds: how long members may take to leave a generation after the first one has.
        most: the most workers in a group.
    """

    def __init__(
        self,
        host: str,
        silent_seconds: float = SILENT_SECONDS,
        all_silent_seconds: float = ALL_SILENT_SECONDS,
        leave_seconds: float = _LEAVE_SECONDS,
        most: int = sys.maxsize,
    ):
        server = rendezvous.server_at(host)
        self.address = ArbiterAddress(rendezvous.joined(host, server.getsockname()[1]), secrets.token_bytes(32))
        self._silent_seconds = silent_seconds
        silence = Silence(silent_seconds / _LOOK_SECONDS, all_silent_seconds / _LOOK_SECONDS)
        self._arbitration = Arbitration(silence, leave_seconds / _LOOK_SECONDS, most, _REFUSE_SECONDS / _LOOK_SECONDS)
        self._workers: dict[str, Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(server)), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections to workers. May be called again."""
        while self._loop is None and self._thread.is_alive():
            self._thread.join(0.01)  # it is just starting
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        door = Door(listening, self._greet)
        door.open()
        polling = asyncio.create_task(self._poll())
        await self._end.wait()
        polling.cancel()
        self._workers.clear()  # so that connections that close now do not count as lost workers
        await door.close()

    def _greet(self, connection: Connection, line: bytes) -> None:
        """Accept a worker, or the connection for its heartbeats; raise ValueError for a stranger."""
        greeting = Greeting.of_line(line)
        worker, is_worker = self._workers.get(greeting.name), greeting.role == WORKER
        if is_worker:
            key = self.address.key
        elif greeting.role == HEARTBEATS and worker is not None:
            key = worker.key
        else:
            raise ValueError("it is not a worker")
        expected = proof(key, greeting.role, greeting.name, connection.challenge)
        if not hmac.compare_digest(greeting.proof.encode(), expected.encode()):
            raise ValueError("it does not know the key")
        if is_worker:
            self._let_in(connection, greeting)
        else:
            self._hear_beats(connection, greeting.name)

    def _let_in(self, connection: Connection, greeting: Greeting) -> None:
        name = greeting.name
        key = connection_key(self.address.key, name, connection.challenge, greeting.challenge)
        seal = Seal(key, WORKER)

        def hear(line: bytes) -> None:
            try:
                self._carry_out(self._arbitration.hear(name, of_worker(seal.opened(line))))
            except ValueError as error:
                connection.write(encoded({"end": f"the driver's arbiter does not understand this worker: {error}"}))
                raise

        def gone() -> None:
            if self._workers.get(name) is connection:
                del self._workers[name]
                self._carry_out(self._arbitration.lose(name))

        connection.let_in(hear, gone, _LINE_BYTES, key)
        watch(connection.socket, self._silent_seconds)
        self._workers[name] = connection
        self._arbitration.come(name)
        connection.write(encoded(self._arbitration.greeting()))

    def _hear_beats(self, connection: Connection, name: str) -> None:
        worker = self._workers[name]

        def hear(line: bytes) -> None:
            if self._workers.get(name) is worker:
                self._arbitration.hear_beat(name)

        connection.let_in(hear, lambda: None, _BEATS_BYTES)
        if worker.beside is not None:
            worker.beside.abort()
        worker.beside = connection
        connection.write(encoded({}))

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._carry_out(self._arbitration.poll())

    def _carry_out(self, commands: Commands) -> None:
        for command in commands:
            if isinstance(command, HangUp):
                self._workers.pop(command.name).close()
                continue
            nonce = {"nonce": secrets.token_hex(32)} if "generation" in command.message else {}
            line = encoded(command.message | nonce)
            for name in command.names:
                self._workers[name].write(line)


@contextlib.contextmanager
def arbitrating(config: TrainConfig, gpus: float, shards: int) -> Iterator[ArbiterAddress | None]:
    """Run an arbiter for the workers of a run until the `with` statement ends. Yields None if the workers cannot meet
    again, because their sums depend on TensorFlow's cluster or on which worker adds.

    Args:
        gpus: GPUs of each worker.
        shards: number of logical shards. A group has at most as many workers, since others would have nothing to do.
    """
    strategy, compute = config.strategy, config.compute
    meets_again = (
        strategy.strategy == "multi-worker-mirrored"
        and config.worker_range[1] > 1
        and compute.reduction == "fixed"
        and not compute.overlap
        and not routes.needs_cluster(strategy.communication, gpus)
    )
    if not meets_again:
        yield None
        return
    server = ArbiterServer(ray.util.get_node_ip_address(), most=shards)
    try:
        yield server.address
    finally:
        server.close()


# -- arbiter connections -----------------------------------------------------------------------------------------------
#
# Anyone who reaches the arbiter's port can connect to it. A connection must prove within seconds that it belongs to the
# run, and until then only a few kilobytes are read from it. The number of connections without this proof is limited,
# and the oldest of them is closed first.


class Connection(asyncio.Protocol):
    """A connection to the arbiter.

    Args:
        door: the Door that accepted the connection.
        greet: called with the first line; calls `let_in`, or raises ValueError for a stranger.

    Attributes:
        challenge: a random text with which a worker proves that it knows the run's secret.
        key: the key of this connection, once it was let in.
        beside: the same worker's connection for heartbeats.
    """

    def __init__(self, door: Door, greet: Callable[[Connection, bytes], None]):
        self.challenge, self.key = secrets.token_hex(16), b""
        self.beside: Connection | None = None
        self._door, self._hear, self._most_bytes = door, lambda line: greet(self, line), _GREETING_BYTES
        self._gone: Callable[[], None] | None = None
        self._seal: Seal | None = None
        self._read = bytearray()

    def let_in(
        self, hear: Callable[[bytes], None], gone: Callable[[], None], most_bytes: int, key: bytes = b""
    ) -> None:
        """Accept this connection as belonging to the run.

        Args:
            hear: called with each further line; raises ValueError for one that cannot be understood.
            gone: called when the connection has ended.
            most_bytes: the most bytes of a line.
            key: seals all lines that are written from now on.
        """
        self._hear, self._gone, self._most_bytes, self.key = hear, gone, most_bytes, key
        self._seal = Seal(key, ARBITER) if key else None
        self._door.forget(self)

    def write(self, line: bytes) -> None:
        self._transport.write(line if self._seal is None else self._seal.sealed(line))

    def close(self) -> None:
        """Close the connection after everything that was written has been sent."""
        self._transport.close()
        if self.beside is not None:
            self.beside.abort()

    def abort(self) -> None:
        self._transport.abort()

    @property
    def socket(self) -> socket.socket:
        handle: socket.socket = self._transport.get_extra_info("socket")
        return handle

    # -- called by asyncio ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._door.note(self)
        self.write(encoded({"challenge": self.challenge}))

    def data_received(self, data: bytes) -> None:
        begin = len(self._read)
        self._read += data
        while not self._transport.is_closing():
            end = self._read.find(b"\n", begin)
            if (end if end >= 0 else len(self._read)) > self._most_bytes:
                self.abort()
                return
            if end < 0:
                return
            line, begin = bytes(self._read[: end + 1]), 0
            del self._read[: end + 1]
            try:
                self._hear(line)
            except ValueError:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.ended(self)
        if self.beside is not None:
            self.beside.abort()
        if self._gone is not None:
            self._gone()


class Door:
    """Accepts connections to the arbiter, which must prove within seconds that they belong to the run. Use it only
    inside asyncio's loop."""

    def __init__(
        self, listening: socket.socket, greet: Callable[[Connection, bytes], None], seconds: float = CALL_SECONDS
    ):
        self._listening, self._greet, self._seconds = listening, greet, seconds
        self._most = most_callers()
        self._loop = asyncio.get_running_loop()
        #: Connections that have not proved that they belong to the run, the oldest first, with timers that close them.
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._all: set[Connection] = set()
        self._starting: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Accept connections from now on."""
        self._listening.setblocking(False)
        self._loop.add_reader(self._listening, self._accept)

    async def close(self) -> None:
        """Stop accepting connections, and close all of them."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for end in (Connection.close, Connection.abort):  # first send what was written, as far as possible at once
            for connection in list(self._all):
                end(connection)
            await asyncio.sleep(0)

    def note(self, connection: Connection) -> None:
        """Count a new connection as a stranger's."""
        self._all.add(connection)
        self._strangers[connection] = self._loop.call_later(self._seconds, connection.abort)
        if len(self._strangers) > self._most:
            self._drop_oldest()

    def forget(self, connection: Connection) -> None:
        """Stop counting a connection as a stranger's."""
        timer = self._strangers.pop(connection, None)
        if timer is not None:
            timer.cancel()

    def ended(self, connection: Connection) -> None:
        self.forget(connection)
        self._all.discard(connection)

    def _accept(self) -> None:
        try:
            peer, _ = self._listening.accept()
        except BlockingIOError:
            return
        except OSError:  # usually, this process has too many open files
            self._make_room()
            return
        close_in_children(peer)
        task = self._loop.create_task(self._begin(peer))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it has hung up
            peer.setblocking(False)
            await self._loop.connect_accepted_socket(lambda: Connection(self, self._greet), peer)

    def _make_room(self) -> None:
        if self._strangers:
            self._drop_oldest()
            return
        self._loop.remove_reader(self._listening)
        self._loop.call_later(_FULL_SECONDS, self._open_again)

    def _drop_oldest(self) -> None:
        connection = next(iter(self._strangers))
        self.forget(connection)
        connection.abort()

    def _open_again(self) -> None:
        if self._listening.fileno() >= 0:
            self.open()
