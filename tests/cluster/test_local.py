"""`cluster-configs/local.yaml` on three hosts, by the real `ray up`: a job that loses two of them, the dashboard."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytf.testing import Job
from raytf.testing.processes import WORKER, titled, wait_until
from tests.cluster.hosts import Host, Hosts
from tests.cluster.onprem import PATIENCE, OnPrem, command_lines, curl

#: Seven minutes; test_hosts.py has the hosts, test_aws.py `ray up`, a loss and a replacement.
pytestmark = pytest.mark.slow
STEPS = 1000
JOB = f"python jobs/mnist.py --data digits --exact --no-warm-workers --steps {STEPS}"
DASHBOARD = "http://127.0.0.1:8265"
NAME = "three-hosts"
SSH = "ssh -o StrictHostKeyChecking=no -o LogLevel=ERROR"


@pytest.fixture(scope="module")
def onprem(hosts_are_possible: None) -> Iterator[OnPrem]:
    """Hosts on which nothing runs yet."""
    with Hosts() as hosts:
        onprem = OnPrem(hosts)
        onprem.type("ray get-auth-token --generate > /dev/null", "token")
        yield onprem
        print(*(f"{what}: {seconds:.1f} s" for what, seconds in onprem.seconds.items()), sep="\n")


@pytest.fixture(scope="module")
def alone(onprem: OnPrem) -> Iterator[Job]:
    """One more host trains the same model alone, beside the others."""
    command = f"RAY_AUTH_MODE=disabled {JOB} --workers 1 --storage {onprem.shared}/runs --run alone"
    with onprem.start(command, onprem.single) as job:
        yield job


@pytest.fixture(scope="module")
def cluster(onprem: OnPrem, alone: Job) -> OnPrem:
    """Ray on the three hosts."""
    onprem.type(f"ray up -y {onprem.config}", "ray up")
    with onprem.timed("from ray up to three nodes"):
        assert len(onprem.alive(3)) == 3
    return onprem


@dataclass(frozen=True)
class Story:
    """A job that was submitted to the cluster and lost two of its hosts.

    Attributes:
        log: what `ray job logs` prints in the end.
        places: Ray Train workers on each host when all were there.
    """

    log: str
    places: list[int]


@pytest.fixture(scope="module")
def tunnel(cluster: OnPrem) -> Iterator[None]:
    """`ray dashboard` on the laptop."""
    with cluster.start(f"ray dashboard {cluster.config}") as tunnel:
        tunnel.until(lambda: curl(cluster.laptop, f"{DASHBOARD}/api/version").returncode == 0)
        yield


@pytest.fixture(scope="module")
def story(cluster: OnPrem, tunnel: None) -> Story:
    """The job runs, one of its hosts is killed, another one is cut off."""
    status_file = cluster.shared / "status.json"
    flags = f"--workers 1:3 --storage {cluster.shared}/runs --run {NAME} --status-file {status_file}"
    options = f"--address {DASHBOARD} --submission-id {NAME} --working-dir . --no-wait"

    def status() -> dict[str, Any]:
        return json.loads(status_file.read_text()) if status_file.exists() else {"step": -1, "workers": 0, "phase": ""}

    def until(condition: Callable[[], object], what: str) -> None:
        try:
            wait_until(condition, what, PATIENCE)
        except TimeoutError as error:
            log = cluster.type(f"ray job logs --address {DASHBOARD} {NAME}", "ray job logs")
            raise AssertionError(f"{error}; status {status()}\n{log}") from None

    def goes_on(workers: int, step: int) -> None:
        def trains() -> bool:
            now = status()
            return (now["workers"], now["phase"]) == (workers, "training") and now["step"] > step

        until(trains, f"step {step} of {workers} workers")

    with cluster.timed("job"):
        with cluster.timed("from the job's submission to step 51"):
            cluster.type(f"ray job submit {options} -- {JOB} {flags}", "ray job submit")
            goes_on(3, 50)
        places = [len(titled(host.processes(), WORKER)) for host in cluster.hosts]
        for what, fault, left in (
            ("from SIGKILL of a host to a new step", cluster.workers[0].kill, 2),
            ("from a host's silence to a new step", cluster.workers[1].disconnect, 1),
        ):
            step = status()["step"]
            with cluster.timed(what):
                fault()
                goes_on(left, step)
            goes_on(left, step + 50)
        ended = f"ray job status --address {DASHBOARD} {NAME}"
        until((cluster.shared / "runs" / NAME / "result.json").exists, "the run has its result")
        until(lambda: "succeeded" in cluster.type(ended, "ray job status"), "the job has succeeded")
    return Story(cluster.type(f"ray job logs --address {DASHBOARD} {NAME}", "ray job logs"), places)


def has_started(host: Host) -> bool:
    return "Ray runtime started" in host.run("cat ~/raytf-node.log").stdout


def test_all_hosts_join_with_a_token_and_each_worker_is_under_the_watcher(cluster: OnPrem):
    assert cluster.alive(3, 0) == sorted(host.address for host in cluster.hosts)
    for host in cluster.workers:
        lines = [" ".join(line) for line in command_lines(host)]
        assert any("raytf node --notices off" in line and "-- ray start" in line for line in lines), lines
        # `ray start` says so a moment after the node has joined.
        wait_until(partial(has_started, host), "Ray says that it has started", PATIENCE)


def test_ray_exec_runs_a_command_on_the_head_with_the_config_s_own_raytf(cluster: OnPrem):
    said = cluster.type(f"ray exec {cluster.config} 'python -c \"import raytf; print(raytf.__file__)\"'")
    assert f"{cluster.head.home}/raytf/raytf/__init__.py" in said
    # Of nodes that have just joined the autoscaler tells a moment later.
    wait_until(lambda: "/3.0 CPU" in cluster.type(f"ray exec {cluster.config} 'ray status'"), "3 CPUs", PATIENCE)


def test_a_job_goes_on_after_one_host_was_killed_and_another_one_fell_silent(cluster: OnPrem, story: Story, alone: Job):
    assert story.places == [1, 1, 1]
    assert "test accuracy" in story.log
    alone.wait()
    result, single = (json.loads((cluster.shared / "runs" / n / "result.json").read_text()) for n in (NAME, "alone"))
    assert result["steps"] == single["steps"] == STEPS
    assert (single["world_sizes"], single["restarts"]) == ([1], 0)
    assert set(result["world_sizes"]) == {1, 2, 3}
    assert result["restarts"] >= 2
    assert result["weights_sha256"] == single["weights_sha256"]


def test_the_dashboard_shows_the_job_and_its_log_to_who_has_the_token(cluster: OnPrem, story: Story, tmp_path: Path):
    if shutil.which("chromium") is None:
        pytest.skip("there is no chromium (Debian's package chromium)")
    assert curl(cluster.laptop, f"{DASHBOARD}/api/jobs/", "-o/dev/null", "-w%{http_code}").stdout == "401"
    field = 'input[placeholder="Enter your authentication token"]'
    token = cluster.laptop.run("cat ~/.ray/auth_token").stdout.strip()
    pictures = [cluster.shared / f"{name}.png" for name in ("jobs", "job")]
    steps = cluster.shared / "steps.json"
    steps.write_text(
        json.dumps(
            [
                ["open", f"{DASHBOARD}/#/jobs"],
                ["see", "Token"],
                ["type", field, token],
                ["click", "submit"],
                ["see", NAME],
                ["shoot", str(pictures[0])],
                ["open", f"{DASHBOARD}/#/jobs/{NAME}"],
                ["see", f"run {NAME} in "],
                ["shoot", str(pictures[1])],
            ]
        )
    )
    seen = json.loads(cluster.type(f"python -m tests.cluster.browser {steps}", "the dashboard").splitlines()[0])
    assert "SUCCEEDED" in seen[1]
    assert "python jobs/mnist.py" in seen[2]
    # The dashboard has no page about Ray Train's runs; the log says where raytf's own is to be had.
    assert f"raytf report {cluster.shared}/runs/{NAME} --html" in seen[2]
    for picture in pictures:
        shutil.copy(picture, tmp_path)  # for people


@pytest.fixture(scope="module")
def returned(cluster: OnPrem, story: Story) -> list[str]:
    """Addresses of the living nodes after the silent host can be reached again."""
    assert cluster.alive(1) == [cluster.head.address], "Ray has not missed the silent host"
    cluster.workers[1].reconnect()
    with cluster.timed("from a host's return to its node"):
        return cluster.alive(2)


def test_the_autoscaler_takes_the_silent_host_again_when_it_is_back(cluster: OnPrem, returned: list[str]):
    assert returned == [cluster.head.address, cluster.workers[1].address]


@pytest.fixture(scope="module")
def restarted(cluster: OnPrem, returned: list[str]) -> None:
    """All of Ray on the head was killed, and `ray up` was typed again."""
    for process in cluster.head.processes():
        with contextlib.suppress(psutil.Error):
            if "ray" in " ".join(process.cmdline()):
                process.kill()
    cluster.type(f"ray up -y {cluster.config}", "ray up again")


def test_a_head_that_was_killed_knows_its_jobs_and_workers_again(cluster: OnPrem, restarted: None):
    with cluster.timed("from ray up again to all nodes"):
        assert cluster.alive(2) == [cluster.head.address, cluster.workers[1].address]
    log = cluster.type(f"ray job logs --address {DASHBOARD} {NAME}", "ray job logs")
    assert "test accuracy" in log
    assert "SUCCEEDED" in cluster.type(f"ray job list --address {DASHBOARD}", "ray job list")
    cluster.type(f"ray job submit --address {DASHBOARD} --no-wait --submission-id more -- true", "ray job submit more")
    ended = f"ray job status --address {DASHBOARD} more"
    wait_until(lambda: "succeeded" in cluster.type(ended, "ray job status"), "a further job has succeeded", PATIENCE)


@pytest.fixture(scope="module")
def torn_down(cluster: OnPrem, restarted: None) -> str:
    """What the commands of docs/clusters/on-prem.md print, after all else."""
    assert any(cluster.ray_processes()["worker-2"])
    cluster.type(f"ray down -y {cluster.config}", "ray down")
    hosts = " ".join(f"ubuntu@{host.address}" for host in (cluster.head, cluster.workers[1]))
    look = 'ray stop > /dev/null 2>&1; pgrep -af "raylet|gcs_server"'
    return cluster.type(f"for host in {hosts}; do {SSH} $host '{look}'; done; true", "ray stop on each host")


def test_ray_down_and_a_stop_on_each_host_leave_nothing(cluster: OnPrem, torn_down: str):
    assert torn_down == ""
    left = cluster.ray_processes
    with cluster.timed("from there to the last process"):
        wait_until(lambda: not any(left().values()), f"no process of Ray is left: {left()}", 120)
