"""Who stays where workers cannot reach each other: a table, and properties beside a search of all sets."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.membership.generations import reaching_each_other


def links(*pairs: str) -> set[frozenset[str]]:
    return {frozenset(pair) for pair in pairs}


@pytest.mark.parametrize(
    ("names", "missing", "with_state", "stays"),
    [
        ("abc", [], "ab", "abc"),
        ("abc", ["ac"], "ab", "ab"),  # a newcomer, which one member does not reach
        ("abc", ["ac", "bc"], "ab", "ab"),
        ("abc", ["ab"], "abc", "ac"),  # of two members the one with the later rank
        ("ab", ["ab"], "b", "b"),
        ("abcd", ["ac", "ad", "bc", "bd"], "abcd", "ab"),  # two halves
        ("abcde", ["ad", "ae", "bd", "be", "cd", "ce"], "de", "de"),  # the larger half has no state
        ("abc", ["ab", "ac"], "a", "a"),  # who has the state stays
        ("abc", ["xy", "ax"], "a", "abc"),  # links of workers that are gone
    ],
)
def test_the_largest_set_stays(names: str, missing: list[str], with_state: str, stays: str):
    assert "".join(reaching_each_other(list(names), links(*missing), set(with_state))) == stays


NAMES = "abcdefg"
PAIRS = [frozenset(pair) for pair in itertools.combinations(NAMES, 2)]


@given(st.sets(st.sampled_from(PAIRS)), st.sets(st.sampled_from(NAMES)))
def test_no_larger_set_would_do(missing: set[frozenset[str]], with_state: set[str]):
    stays = reaching_each_other(NAMES, missing, with_state)

    def is_fine(chosen: set[str]) -> bool:
        return not any(link <= chosen for link in missing) and (not with_state or bool(chosen & with_state))

    assert is_fine(set(stays))
    larger = itertools.combinations(NAMES, len(stays) + 1)
    assert not any(is_fine(set(chosen)) for chosen in larger)


@given(st.integers(13, 40), st.integers(1, 20))
def test_of_two_halves_the_larger_one_stays(size: int, smaller: int):
    names = [f"w{i:02}" for i in range(size)]
    smaller = min(smaller, (size - 1) // 2)
    missing = {frozenset(pair) for pair in itertools.product(names[:smaller], names[smaller:])}
    assert reaching_each_other(names, missing, names) == names[smaller:]


def test_of_many_the_only_one_with_the_state_stays():
    names = [f"w{i:02}" for i in range(20)]
    missing = {frozenset((names[0], other)) for other in names[1:]}
    assert reaching_each_other(names, missing, [names[0]]) == [names[0]]
