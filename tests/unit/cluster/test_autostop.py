"""The pure part of autostop: durations, deadlines, the timer's script, and what the head shows of its jobs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from raytf.cluster import autostop, autostop_head
from raytf.cluster.autostop import SPARE_SECONDS, Activity
from raytf.cluster.job_server import AwayError
from raytf.errors import ConfigError

BUSY, IDLE, GONE, UNKNOWN = Activity.BUSY, Activity.IDLE, Activity.GONE, Activity.UNKNOWN
PERIOD = 900.0


@pytest.mark.parametrize(
    ("duration", "seconds"), [("15m", 900), ("900s", 900), ("2h", 7200), ("1h30m", 5400), ("7m", 420)]
)
def test_a_duration_has_seconds(duration, seconds):
    assert autostop.seconds_of(duration) == seconds


@pytest.mark.parametrize(
    "duration", [None, "", 15, "15", "15 m", "m", "-15m", "1.5h", "30m1h", "15min", True, [], "nan"]
)
def test_a_duration_without_a_unit_or_with_another_is_refused(duration):
    with pytest.raises(ConfigError, match="Write a number and s, m or h, such as 15m"):
        autostop.seconds_of(duration)


@pytest.mark.parametrize("duration", ["0m", "119s"])
def test_a_duration_in_which_no_job_could_start_is_refused(duration):
    with pytest.raises(ConfigError, match="Write 7m or more"):
        autostop.seconds_of(duration)


@pytest.mark.parametrize(
    ("activity", "after", "ends"),
    [
        (BUSY, 0, False),
        (BUSY, 1e6, False),
        (IDLE, PERIOD - 1, False),
        (IDLE, PERIOD, True),
        (GONE, PERIOD - 1, False),
        (GONE, PERIOD, True),
        (UNKNOWN, PERIOD, False),
        (UNKNOWN, 1e6, False),
    ],
)
def test_only_a_head_that_shows_no_job_ends_after_the_period(activity, after, ends):
    start = 1000.0
    deadline = autostop.next_deadline(BUSY, 0.0, start, PERIOD)
    now = start + after
    deadline = autostop.next_deadline(activity, deadline, now, PERIOD)
    assert autostop.is_over(activity, deadline, now) is ends
    assert deadline == (now if activity is BUSY else start) + PERIOD + SPARE_SECONDS


def run_guard(
    folder: Path, kind: str, now: int, deadline: int | None, has_job: bool, uptime: int = 4000
) -> tuple[bool, int]:
    """Run the script of a machine whose clock and processes are given; whether it ended, and the deadline then."""
    programs = {
        "date": f"echo {now}",
        "cut": f"echo {uptime}",
        "pgrep": f'echo "$@" >> asked; exit {0 if has_job else 1}',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    file, ended = folder / "dead line", folder / "ended"
    ended.unlink(missing_ok=True)
    if deadline is not None:
        file.touch()
        os.utime(file, (deadline, deadline))
    script = autostop.guard_script(kind, str(file), PERIOD, "echo yes > ended")
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    subprocess.run(["sh"], input=script, text=True, cwd=folder, env=environment, check=True, timeout=30)
    return ended.exists(), int(file.stat().st_mtime) if file.exists() else 0


@pytest.mark.parametrize("kind", ["head", "worker"])
@pytest.mark.parametrize(
    ("deadline", "has_job", "ends", "after"),
    [
        (5001, False, False, 5001),
        (5000, False, True, 5000),
        (4000, False, True, 4000),
        (None, False, True, 0),
        (4000, True, False, 5000 + 900 + 120),
        (None, True, False, 5000 + 900 + 120),
    ],
)
def test_the_timer_ends_its_machine_after_the_deadline_unless_a_job_runs(
    tmp_path, kind, deadline, has_job, ends, after
):
    assert run_guard(tmp_path, kind, 5000, deadline, has_job) == (ends, after)
    sign = {"head": "[r]ay::JobSupervisor", "worker": "[r]aylet/raylet"}[kind]
    assert (tmp_path / "asked").read_text() == f"-f {sign}\n"


@pytest.mark.parametrize(("uptime", "ends"), [(30, False), (1019, False), (1020, True)])
def test_a_machine_that_starts_again_has_a_period_to_set_up(tmp_path, uptime, ends):
    assert run_guard(tmp_path, "head", 5000, 100, False, uptime)[0] is ends


@pytest.mark.parametrize("command", ["python a.py", "a && {\nb\n}", "raytf autostop arm --after 900s && b"])
def test_a_command_with_a_timer_is_known_as_itself(command):
    wrapped = autostop.with_timer(command, "15m")
    assert wrapped.startswith("raytf autostop arm --after 900s && {\n")
    assert (
        autostop.without_timer(wrapped)
        == command
        == autostop.without_timer(command)
        == autostop.with_timer(command, "")
    )


def test_the_files_of_a_machine_are_written_as_they_are(tmp_path):
    script = autostop.guard_script("head", "/home/o'hara/.raytf-autostop", PERIOD, "echo $HOME || `false`")
    files = autostop.unit_files(script, ["/venv/bin/python", "-m", "raytf"], "ubuntu", {"RAY_AUTH_MODE": "token"})
    moved = {f"{tmp_path}/{Path(path).name}": text for path, text in files.items()}
    for name in ("systemctl", "sysctl"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/called\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["sh"], input=autostop.install_script(moved), text=True, env=environment, check=True, timeout=30)
    assert {path: Path(path).read_text() for path in moved} == moved
    assert (tmp_path / "called").read_text().splitlines() == [
        "systemctl daemon-reload",
        "systemctl enable --quiet --now raytf-autostop.timer",
        "systemctl restart raytf-autostop-watch.service",
        "sysctl -q -w kernel.panic=10",
    ]
    unit = files["/etc/systemd/system/raytf-autostop-watch.service"]
    assert {"User=ubuntu", 'Environment="RAY_AUTH_MODE=token"', "Restart=always"} <= set(unit.splitlines())


def test_a_worker_has_no_watcher():
    files = autostop.unit_files("true\n")
    assert not any("watch" in path for path in files)
    assert "restart" not in autostop.install_script(files)


def test_each_node_starts_its_timer_once():
    config: dict[str, Any] = {"provider": {"autostop": "15m"}, "head_start_ray_commands": ["ray start --head"]}
    for _ in range(2):
        config = autostop.with_start_commands(config)
    assert config["head_start_ray_commands"] == ["ray start --head", "raytf autostop arm --after 900s"]
    assert config["worker_start_ray_commands"] == ["raytf autostop arm --worker --after 900s"]
    assert autostop.with_start_commands({"provider": {}}) == {"provider": {}}


@pytest.mark.parametrize(
    ("commands", "port"),
    [([], 8265), (["ray stop", "ray start --head --dashboard-port=9000"], 9000), (["x --dashboard-port 1"], 1)],
)
def test_the_job_server_is_where_the_head_starts_it(commands, port):
    assert autostop.dashboard_of({"head_start_ray_commands": commands}) == f"http://127.0.0.1:{port}"


class Server:
    """Ray's job server: (unfinished, known) jobs, or None if it does not answer."""

    def __init__(self, jobs: tuple[int, int] | None):
        self.jobs = jobs

    def count(self) -> tuple[int, int]:
        if self.jobs is None:
            raise AwayError("no answer")
        return self.jobs


@pytest.mark.parametrize(
    ("processes", "jobs", "activity"),
    [
        ({"gcs_server"}, (1, 3), BUSY),
        ({"gcs_server"}, (0, 3), IDLE),
        ({"gcs_server"}, None, UNKNOWN),
        ({"gcs_server", "ray::JobSupervisor"}, None, BUSY),
        (set(), (1, 1), GONE),
        ({"ray::JobSupervisor"}, None, GONE),
    ],
)
def test_what_a_head_shows_of_its_jobs(monkeypatch, processes, jobs, activity):
    monkeypatch.setattr(autostop_head, "_has_process", processes.__contains__)
    monkeypatch.setattr(autostop_head, "JobServer", lambda address: Server(jobs))
    assert autostop_head.HeadJobs("http://127.0.0.1:8265").poll() is activity


def test_a_job_that_came_and_went_between_two_looks_counts(monkeypatch):
    server = Server((0, 3))
    monkeypatch.setattr(autostop_head, "_has_process", lambda title: title == "gcs_server")
    monkeypatch.setattr(autostop_head, "JobServer", lambda address: server)
    head = autostop_head.HeadJobs("http://127.0.0.1:8265")
    seen = [head.poll()]
    server.jobs = (0, 4)
    seen += [head.poll(), head.poll()]
    assert seen == [IDLE, BUSY, IDLE]


def test_a_process_is_known_by_its_title_and_not_by_its_arguments():
    with subprocess.Popen(["sh", "-c", "sleep 30; true gcs_server_of_test"]) as process:
        try:
            assert not autostop_head._has_process("gcs_server_of_test")
            assert autostop_head._has_process("sh")
        finally:
            process.kill()
