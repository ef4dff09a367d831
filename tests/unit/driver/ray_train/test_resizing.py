"""When the number of workers changes, as a table of moments, and as laws over random clusters."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.config.resources import fitting
from raytf.driver.ray_train.resizing import (
    LAST_SAVE_SECONDS,
    PATIENCE_SECONDS,
    SETTLE_SECONDS,
    ClusterView,
    ResizeDecision,
    Resizer,
    choose_nodes,
    next_size,
    planned_change,
    ranks_to_replace,
)

EVERY = 60.0


def play(
    resizer: Resizer, workers: int, cluster, until: float, leaving=lambda now: False, saves: bool = True, tick=0.5
):
    """Run time; the moments (now, move, workers after it) at which the resizer moved."""
    now, parked, moved = 0.0, None, []
    resizer.started(workers, now)
    while now < until:
        move = resizer.decide(ClusterView(now, workers, cluster(now), leaving(now), parked))
        parked = {ResizeDecision.PARK: None, ResizeDecision.RELEASE: None}.get(move, parked)
        if move is ResizeDecision.PARK:
            parked = saves
        if move is ResizeDecision.RESIZE:
            workers, parked = cluster(now), None
            resizer.started(workers, now)
        if move is not ResizeDecision.KEEP:
            moved.append((now, move, workers))
        now += tick
    return moved


def resizes(moved):
    return [(now, workers) for now, move, workers in moved if move is ResizeDecision.RESIZE]


def test_nothing_happens_while_nothing_changes():
    assert play(Resizer(1, EVERY), 2, lambda now: 2, 300) == []


def test_a_node_that_comes_is_used_soon_and_all_ranks_save_first():
    moved = play(Resizer(1, EVERY), 1, lambda now: 2 if now >= 10 else 1, 100)
    assert [m for _, m, _ in moved] == [ResizeDecision.PARK, ResizeDecision.RESIZE]
    ((when, workers),) = resizes(moved)
    assert workers == 2
    assert SETTLE_SECONDS <= when - 10 <= SETTLE_SECONDS + 1


def test_a_node_that_comes_and_goes_before_it_was_used_costs_nothing():
    assert play(Resizer(1, EVERY), 1, lambda now: 2 if 10 <= now < 13 else 1, 100) == []


def test_nodes_that_join_one_by_one_are_taken_together_within_a_bound():
    assert resizes(play(Resizer(1, EVERY), 1, lambda now: 1 + (now >= 10) + (now >= 12) + (now >= 14), 60))[0][1] == 4
    ((when, _), *_) = resizes(play(Resizer(1, EVERY), 1, lambda now: 1 + int(max(0, now - 10) // 3), 40))
    assert when - 10 <= 3 + PATIENCE_SECONDS + 1


def test_a_flapping_node_costs_one_planned_restart_a_minute():
    moved = resizes(play(Resizer(1, EVERY), 1, lambda now: 1 + (now >= 10 and int(now) % 20 < 10), 200))
    times = [when for when, _ in moved]
    assert len(times) >= 2
    assert all(b - a >= EVERY for a, b in itertools.pairwise(times))


def test_a_node_lost_and_replaced_within_a_minute_costs_one_restart():
    resizer = Resizer(1, EVERY)
    resizer.started(2, 0.0)
    resizer.started(1, 10.0)  # the group was lost, and restarted on what was left
    moves = [resizer.decide(ClusterView(10 + t / 2, 1, 2)) for t in range(2 * 59)]
    assert set(moves) == {ResizeDecision.KEEP}
    assert resizer.decide(ClusterView(70.5, 1, 2)) is ResizeDecision.PARK


def test_a_lost_worker_alone_does_not_hold_back_growth():
    resizer = Resizer(1, EVERY)
    resizer.started(2, 0.0)
    resizer.started(2, 10.0)
    resizer.decide(ClusterView(11.0, 2, 3))
    assert resizer.decide(ClusterView(11.0 + SETTLE_SECONDS, 2, 3)) is ResizeDecision.PARK


def test_a_notice_is_followed_at_once_even_after_a_change_or_at_equal_size():
    for possible in (1, 2):
        resizer = Resizer(1, EVERY)
        resizer.started(1, 0.0)
        resizer.started(2, 1.0)
        assert resizer.decide(ClusterView(2.0, 2, possible, leaving=True)) is ResizeDecision.PARK
        assert resizer.decide(ClusterView(2.5, 2, possible, leaving=True)) is ResizeDecision.KEEP
        assert resizer.decide(ClusterView(3.0, 2, possible, leaving=True, parked=True)) is ResizeDecision.RESIZE


def test_a_run_that_cannot_move_saves_at_once_and_trains_to_its_nodes_end():
    moved = play(Resizer(2, EVERY), 2, lambda now: 2 - (now >= 10), 100, leaving=lambda now: now >= 10)
    assert [(now, move) for now, move, _ in moved] == [(10.0, ResizeDecision.PARK), (10.5, ResizeDecision.RELEASE)]


def test_what_cannot_go_on_elsewhere_saves_again_shortly_before_the_end():
    resizer, saves = Resizer(2, EVERY), []
    resizer.started(2, 0.0)
    parked = None
    for tick in range(300):
        now = tick / 2
        move = resizer.decide(
            ClusterView(now, 2, 1, leaving=now >= 10, parked=parked, deadline=130.0 if now >= 10 else None)
        )
        parked = True if move is ResizeDecision.PARK else None
        assert move is not ResizeDecision.RESIZE
        if move is ResizeDecision.PARK:
            saves.append(now)
    assert saves == [10.0, 130.0 - LAST_SAVE_SECONDS]


def test_short_notice_that_cannot_be_followed_is_one_save():
    resizer = Resizer(2, EVERY)
    resizer.started(2, 0.0)
    assert resizer.decide(ClusterView(50.0, 2, 1, leaving=True, deadline=55.0)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(51.0, 2, 1, leaving=True, deadline=55.0)) is ResizeDecision.KEEP
    assert resizer.decide(ClusterView(52.0, 2, 1, leaving=True, deadline=55.0, parked=True)) is ResizeDecision.RELEASE
    assert {resizer.decide(ClusterView(52.5 + t, 2, 1, leaving=True, deadline=55.0)) for t in range(100)} == {
        ResizeDecision.KEEP
    }


def test_room_that_comes_after_the_notice_is_moved_into():
    resizer = Resizer(2, EVERY)
    resizer.started(2, 0.0)
    assert resizer.decide(ClusterView(10.0, 2, 1, leaving=True)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(11.0, 2, 1, leaving=True, parked=True)) is ResizeDecision.RELEASE
    assert resizer.decide(ClusterView(20.0, 2, 2, leaving=True)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(21.0, 2, 2, leaving=True, parked=True)) is ResizeDecision.RESIZE
    # ... also while the ranks save
    resizer = Resizer(2, EVERY)
    resizer.started(2, 0.0)
    assert resizer.decide(ClusterView(10.0, 2, 1, leaving=True)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(10.5, 2, 2, leaving=True)) is ResizeDecision.KEEP
    assert resizer.decide(ClusterView(11.0, 2, 2, leaving=True, parked=True)) is ResizeDecision.RESIZE


def test_a_failed_save_on_notice_is_retried_and_the_next_notice_is_new():
    resizer = Resizer(2, EVERY)
    resizer.started(2, 0.0)
    assert resizer.decide(ClusterView(10.0, 2, 1, leaving=True)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(10.5, 2, 1, leaving=True, parked=False)) is ResizeDecision.RELEASE
    assert resizer.decide(ClusterView(11.0, 2, 1, leaving=True)) is ResizeDecision.KEEP
    assert resizer.decide(ClusterView(10.5 + SETTLE_SECONDS, 2, 1, leaving=True)) is ResizeDecision.PARK
    assert resizer.decide(ClusterView(16.0, 2, 1, leaving=True, parked=True)) is ResizeDecision.RELEASE
    assert resizer.decide(ClusterView(17.0, 2, 1, leaving=True)) is ResizeDecision.KEEP
    resizer.started(2, 30.0)
    assert resizer.decide(ClusterView(40.0, 2, 1, leaving=True)) is ResizeDecision.PARK


def test_a_change_that_is_undone_while_the_ranks_save_is_forgotten():
    resizer = Resizer(1, EVERY)
    resizer.started(1, 0.0)
    for now in (1.0, 6.0):
        move = resizer.decide(ClusterView(now, 1, 2))
    assert move is ResizeDecision.PARK
    assert resizer.decide(ClusterView(6.5, 1, 1)) is ResizeDecision.RELEASE
    assert resizer.decide(ClusterView(7.0, 1, 1, parked=True)) is ResizeDecision.KEEP


def test_ranks_that_cannot_save_train_on_and_are_asked_again_later():
    moved = play(Resizer(1, EVERY), 2, lambda now: 1 if now >= 10 else 2, 40, leaving=lambda n: n >= 10, saves=False)
    assert {m for _, m, _ in moved} == {ResizeDecision.PARK, ResizeDecision.RELEASE}
    asked = [now for now, m, _ in moved if m is ResizeDecision.PARK]
    assert len(asked) > 2
    assert all(b - a >= SETTLE_SECONDS for a, b in itertools.pairwise(asked))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 5), st.floats(0.5, 90)), min_size=1, max_size=12),
    fewest=st.integers(1, 2),
)
def test_a_planned_change_is_made_once_a_minute_and_keeps_the_minimum(sizes, fewest):
    ends, total = [], 0.0
    for size, seconds in sizes:
        total += seconds
        ends.append((total, size))

    def cluster(now: float) -> int:
        return next((size for end, size in ends if now < end), sizes[-1][0])

    moved = play(Resizer(fewest, EVERY), max(fewest, sizes[0][0]), cluster, total + 2 * EVERY)
    changes = resizes(moved)
    assert all(workers >= fewest for _, workers in changes)
    assert all(b[0] - a[0] >= EVERY for a, b in itertools.pairwise(changes))
    if sizes[-1][0] >= fewest:  # in the end the run has what there is
        last = changes[-1][1] if changes else max(fewest, sizes[0][0])
        assert last == sizes[-1][0]
    asked = sum(m is ResizeDecision.PARK for _, m, _ in moved)
    assert asked == sum(m in (ResizeDecision.RESIZE, ResizeDecision.RELEASE) for _, m, _ in moved)


def test_workers_that_join_during_training_are_added_at_once_without_a_save():
    moved = play(Resizer(1, EVERY, is_partial=True), 1, lambda now: 2 if now >= 10 else 1, 100)
    ((when, move, workers),) = moved
    assert (move, workers) == (ResizeDecision.RESIZE, 2)
    assert SETTLE_SECONDS <= when - 10 <= SETTLE_SECONDS + 1
    # Notice is followed at once, and only what cannot go on elsewhere saves.
    leaving = play(Resizer(1, EVERY, is_partial=True), 2, lambda now: 1 if now >= 10 else 2, 30, lambda now: now == 10)
    assert [(now, move) for now, move, _ in leaving] == [(10, ResizeDecision.RESIZE)]
    stuck = play(Resizer(2, EVERY, is_partial=True), 2, lambda now: 1 if now >= 10 else 2, 30, lambda now: now >= 10)
    assert next((now, move) for now, move, _ in stuck) == (10, ResizeDecision.PARK)
    assert resizes(stuck) == []


@pytest.mark.parametrize(
    ("possible", "survivors", "size"),
    [(3, 0, 3), (1, 0, None), (None, 0, None), (None, 1, 1), (0, 1, 1), (3, 1, 3)],
)
def test_a_group_starts_with_what_there_is_and_survivors_do_not_wait(possible, survivors, size):
    assert next_size(possible, survivors, 2) == size


@pytest.mark.parametrize(
    ("lost", "wanted", "usable", "replaced"),
    [({2, 0}, 3, "ab", [0, 2]), ({2, 0}, 2, "ab", [0]), ({2, 0}, 3, "b", []), ({1}, 2, "ab", []), ({1}, 3, "ab", [1])],
)
def test_lost_workers_are_replaced_on_their_nodes_as_far_as_they_are_wanted(lost, wanted, usable, replaced):
    assert ranks_to_replace(["a", "b", "a"], lost, wanted, usable) == replaced


@pytest.mark.parametrize(
    ("wanted", "usable", "going", "more"),
    [
        (3, "ab", [], 0),
        (4, "ab", [], 1),
        (2, "ab", [2], 0),
        (3, "a", [1], 1),
        (2, "a", [1], 0),
        (1, "a", [1, 2], 0),
        (2, "c", [0, 1, 2], 2),
    ],
)
def test_who_leaves_and_how_many_come_before(wanted, usable, going, more):
    assert planned_change(["a", "b", "a"], wanted, usable) == (going, more)


@pytest.mark.parametrize(
    ("free", "each", "workers"),
    [
        ({"CPU": 8.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 0.5}, 2),
        ({"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.1, "GPU": 0.2}, 5),  # in floats 1 // 0.2 is 4, and 1 // 0.1 is 9
        ({"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 0.4}, 4),  # no part is of two GPUs
        ({"CPU": 8.0, "GPU": 1.5}, {"CPU": 1.0, "GPU": 0.5}, 3),
        ({"CPU": 3.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 0.5}, 3),
        ({"CPU": 8.0, "GPU": 3.0}, {"CPU": 1.0, "GPU": 1.0}, 3),
        ({"CPU": 8.0, "GPU": 3.0}, {"CPU": 1.0, "GPU": 2.0}, 1),
        ({"CPU": 8.0}, {"CPU": 1.0, "GPU": 0.5}, 0),
        ({"CPU": 8.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 0.3333}, 3),
    ],
)
def test_parts_of_a_gpu_that_fit(free, each, workers):
    assert fitting(free, each) == workers


#: Node -> (workers that fit, kind of its GPUs).
NODES = {"a1": (2, "L4"), "a2": (2, "L4"), "b": (3, "A10G"), "c": (0, "")}


@pytest.mark.parametrize(
    ("unwanted", "slow", "fewest", "nodes", "failing", "others"),
    [
        ([], [], 1, {"a1", "a2"}, set(), {"b"}),
        (["a1"], [], 1, {"b"}, {"a1"}, {"a2"}),  # one kind has more room without it
        (["a1"], [], 4, {"a1", "a2"}, set(), {"b"}),  # the run could not start without it
        (["b", "a1"], [], 2, {"a2"}, {"a1", "b"}, set()),
        ([], ["a1"], 1, {"a1", "a2"}, set(), {"b"}),  # nothing could replace it
        ([], ["c"], 1, {"a1", "a2"}, set(), {"b"}),
    ],
)
def test_the_nodes_of_the_next_group(unwanted, slow, fewest, nodes, failing, others):
    def count(some):
        return sum(NODES[node][0] for node in some)

    def of_one_kind(some):
        kinds = {NODES[node][1] for node in some}
        best = max(sorted(kinds), key=lambda kind: count(n for n in some if NODES[n][1] == kind))
        return {node for node in some if NODES[node][1] == best}

    choice = choose_nodes(NODES, unwanted, slow, fewest, count, of_one_kind)
    assert (choice.nodes, choice.failing, choice.other_kinds) == (nodes, failing, others)
