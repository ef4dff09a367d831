"""A driver whose own Ray dies leaves with one line and exit code 75; the same command goes on, to the same end.

And what such a Ray is, and leaves when it is gone: nobody outside reaches it, no process and no file stays.
"""

from __future__ import annotations

import re
import signal
import stat
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from raytf.cluster.orphaned_processes import MARK, marked
from raytf.testing import Job
from raytf.testing.processes import WORKER, wait_until
from tests.ray.conftest import EVERYTHING, result_of

FLAGS = ("--global-batch-size", 16, "--epochs", 16, "--exact", "--patience", 50, "--run", "a")
#: Generous: 5 s and 10 s are promised, on two cores that many tests may share.
LEFT_SECONDS, GONE_SECONDS = 20.0, 30.0


def process(run: Job, name: str) -> psutil.Process:
    (found,) = [p for p in run.processes() if p.name() == name]
    return found


def mark_of(run: Job) -> str:
    """The mark of a run's own Ray."""
    return process(run, "raylet").environ()[MARK]


def trains_beyond(run: Job, status: Path, steps: int) -> None:
    def step() -> int:
        found = re.search(r'"step": (\d+)', status.read_text()) if status.exists() else None
        return int(found[1]) if found else 0

    run.until(lambda: step() > steps)


def ends_with_one_line(run: Job, victim: psutil.Process, what: str) -> None:
    said = run.output
    victim.kill()
    began = time.monotonic()
    assert run.ended(120) == 75, run.output
    assert time.monotonic() - began < LEFT_SECONDS, run.output
    told = run.output[len(said) :]
    assert f"error: the {what} of this driver's Ray (pid {victim.pid}) has died; " in told
    assert "The same command continues where this one stopped.\n" in told
    for word in ("raylet.cc", "gcs_", "Stack trace", "(raylet)", "Traceback", "core dump"):
        assert word not in told


def listening_outside(pids: list[int]) -> dict[str, str]:
    """Addresses but the loopback's on which processes listen -> who they are."""
    shown = subprocess.run(["ss", "-ltnpH"], check=True, capture_output=True, text=True).stdout
    found = {}
    for line in shown.splitlines():
        address, who = line.split()[3], line.rpartition("users:")[2]
        pid = re.search(r"pid=(\d+)", who)
        if pid and int(pid[1]) in pids and not re.match(r"127\.|\[::1\]|\[::ffff:127\.", address):
            found[address] = who
    return found


@pytest.mark.slow  # test_lost_gcs.py kills GCS and raylet, test_endings.py a driver
def test_a_run_whose_own_ray_is_killed_again_and_again(start, tmp_path: Path):
    status, home, temporary = tmp_path / "status", tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    # Ray's sockets need a short path.
    env = {"HOME": str(home), "TMPDIR": str(temporary), "RAY_TMPDIR": "/tmp"}
    flags = (*FLAGS, "--storage", tmp_path / "runs", "--status-file", status)

    # The raylet: what it takes along is gone, a worker that is stopped too.
    run = start(EVERYTHING, *flags, "--checkpoint-every-steps", 100, **env)
    trains_beyond(run, status, 200)
    mark = mark_of(run)
    workers = [p.pid for p in run.processes(WORKER)]
    assert len(workers) == 2
    assert listening_outside([run.process.pid, *marked(mark)]) == {}
    token = home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text()) == 64
    psutil.Process(workers[0]).send_signal(signal.SIGSTOP)
    ends_with_one_line(run, process(run, "raylet"), "raylet")
    wait_until(lambda: not marked(mark), "nothing of that Ray is left", GONE_SECONDS)

    # The GCS: the workers live, and save first.
    cold = ("--checkpoint-every-steps", 5000, "--no-warm-workers")
    run = start(EVERYTHING, *flags, *cold, **env)
    run.until(lambda: "restored step" in run.output)
    restored = int(re.findall(r"restored step (\d+)", run.output)[-1])
    trains_beyond(run, status, restored + 100)
    mark = mark_of(run)
    ends_with_one_line(run, process(run, "gcs_server"), "GCS")
    assert "the workers saved first" in run.output
    wait_until(lambda: not marked(mark), "nothing of that Ray is left", GONE_SECONDS)

    # The driver: nothing outlives it.
    run = start(EVERYTHING, *flags, *cold, **env)
    run.until(lambda: "restored step" in run.output)
    assert int(re.findall(r"restored step (\d+)", run.output)[-1]) > restored + 100
    run.until(lambda: len(run.processes(WORKER)) == 2)
    mark = mark_of(run)
    run.processes(WORKER)[0].send_signal(signal.SIGSTOP)
    run.process.kill()
    wait_until(lambda: not marked(mark), "nothing of that Ray is left", GONE_SECONDS)

    start(EVERYTHING, *flags, "--no-warm-workers", **env).wait()
    alone = ("--workers", 1, "--no-warm-workers", "--storage", tmp_path / "undisturbed")
    start(EVERYTHING, *FLAGS, *alone, **env).wait()
    digest = result_of(tmp_path / "undisturbed" / "a")["weights_sha256"]
    assert result_of(tmp_path / "runs" / "a")["weights_sha256"] == digest
    wait_until(lambda: not list(temporary.iterdir()), "no temporary file is left", GONE_SECONDS)
