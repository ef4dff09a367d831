"""Who is silent for too long: tables of who is heard between looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.supervision.liveness import Silence

MOST, MOST_OF_ALL = 9, 24


def lost_at(living: str, looks: list[str], others: str = "") -> dict[str, int]:
    """When each is found to be silent for too long: the number of a look.

    Args:
        living: members.
        looks: who is heard before each look.
        others: that are no members.
    """
    silence, found = Silence(MOST, MOST_OF_ALL), {}
    for name in living + others:
        silence.hear(name)
    for number, heard in enumerate(looks, 1):
        for name in heard:
            if name not in found:
                silence.hear(name)
        for name in silence.poll([name for name in living if name not in found]):
            silence.forget(name)
            found[name] = number
    return found


@pytest.mark.parametrize(
    ("looks", "lost"),
    [
        (["ab"] * 50, {}),
        (["a"] * 50, {"b": 10}),
        (["a", "", "a", "", ""] * 10, {"b": 12}),  # a is heard late, as on a loaded machine
        ([""] * 50, {"a": 25, "b": 25}),
        ([""] * 20 + ["ab"] * 20, {}),
        ([""] * 20 + ["a"] + ["ab"] * 20, {}),  # b goes on a little later
        ([""] * 20 + ["a"] * 20, {"b": 28}),
        ([""] * 10 + ["a"] * 20, {"b": 18}),
        (["a"] * 6 + [""] * 30, {"b": 25, "a": 30}),
        (["b", "", "a", "", "a", "", "a", "", "a", ""], {"b": 10}),  # as if it had been heard just before
        (["a"] * 8 + [""] * 15, {}),
        (["a"] * 9 + [""] * 15, {"b": 10}),
    ],
)
def test_members_that_are_silent_while_others_are_heard_are_lost_first(looks: list[str], lost: dict[str, int]):
    assert lost_at("ab", looks) == lost


def test_one_that_is_alone_has_the_time_of_all():
    assert lost_at("a", [""] * 24 + ["a"] * 24) == {}
    assert lost_at("a", [""] * 30) == {"a": 25}


def test_a_process_that_is_no_member_neither_gets_nor_causes_longer_waits():
    assert lost_at("a", [""] * 30, others="x") == {"x": 10, "a": 25}
    assert lost_at("a", ["x"] * 20 + ["ax"] * 20, others="x") == {}
    assert lost_at("", ["x"] * 30, others="xy") == {"y": 10}


@given(st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=80))
def test_no_member_is_lost_before_its_time_or_kept_beyond_the_time_of_all(looks: list[str]):
    found = lost_at("ab", looks)
    for name in "ab":
        silent = 0
        for number, heard in enumerate(looks, 1):
            silent = 1 if name in heard else silent + 1  # looks since the sign of life, with the one right after it
            if found.get(name, len(looks) + 1) > number:
                assert silent <= MOST_OF_ALL + MOST
            elif found[name] == number:
                assert silent > MOST
                break
