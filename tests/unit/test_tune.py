"""The command's decisions: what trials share, what a job says of its flags, and one clear line for what cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytf.errors import ConfigError
from raytf.tune import Share, describe, share
from raytf.tune_trial import reason

ROOT = Path(__file__).parents[2]
MNIST = str(ROOT / "jobs" / "mnist.py")
ONE = ["--search", "learning_rate=grid(0.1)"]


@pytest.mark.parametrize(
    ("workers", "capacity", "parallel", "expected"),
    [
        ("2", 8, None, Share(4)),
        ("2", 8, 3, Share(3)),
        ("2", 1, None, Share(1)),
        ("1:4", 8, None, Share(2)),
        ("1:4", 8, 4, Share(4, ["--workers=1:2", "--logical-shards=4"])),
        ("1:8", 8, 8, Share(8, ["--workers=1:1", "--logical-shards=8"])),
        ("2:4", 8, 8, Share(8, ["--workers=2:2", "--logical-shards=4"])),  # four wait, whole
        ("1", 100, None, Share(20)),
    ],
)
def test_how_trials_share_a_cluster(workers: str, capacity: int, parallel: int | None, expected: Share):
    assert share({"workers": workers}, capacity, 20, parallel, ["learning_rate"]) == expected


def test_a_search_over_workers_keeps_those_that_it_asks_for():
    assert share({"workers": "1:4"}, 4, 20, 4, ["workers"]) == Share(4)
    assert share({"workers": "1:4", "logical_shards": 16}, 4, 20, 2, ["x"]).flags[1] == "--logical-shards=16"


def test_a_job_tells_what_its_flags_say():
    values = describe(MNIST, ["--learning-rate=0.5", "--workers", "1:3"])
    assert values["learning_rate"] == 0.5
    assert values["workers"] == "1:3"
    assert values["epochs"] is None


@pytest.mark.parametrize(
    ("job", "flags", "words"),
    [
        ("jobs/none.py", [], "jobs/none.py: there is no such file"),
        (MNIST, ["--learning-rat=1"], "Unrecognized options: --learning-rat=1.*Perhaps you meant"),
        (MNIST, ["--learning-rate=x"], "learning-rate"),
    ],
)
def test_flags_that_a_job_refuses_are_told(job: str, flags: list[str], words: str):
    with pytest.raises(ConfigError, match=words) as caught:
        describe(job, flags)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("page", ["print('no flags')", "import raytf\nraise SystemExit(0)"])
def test_a_job_without_raytfs_flags_is_refused(tmp_path: Path, page: str):
    job = tmp_path / "job.py"
    job.write_text(page)
    with pytest.raises(ConfigError, match=r"did not tell its flags.*raytf\.cli\(main\)"):
        describe(str(job), [])


@pytest.mark.parametrize(
    ("output", "code", "expected"),
    [
        ("a\nerror: no such bucket\n", 2, "no such bucket"),
        ("error: first\nmore\nerror: last\nwords", 1, "last"),
        ("Traceback\nValueError: x\n", 1, "exit code 1: ValueError: x"),
        ("epoch 1\n", -9, "killed by SIGKILL: epoch 1"),
        ("", 3, "exit code 3"),
    ],
)
def test_why_a_command_failed(output: str, code: int, expected: str):
    assert reason(output, code) == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (ONE, ["there is no job", "raytf tune jobs/mnist.py"]),
        ([MNIST], ["nothing to search", "--search 'learning_rate="]),
        ([MNIST, "--search", "learning_rate=1"], ["--search 'learning_rate=1'", "none of uniform"]),
        ([MNIST, *ONE, "--trials", "0"], ["--trials 0", "1 or more"]),
        ([MNIST, *ONE, "--trials", "2"], ["--trials 2", "the grid has 1 points"]),
        ([MNIST, *ONE, "--metric", "something"], ["--metric something", "max:METRIC"]),
        ([MNIST, *ONE, "--name", "a/b"], ["a/b", "letters, digits"]),
        ([MNIST, *ONE, "--", "--run", "a"], ["--run belongs to the search", "--name"]),
        ([MNIST, *ONE, "--", "--status_file=a"], ["--status-file belongs to the search"]),
        ([MNIST, "--search", "storage=grid(a,b)"], ["--storage belongs to the search"]),
        ([MNIST, *ONE, "--", "--epoch", "1"], ["refuses", "--epoch"]),
    ],
)
def test_bad_commands_end_in_one_line(tmp_path: Path, args: list[str], words: list[str]):
    command = [sys.executable, "-c", "from raytf.main import main; main()", "tune"]
    where = [] if "--" in args else ["--storage", str(tmp_path)]
    done = subprocess.run([*command, *where, *args], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr
    assert not list(tmp_path.iterdir())
