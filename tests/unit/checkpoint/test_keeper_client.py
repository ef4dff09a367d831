"""A rank sees that its keeper has freed its memory, which is needed by later workers now."""

from __future__ import annotations

import os
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from raytf.checkpoint.keeper_client import (
    FRESH_SECONDS,
    MOST_PAUSE_SECONDS,
    SILENT_SECONDS,
    STEADY_SECONDS,
    TRY_PAUSES,
    KeeperClient,
    KeeperHealth,
    Order,
    pause,
)
from raytf.checkpoint.slot_ledger import SlotAnswer, SlotRequest


@pytest.mark.parametrize("freed", [(), (0,), (1,), (0, 1)])
def test_memory_is_lost_once_one_of_its_slots_is_freed(freed):
    """The slot with the newest copy stays for later workers, and must not be written over."""
    files = [os.memfd_create("slot") for _ in range(2)]
    asking: Future[tuple[Any, SlotAnswer]] = Future()
    paths = tuple(f"/proc/{os.getpid()}/fd/{file}" for file in files)
    asking.set_result((SimpleNamespace(), SlotAnswer(paths=paths)))
    monitor: Any = None
    client = KeeperClient("run", SlotRequest("attempt", 0, 1, 100), monitor, clock=lambda: 0.0)
    client._asking = asking
    assert client.take() == SlotAnswer(paths=paths)
    client.poll()
    assert not client.is_lost
    for number in freed:
        os.close(files[number])
    other = os.memfd_create("slot")  # gets the descriptor of one that was closed
    client.poll()
    assert client.is_lost == bool(freed)
    for file in {*files, other} - {files[number] for number in freed if files[number] != other}:
        os.close(file)


# -- test keeper health ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deaths", "seconds"),
    [(0, 0), (1, 0), (2, 1), (3, 2), (6, 16), (8, MOST_PAUSE_SECONDS), (10**6, MOST_PAUSE_SECONDS)],
)
def test_keepers_that_die_again_and_again_make_no_storm(deaths, seconds):
    assert pause(deaths) == seconds


def test_memory_is_asked_for_five_times():
    assert TRY_PAUSES == (1, 2, 4, 8)


def test_what_a_keeper_said_counts_for_some_seconds():
    health = KeeperHealth(100.0)
    assert health.step(100.0) is None
    health.hear(10, 101.0)
    assert health.step(101.0 + FRESH_SECONDS / 2) == 10
    assert health.step(101.0 + FRESH_SECONDS) is None
    health.hear(None, 102.0)  # asked while the ranks wrote
    assert health.step(102.0) == 10
    health.hear(20, 103.0)
    assert health.step(103.0) == 20
    health.lose()
    assert health.step(103.0) is None


@pytest.mark.parametrize(
    ("looks", "orders"),
    [
        ([(0.0, False), (0.5, False), (0.75, True), (1.0, False)], "nothing ask nothing ask"),
        ([(0.5, True), (4.0, True), (8.0, True), (12.0, True), (16.0, True), (20.0, True)], "nothing " * 5 + "end"),
        # The whole container was frozen, and nobody listened.
        ([(0.5, True), (30.5, True), (34.0, True), (38.0, True), (42.0, True)], "nothing " * 5),
    ],
)
def test_a_keeper_is_asked_twice_a_second_and_ended_if_it_answers_nobody(looks, orders):
    assert SILENT_SECONDS == 20
    health = KeeperHealth(0.0)
    found = [health.poll(now, is_asking) for now, is_asking in looks]
    assert [order.value for order in found] == orders.split()
    assert health.is_lost == (found[-1] is Order.END)


def test_a_keeper_that_lived_long_is_replaced_at_once():
    health, now, waits = KeeperHealth(0.0), 0.0, []
    for lived in (1.0, 1.0, 1.0, STEADY_SECONDS, 1.0):
        now += lived
        health.lose()
        waits.append(health.replace(now))
        assert not health.is_lost
        health.begin(now)
        health.hear(10, now)
    assert waits == [0, 1, 2, 0, 1]
