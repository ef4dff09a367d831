"""Who hangs is decided by beats, evidence and time: tables of what is found and when, and what never is."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.supervision.hang_detector import HangDetector, HangEvidence, Heartbeats, blamed_for_loss
from raytf.training.process.heartbeat_types import Activity, HangFinding, HeartbeatState, LastHeartbeat

SECONDS = 30.0


def beat(rank: int = 0, **fields) -> HeartbeatState:
    return HeartbeatState(1, rank, 2, f"node{rank}", f"10.0.0.{rank}", 100 + rank, **{"step": 10, **fields})


class World:
    """Ranks that beat each second, seen each second, by default two that train: a step each half second."""

    def __init__(self, seconds: float = SECONDS):
        self.detector, self.now = HangDetector(seconds), 0.0
        self.beats = {0: beat(0, activity=Activity.STEP), 1: beat(1, activity=Activity.STEP)}
        self.evidence: dict[int, HangEvidence] = {}
        self.silent: set[int] = set()
        self.stuck: set[int] = set()
        self._since = dict.fromkeys(self.beats, 0.0)
        self._heard = dict.fromkeys(self.beats, 0.0)
        self.suspects: frozenset[int] = frozenset()

    def does(self, rank: int, activity: Activity, **fields) -> None:
        """A rank begins something and does not end it."""
        self.beats[rank] = dataclasses.replace(self.beats[rank], activity=activity, **fields)
        self.stuck.add(rank)
        self._since[rank] = self.now

    def trains(self) -> None:
        for rank, last in self.beats.items():
            self.beats[rank] = dataclasses.replace(last, activity=Activity.STEP, step=last.step + 1000)
        self.stuck = set()

    def tick(self, seconds: float = 1.0) -> HangFinding | None:
        self.now += seconds
        sightings = []
        for rank, last in self.beats.items():
            if rank not in self.silent:
                self._heard[rank] = self.now
                if rank not in self.stuck:
                    self._since[rank] = self.now - 0.5
                self.beats[rank] = dataclasses.replace(last, seconds=self.now - self._since[rank])
            sightings.append(LastHeartbeat(self.beats[rank], self.now - self._heard[rank]))
        look = self.detector.judge(self.now, sightings, self.evidence)
        self.suspects = look.suspects
        return look.finding

    def until_found(self, most: float = 10_000.0) -> HangFinding:
        while self.now < most:
            if (found := self.tick()) is not None:
                return found
        raise AssertionError("nothing was found")

    def finds_nothing(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            assert self.tick() is None, self.now


def ranks(found: HangFinding) -> list[int]:
    return [b.rank for b in found.beats]


def test_a_group_that_trains_is_left_alone():
    World().finds_nothing(1000)


@pytest.mark.parametrize("activity", [Activity.INPUT])
def test_who_waits_for_data_is_to_blame_and_not_who_waits_for_it(activity):
    world = World()
    world.does(0, Activity.STEP)
    world.does(1, activity)
    found = world.until_found()
    assert (ranks(found), found.where) == ([1], "input")
    assert "data" in found.text
    assert 25 <= world.now <= SECONDS


def test_where_all_wait_for_each_other_it_is_the_collective():
    world = World()
    world.does(0, Activity.STEP)
    world.does(1, Activity.COLLECTIVE)
    found = world.until_found()
    assert (ranks(found), found.where) == ([0, 1], "collective")
    assert world.now <= SECONDS


def test_a_single_worker_hangs_in_its_step():
    world = World()
    del world.beats[1]
    world.does(0, Activity.STEP)
    found = world.until_found()
    assert (ranks(found), found.where) == ([0], "step")


def test_a_rank_that_waits_is_never_blamed_while_another_works():
    for activity in set(Activity) - {
        Activity.STEP,
        Activity.COLLECTIVE,
        Activity.TRANSFER,
        Activity.REPORT,
        Activity.INPUT,
        Activity.DONE,
    }:
        world = World()
        world.does(0, Activity.STEP)
        world.does(1, activity)
        world.finds_nothing(8 * SECONDS)  # four minutes of whatever
        found = world.until_found()
        assert ranks(found) == [1], activity
        assert world.now <= 20 * SECONDS


@pytest.mark.parametrize("activity", [Activity.START, Activity.TRANSFER])
def test_who_waits_to_meet_the_others_is_no_reason_for_a_step_to_last(activity):
    world = World()
    world.beats[2] = beat(2, activity=activity)  # it reports progress again and again
    world._since[2] = world._heard[2] = 0.0
    world.does(0, Activity.STEP)
    world.does(1, Activity.COLLECTIVE)
    found = world.until_found()
    assert (ranks(found), found.where) == ([0, 1], "collective")
    assert 25 <= world.now <= SECONDS
    world = World()  # one has lost another rank and waits for this one, which does not leave its step
    world.beats[1] = beat(1, activity=activity)
    world.does(0, Activity.STEP)
    found = world.until_found()
    assert (ranks(found), found.where) == ([0], "step")
    assert world.now <= SECONDS


def test_who_has_begun_a_transfer_is_waited_for():
    world = World()
    world.does(0, Activity.STEP)
    world.finds_nothing(20)
    world.does(1, Activity.TRANSFER)
    world.finds_nothing(200)


def test_who_has_left_is_not_waited_for():
    world = World()
    world.does(1, Activity.DONE)
    world.silent.add(1)
    world.does(0, Activity.END)
    world.finds_nothing(400)


@pytest.mark.parametrize(("alone", "earliest", "latest"), [(False, 5, 7), (True, 12, 14)])
def test_one_that_is_known_to_be_stopped_is_blamed_within_seconds(alone, earliest, latest):
    world = World(600.0)
    if alone:  # nobody waits for it, and without it steps are lost
        del world.beats[0]
    world.silent.add(1)
    world.finds_nothing(60)  # a slow one is not
    world.silent.clear()
    world.finds_nothing(10)
    world.silent.add(1)
    world.evidence = {1: HangEvidence.STOPPED}
    before = world.now
    found = world.until_found()
    assert (ranks(found), found.text) == ([1], "frozen (its process was stopped)")
    assert earliest <= world.now - before <= latest


def test_where_all_are_stopped_they_get_the_time_of_one_that_is_alone():
    world = World(600.0)
    world.finds_nothing(10)
    world.silent, world.evidence = {0, 1}, dict.fromkeys((0, 1), HangEvidence.STOPPED)
    before = world.now
    assert ranks(world.until_found()) == [0, 1]
    assert 12 <= world.now - before <= 14


def test_the_first_that_goes_on_after_all_were_stopped_speaks_for_the_others():
    world = World(600.0)
    world.finds_nothing(10)
    world.silent, world.evidence = {0, 1}, dict.fromkeys((0, 1), HangEvidence.STOPPED)
    world.finds_nothing(8)
    world.silent = {1}
    world.finds_nothing(4)
    assert ranks(world.until_found(30)) == [1]


def test_long_steps_may_take_as_long_as_twenty_of_them_or_three_calls():
    for step_seconds, call_steps, allowed in ((4.0, 1, 80.0), (4.0, 32, 384.0), (0.1, 1, 25.5)):
        world = World()
        for rank in (0, 1):
            world.does(rank, Activity.STEP, step_seconds=step_seconds, call_steps=call_steps)
        world.until_found()
        assert world.now == pytest.approx(allowed, abs=1.5)


def test_progress_of_a_validation_counts():
    world = World()
    world.does(0, Activity.COLLECTIVE)
    for _ in range(10):
        world.does(1, Activity.VALIDATION)
        world.finds_nothing(300)


@pytest.mark.parametrize(
    ("evidence", "activity", "at_least", "at_most"),
    [
        (HangEvidence.STOPPED, Activity.STEP, 12, 16),
        (HangEvidence.STOPPED, Activity.START, 12, 16),
        (HangEvidence.SILENT_NODE, Activity.STEP, 12, 16),
        (HangEvidence.IDLE, Activity.STEP, 25, 30),
        (HangEvidence.BUSY, Activity.STEP, 25, 30),
        (HangEvidence.BUSY, Activity.SAVE, 500, 600),
        (HangEvidence.GONE, Activity.STEP, 25, 30),
        (None, Activity.STEP, 25, 30),
    ],
)
def test_a_rank_that_does_not_beat_is_judged_by_what_is_found_there(evidence, activity, at_least, at_most):
    world = World()
    world.does(0, Activity.STEP)
    world.does(1, activity)
    world.silent.add(1)
    while not world.suspects:
        assert world.tick() is None
    assert world.suspects == {1}
    if evidence is not None:
        world.evidence[1] = evidence
    found = world.until_found()
    assert (ranks(found), found.where) == ([1], "frozen")
    assert at_least <= world.now <= at_most


def test_silence_of_all_is_nobodys_fault_without_evidence_against_one():
    world = World()
    world.silent = {0, 1}
    world.finds_nothing(200)
    world.evidence = {0: HangEvidence.IDLE, 1: HangEvidence.STOPPED}
    assert ranks(world.until_found(220)) == [1]


def test_a_single_worker_that_was_stopped_is_found():
    world = World()
    del world.beats[1]
    world.silent = {0}
    world.evidence = {0: HangEvidence.STOPPED}
    world.until_found(SECONDS)


def test_when_the_driver_was_held_up_silence_counts_from_then_on():
    world = World()
    world.finds_nothing(10)
    world.silent = {0, 1}
    assert world.tick(600.0) is None
    world.silent = set()
    world.finds_nothing(100)


def test_a_step_that_hangs_again_gets_more_time_until_it_completes():
    world, taken = World(), []
    for _ in range(7):
        world.does(0, Activity.STEP)
        world.does(1, Activity.INPUT)
        began = world.now
        world.until_found()
        taken.append(world.now - began)
    assert [round(b / a) for a, b in itertools.pairwise(taken)] == [2, 2, 2, 2, 1, 1]
    world.trains()
    world.does(0, Activity.STEP)
    world.does(1, Activity.INPUT)
    began = world.now
    world.until_found()
    assert world.now - began == taken[0]


def test_zero_seconds_find_nothing():
    world = World(0.0)
    world.does(0, Activity.INPUT)
    world.does(1, Activity.INPUT)
    world.silent = {1}
    world.evidence = {1: HangEvidence.STOPPED}
    world.finds_nothing(10_000)


@given(
    seconds=st.floats(5, 300),
    delays=st.lists(
        st.tuples(st.sampled_from([a for a in Activity if a is not Activity.DONE]), st.floats(0, 0.84)), max_size=30
    ),
)
def test_nothing_is_found_of_what_stays_below_its_limit(seconds, delays):
    world = World(seconds)
    for activity, share in delays:
        rank = len(delays) % 2
        world.does(1 - rank, Activity.STEP)
        world.does(rank, activity)
        world.finds_nothing(max(0.0, share * seconds - 1.0))
        world.trains()
        world.finds_nothing(2)


@given(
    seconds=st.floats(5, 300),
    activity=st.sampled_from([a for a in Activity if a is not Activity.DONE]),
    other=st.sampled_from([Activity.STEP, Activity.COLLECTIVE]),
    silent=st.booleans(),
)
def test_whatever_lasts_for_ever_is_found_and_the_rank_that_does_it_named(seconds, activity, other, silent):
    world = World(seconds)
    world.does(0, other)
    world.does(1, activity)
    if silent:
        world.silent.add(1)
    found = world.until_found(30 * seconds + 10)
    assert 1 in ranks(found)
    if silent or activity not in (Activity.STEP, Activity.COLLECTIVE, Activity.TRANSFER, Activity.REPORT):
        assert ranks(found) == [1]


def test_beats_of_older_groups_are_void():
    beats = Heartbeats()
    old = beats.begin()
    beats.hear(dataclasses.replace(beat(0), group=old), 1.0)
    assert [s.age for s in beats.sightings(3.0)] == [2.0]
    new = beats.begin()
    assert beats.sightings(3.0) == []
    beats.hear(dataclasses.replace(beat(1), group=old), 4.0)
    beats.hear(dataclasses.replace(beat(1), group=new), 5.0)
    beats.hear(dataclasses.replace(beat(0), group=new), 5.0)
    assert [s.beat.rank for s in beats.sightings(5.0)] == [0, 1]


def test_who_neither_answered_nor_beat_is_looked_at_when_a_peer_is_lost():
    left = LastHeartbeat(beat(3, activity=Activity.DONE), 9.0)
    seen = [LastHeartbeat(beat(0), 9.0), LastHeartbeat(beat(1), 9.0), LastHeartbeat(beat(2), 0.4), left]
    assert [b.rank for b in blamed_for_loss(seen, [0], 3.0)] == [1]
