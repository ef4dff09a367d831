"""Runs on a cluster whose nodes come and go: they grow, shrink and move, and no step that was saved is done again."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raytf
from raytf.testing import ElasticCluster, Fault, FaultPlan, Job, Kind
from raytf.testing.processes import environment, wait_until
from tests.ray.conftest import MNIST_JOB, ROOT, result_of
from tests.ray.test_resume import attempts
from tests.stress.law import schedules as law

PATIENCE = 300.0
#: Long enough for two nodes that join, on a loaded machine.
EPOCHS = 80
#: As long as it is there, the job sleeps after each step.
PAUSE = "pause"


@pytest.fixture
def elastic() -> Iterator[ElasticCluster]:
    with ElasticCluster(nodes=1) as cluster:
        yield cluster


@pytest.fixture
def run(elastic: ElasticCluster, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """run(*flags): the law's job on the cluster, in the folder `a`; slow as long as there is the file `pause`."""
    jobs: list[Job] = []

    def begin(*flags: object) -> Job:
        status = tmp_path / "status.json"
        command = [
            sys.executable,
            str(law.JOB),
            "--data",
            "digits",
            "--model",
            "batchnorm",
            "--global-batch-size",
            "64",
        ]
        (tmp_path / PAUSE).touch()
        command += ["--pause", "0.1", "--pause-while", str(tmp_path / PAUSE), "--storage", str(tmp_path), "--run", "a"]
        command += ["--status-file", str(status)]
        env = environment(**elastic.env)
        jobs.append(Job([*command, *map(str, flags)], tmp_path / "log", env, status_file=status))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def trains(job: Job, workers: int) -> bool:
    """Whether a group of this many workers has made a step."""
    status = job.status or {}
    return status.get("workers") == workers and status["phase"] == "training" and status["samples_per_second"] > 0


@pytest.mark.slow  # test_repair.py has workers that join, test_notices.py and test_aws.py nodes that go and come
def test_a_node_that_joins_is_used_and_one_that_is_lost_is_done_without(elastic, run, tmp_path: Path):
    folder = tmp_path / "a"
    job = run("--workers", "1:2", "--epochs", EPOCHS, "--resize-every-seconds", 5)
    job.until(lambda: trains(job, 1), PATIENCE)
    elastic.add_node()
    joined = time.monotonic()
    job.until(lambda: trains(job, 2), PATIENCE)
    print(f"a node that joined was used after {time.monotonic() - joined:.1f} s")
    assert attempts(folder)[1]["tier"] == "held"
    # One more than the most workers: a spare, for which nothing moves.
    spare = elastic.add_node()
    at = job.status["step"]
    job.until(lambda: job.status["step"] >= at + 60, PATIENCE)
    assert len(attempts(folder)) == 2
    busy = [node for node in elastic.nodes if node is not spare]
    job.until(lambda: all(len(node.warm()) == 1 for node in elastic.nodes), PATIENCE)
    # The one that is left stays, and a process that was there before joins it.
    left = {busy[1].workers()[0].pid, spare.warm()[0].pid}
    busy[0].kill()
    lost = time.monotonic()
    job.until(lambda: len(attempts(folder)) == 4 and trains(job, 2), PATIENCE)
    print(f"two workers trained {time.monotonic() - lost:.1f} s after a node was lost")
    assert {worker.pid for worker in elastic.workers()} == left
    job.until(lambda: all(len(node.warm()) == 1 for node in elastic.nodes), PATIENCE)
    busy[1].kill()
    job.until(lambda: trains(job, 1), PATIENCE)
    (tmp_path / PAUSE).unlink()
    job.wait(PATIENCE)
    # What waited for a next group goes with the run, while the nodes stay.
    wait_until(lambda: not [p for node in elastic.nodes for p in node.warm()], "warm processes are gone", 30)
    result = result_of(folder)
    assert [(a["world_size"], a["tier"]) for a in attempts(folder)][1:] == [(n, "held") for n in (2, 1, 2, 1)]
    assert law.redone(folder) == 0
    assert [tuple(e["seen"]) for e in result["history"]] == [(0, 0)] * EPOCHS
    assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, result["steps"] + 1))


@pytest.mark.slow  # test_notices.py does the same with each cloud's own notice
def test_notice_is_followed_before_the_node_is_gone_and_counts_as_no_failure(elastic, run, tmp_path: Path):
    folder = tmp_path / "a"
    elastic.add_node()
    job = run("--workers", "1:2", "--epochs", 20, "--max-failures", 0)
    job.until(lambda: trains(job, 2), PATIENCE)
    node = elastic.nodes[-1]
    node.drain(120)
    job.until(lambda: trains(job, 1), PATIENCE)
    node.kill()
    (tmp_path / PAUSE).unlink()
    output = job.wait(PATIENCE)
    assert "workers were lost" not in output
    assert [a["world_size"] for a in attempts(folder)] == [2, 1]
    assert law.redone(folder) == 0


@pytest.mark.slow
def test_a_random_schedule_of_resizes_and_kills_changes_nothing(capsys):
    code = law.main(law.Arguments(schedules=1, seed=3, exact=True, data="digits", epochs=12))
    output = capsys.readouterr().out
    print(output)
    assert code == 0
    assert "0 records missing, 0 twice, 1 hash of mnist" in output
    assert "the law holds" in output


@pytest.mark.slow
def test_five_kills_and_three_resizes_of_the_mnist_job_change_no_bit(elastic, tmp_path: Path):
    def flags(name: str, *more: object) -> list[str]:
        fixed = ["--data", "digits", "--exact", "--steps", "3000", "--logical-shards", "4", "--batch-norm"]
        return [sys.executable, str(MNIST_JOB), *fixed, "--storage", str(tmp_path), "--run", name, *map(str, more)]

    with Job(flags("alone", "--workers", 1), tmp_path / "alone.log") as job:
        job.wait(PATIENCE)
    faults = [(100, Kind.ADD), (150, Kind.ADD), (300, Kind.WORKER), (600, Kind.NODE), (900, Kind.DRIVER)]
    faults += [(1200, Kind.ADD), (1250, Kind.ADD), (1500, Kind.WORKER), (2000, Kind.CONTROLLER)]
    plan = FaultPlan([Fault(step, kind, target=step) for step, kind in faults])
    status = tmp_path / "status.json"
    command = flags("disturbed", "--workers", "1:4", "--status-file", status, "--checkpoint-every-steps", 50)
    report = plan.run([*command, "--resize-every-seconds", "5"], status, tmp_path / "log", elastic, folder=ROOT)
    assert report.code == 0, report.output
    assert {1, 2, 3, 4} <= {a["world_size"] for a in attempts(tmp_path / "disturbed")}
    alone, disturbed = (result_of(tmp_path / name) for name in ("alone", "disturbed"))
    assert disturbed["weights_sha256"] == alone["weights_sha256"]
    assert disturbed["metrics"] == alone["metrics"]
