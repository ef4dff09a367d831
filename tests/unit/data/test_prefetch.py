"""Calls gathered ahead: in order, without a gap, and never more than may be."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from raytf.data import ArraySource
from raytf.data.pipeline import DEPTH, Pipeline, Prefetch
from raytf.data.plan import StepPlan

PLAN = StepPlan(40, 4, 2)


def made(pipeline: Pipeline, start: int = 0) -> Prefetch:
    return Prefetch(pipeline, start, lambda step, stop: PLAN.call_end(step, 3, stop))


def pipeline() -> Pipeline:
    return Pipeline(ArraySource(np.arange(40.0).reshape(40, 1), np.arange(40)), PLAN, range(2), seed=0)


def test_calls_come_in_order_up_to_the_step_that_was_asked_for():
    with closing(pipeline()) as pipe:
        calls, taken = made(pipe), []
        while calls.fill(10):
            call = calls.take()
            taken.append((call.start, call.stop))
    assert taken == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert not calls


def test_as_many_are_ahead_as_may_be_and_a_later_stop_goes_on():
    with closing(pipeline()) as pipe:
        calls = made(pipe, 1)
        assert calls.fill(10)
        assert calls.asked == 1 + 3 * DEPTH
        first = calls.take()
        assert (first.start, first.stop) == (1, 4)
        assert calls.fill(8)
        assert calls.asked == 8
        assert [calls.take().stop for _ in range(DEPTH)] == [7, 8]
        assert not calls.fill(8)
        assert calls.fill(9)
