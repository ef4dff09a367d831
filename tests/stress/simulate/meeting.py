"""How a simulated worker meets the ranks of its generation, in place of `raytf.distributed.membership.rendezvous`.

`MeetingPoint` decides. What is made up here is what sockets do: a kernel takes connections as soon as a process
listens, and keeps them until the process answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from raytf.distributed.membership.generations import node_of
from raytf.distributed.membership.rendezvous import MEET_SECONDS, Link, MeetingPoint
from tests.stress.simulate.world import Process

if TYPE_CHECKING:
    from tests.stress.simulate.group import Worker


class Call(NamedTuple):
    """A connection that a worker has made with another one.

    Attributes:
        key: of the caller's generation.
        caller: the worker that calls.
        link: the caller's rank, and what the connection is for.
        called: the rank that the caller wants.
    """

    key: tuple[int, int]
    caller: Worker
    link: Link
    called: int


class Meeting:
    """One worker's meeting with the others.

    Args:
        worker: that meets them.
        gone: ranks that have hung up.

    Attributes:
        processes: those of the ranks that are connected.
    """

    def __init__(self, worker: Worker, gone: set[int]):
        assert worker.generation is not None
        self._worker, self._gone, self._generation = worker, gone, worker.generation
        deadline = worker.run.world.now + MEET_SECONDS
        self._point = MeetingPoint(worker.rank, self._generation.addresses, deadline)
        self._is_dialing = False
        self._answers: set[Link] = set()
        self.processes: dict[int, Process] = {}

    def answered(self, rank: int, purpose: int) -> None:
        """A rank that this one has called has answered."""
        self._answers.add((rank, purpose))

    def advance(self, calls: list[Call]) -> bool:
        """Do what can be done now, and return whether the ranks have met.

        Args:
            calls: of others, which the kernel has taken; those that are answered are removed.

        Raises:
            OSError: the ranks have not met.
        """
        while (link := self._point.to_call) is not None:
            if not self._call(*link):
                return False
        self._look()
        while self._point.awaits_calls and calls:
            self._greet(calls.pop(0))
        if self._point.awaits_calls:
            return False
        while (link := self._point.to_hear) is not None:
            if link in self._answers:
                self._point.heard(True)
            elif link[0] in self._gone:
                self._point.lose(link[0], "has hung up")
            else:
                return False
        return True

    def _call(self, rank: int, purpose: int) -> bool:
        """Try to make a connection, and return whether it was made."""
        worker, now = self._worker, self._worker.run.world.now
        if not self._is_dialing:
            self._point.dial(now)
        self._is_dialing = worker.run.network.is_cut(worker.process.host, node_of(self._generation.members[rank]))
        if self._is_dialing:
            self._look()
            return False
        called = worker.run.listeners.get(self._generation.addresses[rank])
        if called is None:
            self._point.not_reached(ConnectionRefusedError("refused"), now, self._is_over())
            return False
        call = Call(worker.key, worker, (worker.rank, purpose), rank)
        worker.run.network.send(worker.process, called.process, called.be_called, call)
        self.processes[rank] = called.process
        self._point.called()
        return True

    def _greet(self, call: Call) -> None:
        worker, caller = self._worker, call.caller
        send = worker.run.network.send
        if self._point.answers(call.link, call.called, call.key == worker.key):
            self.processes[call.link[0]] = caller.process
            send(worker.process, caller.process, caller.be_answered, call.key, call.called, call.link[1])
        else:
            send(worker.process, caller.process, caller.be_hung_up_on, call.key, call.called)

    def _look(self) -> None:
        self._point.poll(self._worker.run.world.now, self._is_over())

    def _is_over(self) -> bool:
        return self._worker.member.is_over(self._worker.member.number)
