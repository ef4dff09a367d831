"""When a job is submitted again: a table, and what holds for every history."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.cluster.resubmission import (
    LASTING_SECONDS,
    LONGEST_PAUSE,
    JobSighting,
    NextMove,
    Resubmission,
    ResubmissionLimits,
    judge,
)
from raytf.config.command_line import EXIT_AGAIN

COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"


@pytest.mark.parametrize(
    ("sight", "move"),
    [
        (JobSighting("PENDING"), NextMove.WAIT),
        (JobSighting("RUNNING"), NextMove.WAIT),
        (JobSighting("RUNNING", is_dead=True), NextMove.RESUBMIT),
        (JobSighting("PENDING", is_dead=True), NextMove.RESUBMIT),
        (JobSighting(None), NextMove.RESUBMIT),
        (JobSighting("SUCCEEDED", 0), NextMove.FINISHED),
        (JobSighting("STOPPED"), NextMove.STOPPED),
        (JobSighting("FAILED", 1, COMMAND), NextMove.FAILED),
        (JobSighting("FAILED", 2, COMMAND), NextMove.REFUSED),
        (JobSighting("FAILED", 3, COMMAND), NextMove.FAILED),
        (JobSighting("FAILED", 127, COMMAND), NextMove.FAILED),
        # sys.exit(-1), and what else no signal leaves behind.
        (JobSighting("FAILED", 255, COMMAND), NextMove.FAILED),
        (JobSighting("FAILED", 200, COMMAND), NextMove.FAILED),
        (JobSighting("FAILED", EXIT_AGAIN, COMMAND), NextMove.RESUBMIT),
        (JobSighting("FAILED", -signal.SIGKILL, COMMAND), NextMove.RESUBMIT),
        (JobSighting("FAILED", 128 + signal.SIGKILL, COMMAND), NextMove.RESUBMIT),
        (JobSighting("FAILED", 128 + signal.SIGSEGV, COMMAND), NextMove.RESUBMIT),
        # A machine that goes down ends all processes so.
        (JobSighting("FAILED", 128 + signal.SIGTERM, COMMAND), NextMove.RESUBMIT),
        (JobSighting("FAILED", 128 + signal.SIGINT, COMMAND), NextMove.STOPPED),
        (JobSighting("FAILED", -signal.SIGINT, COMMAND), NextMove.STOPPED),
        (JobSighting("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), NextMove.RESUBMIT),
        (JobSighting("FAILED", None, "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"), NextMove.RESUBMIT),
        (JobSighting("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE"), NextMove.RESUBMIT),
        (JobSighting("FAILED", None, None), NextMove.RESUBMIT),
        (JobSighting("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE"), NextMove.FAILED),
    ],
)
def test_what_a_job_s_state_asks_for(sight: JobSighting, move: NextMove):
    assert judge(sight, 0.0, ResubmissionLimits()).move is move


@pytest.mark.parametrize(("silent", "move"), [(0.0, NextMove.WAIT), (59.9, NextMove.WAIT), (60.0, NextMove.GIVE_UP)])
def test_a_head_that_is_away_is_waited_for_so_long(silent: float, move: NextMove):
    assert judge(None, silent, ResubmissionLimits(silence=60.0)).move is move


def test_a_job_that_dies_at_once_again_and_again_is_given_up():
    job = Resubmission(ResubmissionLimits(resubmits=3), lambda: 0.0)
    found = [job.decide(JobSighting("FAILED", 137), 0.0, 5.0) for _ in range(4)]
    assert [d.move for d in found] == [NextMove.RESUBMIT] * 3 + [NextMove.GIVE_UP]
    assert [d.pause for d in found[:3]] == [1.0, 2.0, 4.0]
    assert found[3].why == "the job's driver was killed (SIGKILL), after 3 resubmissions in a row"


def test_no_resubmission_is_none():
    found = Resubmission(ResubmissionLimits(resubmits=0), lambda: 0.0).decide(JobSighting("FAILED", 137), 0.0, 5.0)
    assert found.move is NextMove.GIVE_UP


def test_a_job_that_lasted_begins_a_new_count():
    job = Resubmission(ResubmissionLimits(resubmits=2), lambda: 0.0)
    for _ in range(50):
        assert job.decide(JobSighting(None), 0.0, 5.0).move is NextMove.RESUBMIT
        assert job.decide(JobSighting(None), 0.0, LASTING_SECONDS).move is NextMove.RESUBMIT
    assert job.resubmits == 100


def test_a_refusal_is_final_unless_the_command_was_taken_before():
    refused, dead = JobSighting("FAILED", 2, COMMAND), JobSighting("RUNNING", is_dead=True)
    assert Resubmission(ResubmissionLimits(), lambda: 0.0).decide(refused, 0.0, 5.0).move is NextMove.REFUSED
    job = Resubmission(ResubmissionLimits(), lambda: 0.0)
    sights = [dead, refused, refused, dead, refused, refused, refused, refused]
    assert [job.decide(sight, 0.0, 5.0).move for sight in sights] == [NextMove.RESUBMIT] * 7 + [NextMove.REFUSED]


sights = st.none() | st.builds(
    JobSighting,
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
def test_in_any_history_pauses_are_bounded_and_only_the_dead_is_resubmitted(history, most, jitter):
    job, in_a_row = Resubmission(ResubmissionLimits(most, 600.0), lambda: jitter), 0
    was_dead = False
    for sight, silent, lived in history:
        found = job.decide(sight, silent, lived)
        if found.move is NextMove.RESUBMIT:
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
            assert found.move in (NextMove.WAIT, NextMove.GIVE_UP)


def test_pauses_grow_to_the_longest_and_spread():
    def pauses(jitter: float) -> list[float]:
        job = Resubmission(ResubmissionLimits(None), lambda: jitter)
        return [job.decide(JobSighting(None), 0.0, 1.0).pause for _ in range(2000)]

    low, high = pauses(0.0), pauses(0.999)
    assert low == sorted(low)
    assert low[-1] == LONGEST_PAUSE / 2
    assert LONGEST_PAUSE * 0.99 < high[-1] <= LONGEST_PAUSE
    assert all(a < b for a, b in zip(low, high, strict=True))
