"""A worker that makes no progress is named with its stacks, and the run goes on without a word from the user."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from raytf.testing import ElasticCluster, Job, environment
from tests.ray.conftest import result_of
from tests.ray.test_resume import attempts

STUCK = Path(__file__).parent / "jobs" / "stuck.py"
#: The loop in stacks, as py-spy shows a frame, or as a process itself does.
TRAINING = re.compile(r"train \(raytf/training/loop\.py|loop\.py\", line \d+ in train\b")


def flags(tmp_path: Path, *more: object) -> list[object]:
    fixed = ["--storage", tmp_path, "--run", "a", "--global-batch-size", 64, "--steps-per-call", 1]
    fixed += ["--no-warm-workers"]
    return [*fixed, "--checkpoint-every-seconds", 1, "--status-file", tmp_path / "status.json", *more]


#: Long enough that a worker joins before the end.
EPOCHS = 120


def test_stuck_data_and_a_stopped_worker_are_named_but_no_slow_callback(start, tmp_path: Path):
    folder = tmp_path / "a"
    # A callback of 12 s at the end of the first epoch, with 10 s for what hangs.
    slow = ("--slow-callback", 12, "--slow-epochs", 1)
    (pause := tmp_path / "pause").touch()
    stuck = ("--stuck", "data", "--mark", tmp_path / "mark", "--pause-while", pause)
    run = start(STUCK, *flags(tmp_path, "--epochs", EPOCHS, "--hang-seconds", 10, *stuck, *slow))
    run.until((tmp_path / "mark").exists)
    began = time.monotonic()
    run.until(lambda: "made no progress" in run.output)
    named = time.monotonic() - began
    assert "epoch 2: " in run.output.partition("made no progress")[0]
    # The other one goes on alone, and another one joins it.
    run.until(lambda: "2 workers continue" in run.output)
    run.until(lambda: run.output.partition("the others continue")[2].count("epoch ") > 3)
    max(run.processes("RayTrainWorker"), key=lambda p: p.create_time()).suspend()
    began = time.monotonic()
    run.until(lambda: run.output.count("made no progress") == 2)
    stopped = time.monotonic() - began
    print(f"stuck data was named after {named:.1f} s, a stopped worker after {stopped:.1f} s")
    pause.unlink()
    output = run.wait()
    first, second = [line for line in output.splitlines() if "made no progress" in line]
    assert first.startswith("rank 1 on node ")
    assert first.endswith("stuck waiting for data")
    assert "StuckSource.take (stuck.py" in output
    assert second.endswith("frozen (its process was stopped)")
    assert output.count("a worker hung (rank ") == 2
    assert stopped < 30
    written = sorted((folder / "hangs").iterdir())
    assert len(written) == 2
    stuck, frozen = (file.read_text() for file in written)
    assert [len(TRAINING.findall(part)) for part in stuck.split("== rank ")[1:]] == [1, 1], stuck
    # The stopped one alone: the other may have left the loop by then, told by its heartbeats.
    rank = second.split()[1]
    assert TRAINING.search(frozen.partition(f"== rank {rank}\n")[2].partition("== rank ")[0]), frozen
    result = result_of(folder)
    assert result["regroups"] == result["restarts"] >= 3
    assert result["steps"] == EPOCHS * 10


@pytest.mark.slow
def test_a_stopped_worker_of_another_node_and_a_frozen_node_are_left_out(tmp_path: Path):
    status = tmp_path / "status.json"
    (pause := tmp_path / "pause").touch()
    wanted = ("--epochs", 100, "--workers", "1:2", "--pause-while", pause)
    command = [sys.executable, str(STUCK), *map(str, flags(tmp_path, *wanted))]
    with ElasticCluster(nodes=2) as cluster:
        job = Job(command, tmp_path / "log", environment(**cluster.env), status_file=status)
        job.until(lambda: (job.step or 0) >= 60)
        began = time.monotonic()
        (worker,) = cluster.nodes[-1].workers()
        worker.suspend()
        job.until(lambda: "1 worker continues" in job.output)
        print(f"the other one went on {time.monotonic() - began:.1f} s after a worker of another node was stopped")
        assert time.monotonic() - began < 30
        job.until(lambda: not worker.is_running())
        job.until(lambda: "2 workers continue" in job.output)
        began = time.monotonic()
        for process in cluster.nodes[-1].processes():
            process.suspend()
        job.until(lambda: job.output.count("1 worker continues") == 2)
        print(f"the other one went on {time.monotonic() - began:.1f} s after a node was frozen")
        assert time.monotonic() - began < 30
        pause.unlink()
        job.wait()
        job.close()
    assert [a["world_size"] for a in attempts(tmp_path / "a")] == [2, 1, 2, 1]
    assert result_of(tmp_path / "a")["regroups"] == 3


@pytest.mark.slow
def test_five_minutes_without_faults_are_left_alone(undisturbed: Job):
    output = undisturbed.wait(540)
    assert " 1 start: 0 alarms" in output
