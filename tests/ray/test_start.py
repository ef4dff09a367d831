"""How runs start on a Ray of their own: nothing runs that nobody asked for, and a second run finds what the first one
left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytf.runs import ledger
from raytf.storage.storage import Storage

TWICE = Path(__file__).parent / "jobs" / "twice.py"
#: Of a worker that finds TensorFlow loaded; to import it takes more than 2, with nothing beside it.
LOADED_SECONDS = 1.0


def phases(run: Path) -> dict[str, float]:
    """Seconds of each phase of a run's start."""
    (attempt,) = [event for event in ledger.read(Storage(str(run))) if event["kind"] == "attempt"]
    return attempt["phases"]


@pytest.mark.slow  # test_notebook.py has several runs of a process
def test_two_runs_of_one_process(start, tmp_path: Path):
    output = start(TWICE, tmp_path).wait()
    (told,) = [line.removeprefix("TOLD ") for line in output.splitlines() if line.startswith("TOLD ")]
    is_same_ray, is_left, commands = json.loads(told)
    assert is_same_ray
    assert is_left, "the program's own Ray was changed"
    for command in commands:
        assert any("/raylet" in line for line in command)
        for helper in ("dashboard/dashboard.py", "autoscaler/_private/monitor.py", "log_monitor.py", "_Autoscaling"):
            assert not [line for line in command if helper in line]
    # The first one's process was started beside the controller, the second one's during the first run.
    for run in ("first", "second"):
        assert phases(tmp_path / run)["tensorflow"] < LOADED_SECONDS
