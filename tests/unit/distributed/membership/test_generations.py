"""Who belongs to a group: tables of what its arbiter hears, and properties of any order of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.distributed.membership.generations import Membership, Place, StaleError


def place(name: str, step: int = -1) -> Place:
    return Place(f"{name}:1", step)


def begun(*names: str) -> Membership:
    """A group whose first generation has begun."""
    membership = Membership()
    for name in names:
        found = membership.join(name, place(name), len(names))
    assert found is not None
    assert (found.number, found.members, found.steps) == (1, names, (-1,) * len(names))
    return membership


def test_the_first_generation_waits_for_all_that_are_started():
    membership = Membership()
    assert membership.join("a", place("a"), 2) is None
    found = membership.join("b", place("b"), 2)
    assert found is not None
    assert (found.members, found.addresses) == (("a", "b"), ("a:1", "b:1"))
    assert not membership.is_pause_wanted


def test_survivors_go_on_without_the_lost_in_the_order_of_their_ranks():
    membership = begun("a", "b", "c")
    assert membership.lose("a") is None
    assert membership.missing() == [], "nobody waits yet"
    assert membership.leave("c", 1, place("c", 7)) is None
    assert membership.missing() == ["b"]
    found = membership.leave("b", 1, place("b", 8))
    assert found is not None
    assert (found.number, found.members, found.steps) == (2, ("b", "c"), (8, 7))
    assert membership.missing() == []


def test_a_loss_that_the_others_notice_before_the_arbiter():
    membership = begun("a", "b")
    assert membership.leave("a", 1, place("a", 3)) is None
    found = membership.lose("b")
    assert found is not None
    assert found.members == ("a",)


def test_who_is_lost_while_it_waits_does_not_hold_the_others():
    membership = begun("a", "b", "c")
    membership.lose("c")
    membership.leave("b", 1, place("b", 5))
    assert membership.lose("b") is None
    found = membership.leave("a", 1, place("a", 5))
    assert found is not None
    assert found.members == ("a",)


def test_a_newcomer_joins_when_all_have_left_between_two_steps():
    membership = begun("a", "b")
    assert membership.join("c", place("c"), 1) is None
    assert membership.is_pause_wanted
    assert membership.leave("b", 1, place("b", 4)) is None
    found = membership.leave("a", 1, place("a", 4))
    assert found is not None
    assert (found.members, found.steps) == (("a", "b", "c"), (4, 4, -1))
    assert not membership.is_pause_wanted


def test_a_newcomer_that_is_lost_again_is_not_waited_for():
    membership = begun("a", "b")
    membership.join("c", place("c"), 1)
    membership.lose("c")
    assert not membership.is_pause_wanted


def test_who_was_frozen_and_comes_back_has_to_end():
    membership = begun("a", "b")
    membership.lose("b")
    membership.leave("a", 1, place("a", 9))
    with pytest.raises(StaleError, match="b comes from generation 1, which has ended without it"):
        membership.leave("b", 1, place("b", 9))


def test_who_comes_back_before_the_others_have_noticed_has_to_end_too():
    membership = begun("a", "b")
    membership.lose("b")
    with pytest.raises(StaleError):
        membership.leave("b", 1, place("b", 9))
    assert membership.leave("a", 1, place("a", 9)) is not None


def test_when_nobody_is_left_the_next_group_begins_as_the_first_one():
    membership = begun("a", "b")
    membership.lose("a")
    assert membership.join("c", place("c"), 2) is None
    assert membership.lose("b") is None
    assert membership.generation is None
    found = membership.join("d", place("d"), 2)
    assert found is not None
    assert (found.number, found.members, found.steps) == (2, ("c", "d"), (-1, -1))


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "lose"]), st.integers(0, 5)), max_size=60))
def test_a_generation_has_no_lost_member_and_those_with_state_come_first(events):
    """A simulated world: workers live until they are lost; members leave at most once, and only the newest."""
    membership, living, joined, latest, fresh = Membership(), set[str](), set[str](), None, 0
    left: set[tuple[str, int]] = set()
    for kind, number in events:
        members = () if latest is None else latest.members
        found = None
        if kind == "join":
            fresh += 1
            name = f"w{fresh}"
            living.add(name)
            joined.add(name)
            found = membership.join(name, place(name), 2)
        elif kind == "lose" and living:
            name = sorted(living)[number % len(living)]
            living.discard(name)
            joined.discard(name)
            found = membership.lose(name)
        elif kind == "leave" and latest is not None and number < len(members):
            name = members[number]
            if name not in living or (name, latest.number) in left:
                continue
            left.add((name, latest.number))
            found = membership.leave(name, latest.number, place(name, latest.number))
        if found is None:
            continue
        assert found.number == (0 if latest is None else latest.number) + 1
        assert set(found.members) <= living
        stayed = [m for m in found.members if m not in joined]
        assert list(found.members[: len(stayed)]) == stayed, "those with state come first"
        assert all((m, found.number - 1) in left for m in stayed), "somebody was taken along"
        assert all(step == -1 for m, step in zip(found.members, found.steps, strict=True) if m in joined)
        joined.difference_update(found.members)
        latest = found


def test_another_number_of_workers_may_be_wanted_before_the_first_generation():
    membership = Membership()
    assert membership.join("a", place("a"), 3) is None
    assert membership.join("b", place("b"), 3) is None
    assert membership.joining == ["a", "b"]
    found = membership.want(2)
    assert found is not None
    assert found.members == ("a", "b")
    assert membership.joining == []


def test_a_member_that_is_gone_is_known_until_the_next_generation():
    membership = begun("a", "b")
    membership.lose("b")
    assert membership.lost == {"b"}
    found = membership.leave("a", 1, place("a", 3))
    assert found is not None
    assert (found.lost, membership.lost) == (1, frozenset())


@pytest.mark.parametrize(("step", "lost"), [(3, 1), (4, 0)])
def test_a_loss_counts_until_a_step_is_trained(step: int, lost: int):
    membership = begun("a", "b")
    membership.lose("b")
    membership.leave("a", 1, place("a", 3))
    membership.join("c", place("c"), 2)
    found = membership.leave("a", 2, place("a", step))
    assert found is not None
    assert (found.members, found.lost) == (("a", "c"), lost)


def test_who_is_dismissed_leaves_with_the_next_generation():
    membership = begun("a", "b", "c")
    membership.dismiss(["b", "x"])
    assert membership.is_pause_wanted
    membership.leave("a", 1, place("a", 5))
    membership.leave("b", 1, place("b", 5))
    found = membership.leave("c", 1, place("c", 5))
    assert found is not None
    assert (found.members, found.dismissed, found.lost) == (("a", "c"), ("b",), 0)
    assert not membership.is_pause_wanted


def test_a_dismissed_member_waits_for_its_successor_and_both_change_at_once():
    membership = begun("a", "b")
    membership.dismiss(["b"], after=["c"])
    assert not membership.is_pause_wanted
    membership.join("c", place("c"), 1)
    assert membership.is_pause_wanted
    membership.leave("a", 1, place("a", 5))
    found = membership.leave("b", 1, place("b", 5))
    assert found is not None
    assert (found.members, found.dismissed) == (("a", "c"), ("b",))
    # One who came before that was asked for is there.
    membership.dismiss(["a"], after=["c"])
    assert membership.is_pause_wanted


def test_never_all_are_dismissed_who_have_the_state():
    membership = begun("a")
    membership.dismiss(["a"], after=["c"])
    membership.join("c", place("c"), 1)
    found = membership.leave("a", 1, place("a", 5))  # it hands the state over, and leaves with the next one
    assert found is not None
    assert found.members == ("a", "c")
    membership.leave("a", 2, place("a", 6))
    found = membership.leave("c", 2, place("c", 6))
    assert found is not None
    assert (found.members, found.dismissed) == (("c",), ("a",))
    membership = begun("a", "b")
    membership.dismiss(["a", "b"])
    assert not membership.is_pause_wanted
    membership.dismiss(["a"])
    membership.lose("b")  # the one that was to stay
    found = membership.leave("a", 1, place("a", 3))
    assert found is not None
    assert (found.members, found.dismissed) == (("a",), ())


def test_who_joins_waits_while_there_is_no_room():
    membership = Membership(most=2)
    membership.join("a", place("a"), 2)
    assert membership.join("b", place("b"), 2) is not None
    membership.join("c", place("c"), 1)
    assert (membership.is_pause_wanted, membership.joining) == (False, ["c"])
    membership.lose("b")
    found = membership.leave("a", 1, place("a", 3))
    assert found is not None
    assert found.members == ("a", "c")


def test_members_are_told_once_that_their_generation_ends():
    membership = begun("a", "b", "c")
    assert membership.news() == []
    membership.join("d", place("d"), 1)
    assert (membership.news(), membership.news()) == (["pause"], [])
    membership.leave("b", 1, place("b", 4))
    assert (membership.news(), membership.news()) == (["left"], [])
    membership.lose("a")
    assert membership.news() == ["lost"]
    membership.join("e", place("e"), 1)
    membership.leave("c", 1, place("c", 4))
    assert membership.generation is not None
    assert membership.generation.number == 2
    assert membership.news() == []
    membership.lose("d")
    assert membership.news() == ["lost"]


def training(*names: str) -> Membership:
    """A group with a state, which a newcomer has joined: it is the last member of the generation."""
    *members, newcomer = names
    membership = begun(*members)
    membership.join(newcomer, place(newcomer), 1)
    for name in members:
        membership.leave(name, 1, place(name, 5))
    assert membership.generation is not None
    assert membership.generation.members == names
    return membership


def test_a_newcomer_that_members_cannot_reach_is_left_out_and_not_awaited():
    membership = training("n1-1", "n1-2", "n2-3")
    for name in ("n2-3", "n1-1"):
        assert membership.leave(name, 2, place(name, 5 if name != "n2-3" else -1), ["n2-3"]) is None
    found = membership.leave("n1-2", 2, place("n1-2", 5))
    assert found is not None
    assert (found.members, found.unreachable, found.lost) == (("n1-1", "n1-2"), ("n2-3",), 0)
    assert membership.is_cut_off("n2-4")
    assert not membership.is_cut_off("n1-4"), "it has members"


@pytest.mark.parametrize("reported", [["a", "b"], []])
def test_a_newcomer_that_cannot_reach_members_is_left_out_and_may_return(reported: list[str]):
    membership = training("a", "b", "c")
    membership.leave("c", 2, place("c"), reported)
    membership.leave("a", 2, place("a", 5))
    found = membership.leave("b", 2, place("b", 5))
    assert found is not None
    assert (found.members, found.unreachable) == (("a", "b"), ("c",))
    assert not membership.is_cut_off("c")


def test_a_newcomer_that_notices_a_death_first_stays():
    membership = training("a", "b", "c")
    membership.leave("c", 2, place("c"))
    membership.lose("a")
    found = membership.leave("b", 2, place("b", 5))
    assert found is not None
    assert (found.members, found.unreachable) == (("b", "c"), ())


def test_of_members_without_a_link_between_them_the_first_ones_stay():
    membership = begun("a", "b", "c")
    for name, unreached in (("c", ["a"]), ("a", []), ("b", [])):
        found = membership.leave(name, 1, place(name, 5), unreached)
    assert found is not None
    assert (found.members, found.unreachable) == (("a", "b"), ("c",))


def test_a_newcomer_is_not_blamed_for_a_meeting_that_a_report_explains():
    # Of a network in which n1 and n3 are cut, n3-3 reports it. Before that the newcomer n2-4 saw somebody hang up.
    membership = training("n1-1", "n2-2", "n3-3")
    membership.join("n2-4", place("n2-4"), 1)
    for name in ("n1-1", "n2-2", "n3-3"):
        membership.leave(name, 2, place(name, 5))
    membership.leave("n2-4", 3, place("n2-4"))
    membership.leave("n3-3", 3, place("n3-3", 5), ["n1-1"])
    membership.leave("n1-1", 3, place("n1-1", 5))
    found = membership.leave("n2-2", 3, place("n2-2", 5))
    assert found is not None
    assert (found.members, found.unreachable) == (("n1-1", "n2-2", "n2-4"), ("n3-3",))


def test_a_newcomer_that_has_met_the_members_is_not_blamed_for_a_broken_sum():
    membership = training("n1-1", "n2-2", "n3-3")
    membership.leave("n3-3", 2, place("n3-3"), has_met=True)
    membership.leave("n1-1", 2, place("n1-1", 5))
    found = membership.leave("n2-2", 2, place("n2-2", 5))
    assert found is not None
    assert (found.members, found.unreachable) == (("n1-1", "n2-2", "n3-3"), ())


def test_a_link_that_is_missing_is_one_between_nodes():
    membership = training("n1-1", "n1-2", "n2-3", "n2-4", "n3-5")
    membership.leave("n2-3", 2, place("n2-3", 5), ["n1-1"])
    for name in ("n1-1", "n1-2", "n2-4"):
        membership.leave(name, 2, place(name, 5))
    found = membership.leave("n3-5", 2, place("n3-5", 5))
    assert found is not None
    assert (found.members, found.unreachable) == (("n1-1", "n1-2", "n3-5"), ("n2-3", "n2-4"))


def test_who_waits_on_a_node_that_members_do_not_reach_is_not_tried():
    membership = training("n1-1", "n1-2", "n2-3")
    membership.most = 3
    membership.join("n2-4", place("n2-4"), 1)
    membership.leave("n1-1", 2, place("n1-1", 5), ["n2-3"])
    membership.leave("n1-2", 2, place("n1-2", 5))
    found = membership.leave("n2-3", 2, place("n2-3"))
    assert found is not None
    assert (found.members, found.unreachable) == (("n1-1", "n1-2"), ("n2-3", "n2-4"))


def test_nodes_that_were_cut_off_may_begin_again_when_nobody_is_left():
    membership = training("n1-1", "n2-2")
    membership.leave("n1-1", 2, place("n1-1", 5), ["n2-2"])
    membership.leave("n2-2", 2, place("n2-2"))
    assert membership.is_cut_off("n2-3")
    membership.lose("n1-1")
    assert not membership.is_cut_off("n2-3")


def test_a_node_that_was_cut_off_is_tried_again_after_a_while():
    membership = training("n1-1", "n2-2")
    membership.refuse_looks = 3
    membership.leave("n1-1", 2, place("n1-1", 5), ["n2-2"])
    membership.leave("n2-2", 2, place("n2-2"))
    refused = []
    for _ in range(3):
        refused.append(membership.is_cut_off("n2-3"))
        membership.count_look()
    assert refused == [True, True, True]
    assert not membership.is_cut_off("n2-3")


def test_a_member_without_the_state_does_not_count_when_others_are_dismissed():
    membership = training("a", "b", "c")
    membership.dismiss(["a"])
    membership.leave("a", 2, place("a", 5))
    membership.leave("b", 2, place("b"))
    found = membership.leave("c", 2, place("c"))
    assert found is not None
    assert (found.members, found.dismissed) == (("a", "b", "c"), ())
