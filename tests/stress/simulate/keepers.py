"""Simulated keepers: processes that own memory on the hosts of a run, in place of `raytf.checkpoint.memory_keeper`.

`SlotLedger` decides who gets which memory. What is made up is the memory itself, into which workers of the host write
directly, also when the keeper has freed it, and how long a request and its answer take.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from raytf.checkpoint.slot_ledger import HeldShare, SlotAnswer, SlotLedger, SlotRequest
from tests.stress.simulate.keeper_checks import KeeperChecks
from tests.stress.simulate.world import Process

if TYPE_CHECKING:
    from tests.stress.simulate.group import Driver, Run

#: Seconds that a keeper outlives its run's driver, and until it sees that the driver is dead.
_ALONE_SECONDS, _LOOK_SECONDS = 60.0, 2.0
#: Bytes of a copy, and of a host's memory for copies: for those of two groups that fill it.
SIZE, _HOST_SIZE = 1, 16
#: Seconds that a request travels, usually and while keepers answer late, and that a copy takes.
_TRAVEL, _LATE_TRAVEL = (0.001, 0.03), (0.5, 90.0)
_SEAL_SECONDS, _SLOW_SEAL_SECONDS = (0.0, 0.0, 0.0, 0.2), (0.5, 3.0, 10.0)


@dataclass
class Slot:
    """Memory for a share of one copy.

    Attributes:
        share: what it holds; None while it is written.
        state: of the copy.
        durable: step of the newest checkpoint when the copy was made.
    """

    share: HeldShare | None = None
    state: int = 0
    durable: int | None = None


class Keeper:
    """A process that owns memory.

    Args:
        memory: of all hosts.
        host: its own.
        number: of keepers so far.
    """

    def __init__(self, memory: Memory, host: str, number: int):
        self._memory, self.ledger = memory, SlotLedger()
        self.process = Process(memory.run.world, f"keeper{number}", host)
        self.slots: dict[int, Slot] = {}
        self._driver: Driver | None = None

    @property
    def is_alive(self) -> bool:
        """Whether the process lives; it ends by itself some time after its driver."""
        if self._orphaned_seconds > _ALONE_SECONDS:
            self.process.die()
        return self.process.is_alive

    @property
    def held(self) -> dict[int, HeldShare]:
        """What is in each slot that is full."""
        return {number: slot.share for number, slot in self.slots.items() if slot.share is not None}

    def reserve(self, request: SlotRequest, driver: Driver) -> SlotAnswer:
        """Carry out a request, as `memory_keeper.Keeper.reserve` does."""
        ledger, checks = self.ledger, self._memory.checks
        if self._orphaned_seconds > _LOOK_SECONDS:
            ledger.desert()
        if ledger.may_reserve(request):
            self._driver = driver
        answer = ledger.known(request)
        if answer is None:
            self._free(ledger.make_room(request, self.held), request.attempt)
            written = {number: SIZE for number, slot in self.slots.items() if slot.share is not None}
            free = self._memory.sizes.get(self.process.host, _HOST_SIZE) - sum(written.values())
            answer = ledger.grant(request, free, written)
            self.slots |= {number: Slot() for number in answer.slots}
        checks.reserved(self, request, answer)
        return answer

    def tidy(self, attempt: str) -> bool:
        """Drop what earlier attempts left."""
        self._free(self.ledger.tidy(self.held), attempt)
        return self.ledger.is_tidy(attempt)

    @property
    def _orphaned_seconds(self) -> float:
        return 0.0 if self._driver is None else self._memory.run.world.now - self._driver.process.ended_at

    def _free(self, numbers: list[int], attempt: str) -> None:
        if numbers:
            self._memory.checks.frees(self, numbers, attempt)
        for number in numbers:
            del self.slots[number]


@dataclass
class Memory:
    """The keepers of a run.

    Attributes:
        run: whose state they hold.
        random: of all that is drawn here, so that it changes nothing else.
        sizes: bytes of a host's memory for copies, where that is less than usual.
        late, slow: hosts whose keepers get requests and give answers late, and where copies take long; how often.
        broken: hosts on which the next copy fails.
    """

    run: Run
    random: Random
    sizes: dict[str, int] = field(default_factory=dict)
    late: dict[str, int] = field(default_factory=dict)
    slow: dict[str, int] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    _keepers: dict[str, Keeper] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        self.checks = KeeperChecks(self)

    @property
    def living(self) -> list[Keeper]:
        """All keepers whose processes live."""
        return [keeper for keeper in self._keepers.values() if keeper.is_alive]

    def on(self, host: str) -> Keeper:
        """Return the keeper of a host, which is started where there is none."""
        keeper = self._keepers.get(host)
        if keeper is None or not keeper.is_alive:
            self._count += 1
            keeper = self._keepers[host] = Keeper(self, host, self._count)
        return keeper

    def lose_host(self, host: str) -> None:
        """A host disappears, with its memory."""
        if host in self._keepers:
            self._keepers[host].process.die()

    def travel(self, host: str) -> float:
        """Return the seconds that a request or an answer travels."""
        return self.random.uniform(*(_LATE_TRAVEL if self.late.get(host) else _TRAVEL))

    def seal_seconds(self, host: str) -> float:
        """Return the seconds that a copy takes beside training."""
        return self.random.choice(_SLOW_SEAL_SECONDS if self.slow.get(host) else _SEAL_SECONDS)
