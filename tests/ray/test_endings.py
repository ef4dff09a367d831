"""Real drivers end in every way of the table, with its exit codes."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytf.config import exit_codes
from raytf.config.exit_codes import ENDINGS, Ending
from raytf.testing import Job, environment
from tests.ray.conftest import ROOT, result_of
from tests.stress.law import schedules as law

FAULTY = ROOT / "tests" / "ray" / "jobs" / "faulty.py"
#: With its pause in each, the run lasts for a minute; the last of its drivers has none.
STEPS, PAUSE = 600, ("--pause", 0.1)
FLAGS = ("--data", "digits", "--workers", 1, "--no-warm-workers", "--steps", STEPS, "--run", "a")


@pytest.fixture
def begin(cluster: dict[str, str], tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """begin(*command): a job in `tmp_path` on the running Ray."""
    jobs: list[Job] = []

    def start(*command: object) -> Job:
        status = tmp_path / f"status-{len(jobs)}.json"
        full = [*map(str, command), "--storage", str(tmp_path), "--status-file", str(status)]
        if "|" in command:  # the last word is the pipe's reader
            full = ["bash", "-c", f"set -o pipefail; {shlex.join([w for w in full if w != '|'])} | true"]
        env = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"])
        jobs.append(Job(full, tmp_path / f"log-{len(jobs)}", env, status_file=status))
        return jobs[-1]

    yield start
    for job in jobs:
        job.close()


def shown(job: Job) -> int:
    """The exit code as a shell shows it."""
    code = job.ended()
    return 128 - code if code < 0 else code


def restored_step(job: Job) -> int:
    """The step that a job went on from; 0 for none."""
    found = re.search(r"restored step (\d+)", job.output)
    return int(found[1]) if found else 0


def owner(run: Path) -> int | None:
    """The process that owns a run, or the one that left its lease."""
    with contextlib.suppress(OSError, ValueError):  # not there, or just being replaced
        return int(json.loads((run / "lease.json").read_text())["pid"])
    return None


def test_every_ending_of_the_table(begin: Callable[..., Job], tmp_path: Path):
    quick = (sys.executable, law.JOB, *FLAGS)
    lasting = (*quick, *PAUSE)
    seen: dict[Ending, int] = {}
    restored = 0

    def told(number: signal.Signals, saves: bool) -> Job:
        """A driver that trains gets a signal; the next one goes on from there."""
        nonlocal restored
        job = begin(*lasting)
        # Steps of its own: a group that has only restored has nothing to save.
        job.until(lambda: (job.step or 0) >= restored_step(job) + 5 and (job.status or {})["phase"] == "training")
        if number is signal.SIGTERM:
            other = begin(*lasting)
            seen[exit_codes.AGAIN] = shown(other)
            assert "is in use by process" in other.output
        job.process.send_signal(number)
        code = shown(job)
        assert (": saved" in job.output) == saves, job.output
        assert (restored_step(job) > 0) == (restored > 0), job.output
        assert restored_step(job) >= restored, job.output
        restored = (job.step or 0) if saves else 1
        seen[exit_codes.of_code(code)] = code
        return job

    job = told(signal.SIGTERM, True)
    assert "the same command continues from the last checkpoint" in job.output.splitlines()[-1]
    assert not (tmp_path / "a" / "lease.json").exists()
    told(signal.SIGKILL, False)
    # Before it trains; test_stopping.py sends these to drivers whose workers have something to save.
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        early = begin(*lasting)
        # The lease of a process that was killed is there before.
        early.until(lambda: owner(tmp_path / "a") == early.process.pid)  # noqa: B023
        early.process.send_signal(number)
        code = shown(early)
        assert code == 128 + number, early.output
        seen[exit_codes.of_code(code)] = code
        assert not (tmp_path / "a" / "lease.json").exists()
    crashed = begin(*lasting)
    crashed.until(lambda: "run a in " in crashed.output)
    crashed.process.send_signal(signal.SIGSEGV)
    seen[exit_codes.CRASHED] = shown(crashed)

    seen[exit_codes.UNREAD] = shown(begin(*lasting, "--help", "|"))
    unread = begin(*quick, "|")
    seen[exit_codes.FINISHED] = shown(unread)
    result = result_of(tmp_path / "a")
    assert result["steps"] == STEPS, unread.output
    again = begin(*quick)
    assert f"has finished ({STEPS} steps); nothing to do" in again.wait()
    assert result_of(tmp_path / "a") == result

    failed = begin(sys.executable, FAULTY, "--fault", "raises", "--workers", 1, "--no-warm-workers", "--run", "b")
    seen[exit_codes.FAILED] = shown(failed)
    (line,) = [line for line in failed.output.splitlines() if line.startswith("error: ")]
    assert "the model function raised KeyError: 'no such layer'" in line
    assert "faulty.py" in line
    assert 'raise KeyError("no such layer")' in failed.output, "the job's own exception has lost its traceback"
    seen[exit_codes.REFUSED] = shown(begin(sys.executable, FAULTY, "--workers", 0, "--run", "c"))
    assert seen == {ending: ending.code for ending in ENDINGS}
