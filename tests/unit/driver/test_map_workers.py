"""Which part is computed when, and that each is counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.map_workers import LOSSES_OF_A_PART, PartQueue, on_workers
from raytf.errors import ClusterError, ConfigError


@given(total=st.integers(1, 12), workers=st.integers(1, 5), draws=st.data())
def test_every_part_is_counted_once_whichever_workers_are_lost(total: int, workers: int, draws: st.DataObject):
    parts: PartQueue[int] = PartQueue(total)
    at_work: list[int] = []
    while not parts.is_done:
        while len(at_work) < workers and (number := parts.take()) is not None:
            assert number not in at_work
            at_work.append(number)
        number = at_work.pop(draws.draw(st.integers(0, len(at_work) - 1)))
        if parts.losses[number] < LOSSES_OF_A_PART - 1 and draws.draw(st.booleans()):
            parts.lost(number, "killed")
        else:
            parts.done(number, number**2)
    assert parts.answers == {number: number**2 for number in range(total)}
    assert parts.take() is None
    assert at_work == []


def test_workers_may_be_a_number_and_nothing_else_of_python():
    assert on_workers(abs, [], workers=2) == on_workers(abs, [], workers="1:4") == []
    with pytest.raises(ConfigError, match=r"^workers=\{\}: expected a string or a whole number\.$"):
        on_workers(abs, [-1], workers={})


def test_a_part_that_was_lost_comes_before_the_others():
    parts: PartQueue[None] = PartQueue(3)
    assert [parts.take(), parts.take()] == [0, 1]
    parts.lost(0, "killed")
    assert [parts.take(), parts.take(), parts.take()] == [0, 2, None]
    assert parts.again == 1


def test_a_part_that_ends_every_worker_ends_the_work():
    parts: PartQueue[None] = PartQueue(2)
    for _ in range(LOSSES_OF_A_PART - 1):
        assert parts.take() == 0
        parts.lost(0, "out of memory")
    assert parts.take() == 0
    with pytest.raises(ClusterError, match="5 workers died while they computed part 0; the last one: out of mem"):
        parts.lost(0, "out of memory")


def test_an_answer_cannot_be_counted_twice():
    parts: PartQueue[int] = PartQueue(1)
    parts.take()
    parts.done(0, 1)
    with pytest.raises(AssertionError, match="part 0 was counted already"):
        parts.done(0, 1)
