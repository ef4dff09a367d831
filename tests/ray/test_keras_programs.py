"""Keras programs in which nothing is changed, run by `raytf run`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest

import raytf
from raytf.testing import Job, environment
from tests.ray.conftest import manifests
from tests.ray.test_resume import attempts

PROGRAM = Path(__file__).parent / "jobs" / "plain_keras.py"
RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()", "run"]
#: Of the second and the third `fit`, which have 9 steps in each.
EPOCHS = 20


@pytest.fixture
def run(tmp_path: Path, cluster: dict[str, str]) -> Iterator[Callable[..., Job]]:
    """run(name, *flags): the program on the running Ray."""
    jobs: list[Job] = []

    def begin(name: str, *flags: object) -> Job:
        command = [*RAYTF, "--exact", "--no-warm-workers", "--storage", tmp_path, "--run", name, *flags]
        command += [PROGRAM, EPOCHS]
        store = {"MLFLOW_TRACKING_URI": (tmp_path / "mlflow").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
        env = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"], **store)
        jobs.append(Job([*map(str, command)], tmp_path / f"log-{len(jobs)}", env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def told(output: str) -> dict[str, Any]:
    """What the program prints, once."""
    (line,) = [line for line in output.splitlines() if line.startswith("TOLD ")]
    return json.loads(line.removeprefix("TOLD "))


def tracked(folder: Path) -> dict[str, list[int]]:
    """The runs that MLFlow knows, all finished, and the steps of each in the order in which it was told of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        client = mlflow.MlflowClient((folder / "mlflow").as_uri())
        runs = client.search_runs(["0"])
        assert {run.info.status for run in runs} == {"FINISHED"}
        names = [run.info.run_name for run in runs]
        assert len(set(names)) == len(names)
        return {r.info.run_name: [m.step for m in client.get_metric_history(r.info.run_id, "loss")] for r in runs}


def test_a_program_that_is_killed_goes_on_in_the_fit_that_it_was_in(run: Callable[..., Job], tmp_path: Path):
    flags = "--workers", 2, "--checkpoint-every-steps", 30
    killed = run("killed", *flags)
    killed.until(lambda: manifests(tmp_path / "killed" / "2"))
    killed.kill()
    output = run("killed", *flags).wait()
    again = told(output)
    assert "run killed/1 has finished (6 steps); nothing to do" in output
    assert [attempt["from_step"] > 0 for attempt in attempts(tmp_path / "killed" / "2")] == [False, True]
    assert again["unequal"] == [0.0, 0.0], "a record was missed or seen twice in an epoch"


@pytest.mark.slow  # the same with more kills, a tracker, and what plain Keras says
def test_a_program_that_is_killed_in_its_second_and_third_fit_goes_on_there(run: Callable[..., Job], tmp_path: Path):
    env = environment(KERAS_BACKEND="tensorflow")
    command = [sys.executable, str(PROGRAM), str(EPOCHS)]
    plain = told(subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True).stdout)
    undisturbed = told(run("undisturbed", "--workers", 1).wait())

    outputs = []
    for workers, fit in ((1, "2"), (2, "3")):
        killed = run("killed", "--workers", workers, "--checkpoint-every-steps", 30, "--track", "mlflow")
        killed.until(lambda: manifests(tmp_path / "killed" / fit))  # noqa: B023
        killed.kill()
        outputs.append(killed.output)
    outputs.append(run("killed", "--workers", 1, "--checkpoint-every-steps", 30, "--track", "mlflow").wait())
    again = told(outputs[-1])

    assert "run killed/1 has finished (6 steps); nothing to do" in outputs[1]
    assert "run killed/2 has finished" in outputs[2]
    for number, sizes in (("1", [1]), ("2", [1, 2]), ("3", [2, 1])):
        found = attempts(tmp_path / "killed" / number)
        assert [attempt["world_size"] for attempt in found] == sizes
        assert [attempt["from_step"] > 0 for attempt in found] == [False, True][: len(sizes)]
    assert tracked(tmp_path) == {
        name: list(range(1, int(raytf.read_steps(str(tmp_path / name))["step"][-1]) + 1))
        for name in ("killed/1", "killed/2", "killed/3")
    }
    assert again == undisturbed
    assert again["unequal"] == [0.0, 0.0], "a record was missed or seen twice in an epoch"
    assert "made by this program while the run trains, since it has " in outputs[0]
    # Each step of the first fit has all records, so they are the same in plain Keras; of the others it draws its own.
    for name, values in plain["first"].items():
        np.testing.assert_allclose(again["first"][name], values, rtol=1e-5, err_msg=name)
    for name in ("drawn", "epochs", "kind", "own", "iterations"):
        assert again[name] == plain[name], name
    np.testing.assert_allclose(again["evaluated"]["loss"], plain["evaluated"]["loss"], atol=0.1)
