"""The arbiter of a run: says who belongs to its group of workers. It lives in the driver, which owns the run's lease.

Each worker keeps a connection with it, which the kernel closes when its process dies; one that is stopped or cut off is
silent. What follows from that is decided in `raytf.driver.arbitration`, and how both talk is described in
`raytf.distributed.arbiter_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import socket
import sys
import threading
from collections.abc import Iterator

import ray

from raytf.config.train_config import TrainConfig
from raytf.distributed import meeting, routes
from raytf.distributed.arbiter_link import ArbiterAddress, watch
from raytf.distributed.arbiter_messages import Greeting, of_worker
from raytf.distributed.heartbeat_sender import SILENT_SECONDS
from raytf.distributed.sealed_lines import HEARTBEATS, WORKER, Seal, connection_key, encoded, proof
from raytf.driver.arbiter_connections import Connection, Door
from raytf.driver.arbitration import Arbitration, Commands, HangUp
from raytf.driver.silence import ALL_SILENT_SECONDS, Silence

#: Seconds between two looks at who is silent.
_LOOK_SECONDS = 0.5
#: How long newcomers from a node that members did not reach are refused: each one that is tried in vain costs the
#: members about ten seconds.
_REFUSE_SECONDS = 60.0
#: Seconds that members may take to leave a generation after the first one has: a step, a callback, or a save.
_LEAVE_SECONDS = 300.0
#: Bytes of a worker's line; the longest is a run's result.
_LINE_BYTES = 1 << 24
#: Bytes of a heartbeat's line at most.
_BEATS_BYTES = 1


class ArbiterServer:
    """Answers the workers of one run, in a thread.

    Args:
        host: address of this machine at which workers reach it.
        silent_seconds: how long a worker may give no sign of life before it counts as lost.
        all_silent_seconds: the same for the members of a generation, where none of them gives one.
        leave_seconds: how long members may take to leave a generation after the first one has.
        most: workers of a group.

    Attributes:
        address: how workers reach it.
    """

    def __init__(
        self,
        host: str,
        silent_seconds: float = SILENT_SECONDS,
        all_silent_seconds: float = ALL_SILENT_SECONDS,
        leave_seconds: float = _LEAVE_SECONDS,
        most: int = sys.maxsize,
    ):
        server = meeting.server_at(host)
        self.address = ArbiterAddress(meeting.joined(host, server.getsockname()[1]), secrets.token_bytes(32))
        self._silent_seconds = silent_seconds
        silence = Silence(silent_seconds / _LOOK_SECONDS, all_silent_seconds / _LOOK_SECONDS)
        self._arbitration = Arbitration(silence, leave_seconds / _LOOK_SECONDS, most, _REFUSE_SECONDS / _LOOK_SECONDS)
        self._workers: dict[str, Connection] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._end = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(server)), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End; workers lose their connections. May be called again."""
        while self._loop is None and self._thread.is_alive():
            self._thread.join(0.01)  # it is just starting
        if self._loop is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _run(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        door = Door(listening, self._greet)
        door.open()
        looking = asyncio.create_task(self._look())
        await self._end.wait()
        looking.cancel()
        self._workers.clear()  # nobody is lost now
        await door.close()

    def _greet(self, connection: Connection, line: bytes) -> None:
        """Let a worker in, or the connection for its heartbeats.

        Raises:
            ValueError: it is a stranger.
        """
        greeting = Greeting.of_line(line)
        worker, is_worker = self._workers.get(greeting.name), greeting.role == WORKER
        if is_worker:
            key = self.address.key
        elif greeting.role == HEARTBEATS and worker is not None:
            key = worker.key
        else:
            raise ValueError("it is no worker")
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
                self._hear(name, seal.opened(line))
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

    def _hear(self, name: str, line: bytes) -> None:
        """Hear what a worker says.

        Raises:
            ValueError: it cannot be understood.
        """
        self._carry_out(self._arbitration.hear(name, of_worker(line)))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._carry_out(self._arbitration.look())

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
    """An arbiter for a run, which ends with the `with` statement; None for one whose workers do not meet again.

    They do where a sum of theirs does not depend on TensorFlow's cluster, nor on who adds.

    Args:
        config: of the run.
        gpus: of each worker.
        shards: logical shards; a group has no more workers, who would have nothing to do.
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
