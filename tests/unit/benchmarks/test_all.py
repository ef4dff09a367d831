"""benchmarks/all.py and the page that it writes: order, failures, limits of time, and an end in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks import all as everything
from benchmarks import performance
from benchmarks.harness import Comparison, Grid, Reading, Report
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


def report(name, reached=True):
    row = Comparison("MLP", "Keras fit", "steps/s", [2.0 if reached else 0.5], [1.0], goal=1.0)
    return Report(name, "A benchmark", [row], machine={"cpu": "a CPU", "cores": 2, "versions": {"ray": "2.60.0"}})


def test_those_asked_for_run_in_the_order_of_the_list():
    assert [entry.name for entry in everything.chosen("scale, input,mine,step_overhead")] == [
        "step_overhead",
        "input",
        "scale",
        "mine",
    ]
    assert everything.chosen("") == list(everything.ENTRIES)


@pytest.mark.parametrize(
    ("flags", "page"),
    [
        ({}, everything.PAGE),
        ({"quick": True}, None),
        ({"only": "scale"}, None),
        ({"quick": True, "write": Path("x.md")}, Path("x.md")),
        ({"only": "scale", "write": Path("x.md")}, Path("x.md")),
    ],
)
def test_only_a_full_run_writes_the_page_by_itself(flags, page):
    assert everything.page_of(everything.Arguments(**flags)) == page


def test_one_that_fails_does_not_keep_the_others_from_running(tmp_path):
    write(tmp_path, step_overhead="raise SystemExit(3)", scale=GOOD, startup="print('no result')")
    page = tmp_path / "page.md"
    done = run(tmp_path, "--quick", "--write", str(page), only="step_overhead,input,scale,startup")
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if line.startswith("no result of ")] == [
        "no result of step_overhead: ended with code 3",
        "no result of input: there is no data/input.py",
        "no result of startup: left no result",
    ]
    assert sorted(path.name for path in (tmp_path / "results").glob("*.json")) == ["scale.json"]
    text = page.read_text()
    assert "- quick\n" in text
    assert "**step_overhead** has no result of the last run: ended with code 3." in text


def test_what_an_earlier_run_left_is_shown_too_and_survives_one_that_fails(tmp_path):
    write(tmp_path, step_overhead=GOOD, scale=GOOD)
    assert run(tmp_path, only="step_overhead").returncode == 0
    write(tmp_path, step_overhead="raise SystemExit(3)")
    page = tmp_path / "page.md"
    assert run(tmp_path, "--write", str(page)).returncode == 1
    text = page.read_text()
    assert text.index("## step_overhead") < text.index("## scale")
    assert "- not quick\n" in text


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


def test_the_page_lists_goals_and_weaves_in_what_people_wrote():
    findings = "For editors.\n\n## introduction\n\nHello.\n\n## scale\n\nTried much.\n\n## outlook\n\nMore to come.\n"
    text = performance.page([report("step_overhead"), report("scale", reached=False)], findings)
    order = ["Hello.", "## Goals", "## step_overhead", "## scale", "Tried much.", "## outlook", "More to come."]
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)
    assert "For editors." not in text
    assert "times Keras `fit` on every model | [step_overhead](#step_overhead) | 1 of 1 | reached |" in text
    assert "| scale: MLP, Keras fit | [scale](#scale) | 0 of 1 | **missed** |" in text
    assert "- [scale](#scale): MLP, Keras fit: 0.50 [0.50, 0.50], wanted ≥ 1\n" in text
    assert "| Recovery: P95 of 20 s or less |  |  | not measured |" in text


def test_a_goal_has_its_rows_by_name():
    recovery = Report("recovery", "Restarts", grids=[Grid("Phases", ["phase", "s"], [["import", "3.1"]])])
    assert "Phases:\n\n| phase | s |\n| --- | --- |\n| import | 3.1 |\n" in performance.page([recovery], "")
    recovery.readings += [Reading("SIGKILL", f"P{p}", "s", [9.0], at_most=10.0) for p in (50, 95)]
    recovery.comparisons.append(Comparison("SIGKILL", "stock Ray", "s", [9.0], [18.0], more_is_better=False, goal=3.0))
    found = performance.goals([recovery])
    assert [row.found for row in found["Recovery: P95 of 20 s or less"]] == ["9 s, wanted ≤ 10.0"]
    assert [row.reached for row in found["Recovery: at least 3 times faster than stock Ray"]] == [False]
    assert len(found["Recovery: P50 of 10 s or less"]) == 1


@pytest.mark.parametrize(
    ("benchmark", "name", "goal"),
    [
        ("step_overhead", "MLP, raytf (as it is), Keras fit (32 steps a call)", "Keras `fit`"),
        ("step_overhead", "MLP, memory of raytf's worker", "Memory of a worker"),
        ("distributed", "MNIST CNN, 2 workers, MWMS by hand", "a script by hand"),
        ("distributed", "MNIST CNN, 2 workers, Ray TensorflowTrainer", "stock Ray, MNIST"),
        ("distributed", "MNIST CNN, 2 workers, DDP through Ray", "PyTorch DDP"),
        ("distributed", "MNIST CNN, 2 workers, exact, raytf, float", "Exact mode"),
        ("exact_cost", "mnist, 421,642 weights, 2 workers, exact, float", "Exact mode"),
        ("checkpoint_cost", "1 GB: stall, to memory, one copy in memory", "A checkpoint's stall"),
        ("checkpoint_cost", "1 GB: time to durable, the disk: write and fsync", "80 % of the raw rate"),
        ("snapshot_cost", "2 workers, to memory every 10 steps, the same without", "1 % or less"),
        ("recovery", "raytf, worker, P95 to a new step, n = 20", "P95"),
        ("recovery", "worker lost, seconds to a new step, Ray TensorflowTrainer", "stock Ray"),
        ("input", "arrays, 28x28 uint8, raytf", "from arrays"),
        ("input", "Parquet, local, raytf", "from Parquet"),
        ("scale", "a row of nobody's goal", "scale: a row of nobody's goal"),
    ],
)
def test_rows_of_the_benchmarks_find_their_goals(benchmark, name, goal):
    assert goal in performance._goal_of(benchmark, name)


def test_a_command_is_told_without_the_file_of_its_result():
    assert performance.command("python -m benchmarks.scale.scale --quick --json /tmp/x/scale.json.part") == (
        "python -m benchmarks.scale.scale --quick"
    )


def test_a_bar_in_a_cell_does_not_end_it():
    assert performance.table(["a"], [["x|y"]]).splitlines()[-1] == "| x\\|y |"
