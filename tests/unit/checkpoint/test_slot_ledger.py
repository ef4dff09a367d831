"""Who gets which memory of a keeper, who loses it, and which slot the next copy takes."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.checkpoint.slot_ledger import CopyTurns, HeldShare, SlotAnswer, SlotLedger, SlotRequest, snapshot_every

#: Attempts of a driver, and of the one that has taken the run over.
OLD, NEW, OTHERS = "a000001.000001-x", "a000001.000002-x", "a000002.000001-x"
LATE = SlotAnswer(reason="other workers continue the run", is_final=True)


class Host:
    """The memory of a host, in which copies take 10 bytes."""

    def __init__(self, size: int = 1000):
        self.ledger, self.size = SlotLedger(), size
        self.slots: set[int] = set()
        self.held: dict[int, HeldShare] = {}

    def reserve(self, attempt: str, share: int = 0, serial: int = 1, driver: str = "") -> SlotAnswer:
        request = SlotRequest(attempt, share, serial, 10, driver)
        answer = self.ledger.known(request)
        if answer is None:
            self.free(self.ledger.make_room(request, self.held))
            answer = self.ledger.grant(request, self.size - 10 * len(self.held), dict.fromkeys(self.held, 10))
            assert not self.slots & set(answer.slots)
            self.slots |= set(answer.slots)
        return answer

    def free(self, numbers: Any) -> None:
        for number in numbers:
            self.slots.remove(number)
            self.held.pop(number, None)

    def write(self, slot: int, step: int, attempt: str, share: int = 0, shares: int = 1) -> None:
        if slot in self.slots:  # else it goes into memory that only the rank still has
            self.held[slot] = HeldShare(step, attempt, share, shares, path=str(slot))

    def tidy(self, attempt: str) -> bool:
        self.free(self.ledger.tidy(self.held))
        return self.ledger.is_tidy(attempt)

    @property
    def steps(self) -> list[tuple[int, str]]:
        return sorted((held.step, held.attempt) for held in self.held.values())


def test_each_rank_gets_two_slots_of_its_own():
    host = Host()
    assert host.reserve(OLD).slots == (0, 1)
    assert host.reserve(OLD, share=1).slots == (2, 3)
    assert host.reserve(OLD).slots == (0, 1)  # made again


@pytest.mark.parametrize(
    ("before", "attempt", "share", "serial", "answer"),
    [
        ([(OLD, 0, 1)], OLD, 0, 1, SlotAnswer((0, 1))),
        ([(OLD, 0, 1)], OLD, 0, 2, SlotAnswer((2, 3))),
        ([(OLD, 0, 1)], NEW, 0, 1, SlotAnswer((2, 3))),
        # Made again after a timeout: the memory has been given to another rank meanwhile.
        ([(OLD, 0, 1), (NEW, 0, 1)], OLD, 0, 1, LATE),
        ([(OLD, 0, 1), (NEW, 0, 1)], NEW, 0, 1, SlotAnswer((2, 3))),
        ([(OLD, 0, 1), (OLD, 0, 2)], OLD, 0, 1, SlotAnswer((), "this rank has requested other memory since", True)),
        # Late, of workers that were replaced, or whose driver has lost the run.
        ([(NEW, 0, 1)], OLD, 1, 1, LATE),
        ([(OTHERS, 0, 1)], NEW, 0, 7, LATE),
        ([(OLD, 0, 1), (OTHERS, 0, 1), (NEW, 0, 1)], OTHERS, 0, 1, SlotAnswer((2, 3))),
    ],
)
def test_a_request_gets_memory_of_its_own_or_none(before, attempt, share, serial, answer):
    host = Host()
    for request in before:
        host.reserve(*request)
    assert host.reserve(attempt, share, serial) == answer


def test_workers_of_two_drivers_do_not_take_turns_with_the_memory():
    host = Host()
    for _ in range(3):
        host.reserve(OLD)
        mine = host.reserve(OTHERS)
        host.write(mine.slots[0], 7, OTHERS)
        assert host.tidy(OLD)
        assert host.reserve(OLD, serial=2) == LATE
        assert host.slots == {2, 3}
        assert host.steps == [(7, OTHERS)]


def test_a_copy_stays_until_the_next_workers_have_one():
    host = Host()
    first = host.reserve(OLD)
    host.write(first.slots[0], 10, OLD)
    host.write(first.slots[1], 20, OLD)
    second = host.reserve(NEW)
    assert host.steps == [(20, OLD)]
    assert not host.tidy(NEW)
    assert host.steps == [(20, OLD)]
    host.write(second.slots[0], 20, NEW)
    assert host.tidy(NEW)
    assert host.steps == [(20, NEW)]
    assert host.slots == set(second.slots)


def test_a_copy_that_becomes_complete_late_takes_no_memory_of_who_continues():
    host = Host()
    one, other = host.reserve(OLD), host.reserve(OLD, share=1)
    for share, place in enumerate((one, other)):
        host.write(place.slots[0], 10, OLD, share, 2)
    host.write(one.slots[1], 20, OLD, 0, 2)
    second = host.reserve(NEW)  # from step 10; what there is of step 20 is freed
    host.write(other.slots[1], 20, OLD, 1, 2)
    host.write(second.slots[0], 11, NEW)
    host.write(one.slots[0], 30, OLD, 0, 2)
    host.write(other.slots[0], 30, OLD, 1, 2)  # complete, late
    assert {held.attempt for held in host.held.values()} == {OLD, NEW}
    assert host.tidy(OLD)
    assert host.tidy(NEW)
    assert host.steps == [(11, NEW)]
    # The next workers keep the copy of those that continued.
    third = host.reserve(OTHERS)
    assert host.steps == [(11, NEW)]
    assert third.slots


def test_half_a_copy_is_none():
    host = Host()
    one, other = host.reserve(OLD), host.reserve(OLD, share=1)
    for share, place in enumerate((one, other)):
        host.write(place.slots[0], 10, OLD, share, 2)
    new = [host.reserve(NEW), host.reserve(NEW, share=1)]
    host.write(new[0].slots[0], 20, NEW, 0, 2)
    assert not host.tidy(NEW)
    assert (10, OLD) in host.steps
    host.write(new[1].slots[0], 20, NEW, 1, 2)
    assert host.tidy(NEW)
    assert host.steps == [(20, NEW), (20, NEW)]


def test_memory_is_promised_once():
    host = Host(size=50)
    first = host.reserve(OLD)
    assert host.reserve(OLD, share=1).slots
    full = host.reserve(OLD, share=2)
    assert (full.slots, full.is_final) == ((), False)
    assert full.reason.endswith("do not fit into the node's free memory")
    host.write(first.slots[0], 10, OLD)  # what is written is not free, and not promised any more
    assert not host.reserve(OLD, share=2).slots
    host.size = 70
    assert host.reserve(OLD, share=2).slots == (4, 5)


def test_the_memory_of_a_deserted_run_is_for_who_asks_next():
    """A run that was deleted and made again begins with the first term."""
    host = Host()
    left = host.reserve(OTHERS)
    host.write(left.slots[0], 90, OTHERS)
    assert host.reserve(OLD) == LATE
    host.ledger.desert()
    assert host.reserve(OLD) == LATE  # of the dead driver
    first = host.reserve(OLD, driver="another")
    assert first.slots
    host.write(first.slots[0], 10, OLD)
    assert host.tidy(OLD)
    assert host.steps == [(10, OLD)]


@pytest.mark.parametrize(
    ("events", "slots"),
    [
        (["10", "20", "30"], [0, 1, 0]),
        (["10", "10", "20", "20"], [0, 0, 1, 1]),  # over itself
        (["10", "20", "abort", "30"], [0, 1, 1]),
        (["10", "20", "abort", "20"], [0, 1, 1]),
        (["10", "20", "20", "abort", "20", "30"], [0, 1, 1, 1, 0]),
        (["10", "20", "abort", "abort", "30"], [0, 1, 1]),
        (["abort", "10"], [0]),
        (["10", "20", "30", "lose", "30"], [0, 1, 0, 0]),
    ],
)
def test_two_slots_take_turns(events, slots):
    turns, taken = CopyTurns(), []
    for event in events:
        if event.isdecimal():
            turns.ask(int(event))
            taken.append(turns.take(int(event)))
        else:
            {"abort": turns.abort, "lose": turns.lose}[event]()
    assert taken == slots


@pytest.mark.parametrize(
    ("events", "step", "is_pending"),
    [
        ([], 10, False),
        (["10"], 10, False),  # over itself
        (["10"], 20, True),
        (["10", "commit"], 20, False),
        (["10", "abort"], 20, False),
        (["10", "commit", "20"], 21, True),
    ],
)
def test_a_copy_waits_for_the_one_before_on_all_ranks(events, step, is_pending):
    turns = CopyTurns()
    for event in events:
        if event.isdecimal():
            turns.ask(int(event))  # a rank without memory takes no slot
        else:
            {"abort": turns.abort, "commit": turns.commit}[event]()
    assert turns.is_pending(step) == is_pending
    assert turns.copied is None


@pytest.mark.parametrize(
    ("asked", "copy", "step", "every"),
    [
        (7, 1.0, 0.001, 7),
        (0, 0.001, 0.001, 0),
        (None, 0.0, 0.01, 10),
        (None, 0.001, 0.0, 10),
        (None, 0.001, 0.02, 7),
        (None, 0.001, 1.0, 1),
        (None, 0.8, 0.1, 1000),
    ],
)
def test_cadence_of_snapshots(asked, copy, step, every):
    assert snapshot_every(asked, copy, step) == every
