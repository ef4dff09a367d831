"""A keeper's memory: a request that is made again gets no memory of its own."""

from __future__ import annotations

import os
from typing import Any

from raytf.checkpoint.memory_keeper import Keeper

MONITOR: Any = None


def test_a_request_whose_answer_was_late_holds_two_slots():
    keeper = Keeper(alone_seconds=3600)
    first = keeper.reserve("attempt", 100, MONITOR, "request")
    assert keeper.reserve("attempt", 100, MONITOR, "request") == first
    other = keeper.reserve("attempt", 100, MONITOR, "another")
    assert len({*first.paths, *other.paths}) == 4
    assert all(os.path.exists(path) for path in first.paths)


def test_memory_that_was_dropped_is_reserved_anew():
    keeper = Keeper(alone_seconds=3600)
    first = keeper.reserve("first", 100, MONITOR, "request")
    keeper.reserve("second", 100, MONITOR, "another")  # what the first attempt had is dropped
    again = keeper.reserve("first", 100, MONITOR, "request")
    assert all(os.path.exists(path) for path in again.paths)
    assert first.paths
