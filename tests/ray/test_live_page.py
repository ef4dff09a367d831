"""The page of a run in a real browser, from `raytf ui`, while workers of the run die and a node joins."""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

import pytest

from raytf.testing import ElasticCluster, Job, environment
from tests.cluster import browser
from tests.ray.conftest import result_of
from tests.ray.test_elastic import trains
from tests.ray.test_resume import attempts
from tests.stress.law import schedules as law

PATIENCE = 300.0
PICTURES = os.environ.get("RAYTF_PICTURES")
#: The number of steps on the page, now.
_STEP = """[...document.querySelectorAll('.tile')].filter(t => t.innerText.startsWith('Steps'))
  .map(t => Number(t.querySelector('dd').firstChild.textContent.replaceAll(',', '')))[0]"""
#: Notes for a while what the page says, and when.
_NOTE = f"window.noted = []; setInterval(() => window.noted.push([Date.now() / 1000, {_STEP}]), 100)"

pytestmark = [pytest.mark.gate, pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")]


def age(noted: list[tuple[float, int]], made: list[tuple[float, int]]) -> list[float]:
    """For how long the run had been further than a page said, at each of its notes."""
    ages = []
    for now, shown in noted:
        further = [at for at, step in made if step > shown and at <= now]
        ages.append(now - further[0] if further else 0.0)
    return ages


@pytest.mark.timeout(900)
def test_a_run_with_two_kills_and_a_resize(tmp_path: Path):
    made: list[tuple[float, int]] = []
    over = threading.Event()

    def follow(job: Job) -> None:
        while not over.wait(0.05):
            if job.step is not None and (not made or made[-1][1] != job.step):
                made.append((time.time(), job.step))

    flags = [
        "--data",
        "digits",
        "--model",
        "batchnorm",
        "--global-batch-size",
        "64",
        "--epochs",
        "60",
        "--workers",
        "1:3",
    ]
    flags += ["--resize-every-seconds", "5", "--exact", "--pause", "0.1", "--pause-while", str(tmp_path / "pause")]
    flags += ["--storage", str(tmp_path / "runs"), "--run", "a", "--status-file", str(tmp_path / "status.json")]
    (tmp_path / "pause").touch()
    (tmp_path / "runs").mkdir()
    with (
        ElasticCluster(nodes=2) as cluster,
        Job(
            [sys.executable, str(law.JOB), *flags],
            tmp_path / "log",
            environment(**cluster.env),
            status_file=tmp_path / "status.json",
        ) as job,
        Job([sys.executable, "-m", "raytf", "ui", str(tmp_path / "runs"), "--port", "0"], tmp_path / "ui") as pages,
    ):
        thread = threading.Thread(target=follow, args=(job,), daemon=True)
        thread.start()
        try:
            job.until(lambda: trains(job, 2) and (job.step or 0) >= 10, PATIENCE)
            pages.until(lambda: re.search(r"http://\S+/", pages.output))
            (url,) = re.findall(r"(http://\S+)/", pages.output)
            steps = ["open", f"{url}/run/a"], ["see", "running"], ["do", _NOTE], ["is", "window.noted.length >= 100"]
            seen = browser.look([*steps, ["tell", "window.noted"]], tmp_path)
            noted = json.loads(seen[-1])
            assert len({step for _, step in noted}) > 3, "the page has not followed the run"
            ages = age(noted, made)
            print(f"the page is behind by {statistics.median(ages):.1f} s, {max(ages):.1f} s at most")
            assert statistics.median(ages) < 10
            for number in (1, 2):
                cluster.workers()[-1].kill()
                job.until(lambda n=number: job.output.count("2 workers continue") >= n, PATIENCE)
            cluster.add_node()
            job.until(lambda: "3 workers continue" in job.output, PATIENCE)
            (tmp_path / "pause").unlink()
            job.wait(PATIENCE)
        finally:
            over.set()
            thread.join(10)
        # Ray's own page about each dead worker is not among the run's lines.
        assert "A worker died or was killed" not in job.output
        shots = Path(PICTURES or tmp_path)
        seen = browser.look(
            [
                ["open", f"{url}/run/a"],
                ["see", "finished"],
                ["is", "document.querySelectorAll('#learning-charts canvas').length >= 2"],
                ["tell", _STEP],
                ["tell", "document.querySelector('#head').innerText"],
                ["tell", "document.body.innerText"],
                ["shoot", str(shots / "killed-and-resized.png")],
                ["phone"],
                ["dark"],
                ["open", f"{url}/run/a"],
                ["is", "document.querySelectorAll('#learning-charts canvas').length >= 2"],
                ["is", "document.documentElement.scrollWidth <= innerWidth"],
                ["shoot", str(shots / "killed-and-resized-phone-dark.png")],
            ],
            tmp_path,
        )
    assert json.loads(seen[1]) == result_of(tmp_path / "runs" / "a")["steps"]
    head, page = json.loads(seen[2]), json.loads(seen[3])
    held = [attempt["tier"] for attempt in attempts(tmp_path / "runs" / "a")].count("held")
    assert held >= 5  # after each death the other one alone, and whenever somebody joins
    assert f"{held} in place, 2 faults seen" in head
    for words in ("--workers", "1:3", "tensorflow", "machine", "raytf replay"):
        assert words in page
