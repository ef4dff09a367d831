"""Steps per second that do not jump."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytf.runs.pace import Pace


def test_an_even_run_has_its_pace_at_once_and_after_a_pause_again():
    pace = Pace(15.0)
    assert pace.add(0, 1.0) == 0.0
    pace = Pace(15.0)
    assert [round(pace.add(5, 0.5), 6) for _ in range(10)] == [10.0] * 10
    paused = pace.add(0, 5.0)
    assert 0 < paused < 10
    assert round([pace.add(5, 0.5) for _ in range(400)][-1], 3) == 10.0


def test_a_run_that_goes_back_has_made_no_step():
    pace = Pace()
    pace.add(10, 1.0)
    assert 0 < pace.add(-5, 1.0) < 10


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.01, 100)), min_size=1))
def test_it_lies_between_the_slowest_and_the_fastest_of_what_was_added(added):
    pace, rates = Pace(), [steps / seconds for steps, seconds in added]
    for steps, seconds in added:
        found = pace.add(steps, seconds)
    assert min(rates) - 1e-6 <= found <= max(rates) * (1 + 1e-9)
