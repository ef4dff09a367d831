"""From which state a new group continues."""

import pytest

from raytf.checkpoint.generations import Generation
from raytf.checkpoint.naming import name_of, split_name
from raytf.checkpoint.restore_plan import Candidate, RestorePlan

A, B = "20260101T000000-aaaaaa", "20260101T000009-000000"


def copies(*steps: int) -> list[Generation]:
    return [Generation(step, A, {}) for step in steps]


def told(candidates: tuple[Candidate, ...]) -> str:
    return " ".join(f"S{split_name(c)[0]}" if isinstance(c, str) else f"M{c.step}" for c in candidates)


@pytest.mark.parametrize(
    ("memory", "known", "is_saving", "stored", "first", "asks", "can_wait", "then"),
    [
        ([8, 6], 4, False, [4], "M8 M6", False, True, None),
        ([8, 4, 2], 4, False, [4], "M8 M4", False, True, None),
        # A commit was under way: step 8 is on storage, and the driver has not heard of it.
        ([6, 4], 4, True, [8, 4], "M6 M4", True, True, "S8 M6 M4 S4"),
        ([6, 4], 4, True, [4], "M6 M4", True, True, "M6 M4 S4"),
        # Storage is known to have a later step than memory.
        ([6], 8, False, [8, 4], "", True, False, "S8 M6 S4"),
        ([6], 8, True, [12, 8], "", True, False, "S12 S8 M6"),
        ([], 0, False, [], "", True, False, ""),
        # A new driver knows nothing.
        ([6], None, False, [8], "", True, False, "S8 M6"),
        ([8], None, False, [8], "", True, False, "M8 S8"),
        ([8], 0, False, [], "M8", False, True, None),
    ],
)
def test_the_newest_state_is_first(memory, known, is_saving, stored, first, asks, can_wait, then):
    plan = RestorePlan.of(copies(*memory), known, is_saving)
    assert (told(plan.candidates), plan.asks_storage, plan.can_wait) == (first, asks, can_wait)
    if then is not None:
        listed = plan.listed([name_of(step, A) for step in stored])
        assert told(listed.candidates) == then
        assert not listed.asks_storage


def test_if_storage_refuses_the_plan_takes_memory_as_new_as_what_was_known():
    plan = RestorePlan.of(copies(6, 2), 4, is_saving=True).unlisted()
    assert (told(plan.candidates), plan.asks_storage) == ("M6", False)


def test_copies_that_cannot_be_read_are_followed_by_storage():
    plan = RestorePlan.of(copies(8, 6, 3), 4, is_saving=False).failed()
    assert plan.asks_storage
    assert told(plan.listed([name_of(4, A)]).candidates) == "S4 M3"


def test_candidates_are_the_latest_steps_of_both_tiers():
    memory = copies(40, 30)
    names = [name_of(50, A), name_of(40, B), name_of(40, A), name_of(35, A)]
    # Should the one of step 50 be damaged, what is in memory of step 40 is still later than step 35 on storage.
    listed = RestorePlan.of(memory, None, is_saving=False).listed(names[::-1])
    assert list(listed.candidates) == [names[0], memory[0], *names[1:], memory[1]]
