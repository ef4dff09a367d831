"""`raytf check --job` of a job with parameter servers: they and their coordinator take CPUs, too."""

from __future__ import annotations

import pytest

from raytf.doctor.check.job_fit import JobNeeds, NodeSupply, check, parse
from raytf.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "helpers"),
    [
        ("python jobs/mnist.py --workers 2", 0),
        ("python jobs/mnist.py --strategy parameter-server", 2),
        ("python jobs/mnist.py --strategy=parameter-server --ps=3", 4),
        ("python jobs/linear_regression.py --ps 1", 2),
    ],
)
def test_helpers_of_a_command(command: str, helpers: int):
    assert parse(command).helpers == helpers


@pytest.mark.parametrize("given", ["0", "two", "-1"])
def test_no_number_of_servers_is_refused(given: str):
    with pytest.raises(ConfigError, match=f"--ps {given}: expected a number, 1 or more"):
        parse(f"python jobs/mnist.py --ps {given}")


def found(rooms: list[NodeSupply], workers: tuple[int, int], helpers: int, cpus: float):
    need = JobNeeds(*workers, cpus, None, "s3://b/r", helpers)
    return [(f.code, f.what) for f in check(need, rooms, ("max_workers",))]


@pytest.mark.parametrize(
    ("rooms", "workers", "helpers", "cpus", "code", "words"),
    [
        ([NodeSupply("n", 1, 4, 0)], (2, 2), 2, 1.0, None, ""),
        ([NodeSupply("n", 1, 4, 0)], (3, 3), 2, 1.0, "job-never-starts", "beside 2 CPUs for parameter servers"),
        ([NodeSupply("n", 1, 4, 0)], (1, 3), 2, 1.0, "job-never-full", "room for 2"),
        ([NodeSupply("n", 1, 2, 0)], (1, 1), 2, 1.0, "job-never-starts", "room for none"),
        # What is left beside workers of three CPUs is enough.
        ([NodeSupply("n", 2, 4, 0)], (2, 2), 2, 3.0, None, ""),
        ([NodeSupply("n", 2, 4, 0)], (2, 2), 3, 3.0, "job-never-starts", "room for 1"),
        # GPUs are what limits the workers.
        ([NodeSupply("n", 2, 8, 2)], (4, 4), 3, 1.0, None, ""),
        ([NodeSupply("head", 1, 2, 0), NodeSupply("n", 1, 1, 1)], (1, 1), 2, 1.0, None, ""),
        ([NodeSupply("n", 1, 2, 0)], (2, 2), 1, 0.5, None, ""),
    ],
)
def test_workers_that_fit_beside_the_servers(rooms, workers, helpers, cpus, code, words):
    findings = found(rooms, workers, helpers, cpus)
    assert [c for c, _ in findings] == ([code] if code else [])
    assert not code or words in findings[0][1]


@pytest.mark.parametrize(("flags", "workers"), [("--use-gpu", 4), ("--use-gpu --gpus-per-worker 0.5", 8)])
def test_parts_of_gpus_are_counted(flags: str, workers: int):
    rooms = [NodeSupply("head", 1, 2, 0), NodeSupply("n", 2, 16, 2)]
    need = parse(f"python jobs/mnist.py --workers {workers} {flags} --storage s3://b/r")
    assert list(check(need, rooms, ("max_workers",))) == []
    more = parse(f"python jobs/mnist.py --workers {workers + 1} {flags} --storage s3://b/r")
    assert [f.code for f in check(more, rooms, ("max_workers",))] == ["job-never-starts"]
