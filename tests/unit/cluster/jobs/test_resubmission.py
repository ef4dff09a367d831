"""When a job is submitted again: a table, and what holds for every history."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.cluster.jobs.resubmission import LASTING_SECONDS, LONGEST_PAUSE, Limits, Move, Resubmission, Sight, judge
from raytf.config.command_line import EXIT_AGAIN

COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"


@pytest.mark.parametrize(
    ("sight", "move"),
    [
        (Sight("PENDING"), Move.WAIT),
        (Sight("RUNNING"), Move.WAIT),
        (Sight("RUNNING", is_dead=True), Move.RESUBMIT),
        (Sight("PENDING", is_dead=True), Move.RESUBMIT),
        (Sight(None), Move.RESUBMIT),
        (Sight("SUCCEEDED", 0), Move.FINISHED),
        (Sight("STOPPED"), Move.STOPPED),
        (Sight("FAILED", 1, COMMAND), Move.FAILED),
        (Sight("FAILED", 2, COMMAND), Move.REFUSED),
        (Sight("FAILED", 3, COMMAND), Move.FAILED),
        (Sight("FAILED", 127, COMMAND), Move.FAILED),
        # sys.exit(-1), and what else no signal leaves behind.
        (Sight("FAILED", 255, COMMAND), Move.FAILED),
        (Sight("FAILED", 200, COMMAND), Move.FAILED),
        (Sight("FAILED", EXIT_AGAIN, COMMAND), Move.RESUBMIT),
        (Sight("FAILED", -signal.SIGKILL, COMMAND), Move.RESUBMIT),
        (Sight("FAILED", 128 + signal.SIGKILL, COMMAND), Move.RESUBMIT),
        (Sight("FAILED", 128 + signal.SIGSEGV, COMMAND), Move.RESUBMIT),
        # A machine that goes down ends all processes so.
        (Sight("FAILED", 128 + signal.SIGTERM, COMMAND), Move.RESUBMIT),
        (Sight("FAILED", 128 + signal.SIGINT, COMMAND), Move.STOPPED),
        (Sight("FAILED", -signal.SIGINT, COMMAND), Move.STOPPED),
        (Sight("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), Move.RESUBMIT),
        (Sight("FAILED", None, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), Move.RESUBMIT),
        (Sight("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"), Move.RESUBMIT),
        (Sight("FAILED", None, None), Move.RESUBMIT),
        (Sight("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE"), Move.FAILED),
    ],
)
def test_what_a_job_s_state_asks_for(sight: Sight, move: Move):
    assert judge(sight, 0.0, Limits()).move is move


@pytest.mark.parametrize(("silent", "move"), [(0.0, Move.WAIT), (59.9, Move.WAIT), (60.0, Move.GIVE_UP)])
def test_a_head_that_is_away_is_waited_for_so_long(silent: float, move: Move):
    assert judge(None, silent, Limits(silence=60.0)).move is move


def test_a_job_that_dies_at_once_again_and_again_is_given_up():
    job = Resubmission(Limits(resubmits=3), lambda: 0.0)
    found = [job.decide(Sight("FAILED", 137), 0.0, 5.0) for _ in range(4)]
    assert [d.move for d in found] == [Move.RESUBMIT] * 3 + [Move.GIVE_UP]
    assert [d.pause for d in found[:3]] == [1.0, 2.0, 4.0]
    assert found[3].why == "the job's driver was killed (SIGKILL), after 3 resubmissions in a row"


def test_no_resubmission_is_none():
    found = Resubmission(Limits(resubmits=0), lambda: 0.0).decide(Sight("FAILED", 137), 0.0, 5.0)
    assert found.move is Move.GIVE_UP


def test_a_job_that_lasted_begins_a_new_count():
    job = Resubmission(Limits(resubmits=2), lambda: 0.0)
    for _ in range(50):
        assert job.decide(Sight(None), 0.0, 5.0).move is Move.RESUBMIT
        assert job.decide(Sight(None), 0.0, LASTING_SECONDS).move is Move.RESUBMIT
    assert job.resubmits == 100


def test_a_refusal_is_final_unless_the_command_was_taken_before():
    refused, dead = Sight("FAILED", 2, COMMAND), Sight("RUNNING", is_dead=True)
    assert Resubmission(Limits(), lambda: 0.0).decide(refused, 0.0, 5.0).move is Move.REFUSED
    job = Resubmission(Limits(), lambda: 0.0)
    sights = [dead, refused, refused, dead, refused, refused, refused, refused]
    assert [job.decide(sight, 0.0, 5.0).move for sight in sights] == [Move.RESUBMIT] * 7 + [Move.REFUSED]


sights = st.none() | st.builds(
    Sight,
    st.none() | st.sampled_from(["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]),
    st.none() | st.integers(-64, 255),
    st.none() | st.sampled_from([COMMAND, "JOB_SUPERVISOR_ACTOR_DIED", "RUNTIME_ENV_SETUP_FAILURE"]),
    st.booleans(),
)


@given(
    st.lists(st.tuples(sights, st.floats(0, 1e5), st.floats(0, 1e5)), max_size=60),
    st.none() | st.integers(0, 5),
    st.floats(0, 1, exclude_max=True),
)
def test_in_every_history_pauses_are_bounded_and_only_what_died_is_submitted_again(history, most, jitter):
    job, in_a_row = Resubmission(Limits(most, 600.0), lambda: jitter), 0
    was_dead = False
    for sight, silent, lived in history:
        found = job.decide(sight, silent, lived)
        if found.move is Move.RESUBMIT:
            assert sight is not None
            assert sight.status not in ("SUCCEEDED", "STOPPED")
            assert sight.code != 1 or sight.status != "FAILED"
            assert sight.code != 2 or sight.status != "FAILED" or was_dead
            was_dead = True
            assert sight.is_dead or sight.status not in ("PENDING", "RUNNING")
            in_a_row = 1 if lived >= LASTING_SECONDS else in_a_row + 1
            assert most is None or in_a_row <= most
            assert 1.0 <= found.pause <= LONGEST_PAUSE
            assert found.why
        else:
            assert found.pause == 0.0
        if sight is None:
            assert found.move in (Move.WAIT, Move.GIVE_UP)


def test_pauses_grow_to_the_longest_and_spread():
    def pauses(jitter: float) -> list[float]:
        job = Resubmission(Limits(None), lambda: jitter)
        return [job.decide(Sight(None), 0.0, 1.0).pause for _ in range(2000)]

    low, high = pauses(0.0), pauses(0.999)
    assert low == sorted(low)
    assert low[-1] == LONGEST_PAUSE / 2
    assert LONGEST_PAUSE * 0.99 < high[-1] <= LONGEST_PAUSE
    assert all(a < b for a, b in zip(low, high, strict=True))
