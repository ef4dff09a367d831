"""A GCS of a cluster that keeps its state is waited for, a raylet is not: the driver leaves with exit code 75."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raytf.testing import environment
from raytf.testing.processes import Session, free_port
from tests.ray.conftest import EVERYTHING, PATIENCE, manifests

RAY = [sys.executable, "-m", "ray.scripts.scripts"]


class Head:
    """A head without `--block`, which would end with its GCS."""

    def __init__(self, folder: Path):
        port = free_port()
        self.env = {"RAY_ADDRESS": f"127.0.0.1:{port}", "RAY_AUTH_MODE": "disabled"}
        kept = environment(RAY_AUTH_MODE="disabled", RAY_gcs_storage="rocksdb", RAY_gcs_storage_path=f"{folder}/state")
        command = [*RAY, "start", "--head", f"--port={port}", "--num-cpus=4", f"--temp-dir={folder}/ray"]
        command += ["--include-dashboard=false", "--min-worker-port=0", "--max-worker-port=0"]
        command += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
        command += ["--object-store-memory=150000000"]
        with (folder / "log").open("w") as log:
            start = subprocess.Popen(command, env=kept, stdout=log, stderr=log, start_new_session=True)
        self._session, self._again = Session(start.pid), None
        assert start.wait(PATIENCE) == 0, (folder / "log").read_text()

    def process(self, name: str) -> psutil.Process:
        (found,) = [p for p in self._session.members() if p.name() == name]
        return found

    def restart_gcs(self, seconds: float) -> None:
        """Kill it, and start it again with the same command after so long."""
        gcs = self.process("gcs_server")
        command, env = gcs.cmdline(), gcs.environ()
        gcs.kill()
        with contextlib.suppress(psutil.TimeoutExpired):
            gcs.wait(seconds)
        threadless = ["sh", "-c", 'sleep "$0"; exec "$@"', str(seconds), *command]
        self._again = subprocess.Popen(threadless, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def close(self) -> None:
        if self._again is not None:
            self._again.kill()
            self._again.wait()
        self._session.end()


@pytest.fixture
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="raytf-", dir="/tmp"))
    started = None
    try:
        started = Head(folder)
        yield started
    finally:
        if started is not None:
            started.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow  # tests/unit/cluster/test_ray_watch.py has the signs; test_each_process.py kills a GCS
def test_a_gcs_that_comes_back(start, head: Head, tmp_path: Path):
    flags = ("--global-batch-size", 16, "--epochs", 400, "--patience", 500, "--checkpoint-every-steps", 100)
    run = start(EVERYTHING, *flags, "--no-warm-workers", "--storage", tmp_path, "--run", "a", **head.env)
    run.until(lambda: manifests(tmp_path / "a")[-1:] >= [100])
    head.restart_gcs(5.0)
    there = manifests(tmp_path / "a")[-1]
    run.until(lambda: manifests(tmp_path / "a")[-1] >= there + 400)
    assert "error" not in run.output
    assert "starting again" not in run.output

    # Its raylet, on the other hand, takes the driver along.
    raylet = head.process("raylet")
    raylet.kill()
    assert run.ended(120) == 75, run.output
    assert f"error: the raylet of this driver's node (pid {raylet.pid}) has died; " in run.output
    assert run.output.endswith("The same command continues where this one stopped.\n")
    assert "(raylet)" not in run.output
