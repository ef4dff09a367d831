"""The arbiter of a run: says who belongs to its group of workers. It lives in the driver, which owns the run's lease.

Each worker keeps a connection with it, which the kernel closes when its process dies; one that is stopped or cut off is
silent. What follows from that is decided in `raytf.distributed.membership`, and how both talk is described in
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
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

import ray

from raytf.config.train_config import TrainConfig
from raytf.distributed import meeting, routes
from raytf.distributed.arbiter_link import ArbiterAddress, watch
from raytf.distributed.arbiter_messages import Dismiss, Greeting, Join, Leave, Over, Want, of_worker
from raytf.distributed.heartbeat_sender import SILENT_SECONDS
from raytf.distributed.membership import Generation, Membership, StaleError
from raytf.distributed.sealed_lines import HEARTBEATS, WORKER, Seal, connection_key, encoded, proof
from raytf.driver.arbiter_connections import Connection, Door, Peer
from raytf.driver.silence import ALL_SILENT_SECONDS, Silence

#: Seconds between two looks at who is silent.
_LOOK_SECONDS = 0.5
#: Seconds that members may take to leave a generation after the first one has: a step, a callback, or a save.
_LEAVE_SECONDS = 300.0
#: Bytes of a worker's line; the longest is a run's result.
_LINE_BYTES = 1 << 24
#: Bytes of a heartbeat's line at most.
_BEATS_BYTES = 1
_CUT_OFF = "the other workers and this one cannot reach each other, so they continue without it"


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
        self._silence = Silence(silent_seconds / _LOOK_SECONDS, all_silent_seconds / _LOOK_SECONDS)
        self._leave_looks = leave_seconds / _LOOK_SECONDS
        self._membership = Membership(most)
        self._workers: dict[str, Peer] = {}
        #: What the run has come to, once it is over.
        self._result: Any = None
        #: Looks since members did not leave the generation of a number.
        self._slow = (0, 0)
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
        elif greeting.role == HEARTBEATS and isinstance(worker, Connection):
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
                self._tell(name, {"end": f"the driver's arbiter does not understand this worker: {error}"})
                raise

        def gone() -> None:
            if self._workers.get(name) is connection:
                self._forget(name)
                self._begin(self._membership.lose(name))

        connection.let_in(hear, gone, _LINE_BYTES, key)
        watch(connection.socket, self._silent_seconds)
        self._workers[name] = connection
        self._silence.hear(name)
        self._tell(name, {"running": self._membership.generation is not None, "over": self._result})

    def _hear_beats(self, connection: Connection, name: str) -> None:
        worker = self._workers[name]
        assert isinstance(worker, Connection)

        def hear(line: bytes) -> None:
            if self._workers.get(name) is worker:
                self._silence.hear(name)

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
        if name not in self._workers:
            return  # it counts as lost
        self._silence.hear(name)
        match of_worker(line):
            case Join() if self._result is not None:
                self._tell(name, {"over": self._result})
            case Join() if self._membership.is_cut_off(name):
                self._tell(name, {"end": _CUT_OFF, "unreachable": True})
            case Join(place, wanted):
                self._begin(self._membership.join(name, place, wanted))
            case Leave(number, place, unreached):
                try:
                    self._begin(self._membership.leave(name, number, place, unreached))
                except StaleError as error:
                    self._tell(name, {"end": str(error)})
            case Dismiss(names, after):
                self._membership.dismiss(names, after)
                self._begin(None)
            case Want(wanted):
                self._begin(self._membership.want(wanted))
            case Over(result):
                self._result = result
                for joining in self._membership.joining:
                    self._tell(joining, {"over": self._result})

    def _begin(self, generation: Generation | None) -> None:
        """Tell members of the next generation, if there is one, and of what has become of the present one."""
        if generation is not None:
            self._tell_all(generation.members, {"generation": asdict(generation), "nonce": secrets.token_hex(32)})
            self._tell_all(generation.dismissed, {"dismissed": generation.number})
            self._tell_all(generation.unreachable, {"end": _CUT_OFF, "unreachable": True})
            for name in generation.unreachable:
                self._let_go(name)
        present = self._membership.generation
        # Members of a run that is over hang up one after another, and none of them is lost.
        news = self._membership.news() if self._result is None else []
        if present is not None and news:
            self._tell_all(present.members, dict.fromkeys(news, present.number))

    def _tell(self, name: str, message: dict[str, Any]) -> None:
        self._tell_all([name], message)

    def _tell_all(self, names: Iterable[str], message: dict[str, Any]) -> None:
        line = encoded(message)
        for name in names:
            if name in self._workers:
                self._workers[name].write(line)

    async def _look(self) -> None:
        """Let go who is silent."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for name in self._silence.look(self._membership.living):
                self._let_go(name)
            missing, generation = self._membership.missing(), self._membership.generation
            number = generation.number if missing and generation is not None else 0
            self._slow = (number, self._slow[1] + 1 if number and number == self._slow[0] else 0)
            if self._slow[1] > self._leave_looks:
                for name in missing:
                    self._tell(name, {"end": f"{name} did not leave its group in time"})
                    self._let_go(name)

    def _let_go(self, name: str) -> None:
        """A worker counts as lost from now on, whatever it does."""
        peer = self._forget(name)
        if peer is not None:
            peer.close()
            self._begin(self._membership.lose(name))

    def _forget(self, name: str) -> Peer | None:
        self._silence.forget(name)
        return self._workers.pop(name, None)


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
