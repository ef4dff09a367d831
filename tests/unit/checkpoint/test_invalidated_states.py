"""States that count no more."""

from __future__ import annotations

from raytf.checkpoint import invalidated_states, manifest
from raytf.checkpoint.naming import name_of
from raytf.storage.storage import Storage

FIRST, SECOND = "20260101T000000.000-aaaaaa", "20260101T000001.000-bbbbbb"


def test_states_after_a_step_of_the_attempts_until_then_are_void(tmp_path):
    run = Storage(str(tmp_path / "run"))
    assert invalidated_states.read(run) == invalidated_states.VoidStates()
    assert invalidated_states.sweep(run, invalidated_states.read(run)) == []
    for step, attempt in ((20, FIRST), (40, FIRST), (60, SECOND)):
        manifest.write(run, name_of(step, attempt), step, [], {})
    invalidated_states.write(run, invalidated_states.read(run).and_after(30, [FIRST]))
    states = invalidated_states.read(run)
    assert [states.holds(step, FIRST) for step in (30, 31)] == [False, True]
    assert not states.holds(60, SECOND)
    assert invalidated_states.sweep(run, states) == [name_of(40, FIRST)]
    assert manifest.list_complete(run) == [name_of(60, SECOND), name_of(20, FIRST)]
    # Another one adds to it.
    invalidated_states.write(run, states.and_after(0, [FIRST, SECOND]))
    assert invalidated_states.sweep(run, invalidated_states.read(run)) == [name_of(60, SECOND), name_of(20, FIRST)]
