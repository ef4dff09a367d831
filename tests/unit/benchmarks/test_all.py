"""benchmarks/all.py: order, failures, limits of time, and an end in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from benchmarks import all as everything
from benchmarks.harness import Report
from raytf._process import process_start

ROOT = everything.ROOT
GOOD = """
    import sys
    from pathlib import Path
    from benchmarks.harness import Comparison, Report

    file = Path(sys.argv[sys.argv.index("--json") + 1])
    report = Report(file.name.partition(".")[0], "A benchmark")
    report.comparisons.append(Comparison("MLP", "Keras fit", "steps/s", [2.0], [1.0], goal=1.0))
    report.notes.append("quick" if "--quick" in sys.argv else "not quick")
    sys.exit(report.finish(file))
"""
#: Goes only when it is told to, in its own time, and has a child that has left its process group.
SLOW = """
    import subprocess, sys, time
    from pathlib import Path

    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(sys.argv[sys.argv.index("--json") + 1]).with_name("pids").write_text(str(child.pid))
    try:
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)
"""


FILES = {entry.name: entry.file for entry in everything.ENTRIES}


def write(folder, **programs):
    for name, program in programs.items():
        file = folder / FILES[name]
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(program))


def command(tmp_path, only):
    flags = ["--folder", tmp_path, "--results", tmp_path / "results", "--only", only]
    return [sys.executable, "-m", "benchmarks.all", *flags]


def run(tmp_path, *flags, only="step_overhead,scale"):
    asked = [*command(tmp_path, only), *flags]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_those_asked_for_run_in_the_order_of_the_list():
    assert [entry.name for entry in everything.chosen("scale, input,mine,step_overhead")] == [
        "step_overhead",
        "input",
        "scale",
        "mine",
    ]
    assert everything.chosen("") == list(everything.ENTRIES)


def test_one_that_fails_does_not_keep_the_others_from_running(tmp_path):
    write(tmp_path, step_overhead="raise SystemExit(3)", scale=GOOD, startup="print('no result')")
    done = run(tmp_path, "--quick", only="step_overhead,input,scale,startup")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("no result of ")] == [
        "no result of step_overhead: ended with code 3",
        "no result of input: there is no data/input.py",
        "no result of startup: left no result",
    ]
    (result,) = (tmp_path / "results").glob("*.json")
    assert result.name == "scale.json"
    assert Report.read(result).notes == ["quick"]


def test_what_an_earlier_run_left_survives_one_that_fails(tmp_path):
    write(tmp_path, step_overhead=GOOD, scale=GOOD)
    assert run(tmp_path, only="step_overhead").returncode == 0
    write(tmp_path, step_overhead="raise SystemExit(3)")
    assert run(tmp_path).returncode == 1
    reports = [Report.read(tmp_path / "results" / f"{name}.json") for name in ("step_overhead", "scale")]
    assert [report.notes for report in reports] == [["not quick"], ["not quick"]]


def test_one_that_takes_too_long_is_ended_with_all_that_it_has_started(tmp_path):
    write(tmp_path, step_overhead=SLOW, scale=GOOD)
    done = run(tmp_path, "--limit-seconds", "3")
    assert "no result of step_overhead: took longer than 3 s" in done.stdout
    assert "cleaned up" in done.stdout
    assert "== scale: done" in done.stdout
    assert process_start(int((tmp_path / "results" / "pids").read_text())) is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_one_that_runs_and_all_that_it_has_started(tmp_path, number):
    write(tmp_path, step_overhead=SLOW, scale=GOOD)
    pids = tmp_path / "results" / "pids"
    with open(tmp_path / "log", "w") as log:
        asked = command(tmp_path, "step_overhead,scale")
        process = subprocess.Popen(asked, cwd=ROOT, stdout=log, start_new_session=True)
        try:
            end = time.monotonic() + 60
            while not (pids.exists() and pids.read_text()):
                assert time.monotonic() < end
                assert process.poll() is None
                time.sleep(0.05)
            process.send_signal(number)
            assert process.wait(30) == 128 + number
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    log_text = (tmp_path / "log").read_text()
    assert "cleaned up" in log_text
    assert f"stopped by {number.name}" in log_text
    assert "== scale" not in log_text
    assert process_start(int(pids.read_text())) is None


def test_time_that_is_used_up_is_told(tmp_path):
    write(tmp_path, scale=GOOD)
    assert everything.Runner(tmp_path, tmp_path).run(everything.chosen("scale")[0], -1.0) == "not run: no time is left"
