"""What must be so of copies in memory, checked at each request to a keeper, at each commit and at each restore."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from raytf.checkpoint.slot_ledger import SLOTS, HeldShare, SlotAnswer, SlotRequest, generations
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.keepers import Keeper, Memory


class KeeperChecks:
    """Of the keepers of one run.

    Args:
        memory: their memory.
    """

    def __init__(self, memory: Memory):
        self._memory = memory
        #: Keeper and number of a slot -> whose it is: attempt and share.
        self._owners: dict[tuple[Keeper, int], tuple[str, int]] = {}
        #: (Attempt, step) of copies that are complete on all ranks -> keepers that hold all of them.
        self._committed: dict[tuple[str, int], set[Keeper]] = {}
        #: Keeper -> the last one of these.
        self._latest: dict[Keeper, tuple[str, int]] = {}
        self._answers: dict[tuple[Keeper, SlotRequest], tuple[int, ...]] = {}

    def frees(self, keeper: Keeper, numbers: Collection[int], attempt: str) -> None:
        """A keeper frees slots since an attempt has asked for something: not those, nor the newest copy, of others that
        continue the run."""
        before = _newest(keeper.held.values())
        after = _newest([share for number, share in keeper.held.items() if number not in numbers])
        if before != after:
            raise Violation(f"{keeper.process.name} drops the copy {before}, its newest, for {attempt}")
        for number in numbers:
            held = keeper.slots[number].share
            if held is not None:  # a later attempt has a copy, even if the driver that restores does not know that one
                self._forget(keeper, (held.attempt, held.step))
            owner, share = self._owners.pop((keeper, number))
            if owner > attempt:
                raise Violation(
                    f"slot {number} of {keeper.process.name} is taken from share {share} of {owner} by {attempt}"
                )

    def reserved(self, keeper: Keeper, request: SlotRequest, answer: SlotAnswer) -> None:
        """A keeper has answered a request."""
        mine = request.attempt, request.share
        for number in answer.slots:
            if self._owners.setdefault((keeper, number), mine) != mine:
                raise Violation(f"slot {number} of {keeper.process.name} is given to {mine}, and is another rank's")
        for number in answer.slots:
            if number not in keeper.slots:
                raise Violation(f"{keeper.process.name} gives slot {number}, which it does not have")
        present = [number for number in keeper.slots if self._owners[keeper, number][0] == keeper.ledger.attempt]
        left = len(keeper.slots) - len(present)
        if len(present) > 2 * SLOTS * self._memory.run.slots or left > self._memory.run.slots:
            raise Violation(f"{keeper.process.name} has {len(present)} slots of the present workers, and {left} others")

        if answer.slots and self._answers.setdefault((keeper, request), answer.slots) != answer.slots:
            raise Violation(f"{keeper.process.name} gives a request that is made again other slots: {answer.slots}")

    def replaces(self, attempt: str, step: int) -> None:
        """A copy is about to be replaced by another one of the same step."""
        for keeper in self._committed.pop((attempt, step), ()):
            self._latest.pop(keeper, None)

    def stopped(self, keeper: Keeper) -> None:
        """A rank makes no copies any more, so that those of others on its host are not whole; other hosts have some."""
        for keepers in self._committed.values():
            keepers.discard(keeper)
        self._latest.pop(keeper, None)

    def writes(self, keeper: Keeper, share: HeldShare | None, looked_at: float) -> None:
        """A rank writes a copy over a share."""
        if keeper.process.ended_at < looked_at:
            raise Violation(f"a copy is written into the memory of {keeper.process.name}, which is gone")
        if keeper.is_alive and share is not None and self._latest.get(keeper) == (share.attempt, share.step):
            raise Violation(f"a copy is written over the one of step {share.step}, the newest of all ranks")

    def committed(self, keeper: Keeper, attempt: str, step: int | None) -> None:
        """A rank knows that a copy is complete on all ranks."""
        assert step is not None
        keepers = self._committed.setdefault((attempt, step), set())
        if (
            keeper not in keepers
            and keeper.is_alive
            and any(g.step == step for g in generations({"": keeper.held.values()}, [attempt]))
        ):
            keepers.add(keeper)
            self._latest[keeper] = attempt, step

    def restoring(self, asked: Collection[Keeper], attempts: Collection[str]) -> int:
        """Return the step that a group has to restore at least.

        Args:
            asked: keepers that have told what they hold.
            attempts: of the run, before the group.
        """
        for (attempt, step), keepers in sorted(self._committed.items(), key=lambda entry: entry[0], reverse=True):
            if attempt in attempts and any(keeper in keepers for keeper in asked):
                return step
        return 0

    def _forget(self, keeper: Keeper, last: tuple[str, int]) -> None:
        for key, keepers in self._committed.items():
            if key <= last:
                keepers.discard(keeper)


def _newest(held: Iterable[HeldShare]) -> tuple[str, int] | None:
    whole = generations({"": list(held)}, None)
    return max(((g.attempt, g.step) for g in whole), default=None)
