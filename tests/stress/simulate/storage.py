"""Simulated storage: a server that each process asks, and that can be out, slow, lose answers and list late."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from raytf.checkpoint import naming
from raytf.errors import CheckpointError, StorageError
from raytf.runs.lease_decisions import Found
from tests.stress.simulate.world import Process, World

#: Seconds that a request travels, and an answer, usually and while storage is slow.
_TRAVEL, _SLOW_TRAVEL = (0.005, 0.05), (0.5, 8.0)
#: Seconds until a client hears that storage refuses, or gives up.
_REFUSAL_SECONDS = (0.05, 2.0, 10.0)
#: Seconds after which a list has all, while storage lists late.
LATE_SECONDS = 6.0


class Request(NamedTuple):
    """A request to storage.

    Attributes:
        work: what the server does, and its answer.
        is_write: whether something changes; only the answers to such requests are lost.
        seconds: that it takes longer than a small one.
    """

    work: Callable[[], Any]
    is_write: bool = False
    seconds: float = 0.0


#: What a thread of a process does: it yields requests, whose answers it is sent, and seconds to wait.
Steps = Generator[Request | float, Any, None]


@dataclass
class Store:
    """What all processes see of storage.

    Attributes:
        world: whose clock counts.
        random: of all that is drawn here.
        lease: the lease of the run.
        shares: name of a checkpoint -> rank -> state of which it is a share.
        manifests: name of a checkpoint -> (step, number of shares).
        terms: of the drivers that have owned the run -> when their ledger was begun.
        is_out: for how many reasons storage refuses.
        is_lossy: whether it loses the answers to writes that were made.
        is_slow, is_late: whether it takes long, and lists what was before.
        cut_off: hosts that do not reach it.
        troubled: when something was wrong with it last, by host; "" for all.
    """

    world: World
    random: Random
    lease: Found = None
    shares: dict[str, dict[int, int]] = field(default_factory=dict)
    manifests: dict[str, tuple[int, int]] = field(default_factory=dict)
    terms: dict[int, float] = field(default_factory=dict)
    is_out: int = 0
    is_lossy: int = 0
    is_slow: int = 0
    is_late: int = 0
    cut_off: set[str] = field(default_factory=set)
    troubled: dict[str, float] = field(default_factory=dict)
    #: When manifests were written and deleted.
    _written: dict[str, float] = field(default_factory=dict)
    _deleted: dict[str, float] = field(default_factory=dict)
    _versions: int = 0

    @property
    def is_well(self) -> bool:
        """Whether nothing is wrong with it for all."""
        return not (self.is_out or self.is_lossy or self.is_slow or self.is_late)

    def trouble_at(self, host: str) -> float:
        """Return when something was wrong last, seconds, as seen from a host."""
        if not self.is_well or host in self.cut_off:
            return self.world.now
        return max(self.troubled.get("", float("-inf")), self.troubled.get(host, float("-inf")))

    def ask(self, process: Process, call: Request, then: Callable[[Any, Exception | None], None]) -> None:
        """Have a process do something with the answer to a request, or with the error."""
        self.world.after(self._travel() + call.seconds, self._serve, process, call, then)

    def _serve(self, process: Process, call: Request, then: Callable[[Any, Exception | None], None]) -> None:
        answer: Any = None
        error: Exception | None = None
        if self.is_out or process.host in self.cut_off:
            error, seconds = StorageError("storage is out", "unreachable"), self.random.choice(_REFUSAL_SECONDS)
        else:
            try:
                answer = call.work()
            except CheckpointError as damage:
                error = damage
            if self.is_lossy and call.is_write:
                answer, error = None, StorageError("the answer was lost", "unreachable")
            seconds = self._travel()
        self.world.after(seconds, process.do, then, answer, error)

    def _travel(self) -> float:
        return self.random.uniform(*(_SLOW_TRAVEL if self.is_slow else _TRAVEL))

    # -- the lease -----------------------------------------------------------------------------------------------------

    def read_lease(self) -> Found:
        """Return the lease and its version."""
        return self.lease

    def swap_lease(self, text: bytes, version: str | None) -> bool:
        """Write the lease if it still has a version, None for none; returns whether it was written."""
        if (self.lease and self.lease[1]) != version:
            return False
        self._versions += 1
        self.lease = text, str(self._versions)
        return True

    def delete_lease(self) -> None:
        """Delete the lease, whoever holds it."""
        self.lease = None

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def list_complete(self) -> list[str]:
        """Return the names of complete checkpoints, best to restore first."""
        return naming.restore_order(self._as_listed(self.manifests))

    def list_folders(self) -> list[str]:
        """Return the names of all checkpoints, also of those that are not complete."""
        return self._as_listed({**self.shares, **self.manifests})

    def _as_listed(self, names: Iterable[str]) -> list[str]:
        if not self.is_late:
            return list(names)
        since = self.world.now - LATE_SECONDS
        gone = [name for name, at in self._deleted.items() if at > since]
        return [name for name in names if self._written.get(name, 0.0) <= since] + gone

    def latest_term(self) -> int:
        """Return the highest term in the names of files."""
        since = self.world.now - LATE_SECONDS if self.is_late else self.world.now
        names = map(naming.term_of, self.list_folders())
        return max([*names, *(term for term, at in self.terms.items() if at <= since)], default=0)

    def put_share(self, name: str, rank: int, state: int) -> None:
        """Write a rank's share."""
        self.shares.setdefault(name, {})[rank] = state

    def put_manifest(self, name: str, step: int, count: int) -> None:
        """Make a checkpoint complete."""
        self.manifests[name] = step, count
        self._written[name] = self.world.now

    def delete(self, name: str) -> None:
        """Delete a checkpoint."""
        if self.manifests.pop(name, None) is not None:
            self._deleted[name] = self.world.now
        self.shares.pop(name, None)

    def load(self, name: str) -> tuple[int, int]:
        """Return step and state of a checkpoint.

        Raises:
            CheckpointError: it is gone, or a share is missing.
        """
        step, count = self.manifests.get(name, (0, 0))
        states = {self.shares.get(name, {}).get(rank) for rank in range(count)}
        state = states.pop() if len(states) == 1 else None
        if state is None:
            raise CheckpointError(f"checkpoint {name} is damaged or gone")
        return step, state


class Task:
    """A thread of a process, which waits for storage and for time.

    Args:
        store: that it asks.
        process: in which it runs.
        steps: what it does.
    """

    def __init__(self, store: Store, process: Process, steps: Steps):
        self._store, self._process, self._steps = store, process, steps
        self._go_on(None, None)

    def _go_on(self, answer: Any, error: Exception | None) -> None:
        try:
            wanted = self._steps.send(answer) if error is None else self._steps.throw(error)
        except StopIteration:
            return
        if isinstance(wanted, Request):
            self._store.ask(self._process, wanted, self._go_on)
        else:
            self._process.after(wanted, self._go_on, None, None)
