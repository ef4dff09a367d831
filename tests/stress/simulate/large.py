"""What a death in a large group costs the driver: the arbiter's own code, and the messages of real members."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from raytf.distributed.membership.arbiter_messages import ARBITER, WORKER, Seal, encoded, of_arbiter, of_worker
from raytf.distributed.membership.member import Member
from raytf.driver.arbitration import Arbitration, Commands, HangUp
from raytf.driver.supervision.liveness import Silence

T = TypeVar("T")


class LargeGroup:
    """Workers that have an arbiter, and nothing else: no network, no sums.

    Args:
        count: of workers.

    Attributes:
        members: by name.
        cpu_seconds: that the driver has used, without what its kernel needs to send.
        sent_bytes: from the driver to the workers.
    """

    def __init__(self, count: int):
        self.members = {name: Member(name) for name in (f"node{n:05d}-{10000 + n}" for n in range(count))}
        self.cpu_seconds, self.sent_bytes = 0.0, 0
        self._arbitration = Arbitration(Silence(9, 24), 600)
        key = bytes(32)
        self._arbiters = {name: (Seal(key, ARBITER), Seal(key, WORKER)) for name in self.members}
        self._workers = {name: Seal(key, WORKER) for name in self.members}

    def begin(self) -> None:
        """All workers come and join."""
        for name in self.members:
            self._arbitration.come(name)
        count = len(self.members)
        self._say(member.joining(f"10.0.{n >> 8}.{n & 255}:40000", count, n) for n, member in self._numbered())

    def lose_one(self) -> None:
        """A worker dies: the others hear of it and leave their generation, and the next one begins."""
        lost, _ = self.members.popitem()
        self._carry_out(self._in_driver(partial(self._arbitration.lose, lost)))
        self._say(member.leaving(f"10.1.{n >> 8}.{n & 255}:40000", 7) for n, member in self._numbered())

    def _numbered(self) -> Iterable[tuple[int, Member]]:
        return enumerate(list(self.members.values()))

    def _in_driver(self, work: Callable[[], T]) -> T:
        began = time.process_time()
        try:
            return work()
        finally:
            self.cpu_seconds += time.process_time() - began

    def _say(self, messages: Iterable[dict[str, Any]]) -> None:
        """Each member sends the arbiter a message."""
        for name, message in zip(list(self.members), list(messages), strict=True):
            line = self._workers[name].sealed(encoded(message))
            self._carry_out(self._in_driver(partial(self._heard, name, line)))

    def _heard(self, name: str, line: bytes) -> Commands:
        return self._arbitration.hear(name, of_worker(self._arbiters[name][1].opened(line)))

    def _carry_out(self, commands: Commands) -> None:
        for command in commands:
            assert not isinstance(command, HangUp)
            line = self._in_driver(partial(self._sent, command.names, command.message))
            for name in command.names:
                news = of_arbiter(line, name)
                self.members[name].hear(news)
                if news.answer:
                    self.members[name].take(news.answer)

    def _sent(self, names: Iterable[str], message: dict[str, Any]) -> bytes:
        """Seal a message for each worker, as `ArbiterServer` and its connections do."""
        line = encoded(message | {"nonce": "0" * 64})
        self.sent_bytes += sum(len(self._arbiters[name][0].sealed(line)) for name in names)
        return line


def tell(count: int) -> str:
    """Return what a death in a group of so many workers costs, for people."""
    group = LargeGroup(count)
    group.begin()
    begun, sent = group.cpu_seconds, group.sent_bytes
    group.lose_one()
    cpu, mebibytes = group.cpu_seconds - begun, (group.sent_bytes - sent) / 2**20
    return f"{count:,} workers: a death costs the driver {cpu:.3f} s of CPU, in which it tells them {mebibytes:.0f} MiB"
