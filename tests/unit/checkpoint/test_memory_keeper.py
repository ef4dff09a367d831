"""A keeper's memory: what a request gets, and who loses nothing by it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from raytf.checkpoint import snapshot_slot
from raytf.checkpoint.memory_keeper import Keeper
from raytf.checkpoint.slot_ledger import MemoryShare, SlotAnswer, SlotRequest

MONITOR: Any = None
FIRST, SECOND = "a000001.000001-first", "a000001.000002-second"


def reserve(keeper: Keeper, attempt: str, share: int = 0, serial: int = 1) -> SlotAnswer:
    return keeper.reserve(SlotRequest(attempt, share, serial, 100), MONITOR)


def write(place: SlotAnswer, step: int, attempt: str) -> None:
    tensors = {"w": np.full(10, step, np.float32)}
    snapshot_slot.Slot(place.paths[0]).write(MemoryShare(step, attempt, 0, 1), tensors, {}, b"{}")


def test_a_request_whose_answer_was_late_holds_two_slots():
    keeper = Keeper(alone_seconds=3600)
    first = reserve(keeper, FIRST)
    assert reserve(keeper, FIRST) == first
    other = reserve(keeper, FIRST, share=1)
    assert len({*first.paths, *other.paths}) == 4
    assert all(os.path.exists(path) for path in first.paths)


def test_a_request_that_is_made_again_gets_no_memory_of_another_rank():
    keeper = Keeper(alone_seconds=3600)
    first = reserve(keeper, FIRST)
    second = reserve(keeper, SECOND)
    assert set(first.paths) & set(second.paths)  # the system gives a descriptor that was closed to the next file
    again = reserve(keeper, FIRST)
    assert again == SlotAnswer(reason="other workers continue the run", is_final=True)
    assert reserve(keeper, SECOND) == second


def test_who_was_replaced_takes_nothing_however_late_it_copies():
    keeper = Keeper(alone_seconds=3600)
    old = reserve(keeper, FIRST)
    late = snapshot_slot.Slot(old.paths[0])  # whose rank is still there
    write(old, 10, FIRST)
    new = reserve(keeper, SECOND)
    write(new, 11, SECOND)
    late.write(MemoryShare(20, FIRST, 0, 1), {"w": np.zeros(10, np.float32)}, {}, b"{}")
    assert sorted(held.step for held in keeper.held()) == [11, 20]
    assert keeper.tidy(FIRST)
    assert keeper.newest(SECOND) == 11
    assert keeper.tidy(SECOND)
    assert [held.step for held in keeper.held()] == [11]


def test_a_keeper_reads_the_slot_that_has_the_path():
    keeper = Keeper(alone_seconds=3600)
    place = reserve(keeper, FIRST)
    write(place, 10, FIRST)
    (held,) = keeper.held()
    assert held.path == place.paths[0]
    assert snapshot_slot.parse(keeper.read(held.path).data)[1]["w"].tolist() == [10] * 10
