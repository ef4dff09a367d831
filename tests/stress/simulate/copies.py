"""A simulated rank's copies in the memory of its host, in place of `raytf.checkpoint.memory` and `keeper_client`.

`CopyTurns` decides which slot a copy takes, and `KeeperHealth` when a keeper is lost.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from raytf.checkpoint.keeper_client import TRY_PAUSES, KeeperHealth, Order
from raytf.checkpoint.slot_ledger import CopyTurns, HeldShare, SlotAnswer, SlotRequest
from tests.stress.simulate.keepers import SIZE, Keeper, Slot
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Worker

#: Steps between two copies, and seconds after which a request is made again.
_COPY_EVERY, _RESERVE_SECONDS = 2, 60.0


class Copied(NamedTuple):
    """A state to copy, and the step of the newest checkpoint by then."""

    step: int
    state: int
    durable: int | None


class CopyFlags(NamedTuple):
    """What a rank says about copies with each step, or all of them together: how many ranks' newest copy is incomplete,
    how many want a copy."""

    unsealed: int
    wanted: int


class Copies:
    """One rank's copies in one generation.

    Args:
        worker: the rank.
        attempt: name of its generation's.
        place: index of the rank among those of its host, and how many these are.

    Attributes:
        has_failed: whether this rank's newest copy could not be made.
    """

    def __init__(self, worker: Worker, attempt: str, place: tuple[int, int]):
        self._worker, self._memory, self._attempt = worker, worker.run.memory, attempt
        self._process, self._place = worker.process, place
        self.turns, self._health = CopyTurns(), KeeperHealth(self._now)
        self._request = SlotRequest(attempt, place[0], 1, SIZE, worker.driver.process.name)
        self._keeper: Keeper | None = None
        self._numbers: tuple[int, ...] = ()
        self._slots: list[Slot] = []
        #: Copies so far, and how many of them were sealed last; whether the newest one has failed.
        self._begun = self._sealed = 0
        self.has_failed = self._is_tidy = False
        self._wished: int | None = None
        self._looked_at = self._now
        #: When the answer to the present question arrives.
        self._answer_at: float | None = None
        self._ask(1)

    @property
    def _now(self) -> float:
        return self._worker.run.world.now

    @property
    def is_settled(self) -> bool:
        """Whether this rank's newest copy is complete, or has failed."""
        return self._begun == self._sealed

    # -- the group, as `MemoryCopies` ----------------------------------------------------------------------------------

    def flags(self, step: int) -> CopyFlags:
        """What this rank says in the call that ends at a step."""
        self._look()
        wanted = self._ready() and self.turns.copied is None
        if self._worker.rank == 0 and (self._wished is None or step - self._wished >= _COPY_EVERY):
            wanted, self._wished = True, step
        return CopyFlags(int(not self.is_settled or self.has_failed), int(wanted))

    def hear(self, unsealed: int, step: int) -> None:
        """Commit the newest copy if it is complete on all ranks."""
        if not unsealed and self.turns.is_pending(step):
            self._commit()

    def settled(self, failed: int) -> None:
        """All ranks know what has become of the newest copy."""
        if failed and not self.turns.is_settled:
            self._abort()
        elif not self.turns.is_settled:
            self._commit()

    # -- the tier ------------------------------------------------------------------------------------------------------

    def make(self, save: Copied) -> None:
        """Copy the state."""
        if self.turns.asked == save.step:
            self._memory.checks.replaces(self._attempt, save.step)
        elif not self.turns.is_settled:
            raise Violation(f"step {save.step} is copied before the copy of step {self.turns.asked} is complete")
        self.turns.ask(save.step)
        self._look()
        if not self._ready():
            return
        slot = self._slots[self.turns.take(save.step)]
        if self._keeper is not None:
            self._memory.checks.writes(self._keeper, slot.share, self._looked_at)
        slot.share = None
        self._begun += 1
        seconds = self._memory.seal_seconds(self._process.host)
        if seconds:
            self._process.after(seconds, self._seal, self._begun, slot, save)
        else:
            self._seal(self._begun, slot, save)

    def _commit(self) -> None:
        self.turns.commit()
        if self._keeper is not None:
            self._memory.checks.committed(self._keeper, self._attempt, self.turns.asked)

    def _abort(self) -> None:
        self.turns.abort()
        if self.has_failed:
            self._stop()

    def _seal(self, number: int, slot: Slot, save: Copied) -> None:
        if number != self._begun:
            return
        self._sealed = number
        if self._process.host in self._memory.broken:
            self._memory.broken.discard(self._process.host)
            self.has_failed = True
            return
        slot.state, slot.durable = save.state, save.durable
        name = next((str(n) for n, own in zip(self._numbers, self._slots, strict=True) if own is slot), "")
        slot.share = HeldShare(save.step, self._attempt, *self._place, path=name)
        if not self._is_tidy and self._keeper is not None:
            seconds = self._memory.travel(self._process.host)
            self._worker.run.world.after(seconds, self._keeper.process.do, self._tidy, self._keeper)

    def _tidy(self, keeper: Keeper) -> None:
        if keeper.is_alive:
            self._is_tidy = keeper.tidy(self._attempt)

    # -- the keeper, as `raytf.checkpoint.keeper_client` ---------------------------------------------------------------

    def _ask(self, tries: int) -> None:
        """Ask the host's keeper for memory; it may get the request late, and its answer may be lost."""
        world, host = self._worker.run.world, self._process.host
        keeper, request = self._memory.on(host), self._request
        there, back = self._memory.travel(host), self._memory.travel(host)

        def serve() -> None:
            answer = keeper.reserve(request, self._worker.driver)
            self._process.after(back, self._answered, request, tries, keeper, answer)

        def arrive() -> None:
            if keeper.is_alive:
                keeper.process.do(serve)
            else:
                self._process.after(0.1, self._again, request, tries)

        world.after(there, arrive)
        if there + back > _RESERVE_SECONDS or keeper.process.is_frozen:
            self._process.after(_RESERVE_SECONDS, self._again, request, tries)

    def _again(self, request: SlotRequest, tries: int) -> None:
        if tries <= len(TRY_PAUSES) and request == self._request and not self._slots:
            self._process.after(TRY_PAUSES[tries - 1], self._ask_again, request, tries + 1)

    def _ask_again(self, request: SlotRequest, tries: int) -> None:
        # Also after its generation is over: the thread that asks does not know that.
        if request == self._request and not self._slots:
            self._ask(tries)

    def _answered(self, request: SlotRequest, tries: int, keeper: Keeper, answer: SlotAnswer) -> None:
        if request != self._request or self._slots:
            return
        if not answer.slots:
            if not answer.is_final:
                self._again(request, tries)
            return
        slots = [keeper.slots.get(number) for number in answer.slots]
        self._keeper, self._numbers = keeper, answer.slots
        self._slots = [slot for slot in slots if slot is not None]
        self._health.begin(self._now)
        self._answer_at = None
        if len(self._slots) < len(slots) or not keeper.is_alive:
            self._health.lose()

    def _look(self) -> None:
        """Ask the keeper what it holds, and take its last answer."""
        keeper, self._looked_at = self._keeper, self._now
        if keeper is None or self._health.is_lost:
            return
        if not keeper.is_alive or any(number not in keeper.slots for number in self._numbers):
            self._health.lose()
            return
        if self._answer_at is not None and self._now >= self._answer_at and not keeper.process.is_frozen:
            self._answer_at = None
            self._health.hear(None, self._now)
        order = self._health.poll(self._now, self._answer_at is not None)
        if order is Order.ASK:
            self._answer_at = self._now + self._memory.travel(self._process.host)
        elif order is Order.END:
            self._worker.run.world.tell(f"{self._process.name} ends {keeper.process.name}, which answers nobody")
            keeper.process.die()

    def _ready(self) -> bool:
        if self._health.is_lost:
            self._keeper, self._slots, self._numbers = None, [], ()
            self.turns.lose()
            self._forget_newest()
            self._is_tidy = False
            self._request = dataclasses.replace(self._request, serial=self._request.serial + 1)
            self._process.after(self._health.replace(self._now), self._ask_again, self._request, 1)
        return bool(self._slots)

    def _stop(self) -> None:
        """Make no copies any more."""
        if self._keeper is not None:
            self._memory.checks.stopped(self._keeper)
        self._keeper, self._slots, self._numbers, self.has_failed = None, [], (), False
        self.turns.lose()
        self._forget_newest()
        self._request = dataclasses.replace(self._request, serial=-1)

    def _forget_newest(self) -> None:
        """Nobody waits for the newest copy any more."""
        self._begun = self._sealed = self._begun + 1
