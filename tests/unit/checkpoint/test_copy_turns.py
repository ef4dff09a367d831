"""Whose turn it is: a copy never takes the slot of the newest one that is complete on all ranks."""

import pytest

from raytf.checkpoint.copy_turns import CopyTurns


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
