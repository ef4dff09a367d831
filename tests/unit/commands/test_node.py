"""`raytf node` around plain commands: exit codes, signals, orphans. tests/ray/test_notices.py runs it around Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from raytf.testing import Job

NODE = [sys.executable, "-c", "from raytf.commands.main import main; main()", "node", "--notices", "off"]


@pytest.fixture
def start(tmp_path: Path):
    jobs: list[Job] = []

    def begin(*arguments: str) -> Job:
        jobs.append(Job([*NODE, *arguments], tmp_path / f"log-{len(jobs)}"))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def python(code: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", code)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("raise SystemExit(0)", 0), ("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_the_exit_code_is_the_command_s(start: Callable[..., Job], code: str, expected: int):
    assert start(*python(code)).ended(60) == expected


def test_arguments_after_the_dashes_are_the_command_s_alone(start: Callable[..., Job]):
    job = start(
        "--", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--grace-seconds", "3", "--use-gpu", "--", "x"
    )
    assert job.wait(60) == "['--grace-seconds', '3', '--use-gpu', '--', 'x']\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "No command given"),
        (["--", "/no/such/program"], "cannot run '/no/such/program'"),
        (["--grace-seconds", "5", "--margin-seconds", "6", "--", "true"], "expected a margin"),
        (["--grace-seconds", "nan", "--", "true"], "expected a margin"),
        (["--notice-url", "host", "--", "true"], "--notice-url host"),
    ],
)
def test_a_refusal_is_one_line(arguments: list[str], words: str):
    done = subprocess.run([*NODE, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_sigterm_without_a_node_of_ray_is_passed_on_at_once(start: Callable[..., Job]):
    job = start(*python("import time; print('up', flush=True); time.sleep(600)"))
    job.until(lambda: "up" in job.output)
    began = time.monotonic()
    job.process.terminate()
    assert job.ended(60) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 20


def test_other_signals_are_passed_on(start: Callable[..., Job]):
    code = """
import signal, time
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, lambda n, _: print("got", n, flush=True))
print("up", flush=True)
while True: time.sleep(0.1)
"""
    job = start(*python(code))
    job.until(lambda: "up" in job.output)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        job.process.send_signal(number)
        job.until(lambda number=number: f"got {int(number)}" in job.output)


def test_a_command_that_ignores_sigterm_is_killed_within_the_grace_period(start: Callable[..., Job]):
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    job = start("--grace-seconds", "6", "--margin-seconds", "3", *python(code))
    job.until(lambda: "up" in job.output)
    began = time.monotonic()
    job.process.terminate()
    assert job.ended(60) == 128 + signal.SIGKILL
    assert 4 <= time.monotonic() - began < 15


def test_orphans_are_reaped(start: Callable[..., Job]):
    # The middle one ends and leaves its child to the watch, where it ends as well.
    code = "import subprocess, time; subprocess.run(['sh', '-c', 'sleep 0.3 & echo pid $!']); time.sleep(600)"
    job = start(*python(code))
    job.until(lambda: "pid" in job.output and job.output.endswith("\n"))
    orphan = int(job.output.split("pid ")[1].split()[0])
    job.until(lambda: not psutil.pid_exists(orphan), 30)


def test_a_command_that_outlives_its_ray_node_is_ended_as_by_ray_start(start: Callable[..., Job]):
    # In place of Ray's own process, one with its command line; tests/cluster has the real one.
    node = f"--node_id={'a' * 56} --gcs_address=127.0.0.1:1"
    raylet = f"exec -a ray/raylet/raylet {sys.executable} -c 'import time; time.sleep(3)' {node}"
    began = time.monotonic()
    job = start("--", "bash", "-c", f'({raylet}) & wait $!; echo "stopped"; sleep 600 & wait')
    assert job.ended(120) == 128 + signal.SIGTERM
    assert job.output == "stopped\nraytf node: Ray has stopped here; stopping the command, which still runs\n"
    assert time.monotonic() - began > 10
