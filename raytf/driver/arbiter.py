"""The arbiter of a run: says who belongs to its group of workers. It lives in the driver, which owns the run's lease.

Each worker keeps a connection with it, which the kernel closes when its process dies; one that is stopped or cut off is
silent. What follows from that is decided in `raytf.distributed.membership`, and how both talk is described in
`raytf.distributed.arbiter_link`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
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
from raytf.distributed.arbiter_link import ArbiterAddress, encoded, proof
from raytf.distributed.heartbeat_sender import SILENT_SECONDS
from raytf.distributed.membership import Generation, Membership, Place, StaleError
from raytf.driver.silence import ALL_SILENT_SECONDS, Silence

#: Seconds between two looks at who is silent.
_LOOK_SECONDS = 0.5
#: Seconds for a worker to say who it is.
_GREETING_SECONDS = 10.0
#: Seconds that members may take to leave a generation after the first one has: a step, a callback, or a save.
_LEAVE_SECONDS = 300.0
#: Bytes of a worker's line; the longest is a run's result.
_LINE_BYTES = 1 << 24
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
        self._workers: dict[str, asyncio.StreamWriter] = {}
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
        server = await asyncio.start_server(self._serve, sock=listening, limit=_LINE_BYTES)
        looking = asyncio.create_task(self._look())
        await self._end.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert looking.done()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            with contextlib.suppress(Exception):  # a stranger, or one that has hung up
                name = await asyncio.wait_for(self._greeted(reader, writer), _GREETING_SECONDS)
            if name:
                # It is lost, or this server ends: asyncio would report a task that was cancelled as an error.
                with contextlib.suppress(OSError, ValueError, asyncio.CancelledError):
                    while line := await reader.readline():
                        self._hear(name, line)
        finally:
            writer.close()
            if name and self._workers.get(name, writer) is writer:
                self._forget(name)
                self._begin(self._membership.lose(name))

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The name of a worker of this run; empty for a stranger."""
        challenge, key = secrets.token_hex(16), self.address.key
        writer.write(encoded({"challenge": challenge}))
        told = json.loads(await reader.readline())
        name, theirs = str(told["name"]), str(told["challenge"])
        if not hmac.compare_digest(str(told["proof"]).encode(), proof(key, "worker", name, challenge).encode()):
            return ""
        is_running = self._membership.generation is not None
        writer.write(
            encoded({"proof": proof(key, "arbiter", name, theirs), "running": is_running, "over": self._result})
        )
        _watch(writer.get_extra_info("socket"), self._silent_seconds)
        self._workers[name] = writer
        self._silence.hear(name)
        return name

    def _hear(self, name: str, line: bytes) -> None:
        if name not in self._workers:
            return  # it counts as lost
        self._silence.hear(name)
        message = json.loads(line) if line.strip() else {}
        if "join" in message and self._result is not None:
            self._tell(name, {"over": self._result})
        elif "join" in message and self._membership.is_cut_off(name):
            self._tell(name, {"end": _CUT_OFF, "unreachable": True})
        elif "join" in message:
            told = message["join"]
            self._begin(self._membership.join(name, Place(told["address"], order=told["order"]), told["wanted"]))
        elif "leave" in message:
            told = message["leave"]
            try:
                place, unreached = Place(told["address"], told["step"]), told.get("unreached", ())
                self._begin(self._membership.leave(name, told["number"], place, unreached))
            except StaleError as error:
                self._tell(name, {"end": str(error)})
        elif "dismiss" in message:
            self._membership.dismiss(message["dismiss"], message["after"])
            self._begin(None)
        elif "wanted" in message:
            self._begin(self._membership.want(message["wanted"]))
        elif "over" in message:
            self._result = message["over"]
            for joining in self._membership.joining:
                self._tell(joining, {"over": self._result})

    def _begin(self, generation: Generation | None) -> None:
        """Tell members of the next generation, if there is one, and of what has become of the present one."""
        if generation is not None:
            self._tell_all(generation.members, {"generation": asdict(generation), "key": secrets.token_hex(32)})
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
        writer = self._forget(name)
        if writer is not None:
            writer.close()
            self._begin(self._membership.lose(name))

    def _forget(self, name: str) -> asyncio.StreamWriter | None:
        self._silence.forget(name)
        return self._workers.pop(name, None)


def _watch(peer: Any, silent_seconds: float) -> None:
    """Have the kernel end a connection whose other host is gone or cut off; that of a stopped process answers."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        peer.setsockopt(socket.IPPROTO_TCP, option, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * silent_seconds))


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
