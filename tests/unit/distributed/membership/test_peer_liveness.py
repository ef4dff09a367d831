"""Which of the processes that a sum waits for are lost: tables of what looks show."""

from __future__ import annotations

import pytest

from raytf.distributed.membership.peer_liveness import Loss, Sign, Waiting, sign_of_process

ALIVE, QUIET, GONE = Sign.ALIVE, Sign.QUIET, Sign.GONE


def look_until_lost(waiting: Waiting, sign: Sign) -> int:
    looks = 1
    while waiting.check_signs({1: sign}) is None:
        looks += 1
    return looks


@pytest.mark.parametrize(("seconds", "looks"), [(6.0, 6), (1.0, 1), (1.5, 2)])
def test_a_process_that_is_stopped_counts_as_lost_after_so_many_seconds(seconds, looks):
    assert look_until_lost(Waiting.for_processes(seconds), QUIET) == looks


@pytest.mark.parametrize(("seconds", "looks"), [(4.5, 10), (1.0, 3), (0.7, 2)])
def test_heartbeats_may_be_missing_for_a_look_more(seconds, looks):
    assert look_until_lost(Waiting.for_heartbeats(seconds), QUIET) == looks


def test_silence_counts_only_in_looks_one_after_the_other():
    waiting = Waiting(2)
    for sign in (QUIET, ALIVE, QUIET, ALIVE):
        assert waiting.check_signs({1: sign, 2: ALIVE}) is None
    assert waiting.check_signs({2: QUIET}) is None
    assert waiting.check_signs({1: QUIET, 2: ALIVE}) is None
    assert waiting.check_signs({1: QUIET, 2: QUIET}) == Loss(1, QUIET)


def test_a_dead_process_and_a_broken_group_are_not_waited_for():
    waiting = Waiting(10)
    assert waiting.check_signs({1: ALIVE, 2: GONE}) == Loss(2, GONE)
    assert waiting.check_signs({1: ALIVE, 2: GONE}, is_broken=True) == Loss(2, GONE)
    assert waiting.check_signs({1: ALIVE}, is_broken=True) == Loss(None, GONE)


@pytest.mark.parametrize(
    ("state", "started", "began", "sign"),
    [
        ("S", "5", "5", ALIVE),
        ("T", "5", "5", QUIET),
        ("t", "5", "5", QUIET),
        ("Z", "5", "5", GONE),
        ("X", "5", "5", GONE),
        ("", "", "5", GONE),
        ("S", "9", "5", GONE),  # another process has its number
        ("", "", "", ALIVE),  # it was never visible, as in another container
    ],
)
def test_what_the_table_of_processes_shows(state, started, began, sign):
    assert sign_of_process(state, started, began) is sign
