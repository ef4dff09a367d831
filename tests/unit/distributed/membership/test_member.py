"""What a worker knows of its group: tables of what its arbiter tells it and of how meetings end."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.distributed.membership.arbiter_messages import News
from raytf.distributed.membership.generations import Generation
from raytf.distributed.membership.member import (
    DismissedError,
    LeftBehindError,
    Member,
    RunOverError,
    UnreachableError,
    step_after_broken_transfer,
    transfer,
)
from raytf.errors import WorkerLostError


def generation(number: int, *steps: int) -> dict[str, Any]:
    members = tuple(f"n-{rank}" for rank in range(len(steps)))
    return {"generation": Generation(number, members, tuple(f"{name}:1" for name in members), steps)}


def in_generation(number: int = 1) -> Member:
    member = Member("n-1")
    member.take(generation(number, 4, 5))
    return member


def test_a_worker_joins_and_after_that_leaves():
    member = Member("n-1")
    assert not member.has_joined
    assert member.joining("h:1", 2, 1) == {"join": {"address": "h:1", "wanted": 2, "order": 1}}
    member.take(generation(3, -1, -1))
    assert member.has_joined
    assert member.leaving("h:2", 7) == {
        "leave": {"number": 3, "address": "h:2", "step": 7, "unreached": [], "met": False}
    }
    member.met()
    assert member.leaving("h:2", 7)["leave"]["met"]
    member.take(generation(4, 7, 7))
    assert not member.leaving("h:2", 7)["leave"]["met"], "of another generation"


@pytest.mark.parametrize(
    ("news", "is_paused", "is_broken", "is_over"),
    [
        ({}, False, False, False),
        ({"pause": 1}, True, False, False),
        ({"pause": 0}, False, False, False),  # of an old generation
        ({"lost": 1}, False, True, True),
        ({"left": 1}, False, False, True),
        ({"left": 1, "lost": 1, "pause": 1}, True, True, True),
        ({"lost": 2}, False, False, False),
    ],
)
def test_what_is_heard_counts_for_its_generation(news, is_paused, is_broken, is_over):
    member = in_generation()
    member.hear(News(news, {}))
    assert member.is_pause_wanted is is_paused
    assert member.is_broken(1) is is_broken
    assert member.is_over(1) is is_over


def test_who_is_lost_itself_is_in_no_generation_any_more():
    member = in_generation()
    member.is_lost = True
    assert member.is_broken(1)
    assert member.is_over(1)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ({"end": "too late"}, LeftBehindError, "too late"),
        ({"end": "apart", "unreachable": True}, UnreachableError, "apart"),
        ({"over": {"loss": 1}}, RunOverError, "over"),
        ({"dismissed": 1}, DismissedError, "planned"),
    ],
)
def test_how_a_worker_ends(answer, kind, words):
    member = in_generation()
    with pytest.raises(kind, match=words) as raised:
        member.take(answer)
    if kind is UnreachableError:
        assert raised.value.node == "n"


def test_a_meeting_that_fails_is_reported_and_tried_again_but_not_for_ever():
    member = in_generation()
    found = member.take(generation(2, 4, 5))
    member.not_met(found, {0})
    assert member.leaving("h", 5)["leave"]["unreached"] == ["n-0"]
    member.met()
    assert member.leaving("h", 5)["leave"]["unreached"] == []
    for _ in range(9):
        member.not_met(found, ())
    with pytest.raises(WorkerLostError, match="not met in 10 tries"):
        member.not_met(found, ())


def test_who_was_connected_with_all_is_not_to_blame_for_a_meeting_that_fails():
    member = Member("n-1")
    found = member.take(generation(2, 4, -1))
    member.not_met(found, ())
    assert not member.leaving("h", -1)["leave"]["met"]
    member.not_met(found, (), are_connected=True)
    assert member.leaving("h", -1)["leave"]["met"]


@pytest.mark.parametrize(
    ("steps", "giver", "givers", "takers"),
    [
        ([5, 5], 0, (0, 1), ()),
        ([4, 5, -1, 5], 1, (1, 3), (0, 2)),
        ([0, -1], 0, (0,), (1,)),
        ([-1, 0], 1, (1,), (0,)),
    ],
)
def test_who_gives_the_state_to_whom(steps, giver, givers, takers):
    assert transfer(steps) == (giver, givers, takers)


@pytest.mark.parametrize(
    ("step", "steps", "left"), [(4, [4, 5], -1), (5, [4, 5], 5), (-1, [-1, 5], -1), (5, [5, 5], 5)]
)
def test_a_state_that_was_taken_in_part_is_none(step, steps, left):
    assert step_after_broken_transfer(step, steps) == left
