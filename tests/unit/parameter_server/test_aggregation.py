"""Which gradients make an update, and which server holds what."""

import random

import pytest

from raytf.parameter_server.state import rows, spread
from raytf.parameter_server.step import Aggregation


def ask_all(aggregation: Aggregation) -> list[int]:
    """What all idle workers are given."""
    parts = []
    while (part := aggregation.ask()) is not None:
        parts.append(part)
    return parts


@pytest.mark.parametrize(
    ("parts", "workers", "given"),
    [
        (2, 2, [0, 1]),
        (4, 2, [0, 1]),  # the others come when a worker is idle
        (2, 3, [0, 1, 0]),  # one backup
        (2, 4, [0, 1, 0, 1]),
        (1, 3, [0, 0, 0]),
        (3, 1, [0]),
    ],
)
def test_parts_come_first_and_idle_workers_are_backups(parts: int, workers: int, given: list[int]):
    aggregation = Aggregation(parts, workers)
    aggregation.begin(0)
    assert ask_all(aggregation) == given


def test_an_update_waits_for_all_parts_and_for_no_backup():
    aggregation = Aggregation(2, 3)
    aggregation.begin(7)
    assert ask_all(aggregation) == [0, 1, 0]
    assert aggregation.arrive(7, 0)
    assert not aggregation.is_complete
    assert aggregation.arrive(7, 1)
    assert aggregation.is_complete
    assert not aggregation.arrive(7, 0)


def test_a_stragglers_gradient_is_dropped_once_the_weights_have_changed():
    aggregation = Aggregation(2, 3)
    aggregation.begin(0)
    ask_all(aggregation)
    aggregation.arrive(0, 0)
    aggregation.arrive(0, 1)
    aggregation.begin(1)
    # One worker still computes the backup of step 0, so there is none of step 1.
    assert ask_all(aggregation) == [0, 1]
    assert not aggregation.arrive(0, 0)
    assert ask_all(aggregation) == [0]
    assert aggregation.arrive(1, 0)
    assert not aggregation.arrive(1, 0)
    assert not aggregation.is_complete


def test_a_gradient_that_is_lost_with_its_worker_is_computed_again():
    aggregation = Aggregation(2, 2)
    aggregation.begin(0)
    ask_all(aggregation)
    aggregation.arrive(0, 0)
    aggregation.lose(0, 1)
    assert ask_all(aggregation) == [1]
    aggregation.begin(1)
    aggregation.lose(0, 1)
    assert ask_all(aggregation) == [0, 1]


def test_what_nobody_has_begun_comes_before_a_backup():
    aggregation = Aggregation(3, 4)
    aggregation.begin(0)
    assert [aggregation.ask() for _ in range(2)] == [0, 1]
    aggregation.arrive(0, 0)
    assert ask_all(aggregation) == [2, 1]


def test_every_step_takes_each_part_once_whoever_is_slow():
    chance = random.Random(0)
    for _ in range(200):
        parts, workers = chance.randint(1, 5), chance.randint(1, 8)
        aggregation, under_way = Aggregation(parts, workers), []
        for step in range(5):
            aggregation.begin(step)
            taken = []
            while not aggregation.is_complete:
                under_way += [(step, part) for part in ask_all(aggregation)]
                assert len(under_way) == aggregation.under_way <= workers
                assert under_way, "nobody computes, and the step is not done"
                done = under_way.pop(chance.randrange(len(under_way)))
                if aggregation.arrive(*done):
                    assert done[0] == step
                    taken.append(done[1])
            assert sorted(taken) == list(range(parts))


@pytest.mark.parametrize(
    ("sizes", "servers", "places"),
    [
        ([100, 1, 100, 1], 2, [0, 0, 1, 1]),  # dealt out in turn, both large ones would be on one
        ([5, 5, 5], 1, [0, 0, 0]),
        ([1, 10, 4, 5], 2, [1, 0, 1, 1]),
        ([0, 0, 0], 3, [0, 1, 2]),
        ([], 2, []),
    ],
)
def test_variables_are_spread_by_their_bytes(sizes: list[int], servers: int, places: list[int]):
    assert spread(sizes, servers) == places


@pytest.mark.parametrize(
    ("length", "parts", "cut"), [(10, 4, [3, 3, 2, 2]), (3, 5, [1, 1, 1]), (7, 1, [7]), (6, 3, [2, 2, 2])]
)
def test_a_variable_is_cut_into_parts_that_differ_by_a_row(length: int, parts: int, cut: list[int]):
    assert rows(length, parts) == cut
