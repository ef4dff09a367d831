"""Work in parts on real Ray: workers and nodes are killed and join, and the answer is the same to the last bit."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from raytf.config.command_line import EXIT_FAILED, EXIT_REFUSED
from raytf.testing import ElasticCluster, Job, environment
from raytf.testing.cluster import Node
from raytf.testing.processes import end, titled
from tests.ray.jobs.parts import number

PARTS = Path(__file__).parent / "jobs" / "parts.py"
#: What Ray calls a worker's process, and that while it computes a part.
WORKER, COMPUTING = "ray::_Worker", "ray::_Worker.compute"


def test_no_part_is_lost_or_counted_twice_while_workers_and_nodes_change(tmp_path: Path):
    def computing(node: Node) -> bool:
        return bool(titled(node.processes(), COMPUTING))

    mark = tmp_path / "mark"
    command = [sys.executable, str(PARTS), "--workers", "1:2", "--parts", "80", "--fault", "waits", "--mark", str(mark)]
    with ElasticCluster(nodes=1) as cluster:
        first = cluster.nodes[0]
        with Job(command, tmp_path / "log", environment(**cluster.env)) as job:
            job.until(lambda: computing(first))
            second = cluster.add_node()
            job.until(lambda: computing(second))
            end(titled(first.processes(), WORKER))
            job.until(lambda: "a worker was lost in part 4; another one computes it" in job.output and computing(first))
            second.kill()
            job.until(lambda: "a worker was lost in part 5; another one computes it" in job.output)
            mark.touch()
            output = job.wait()
    assert "; 2 started again after a worker was lost" in output
    assert output.splitlines()[-1] == f"sum: {sum(number(part) for part in range(80)).hex()}"


def test_a_part_that_ends_its_worker_once_is_computed_again(start_there, tmp_path: Path):
    output = start_there(PARTS, "--fault", "exits-once", "--mark", tmp_path / "mark").wait()
    assert "a worker was lost in part 3; another one computes it" in output
    assert output.splitlines()[-1] == f"sum: {sum(number(part) for part in range(8)).hex()}"


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [
        (signal.SIGTERM, 143, "4 of 8 parts, 2 workers"),
        pytest.param(signal.SIGINT, 130, "interrupted; the same command starts over.", marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_the_work_in_order(start_there, tmp_path: Path, number: signal.Signals, code: int, says: str):
    job = start_there(PARTS, "--fault", "waits", "--mark", tmp_path / "never")
    job.until(lambda: "4 of 8 parts, 2 workers" in job.output)
    job.process.send_signal(number)
    assert job.ended() == code, job.output
    assert job.output.splitlines()[-1] == says, job.output


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (("--fault", "raises"), EXIT_FAILED, "error: part 3 raised ZeroDivisionError: no darts (/"),
        (("--fault", "refuses"), EXIT_REFUSED, "error: there are no darts"),
        (("--fault", "exits"), EXIT_REFUSED, "error: 5 workers died while they computed part 3; the last one: "),
        (("--fault", "unpicklable"), EXIT_REFUSED, "error: the function or a part cannot be sent to the workers: "),
        (("--fault", "unpicklable-part"), EXIT_REFUSED, "error: the function or a part cannot be sent to the workers"),
        (("--workers", "0"), EXIT_REFUSED, "error: --workers 0: expected a number"),
        pytest.param(
            ("--workers", "9"),
            EXIT_REFUSED,
            "error: --workers 9 with 1 CPU each: this cluster has room for at most 4",
            marks=pytest.mark.slow,  # a young cluster is given time to grow
        ),
        (("--cpus-per-worker", "0"), EXIT_REFUSED, "error: --cpus-per-worker 0.0: expected a number above 0."),
    ],
)
def test_what_cannot_be_done_is_one_line(start_there, flags: tuple[str, ...], code: int, says: str):
    job = start_there(PARTS, *flags)
    assert job.ended() == code, job.output
    lines = job.output.splitlines()
    assert lines[-1].startswith(says), job.output
    if code == EXIT_REFUSED:
        assert "Traceback" not in job.output
    else:
        assert "in compute" in job.output, "the traceback shows where the job's own code raised"
