"""Each kind of process of a running job is killed once; the run ends with the weights of an undisturbed one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

import raytf
from raytf.config import exit_codes
from raytf.runs import ledger, timeline
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Job, environment, processes
from tests.ray.conftest import PATIENCE, result_of
from tests.stress.law import schedules as law

STEPS = 900
#: Steps that a run makes between two faults.
BETWEEN = 15
FLAGS = {
    "--data": "digits",
    "--model": "batchnorm",
    "--global-batch-size": 64,
    "--pause": 0.12,
    "--workers": 2,
    "--steps": STEPS,
    "--run": "a",
}
#: Kind -> what Ray or the system calls the process, of those that belong to a job with a Ray of its own.
TITLES = {
    "worker": processes.WORKER,
    "keeper": "ray::Keeper",
    "monitor": "ray::Monitor",
    "controller": processes.CONTROLLER,
    "warm process": processes.WARM,
    "raylet of the driver's node": processes.RAYLET,
    "GCS": "gcs/gcs_server",
}


@dataclass
class Run:
    """The job in a folder, started as often as it takes."""

    folder: Path
    env: dict[str, str]
    find: Callable[[str, Job], list[psutil.Process]] = lambda kind, job: job.processes(TITLES[kind])
    more: dict[str, object] = field(default_factory=dict)
    switches: tuple[str, ...] = ()
    starts: int = 0

    def start(self) -> Job:
        self.starts += 1
        status = self.folder / "status.json"
        flags = {**FLAGS, **self.more, "--storage": self.folder, "--status-file": status}
        given = [str(x) for flag in flags.items() for x in flag]
        command = [sys.executable, str(law.JOB), "--exact", "--pause-while", str(self._pause), *self.switches, *given]
        return Job(command, self.folder / f"log-{self.starts}", self.env, status_file=status)

    def play(self, kinds: tuple[str, ...]) -> dict[str, float]:
        """Train to the end while one process of each kind is killed; seconds from each kill to the next new step."""
        took: dict[str, float] = {}
        self._pause.touch()
        job = self.start()
        try:
            for kind in kinds:
                begun = job.step or 0
                job.until(lambda: self._trains(job, begun + BETWEEN))  # noqa: B023
                job.until(lambda: self.find(kind, job), PATIENCE)  # noqa: B023
                reached, at = job.step or 0, time.monotonic()
                self.find(kind, job)[0].kill()
                deadline = at + PATIENCE
                while (job.step or 0) <= reached:
                    assert time.monotonic() < deadline, f"{kind}: no new step\n{job.output}"
                    if not job.is_running:
                        # A Ray that is gone, or could not be started on a loaded machine: the same command goes on.
                        assert job.process.returncode == exit_codes.AGAIN.code, job.output
                        job.close()
                        job = self.start()
                    time.sleep(0.05)
                took[kind] = time.monotonic() - at
                print(f"{kind}: {took[kind]:.1f} s to the next new step")
            self._pause.unlink()
            job.wait()
        finally:
            job.close()
        return took

    @property
    def _pause(self) -> Path:
        """As long as it is there, the job sleeps after each step."""
        return self.folder / "pause"

    def _trains(self, job: Job, step: int) -> bool:
        status = job.status or {}
        return status.get("phase") == "training" and status["step"] >= step

    @property
    def output(self) -> str:
        return "".join((self.folder / f"log-{i + 1}").read_text() for i in range(self.starts))

    def check(self, weights: str) -> None:
        """Everything was learned once, and every second is booked."""
        folder = self.folder / "a"
        result = result_of(folder)
        assert result["weights_sha256"] == weights, self.output
        assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, STEPS + 1))
        assert "Traceback" not in self.output
        events = ledger.read(Storage(str(folder)))
        spans = timeline.timeline(events)
        assert sum(s.seconds for s in spans) == pytest.approx(events[-1]["time"] - events[0]["time"], abs=0.01)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, cluster: dict[str, str]) -> str:
    """Of the run that nothing happens to."""
    there = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"])
    more: dict[str, object] = {"--workers": 1, "--pause": 0}
    run = Run(tmp_path_factory.mktemp("quiet"), there, more=more, switches=("--no-warm-workers",))
    run.play(())
    return result_of(run.folder / "a")["weights_sha256"]


#: Without the driver, which test_endings.py kills.
OWN = ("worker", "keeper", "monitor", "warm process", "controller")


def test_each_kind_of_process_of_a_job_with_a_ray_of_its_own(tmp_path: Path, weights: str):
    run = Run(tmp_path, environment())
    run.play(OWN)
    run.check(weights)
    assert run.output.count("Ray Train's controller died; starting another one") == 1


@pytest.mark.slow
def test_each_kind_of_process_of_a_job_on_a_cluster(tmp_path: Path, weights: str):
    with ElasticCluster(nodes=2, cpus=2) as cluster:

        def find(kind: str, job: Job) -> list[psutil.Process]:
            nodes = [cluster.head, *cluster.nodes]
            if kind == "raylet of a worker":
                return [node.raylet() for node in cluster.nodes if node.workers()]
            return processes.titled([p for node in nodes for p in node.processes()], TITLES[kind])

        run = Run(tmp_path, environment(**cluster.env), find)
        run.play(("raylet of a worker", "monitor", "controller"))
        run.check(weights)
    assert run.starts == 1
