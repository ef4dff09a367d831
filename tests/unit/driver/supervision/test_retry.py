"""Which failures get another attempt, and when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.supervision.failures import Cause, Failure
from raytf.driver.supervision.retry import FRUITLESS_CONTROLLERS, FRUITLESS_FAILURES, LONGEST_PAUSE, Retry

DIED = Failure(Cause.WORKER_DIED, "1 worker process died")
HUNG = Failure(Cause.HANG, "rank 1 hung")


def error(step: int | None = 100, text: str = "KeyError: 'a'", final: bool = False) -> Failure:
    return Failure(Cause.ERROR, text, text, step, final)


def test_what_cannot_be_transient_stops_at_once():
    assert not Retry().decide(error(final=True), 500).retry


def test_an_error_before_the_first_step_stops_at_once():
    assert not Retry().decide(error(None), 0).retry


def test_the_same_error_at_the_same_step_twice_stops():
    retry = Retry()
    first = retry.decide(error(), 100)
    assert first.retry
    assert "once more" in first.why
    second = retry.decide(error(), 100)
    assert not second.retry
    assert "the same as before at the same step" in second.why


@pytest.mark.parametrize(
    "again",
    [
        error(112),  # seen at the end of a call of several steps
        error(100, "KeyError: 'a'"),
    ],
)
def test_the_same_error_is_known_though_the_call_ended_elsewhere(again):
    retry = Retry()
    assert retry.decide(error(), 100).retry
    assert not retry.decide(again, 112).retry


def test_numbers_in_its_text_do_not_make_it_another_one():
    retry = Retry()
    assert retry.decide(error(100, "RuntimeError: failed after 12.5 s in /tmp/x81"), 100).retry
    assert not retry.decide(error(100, "RuntimeError: failed after 13.1 s in /tmp/x94"), 100).retry


@pytest.mark.parametrize("other", [error(600), error(100, "OSError: no route")])
def test_another_error_or_another_step_is_tried_once_more_too(other):
    retry = Retry()
    assert retry.decide(error(), 100).retry
    assert retry.decide(other, 600).retry


def test_different_errors_without_a_new_step_are_tried_two_times():
    retry = Retry()
    assert [retry.decide(error(text=f"E{c}"), 100).retry for c in "abc"] == [True, True, False]


def test_infrastructure_backs_off_while_there_is_no_new_step():
    retry = Retry()
    pauses = [retry.decide(DIED, 100).pause for _ in range(8)]
    assert pauses == [0, 1, 2, 4, 8, 10, 10, 10]
    assert retry.decide(DIED, 101).pause == 0
    assert retry.decide(DIED, 101).pause == 1


def test_deaths_are_retried_for_ever_and_others_are_not_without_a_new_step():
    retry = Retry()
    assert all(retry.decide(DIED, 0).retry for _ in range(100))
    retry = Retry()
    assert [retry.decide(HUNG, 7).retry for _ in range(FRUITLESS_FAILURES + 1)] == [True] * FRUITLESS_FAILURES + [False]
    retry = Retry()
    assert all(retry.decide(HUNG, step).retry for step in range(100))


def test_few_controllers_of_ray_train_may_die_without_a_new_step():
    died = Failure(Cause.CONTROLLER_DIED, "Ray Train's controller died")
    retry = Retry()
    verdicts = [retry.decide(died, 7) for _ in range(FRUITLESS_CONTROLLERS + 1)]
    assert [verdict.retry for verdict in verdicts] == [True] * FRUITLESS_CONTROLLERS + [False]
    assert verdicts[0].why == "Ray Train's controller died; starting another one"
    assert all(retry.decide(died, step).retry for step in range(8, 100))


def test_waiting_for_a_place_is_no_failure():
    retry, wait = Retry(), Failure(Cause.START, "no place", is_wait=True)
    assert all(retry.decide(wait, 7).retry for _ in range(100))
    # It does not make the failures between two waits forgotten.
    retry = Retry()
    tried = [retry.decide(failure, 7).retry for _ in range(FRUITLESS_FAILURES + 1) for failure in (HUNG, wait)]
    assert tried[::2] == [True] * FRUITLESS_FAILURES + [False]


def test_the_two_kinds_are_told_apart_for_the_user():
    assert Retry().decide(DIED, 5).why == "1 worker process died; starting again"
    assert "the job's own code failed" in Retry().decide(error(), 5).why


@given(
    st.lists(
        st.tuples(st.sampled_from([DIED, HUNG, Failure(Cause.START, "no"), error(), error(3, "B")]), st.integers(0, 50))
    )
)
def test_pauses_are_bounded_and_nothing_final_is_tried(history):
    retry, reached = Retry(), 0
    for failure, more in history:
        reached += more
        decision = retry.decide(failure, reached)
        assert 0 <= decision.pause <= LONGEST_PAUSE
        assert decision.why.startswith(failure.text) or failure.text in decision.why
        if failure.cause is Cause.ERROR:
            assert decision.pause == 0
    assert not retry.decide(error(final=True), reached + 1).retry
