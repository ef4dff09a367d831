"""Workers die while others train: the others go on where they are, and all learn the same to the last bit."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from tests.ray.conftest import PATIENCE, result_of
from tests.ray.test_resume import attempts
from tests.stress.law.schedules import redone
from tests.stress.repair import workers_of

LAW = Path(__file__).parents[1] / "stress" / "law" / "job.py"
#: Long enough, with the pauses, for all that happens, also where workers take half a minute to come.
EPOCHS, PAUSE = 50, 0.2


def trained(tmp_path: Path, name: str, workers: int, disturb: Callable[[Job], None] | None = None) -> dict:
    pause = tmp_path / f"{name}.pause"
    command = [sys.executable, str(LAW), "--epochs", str(EPOCHS), "--global-batch-size", "96", "--logical-shards", "12"]
    command += ["--workers", str(workers), "--exact", "--model", "batchnorm", "--max-failures", "100"]
    command += ["--pause", str(PAUSE), "--pause-while", str(pause)]
    command += ["--storage", str(tmp_path), "--run", name, "--status-file", str(tmp_path / f"{name}.json")]
    with Job(command, tmp_path / f"{name}.log", environment(), status_file=tmp_path / f"{name}.json") as job:
        if disturb is not None:
            pause.touch()
            disturb(job)
            pause.unlink()
        job.wait(PATIENCE * 2)
    return result_of(tmp_path / name)


def died(job: Job) -> int:
    """How many workers the run has reported as dead. Of two that die at once it may see one, and then both, before the
    others go on."""
    repairs = re.split(r"workers? continues? after", job.output)
    found = [re.findall(r"workers were lost \((\d+) worker process", repair) for repair in repairs]
    return sum(max(map(int, counts)) for counts in found if counts)


def test_who_is_left_goes_on_at_once_and_who_comes_joins_them(tmp_path: Path):
    def until_full(job: Job, times: int) -> None:
        """Wait until all train, after so many repairs."""
        job.until(lambda: job.output.count("3 workers continue") >= times and len(workers_of(job)) == 3, PATIENCE)

    def disturb(job: Job) -> None:
        # Another one, rank 0, two at once, and a worker that is stopped for longer than others wait.
        for number, victims in enumerate(([1], [0], [0, 2])):
            until_full(job, number)
            at = job.step or 0
            job.until(lambda at=at: (job.step or 0) >= at + 15, PATIENCE)
            living = workers_of(job)
            for victim in victims:
                living[victim].kill()
            job.until(lambda n=number: job.output.count("; the others continue") > n, PATIENCE)
        until_full(job, 3)
        # All at once, for longer than others would wait for one: nobody does.
        at, repairs = job.step or 0, job.output.count("; the others continue")
        assert died(job) == 4, job.output
        all_three = workers_of(job)
        for worker in all_three:
            worker.send_signal(signal.SIGSTOP)
        time.sleep(8.0)
        for worker in all_three:
            worker.send_signal(signal.SIGCONT)
        job.until(lambda: (job.step or 0) >= at + 15, PATIENCE)
        assert (died(job), job.output.count("; the others continue")) == (4, repairs), job.output
        assert [worker.pid for worker in workers_of(job)] == [worker.pid for worker in all_three]
        # Beside warm workers, a process for the next group's actor and one for a controller, however many have died.
        idle, warm = job.processes("ray::IDLE"), job.processes("ray::IDLE raytf warm")
        assert len(idle) - len(warm) <= 4, [process.cmdline() for process in idle]
        stopped = workers_of(job)[1]
        stopped.send_signal(signal.SIGSTOP)
        try:
            job.until(lambda: job.output.count("; the others continue") > repairs, PATIENCE)
        finally:
            if stopped.is_running():
                stopped.send_signal(signal.SIGCONT)

    reference = trained(tmp_path, "undisturbed", 1)
    result = trained(tmp_path, "disturbed", 3, disturb)
    assert result["weights_sha256"] == reference["weights_sha256"]
    assert [tuple(e["seen"]) for e in result["history"]] == [(0, 0)] * EPOCHS
    assert redone(tmp_path / "disturbed") == 0
    begun = attempts(tmp_path / "disturbed")
    assert all(a["from_step"] <= b["from_step"] for a, b in itertools.pairwise(begun))
    happened = ledger.read(Storage(str(tmp_path / "disturbed")))
    assert all(event.get("survived") for event in happened if event["kind"] == "fault")
