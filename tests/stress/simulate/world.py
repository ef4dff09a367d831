"""A world in one thread: a clock, hosts, processes and a network, all drawn from one seed."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from random import Random
from typing import Any

#: Seconds after which the kernel ends a watched connection whose other side does not answer.
BROKEN_SECONDS = 4.5


class Violation(AssertionError):
    """Something happened that must never happen."""


class World:
    """The clock and everything that is due.

    Args:
        seed: of all that is drawn.
        tells: whether to keep a story of what happens.

    Attributes:
        now: virtual seconds since the beginning.
        events: that have happened.
        story: lines of (seconds, what happened).
        storage, memory, names: draw what concerns storage, and copies in memory, and random names.
        running: host of the process that runs now.
        clock_errors: host -> seconds by which its wall clock is wrong.
    """

    running: str
    clock_errors: dict[str, float]

    def __init__(self, seed: int, tells: bool = False):
        self.now, self.events, self.random = 0.0, 0, Random(seed)
        self.storage, self.memory = Random(f"storage {seed}"), Random(f"memory {seed}")
        self.names = Random(f"names {seed}")
        self.running, self.clock_errors = "", {}
        self.story: list[tuple[float, str]] = []
        self._tells = tells
        self._due: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Have something happen after some seconds."""
        heapq.heappush(self._due, (self.now + seconds, next(self._order), call, args))

    def run(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Let the time pass until a moment, or until something is so."""
        while self._due and self._due[0][0] <= seconds and not is_over():
            self.now, _, call, args = heapq.heappop(self._due)
            self.events += 1
            call(*args)

    def tell(self, text: str) -> None:
        """Add a line to the story."""
        if self._tells:
            self.story.append((self.now, text))


class Process:
    """A process. While it is frozen nothing happens to it; what was due happens when it thaws.

    Args:
        world: in which it lives.
        name: of the process.
        host: name of its host.

    Attributes:
        has_child: whether a child that it has forked keeps its sockets open after its death.
        troubled: until when something was wrong with it, seconds; what follows from that is no fault of the code.
        ended_at: when it ended.
    """

    def __init__(self, world: World, name: str, host: str):
        self._world, self.name, self.host = world, name, host
        self.is_alive, self.is_frozen, self.has_child = True, False, False
        self.troubled, self.ended_at = float("-inf"), float("inf")
        self._held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Have this process do something after some seconds."""
        self._world.after(seconds, self.do, call, *args)

    def do(self, call: Callable[..., None], *args: Any) -> None:
        """Have this process do something now, if it lives."""
        if self.is_frozen:
            self._held.append((call, args))
        elif self.is_alive:
            self._world.running = self.host
            call(*args)

    def freeze(self) -> None:
        """Stop, as by SIGSTOP."""
        self.is_frozen = True

    def thaw(self) -> None:
        """Go on."""
        if not self.is_frozen:
            return
        self.is_frozen, held, self._held = False, self._held, []
        for call, args in held:
            self._world.after(0.0, self.do, call, *args)

    def die(self) -> None:
        """End. What is left of it are its connections, if a child holds them."""
        self.is_alive = self.is_frozen = False
        self.ended_at = min(self.ended_at, self._world.now)
        self._held = []


class Network:
    """Carries messages between processes, in order for each pair and direction.

    Args:
        world: whose clock counts.

    Attributes:
        changed: called with the names of two hosts when the link between them is cut or healed.
    """

    def __init__(self, world: World):
        self._world = world
        self._cut: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], list[tuple[Process, Process, Callable[..., None], tuple[Any, ...]]]] = {}
        #: When the last message of a pair of processes arrives.
        self._last: dict[tuple[str, str], float] = {}
        self.changed: list[Callable[[str, str], None]] = []

    @property
    def cuts(self) -> list[tuple[str, str]]:
        """Pairs (from, to) of hosts between which nothing gets through."""
        return list(self._cut)

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets from a host to another one, or back: acknowledgments, for example."""
        return bool(self._cut) and ((one, other) in self._cut or (other, one) in self._cut)

    def cut(self, sender: str, receiver: str) -> None:
        """Let nothing get from a host to another one."""
        self._cut[sender, receiver] = self._cut.get((sender, receiver), 0) + 1
        self._tell(sender, receiver)

    def heal(self, sender: str, receiver: str) -> None:
        """Undo one `cut`, and carry what was sent meanwhile."""
        left = self._cut.pop((sender, receiver)) - 1
        if left:
            self._cut[sender, receiver] = left
            return
        for source, target, call, args in self._held.pop((sender, receiver), []):
            self.send(source, target, call, *args)
        self._tell(sender, receiver)

    def send(self, sender: Process, receiver: Process, call: Callable[..., None], *args: Any) -> None:
        """Have a process do something once a message has reached it."""
        pair, names = (sender.host, receiver.host), (sender.name, receiver.name)
        if pair in self._cut:
            self._held.setdefault(pair, []).append((sender, receiver, call, args))
            return
        latency = 0.0005 if sender.host == receiver.host else self._world.random.uniform(0.001, 0.02)
        arrives = max(self._world.now + latency, self._last.get(names, 0.0))
        self._last[names] = arrives
        self._world.after(arrives - self._world.now, receiver.do, call, *args)

    def hears(self, one: Process, other: Process) -> bool:
        """Whether a process gets another one's heartbeats."""
        return other.is_alive and not other.is_frozen and not self.is_cut(one.host, other.host)

    def _tell(self, one: str, other: str) -> None:
        for changed in list(self.changed):
            changed(one, other)


class Connection:
    """A TCP connection that the kernel watches: both sides see that it has ended when nothing gets through.

    Args:
        network: that carries it.
        world: whose clock counts.
        ends: the two processes.
        hear: what each of them does with a message.
        ended: what each of them does when the other one has closed it, or the kernel has.
    """

    def __init__(
        self,
        network: Network,
        world: World,
        ends: tuple[Process, Process],
        hear: tuple[Callable[[Any], None], Callable[[Any], None]],
        ended: tuple[Callable[[], None], Callable[[], None]],
    ):
        self._network, self._world, self._ends, self._hear, self._ended = network, world, ends, hear, ended
        self._open = [True, True]
        self._cuts = 0
        network.changed.append(self._look)
        self._look(ends[0].host, ends[1].host)

    def send(self, end: int, message: Any) -> None:
        """Send a message from an end, 0 or 1, to the other one."""
        if self._open[end]:
            self._network.send(self._ends[end], self._ends[1 - end], self._arrive, 1 - end, message)

    def close(self, end: int) -> None:
        """Close an end; the other one hears of it after what was sent before."""
        if not self._open[end]:
            return
        self._open[end] = False
        self._network.send(self._ends[end], self._ends[1 - end], self._end, 1 - end)
        self._forget()

    def _arrive(self, end: int, message: Any) -> None:
        if self._open[end]:
            self._hear[end](message)

    def _end(self, end: int) -> None:
        if self._open[end]:
            self._open[end] = False
            self._ended[end]()
        self._forget()

    def _look(self, one: str, other: str) -> None:
        hosts = self._ends[0].host, self._ends[1].host
        if {one, other} == set(hosts) and self._network.is_cut(*hosts):
            self._cuts += 1
            self._world.after(BROKEN_SECONDS, self._break, self._cuts)
        elif {one, other} == set(hosts):
            self._cuts += 1

    def _break(self, cuts: int) -> None:
        if cuts != self._cuts:
            return  # it was healed meanwhile
        for end in (0, 1):
            if self._open[end]:
                self._open[end] = False
                self._ends[end].do(self._ended[end])
        self._forget()

    def _forget(self) -> None:
        if not any(self._open) and self._look in self._network.changed:
            self._network.changed.remove(self._look)
