"""Whom a rank calls and answers while a group meets, and when it gives up: the decisions alone."""

from __future__ import annotations

import pytest

from raytf.distributed.membership.rendezvous import (
    DATA,
    HEARTBEATS,
    MEET_SECONDS,
    REACH_SECONDS,
    MeetingPoint,
    UnreachedError,
)


def meeting(rank: int, size: int = 3) -> MeetingPoint:
    return MeetingPoint(rank, [f"h{n}:1" for n in range(size)], MEET_SECONDS)


def with_calls_made(rank: int, size: int = 3) -> MeetingPoint:
    point = meeting(rank, size)
    while point.to_call is not None:
        point.dial(0.0)
        point.called()
    return point


def test_a_rank_calls_lower_ranks_then_answers_higher_ones_then_listens():
    point, called = meeting(2, 4), []
    while (link := point.to_call) is not None:
        called.append(link)
        point.called()
    assert called == [(0, DATA), (0, HEARTBEATS), (1, DATA), (1, HEARTBEATS)]
    assert point.answers((3, HEARTBEATS), 2, True)
    assert point.awaits_calls
    assert point.answers((3, DATA), 2, True)
    assert not point.awaits_calls
    heard = []
    while (link := point.to_hear) is not None:
        heard.append(link)
        point.heard(True)
    assert heard == called


@pytest.mark.parametrize(
    ("caller", "called", "is_of_group"),
    [
        ((2, DATA), 1, False),  # does not know the key
        ((2, DATA), 0, True),  # wants another rank
        ((0, DATA), 1, True),  # has to be called
        ((3, DATA), 1, True),
        ((2, 2), 1, True),
    ],
)
def test_strangers_are_not_answered(caller, called, is_of_group):
    point = with_calls_made(1)
    assert not point.answers(caller, called, is_of_group)
    assert point.answers((2, DATA), 1, True)
    assert not point.answers((2, DATA), 1, True), "a second time"


def test_a_rank_that_refuses_is_called_again_until_the_meeting_has_failed():
    point, refused = meeting(2), ConnectionRefusedError("refused")
    point.not_reached(refused, MEET_SECONDS - 1, False)
    with pytest.raises(UnreachedError, match="rank 0 at h0:1 cannot be reached: refused") as raised:
        point.not_reached(refused, MEET_SECONDS, False)
    assert raised.value.ranks == {0}
    with pytest.raises(UnreachedError, match="no route"):
        point.not_reached(OSError("no route"), 0.0, False)


def test_a_host_that_is_cut_off_is_given_up_in_seconds_and_a_busy_one_not():
    point = meeting(1)
    point.dial(5.0)
    point.poll(5.0 + REACH_SECONDS - 0.1, False)
    with pytest.raises(UnreachedError, match="rank 0 at h0:1 cannot be reached: no answer"):
        point.poll(5.0 + REACH_SECONDS, False)
    point = with_calls_made(1)
    point.poll(5.0 + REACH_SECONDS, False)


def test_who_does_not_come_or_answer_in_time_is_unreached():
    point = with_calls_made(1, 4)
    point.poll(MEET_SECONDS - 0.1, False)
    with pytest.raises(UnreachedError, match="rank 2 at h2:1, rank 3 at h3:1 did not connect in time") as raised:
        point.poll(MEET_SECONDS, False)
    assert raised.value.ranks == {2, 3}
    point = with_calls_made(2)
    with pytest.raises(UnreachedError, match="rank 0 at h0:1 did not answer in time") as raised:
        point.poll(MEET_SECONDS, False)
    assert raised.value.ranks == {0}


@pytest.mark.parametrize("point", [meeting(1), with_calls_made(0), with_calls_made(2)])
def test_every_wait_ends_with_the_generation_and_blames_nobody(point):
    with pytest.raises(ConnectionAbortedError, match="another rank is lost"):
        point.poll(0.0, True)


def test_a_connection_that_ends_or_proves_nothing_does_not_mean_a_lost_link():
    point = with_calls_made(1)
    with pytest.raises(ConnectionError, match="rank 0 at h0:1 has hung up") as raised:
        point.lose(0, "has hung up")
    assert not isinstance(raised.value, UnreachedError)
    with pytest.raises(ConnectionError, match="rank 0 at h0:1 is not of this group") as raised:
        point.heard(False)
    assert not isinstance(raised.value, UnreachedError)
