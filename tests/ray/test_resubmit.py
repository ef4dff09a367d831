"""`raytf submit` and a head that keeps its state: drivers and heads die, the run finishes as if nothing had been."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

import raytf
from raytf.testing import ElasticCluster, Job, environment
from tests.ray.conftest import MNIST_JOB, PATIENCE, manifests, result_of
from tests.ray.test_resume import attempts

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]
#: Steps of a run, and between two checkpoints.
STEPS, EVERY = 480, 40


def submission(url: str, folder: Path, run: str, *flags: object, options: tuple[str, ...] = ()) -> list[str]:
    """The command that submits the MNIST job from a folder with nothing else in it."""
    working = folder / "project"
    working.mkdir(exist_ok=True)
    shutil.copy(MNIST_JOB, working)
    job = ["python", "mnist.py", "--data", "digits", "--storage", str(folder), "--run", run]
    return [*RAYTF, "submit", url, "--working-dir", str(working), *options, "--", *job, *map(str, flags)]


def plain() -> dict[str, str]:
    return environment(RAY_AUTH_MODE="disabled")


def driver(folder: Path) -> int:
    """The process that owns a run."""
    return int(json.loads((folder / "lease.json").read_text())["pid"])


def weights(output: str) -> str:
    found = re.findall(r"^weights_sha256: (\w+)$", output, re.MULTILINE)
    assert len(found) == 1, output
    return found[0]


@pytest.mark.slow  # the same with a head that forgets its jobs
def test_a_run_outlives_a_head_without_state(tmp_path: Path):
    flags = ("--workers", 1, "--no-warm-workers", "--steps", STEPS, "--checkpoint-every-steps", EVERY)
    folder = tmp_path / "a"
    with ElasticCluster(head_cpus=1, dashboard=True) as cluster:
        command = submission(str(cluster.dashboard_url), tmp_path, "a", *flags)
        with Job(command, tmp_path / "log", plain()) as job:
            job.until(lambda: manifests(folder), PATIENCE)
            cluster.restart_head()
            output = job.wait(PATIENCE)
    assert "the head restarted and does not know the job; submitting it again in " in output
    assert len(re.findall(r"submitted as job raytf-a-\w+-[01]$", output, re.MULTILINE)) == 2
    assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, STEPS + 1))


@pytest.mark.slow  # tests/unit/cluster/test_resubmission.py has the decisions, test_submit.py the command
def test_a_run_outlives_its_driver_and_its_head(tmp_path: Path):
    # One worker, and none ready beside it: what is started again and again is slow to start.
    flags = ("--exact", "--workers", 1, "--no-warm-workers", "--steps", STEPS, "--checkpoint-every-steps", EVERY)
    folder = tmp_path / "a"

    with ElasticCluster(head_cpus=1, dashboard=True, keeps_state=True) as cluster:
        url = str(cluster.dashboard_url)
        with Job(submission(url, tmp_path, "a", *flags), tmp_path / "log", plain()) as job:
            job.until(lambda: manifests(folder), PATIENCE)
            began = time.monotonic()
            os.kill(driver(folder), signal.SIGKILL)
            first = manifests(folder)[-1]
            # Of the next driver's group: the workers of the one that was killed may live on for a moment, and save.
            job.until(lambda: len(attempts(folder)) == 2, PATIENCE)
            job.until(lambda: manifests(folder)[-1] > attempts(folder)[1]["from_step"], PATIENCE)
            print(f"a new checkpoint {time.monotonic() - began:.1f} s after the driver was killed")

            # With the driver, the workers and what they had in memory; and what started the driver.
            cluster.head.kill()
            began, second = time.monotonic(), manifests(folder)[-1]
            job.until(lambda: "the head does not answer" in job.output, PATIENCE)
            cluster.restart_head()
            print(f"the head was back {time.monotonic() - began:.1f} s after it was killed")
            job.until(lambda: len(attempts(folder)) == 3, PATIENCE)
            print(f"a group trains {time.monotonic() - began:.1f} s after the head was killed")
            output = job.wait(PATIENCE)
            print(f"finished {time.monotonic() - began:.1f} s after the head was killed")
        command = [sys.executable, MNIST_JOB, "--data", "digits", "--storage", tmp_path, "--run", "b", *flags]
        with Job([*map(str, command)], tmp_path / "undisturbed", environment(**cluster.env)) as job:
            undisturbed = job.wait(PATIENCE)

    assert "the job's driver was killed (SIGKILL); submitting it again in " in output
    # Of the second job's log the last lines may have died with the head.
    begun, again, last = (attempt["from_step"] for attempt in attempts(folder))
    assert 0 == begun < first <= again <= last == second < STEPS
    assert f"restored step {second} from checkpoint" in output
    assert "the job died with its head, though Ray still reports RUNNING; submitting it again in " in output
    assert len(re.findall(r"submitted as job raytf-a-\w+-[012]$", output, re.MULTILINE)) == 3
    assert result_of(folder)["steps"] == STEPS
    assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, STEPS + 1))
    assert weights(output) == weights(undisturbed)
