"""With which faults of a schedule all died that had the state: a table."""

from __future__ import annotations

import pytest

from raytf.testing import Fault, Injection, Kind
from tests.stress.law.schedules import whole_losses


@pytest.mark.parametrize(
    ("faults", "whole"),
    [
        ([(Kind.WORKER, 2, 0)], []),
        ([(Kind.WORKER, 1, 0)], [0]),
        ([(Kind.RAYLET, 1, 0), (Kind.PAUSE, 1, 30)], [0]),
        ([(Kind.PAUSE, 1, 0), (Kind.ADD, 1, 9)], []),  # who is stopped still has it
        ([(Kind.DRIVER, 4, 0), (Kind.CONTROLLER, 4, 30)], [0, 1]),
        ([(Kind.NODE, 2, 0), (Kind.WORKER, 2, 1)], [1]),  # the status file did not know
        ([(Kind.NODE, 2, 0), (Kind.WORKER, 2, 30)], []),
        ([(Kind.NODE, 3, 0), (Kind.WORKER, 3, 1)], []),
    ],
)
def test_those_that_take_the_last_worker_or_end_all(faults: list[tuple[Kind, int, float]], whole: list[int]):
    injections = [Injection(Fault(9, kind), "done", 9, workers, seconds) for kind, workers, seconds in faults]
    assert whole_losses(injections) == [injections[number] for number in whole]


def test_a_fault_that_was_not_injected_takes_nobody():
    assert whole_losses([Injection(Fault(9, Kind.WORKER), "skipped: there was no worker", 9, 1, 0.0)]) == []
