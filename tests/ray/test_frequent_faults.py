"""Faults more frequent than checkpoints, and then the end of everything: at most a cadence of steps is lost."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import time
from pathlib import Path

import psutil
import pytest

from raytf.testing import Job, environment
from raytf.testing.processes import WORKER
from raytf.training.saving.checkpoint_policy import DEFAULT_EVERY_SECONDS
from tests.ray.conftest import PATIENCE, manifests, result_of
from tests.stress.law import schedules as law

#: After each step of rank 0, so that no more steps than this allows are made in a cadence.
PAUSE_SECONDS = 0.05
KEEPER = "Keeper"
GOING_ON = re.compile("restarted in |; the others continue")


def command(folder: Path, run: str, pause: float, epochs: int) -> list[str]:
    """The law's job with raytf's defaults, but for bits that can be compared."""
    flags = ["--data", "digits", "--model", "batchnorm", "--pause", str(pause), "--epochs", str(epochs), "--exact"]
    flags += ["--storage", str(folder), "--run", run, "--status-file", str(folder / f"{run}.json")]
    return [sys.executable, str(law.JOB), *flags]


def start(folder: Path, run: str, pause: float, epochs: int, log: str) -> Job:
    status = folder / f"{run}.json"
    return Job(command(folder, run, pause, epochs), folder / log, environment(), status_file=status)


def trains(job: Job, losses: int) -> bool:
    """Whether a group makes steps after workers were lost so many times: the others go on, or all start again."""
    status = job.status or {}
    return len(GOING_ON.findall(job.output)) >= losses and status.get("phase") == "training"


def kill_workers(job: Job, draw: random.Random, most: int) -> int:
    """Kill so many of those that there are; whether one died."""
    workers, died = job.processes(WORKER), 0
    for worker in draw.sample(workers, min(most, len(workers))):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.kill()
            died = 1
    return died


def kill_the_keeper(job: Job) -> None:
    """The status says that nothing is in memory, and then that the state is there again."""
    job.until(lambda: (job.status or {}).get("snapshot"))
    (keeper,) = job.processes(KEEPER)
    keeper.kill()
    killed = time.monotonic()
    job.until(lambda: (job.status or {}).get("phase") == "training" and (job.status or {})["snapshot"] is None)
    print(f"the status told of a dead keeper after {time.monotonic() - killed:.1f} s")
    at = job.step
    job.until(lambda: ((job.status or {}).get("snapshot") or 0) > at)
    print(f"the state was in memory again {time.monotonic() - killed:.1f} s after a keeper's death")


def last_step(folder: Path) -> int:
    """That rank 0 has made, by its callback."""
    lines = (folder / "files" / "executed.txt").read_text().split()
    return int(next(line for line in reversed(lines) if line.isdigit()))


def disturb(folder: Path, epochs: int, faults: int, every: float, keeper_before: int | None = None) -> None:
    """A run with a fault every this many seconds, all of which is killed then; nothing but a cadence may be lost.

    Args:
        keeper_before: the number of the worker's death before which the keeper dies.
    """
    draw, killed = random.Random(15), 0
    with start(folder, "disturbed", PAUSE_SECONDS, epochs, "disturbed.log") as job:
        job.until(lambda: trains(job, 0))
        began = time.monotonic()
        job.until(lambda: manifests(folder / "disturbed"))
        print(f"the first checkpoint was there {time.monotonic() - began:.1f} s after the first steps")
        for n in range(faults):
            job.until(lambda n=n: time.monotonic() >= began + (n + 1) * every)
            if n == keeper_before:
                job.until(lambda n=n: trains(job, n))
                kill_the_keeper(job)
                snapshot, restored = (job.status or {})["snapshot"], job.output.count("restored step")
                killed += kill_workers(job, draw, 99)  # who is left would go on with the state
                job.until(lambda r=restored: job.output.count("restored step") > r)
                step, place = re.findall(r"restored step (\d+) from (\w+)", job.output)[-1]
                assert place == "memory"
                assert int(step) >= snapshot
            else:
                killed += kill_workers(job, draw, 1)
        job.until(lambda: time.monotonic() >= began + (faults + 1) * every)
        reached = last_step(folder / "disturbed")
        job.kill()
        output = job.output
    saved = manifests(folder / "disturbed")[-1]
    from_memory = len(re.findall(r"restored step \d+ from memory", output))
    print(
        f"{killed} of {faults} faults met a worker in {faults * every:.0f} s, "
        f"{output.count(' continue after ') + output.count(' continues after ')} times others went on or were joined, "
        f"{output.count('restarted in ')} restarts, {from_memory} from memory; "
        f"step {reached} was reached, {saved} is on storage, {reached - saved} lost"
    )
    assert reached - saved <= DEFAULT_EVERY_SECONDS / PAUSE_SECONDS
    # The next kill came `every` seconds after the last: a young group saves more often than the cadence.
    assert reached - saved <= max(every, 10.0) / PAUSE_SECONDS

    with start(folder, "disturbed", 0.0, epochs, "resumed.log") as job:
        output = job.wait(3 * PATIENCE)
    assert int(re.findall(r"restored step (\d+)", output)[0]) >= saved
    with start(folder, "reference", 0.0, epochs, "reference.log") as job:
        job.wait(3 * PATIENCE)
    disturbed, reference = (result_of(folder / run) for run in ("disturbed", "reference"))
    assert disturbed["weights_sha256"] == reference["weights_sha256"]


@pytest.mark.slow
def test_three_faults_a_dead_keeper_and_a_full_stop_cost_under_a_cadence(tmp_path: Path):
    disturb(tmp_path, epochs=60, faults=3, every=12.0, keeper_before=1)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_fault_every_20_seconds_and_a_full_stop_cost_under_a_cadence(tmp_path: Path):
    disturb(tmp_path, epochs=360, faults=15, every=20.0)
