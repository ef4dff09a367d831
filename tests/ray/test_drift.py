"""A bit of one worker's weights flips: the ranks find out, and the run goes back to where they agreed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import Job
from tests.ray.conftest import ROOT, result_of

DRIFTING = ROOT / "tests" / "ray" / "jobs" / "drifting.py"


@pytest.mark.slow
def test_two_workers_that_drift_apart_go_back_to_where_they_agreed(start: Callable[..., Job], tmp_path: Path):
    flags = ("--workers", 2, "--steps", 600, "--global-batch-size", 32, "--snapshot-every-steps", 10)
    flags += ("--storage", tmp_path, "--no-warm-workers")
    output = start(DRIFTING, *flags, "--run", "a", "--mark", tmp_path / "flipped").wait()
    assert (tmp_path / "flipped").exists()
    assert "no majority shows which are right; the run goes back to the last agreed step; starting again" in output
    assert "restored step" in output
    events = ledger.read(Storage(str(tmp_path / "a")))
    [drift] = [event for event in events if event["kind"] == "replicas"]
    [fault] = [event for event in events if event["kind"] == "fault"]
    assert (drift["ranks"], drift["fixed"], fault["cause"], fault["retry"]) == ([0, 1], False, "replicas", True)
    [again] = [event for event in events if event["kind"] == "attempt"][1:]
    assert again["from_step"] <= (drift["from_step"] or 0) < drift["of_step"], "the copy of that step was not taken"
    start(DRIFTING, *flags, "--run", "b").wait()
    assert result_of(tmp_path / "a")["weights_sha256"] == result_of(tmp_path / "b")["weights_sha256"]
