"""`raytf tune` as a user types it: killed and repeated, stopped early, failed, and better than the default."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytf.testing import Job, environment
from tests.ray.conftest import MNIST_JOB, manifests, result_of

TUNE = [sys.executable, "-c", "from raytf.commands.main import main; main()", "tune", str(MNIST_JOB)]
ON_DIGITS = ["--", "--data", "digits", "--validation-share", "0.2", "--workers", "1", "--no-warm-workers"]
#: A search has several starts of TensorFlow in it, each of which takes a minute on a loaded machine.
PATIENCE = 600


@pytest.fixture
def search(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """search(*flags, **env): a search, started; stopped at the end of the test."""
    started: list[Job] = []

    def begin(*flags: object, **env: str) -> Job:
        command = [*TUNE, "--storage", str(tmp_path), "--metric", "val_accuracy", *map(str, flags)]
        started.append(Job(command, tmp_path / f"search-{len(started)}.log", environment(**env)))
        return started[-1]

    yield begin
    for job in started:
        job.close()


def records(folder: Path) -> dict[int, dict]:
    """Trials that are over, by number."""
    files = sorted((folder / "search" / "trials").glob("*.json"))
    return {int(file.stem): json.loads(file.read_text()) for file in files}


def attempts(folder: Path) -> list[int]:
    """Steps from which a run's worker groups began, in order."""
    return [json.loads(file.read_text())["from_step"] for file in sorted((folder / "attempts").glob("*.json"))]


def rows(output: str) -> dict[str, list[str]]:
    """Cells of the table at the end, by trial; with a star first where it is the best."""
    found = {}
    for line in output.splitlines():
        match = re.match(r"(\*?)\s+(trial-\d+)  (.*)", line)
        if match:
            found[match[2]] = [match[1], *re.split(r"\s{2,}", match[3])]
    return found


@pytest.mark.timeout(1500)
@pytest.mark.slow  # tests/unit/tune has the decisions, and what a search keeps
def test_a_search_that_was_killed_goes_on_and_tells_of_all_its_trials(
    search: Callable[..., Job], cluster: dict[str, str], tmp_path: Path
):
    there, folder = {"RAY_ADDRESS": cluster["RAY_ADDRESS"]}, tmp_path / "tune"
    asked = ["--search", "learning_rate=grid(0.01,1e-9)", "--search", "dropout=grid(0,2)", "--parallel", 1]
    asked += ["--scheduler", "asha", *ON_DIGITS, "--epochs", 40, "--checkpoint-every-steps", 30]
    first = search(*asked, **there)
    first.until(lambda: manifests(folder / "trial-000")[-1:] >= [30], PATIENCE)
    os.kill(first.process.pid, signal.SIGKILL)
    first.ended()
    assert records(folder) == {}

    output = search(*asked, **there).wait(PATIENCE)
    found, table = records(folder), rows(output)
    assert [found[n]["outcome"] for n in range(4)] == ["finished", "stopped", "failed", "failed"]
    began = attempts(folder / "trial-000")
    assert len(began) == 2
    assert began[1] >= 30, "the trial that was killed did not go on from its checkpoint"
    assert result_of(folder / "trial-000")["steps"] == 360
    assert found[1]["epochs"] == 1
    assert not (folder / "trial-001" / "result.json").exists()
    assert manifests(folder / "trial-001"), "a trial that is stopped saves first"
    assert table["trial-000"][:5] == ["*", "finished", "0", "0.01", "40"]
    assert table["trial-001"][:5] == ["", "stopped", "0", "1e-09", "1"]
    assert table["trial-002"][1] == "failed"
    assert "--dropout 2.0: expected a number from 0 to below 1." in " ".join(table["trial-002"])
    best = folder / "best"
    assert f"its run: {best}" in output
    assert json.loads((best / "parameters.json").read_text())["parameters"] == {"dropout": 0, "learning_rate": 0.01}
    assert result_of(best) == result_of(folder / "trial-000")
    assert (best / "export" / "1" / "saved_model.pb").exists()
    assert manifests(best) == [360]

    again = search(*asked, **there).wait(PATIENCE)
    assert "4 of 4 trials have ended already" in again
    assert rows(again) == table
    assert len(attempts(folder / "trial-000")) == 2


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_search_that_is_killed_midway_beats_the_default_within_8_trials(search: Callable[..., Job], tmp_path: Path):
    folder = tmp_path / "tune"
    asked = ["--search", "learning_rate=loguniform(1e-4,1e-1)", "--trials", 8, "--try-default", "--parallel", 2]
    asked += [*ON_DIGITS, "--epochs", 6]
    first = search(*asked)
    first.until(lambda: len(records(folder)) >= 3, PATIENCE)
    os.kill(first.process.pid, signal.SIGKILL)
    first.ended()
    before = records(folder)
    assert 3 <= len(before) < 8

    output = search(*asked).wait(2 * PATIENCE)
    after, table = records(folder), rows(output)
    assert f"{len(before)} of 8 trials have ended already" in output
    assert {n: after[n] for n in before} == before, "trials that were over were run again"
    assert all(len(attempts(folder / f"trial-{n:03d}")) == 1 for n in before)
    assert [record["outcome"] for record in after.values()] == ["finished"] * 8
    best = json.loads((folder / "best" / "parameters.json").read_text())
    assert after[0]["parameters"] == {}
    assert table["trial-000"][2] == "0.001"
    assert best["value"] == max(record["value"] for record in after.values())
    assert best["value"] > after[0]["value"] + 0.02, "no learning rate was better than the default"
    rates = [record["parameters"]["learning_rate"] for n, record in after.items() if n]
    assert len(set(rates)) == 7

    # More trials go on with the same ones.
    more = search(*[9 if a == 8 else a for a in asked]).wait(PATIENCE)
    assert "8 of 9 trials have ended already" in more
    assert {n: record for n, record in records(folder).items() if n < 8} == after
    assert records(folder)[8]["parameters"]["learning_rate"] not in rates


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_search_that_is_told_to_stop_saves_all_trials(search: Callable[..., Job], tmp_path: Path):
    folder = tmp_path / "tune"
    asked = ["--search", "learning_rate=grid(0.001,0.01)", "--parallel", 2, *ON_DIGITS, "--epochs", 3000]
    job = search(*asked)
    job.until(lambda: all((folder / f"trial-{n:03d}" / "attempts").exists() for n in (0, 1)), PATIENCE)
    os.kill(job.process.pid, signal.SIGINT)
    assert job.ended(PATIENCE) == 130
    assert "stopping: the trials save first" in job.output
    assert records(folder) == {}
    for n in (0, 1):
        assert "SIGTERM): saved" in (folder / f"trial-{n:03d}" / "job.log").read_text()
        assert manifests(folder / f"trial-{n:03d}")
        assert not (folder / f"trial-{n:03d}" / "lease.json").exists()
