"""Decisions about checkpoints: when they are complete, what to keep, what to restore."""

import pytest

from raytf.checkpoint.cleanup import to_delete
from raytf.checkpoint.commit import Event, Phase, Votes, advance
from raytf.checkpoint.durable import deadline
from raytf.checkpoint.naming import attempt_of, name_of, restore_order, split_name
from raytf.checkpoint.slot_ledger import HeldShare, generations, is_latest

A, B = "20260101T000000-aaaaaa", "20260101T000009-000000"


@pytest.mark.parametrize(
    ("phase", "votes", "expected"),
    [
        (Phase.IDLE, Votes(), (Phase.IDLE, Event.NOTHING)),
        (Phase.IDLE, Votes(want=1), (Phase.WRITING, Event.BEGIN)),
        (Phase.WRITING, Votes(written=2), (Phase.WRITING, Event.NOTHING)),
        (Phase.WRITING, Votes(written=3), (Phase.COMMITTING, Event.COMMIT)),
        (Phase.WRITING, Votes(written=2, failed=1), (Phase.IDLE, Event.FAILED)),
        (Phase.WRITING, Votes(want=3), (Phase.WRITING, Event.NOTHING)),
        (Phase.COMMITTING, Votes(written=3), (Phase.COMMITTING, Event.NOTHING)),
        (Phase.COMMITTING, Votes(committed=1), (Phase.IDLE, Event.DONE)),
        (Phase.COMMITTING, Votes(failed=1), (Phase.IDLE, Event.FAILED)),
    ],
)
def test_advance_of_three_workers(phase, votes, expected):
    assert advance(phase, votes, 3) == expected


def test_names():
    assert name_of(12, A, 7) == f"000000000012-{A}-0007"
    assert attempt_of(name_of(12, A, 7)) == A
    assert split_name(name_of(12, A, 7)) == (12, f"{A}-0007")


@pytest.mark.parametrize("name", ["", "logs", "x-y", "-a", "12", ".tmp", "1.5-a"])
def test_names_of_other_folders(name):
    assert split_name(name) == (-1, name)


def test_restore_order():
    names = [name_of(9, A), name_of(10, A), name_of(10, B), name_of(2, B)]
    assert restore_order(names) == [name_of(10, B), name_of(10, A), name_of(9, A), name_of(2, B)]


def test_the_newest_stay():
    names = [name_of(step, A) for step in (1, 2, 3, 4)]
    assert to_delete(names, names, 3, A) == [name_of(1, A)]
    assert to_delete(names, names, 1, A) == names[:3]
    assert to_delete(names, names, 9, A) == []


def test_unfinished_ones_of_others_go_once_they_are_older():
    complete = [name_of(5, B)]
    mine, older, newer = name_of(3, B), name_of(4, A), name_of(6, A)
    assert to_delete([*complete, mine, older, newer], complete, 3, B) == [older]


def test_unfinished_ones_of_attempts_that_are_over_go_at_once():
    complete = [name_of(5, B)]
    mine, newer = name_of(3, B, 7), name_of(6, A)
    assert to_delete([*complete, mine, newer], complete, 3, B, over=[A]) == [newer]
    assert to_delete([*complete, mine, newer], complete, 3, B, over=[A, B]) == [mine, newer]
    assert to_delete([*complete, mine, newer], complete, 3, B, over=[A, B], writing=[mine]) == [newer]


def test_nothing_goes_where_nothing_good_is_left():
    names = [name_of(5, A), name_of(6, A)]
    assert to_delete(names, names, 1, B, damaged=names) == []


def test_nothing_goes_before_there_is_a_complete_one():
    assert to_delete([name_of(1, A), name_of(2, A)], [], 3, B) == []


@pytest.mark.parametrize("foreign", [".snapshot", "-", "#recycle", "zzz"])
def test_folders_that_are_no_checkpoints_stay(foreign):
    complete = [name_of(5, A)]
    assert to_delete([*complete, foreign], complete, 1, A) == []


def test_damaged_ones_go_first_and_count_for_nothing():
    damaged, restored, written = name_of(400, A), name_of(300, A), name_of(350, B)
    names = [damaged, restored, name_of(200, A), written]
    assert to_delete(names, names, 1, B, damaged=[damaged], needed=[written]) == sorted(
        [damaged, restored, name_of(200, A)]
    )
    assert to_delete([damaged, restored], [damaged, restored], 1, B, [damaged], [restored]) == [damaged]


def held(step, attempt=A, share=0, shares=1):
    return HeldShare(step, attempt, share, shares, 10, f"/{attempt}/{step}/{share}")


def found(*nodes, attempts=None):
    answer = generations({f"n{i}": shares for i, shares in enumerate(nodes)}, attempts)
    return [(g.step, g.attempt, sorted(g.holders)) for g in answer]


def test_the_latest_snapshot_that_a_node_holds_whole_comes_first():
    assert found([held(10), held(20)], [held(20), held(30)]) == [
        (30, A, ["n1"]),
        (20, A, ["n0", "n1"]),
        (10, A, ["n0"]),
    ]


def test_a_snapshot_needs_all_shares_of_one_node():
    assert found([held(10, share=0, shares=2)], [held(10, share=1, shares=2)]) == []
    assert found([held(10, share=1, shares=2), held(10, share=0, shares=2), held(20, share=0, shares=2)]) == [
        (10, A, ["n0"])
    ]
    whole = generations({"n": [held(10, share=1, shares=2), held(10, share=0, shares=2)]}, None)[0]
    assert [h.share for h in whole.holders["n"]] == [0, 1]


def test_a_share_that_is_there_twice_counts_once():
    assert found([held(10), held(10)]) == [(10, A, ["n0"])]
    twice = [held(10, share=share, shares=2) for share in (0, 1, 0, 1)]
    assert [h.share for h in generations({"n": twice}, None)[0].holders["n"]] == [0, 1]
    assert found([held(10, share=0, shares=2), held(10, share=0, shares=2)]) == []


def test_of_two_attempts_at_one_step_the_latest_comes_first():
    assert [g[:2] for g in found([held(10, A)], [held(10, B)])] == [(10, B), (10, A)]


def test_what_another_run_of_the_same_name_left_is_not_restored():
    assert found([held(90, B), held(10, A)], attempts=[A]) == [(10, A, ["n0"])]
    assert found([held(90, B)], attempts=[]) == []


@pytest.mark.parametrize(
    ("nodes", "attempts", "is_enough"),
    [
        ([[held(10, B)]], [A, B], True),
        ([[held(10, A)]], [A, B], False),  # another node may hold what B has made
        ([[held(10, B, share=0, shares=2)]], [A, B], False),
        ([[held(10, B, share=0, shares=2)], [held(20, B)]], [B, A], True),
        ([], [A], False),
        ([], [], False),
        ([[held(10, A)]], [], False),
    ],
)
def test_busy_nodes_are_waited_for_unless_the_latest_attempt_is_in_hand(nodes, attempts, is_enough):
    assert A < B
    assert is_latest({f"n{i}": shares for i, shares in enumerate(nodes)}, attempts) == is_enough


@pytest.mark.parametrize(("good", "seconds"), [(0, 120), (11, 120), (13, 130), (60, 600)])
def test_a_save_has_a_deadline(good, seconds):
    assert deadline(good) == seconds
