"""How a simulated rank looks at the ranks that it waits for in a sum.

`Waiting` decides for those of the same host, as in `raytf.distributed.allreduce.host`, and for those of other hosts, as
in `raytf.distributed.allreduce.network`. What is made up here is /proc and the heartbeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from raytf.distributed.membership.peer_liveness import (
    BEAT_SECONDS,
    PROCESS_LOOK_SECONDS,
    Loss,
    Sign,
    Waiting,
    sign_of_process,
)
from tests.stress.simulate.world import Process

if TYPE_CHECKING:
    from tests.stress.simulate.group import Worker

#: A host whose workers do not see each other's processes, as containers that share a network.
_HIDING_HOST = "h1"
#: Looks at heartbeats between two looks at processes of the same host.
_EVERY = round(PROCESS_LOOK_SECONDS / BEAT_SECONDS)
#: Seconds for which a rank may wait for a process of its host that is gone: a look, and what follows.
_GONE_SECONDS = 3.0


class Lookout:
    """The looks of one worker at the ranks of its generation, one every `BEAT_SECONDS` while it waits.

    Args:
        worker: that looks.
        processes: of the other ranks.
    """

    def __init__(self, worker: Worker, processes: Mapping[int, Process]):
        self._worker, self._processes = worker, processes
        self._far = Waiting.for_heartbeats()
        self.begin()

    def begin(self) -> None:
        """Begin to wait for the parts of a sum."""
        self._near, self._looks, self._since = Waiting.for_processes(), 0, self._worker.run.world.now

    def look(self, awaited: Set[int]) -> Loss | None:
        """Return a loss, for which the sum cannot end.

        Args:
            awaited: ranks whose parts have not come.
        """
        worker, self._looks = self._worker, self._looks + 1
        near = {rank for rank in awaited if self._is_near(rank)}
        if near and self._looks % _EVERY == 0:
            is_broken = worker.member.is_broken(worker.member.number)
            loss = self._near.check_signs({rank: self._sign(self._processes[rank]) for rank in near}, is_broken)
            if loss is not None:
                return loss
        hears, own = worker.run.network.hears, worker.process
        return self._far.check_signs(
            {rank: Sign.ALIVE if hears(own, self._processes[rank]) else Sign.QUIET for rank in awaited - near}
        )

    def overdue(self, awaited: Set[int]) -> list[str]:
        """Return the processes of this host that are waited for although they ended long ago, and could be seen to."""
        own = self._worker.process
        since = max(self._since, own.troubled)
        return [
            process.name
            for process in (self._processes[rank] for rank in awaited if self._is_near(rank))
            if process.host != _HIDING_HOST
            and self._worker.run.world.now - max(since, process.ended_at) > _GONE_SECONDS
        ]

    def _is_near(self, rank: int) -> bool:
        return self._processes[rank].host == self._worker.process.host

    def _sign(self, process: Process) -> Sign:
        if process.host == _HIDING_HOST:
            return sign_of_process("", "", "")
        return sign_of_process("" if not process.is_alive else "T" if process.is_frozen else "S", "1", "1")
