"""Steps per second that do not jump, and the time that is left."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.runs.status import Moment, Pace


def paced(*moments: tuple[int, float, bool] | tuple[int, float, bool, float]) -> Pace:
    pace = Pace(15.0)
    for moment in moments:
        pace.see(Moment(*moment))
    return pace


#: What is left of a sum after four seconds.
FADED = math.exp(-4 / 15)
#: A start of 20 s, the end of the first call, and 40 steps in 4 s.
BEGIN = ((0, 0.0, False), (1, 20.0, True), (41, 24.0, True))


@pytest.mark.parametrize(
    ("moments", "rate"),
    [
        ((), 0.0),
        (BEGIN[:1], 0.0),
        (BEGIN[:2], 0.0),  # the first call, which traces the step
        (BEGIN, 10.0),
        ((*BEGIN, (41, 24.0, False), (41, 90.0, True)), 10.0),  # a validation
        ((*BEGIN, (51, 30.0, True, 5.0)), 10.0),  # a save that took 5 s
        ((*BEGIN, (61, 26.0, True)), 10.0),
        ((*BEGIN, (5, 28.0, True)), 40 / 4 * FADED / (1 + FADED)),  # a run that goes back has made no step
    ],
)
def test_the_pace_is_that_of_steps(moments, rate):
    assert paced(*moments).steps_per_second == pytest.approx(rate)


@pytest.mark.parametrize(
    ("moments", "left"),
    [
        (BEGIN[:2], None),
        ((*BEGIN[:2], (2, 20.5, True)), None),  # a step in half a second tells too little
        ((*BEGIN[:2], (2, 25.0, True)), None),  # and so does a step that took long
        (BEGIN, 10.0),
        ((*BEGIN, (41, 24.0, False), (41, 28.0, True)), 20.0),  # validation takes as long as training
        ((*BEGIN, (41, 28.0, True, 4.0)), 20.0),  # and so does a save
    ],
)
def test_the_time_that_is_left_is_told_once_the_pace_is_known(moments, left):
    assert paced(*moments).seconds_left(100) == pytest.approx(left)


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 100)), min_size=1))
def test_it_lies_between_the_slowest_and_the_fastest_of_what_was_seen(added):
    pace, step, now = Pace(), 0, 0.0
    pace.see(Moment(step, now, True))
    for steps, seconds in added:
        step, now = step + steps, now + seconds
        pace.see(Moment(step, now, True))
    rates = [steps / seconds for steps, seconds in added]
    assert min(rates) - 1e-6 <= pace.steps_per_second <= max(rates) * (1 + 1e-6) + 1e-6
