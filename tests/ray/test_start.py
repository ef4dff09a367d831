"""How runs start on a Ray of their own: nothing runs that nobody asked for, and a second run finds what the first one
left."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing.processes import wait_until
from tests.ray.conftest import environment

TWICE = Path(__file__).parent / "jobs" / "twice.py"
#: Of a worker that finds TensorFlow loaded; to import it takes more than 2, with nothing beside it.
LOADED_SECONDS = 1.0
#: Starts a Ray of its own, and says where its session is.
DRIVER = """
from raytf._ray import worker_process
from raytf.cluster.connect import reached
with reached(lambda: 1, verbose=False):
    print(worker_process.this_node().get_session_dir_path())
"""


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


def test_the_session_of_a_ray_of_ones_own_goes_with_it():
    with tempfile.TemporaryDirectory(prefix="rt-", dir="/tmp") as folder:  # Ray's sockets need a short path
        other = Path(folder) / "ray" / "session_2026-01-01_00-00-00_000000_1"
        other.mkdir(parents=True)
        command = [sys.executable, "-c", DRIVER]
        done = subprocess.run(command, env=environment(RAY_TMPDIR=folder), capture_output=True, text=True, timeout=300)
        session = Path(done.stdout.strip())
        assert session.parent == other.parent, done.stderr
        wait_until(lambda: list(other.parent.iterdir()) == [other], "only another Ray's session is left", 60)
