"""Parameter servers: workers, servers and the coordinator are killed, and the run reaches what it should by itself."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raytf
from raytf.checkpoint import durable, manifest
from raytf.storage.storage import Storage
from raytf.testing import Job
from raytf.testing.processes import wait_until
from tests.ray.conftest import EVERYTHING, MNIST_JOB, ROOT, manifests, result_of
from tests.ray.test_data import subset
from tests.ray.test_resume import attempts

SERVERS = ("--strategy", "parameter-server")
LINE_JOB = ROOT / "jobs" / "linear_regression.py"
PATIENCE = 400.0
#: Of MNIST, and steps of an epoch with 128 in each.
RECORDS, EPOCH = 30_000, 235


def counted(folder: Path) -> tuple[int, int]:
    """(step, updates that the servers had seen) of the newest checkpoint."""
    run = Storage(str(folder))
    found = durable.load(run, manifest.list_complete(run)[0])
    (count,) = (value for name, value in found.tensors.items() if name.startswith("optimizer/00000"))
    return found.step, int(count)


def raytf_command(*args: object) -> str:
    command = [sys.executable, "-c", "from raytf.commands.main import main; main()", *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def step_of(run: Job, status: Path) -> int:
    return json.loads(status.read_text())["step"] if status.exists() else 0


@pytest.mark.slow  # the next one has the strategy, supervision/test_parameter_servers.py what a loss leads to
def test_show_2_kills_of_worker_server_and_coordinator(start: Callable[..., Job], tmp_path: Path, mnist_dir: Path):
    folder, status = tmp_path / "a", tmp_path / "status.json"
    data = subset(mnist_dir, tmp_path / "mnist", RECORDS)
    flags = ("--data", data, *SERVERS, "--ps", 1, "--workers", 2, "--epochs", 2, "--global-batch-size", 128)
    flags += ("--show-cluster", "--status-file", status)
    flags += ("--checkpoint-every-steps", 67, "--storage", tmp_path, "--run", "a")
    run = start(MNIST_JOB, *flags)

    run.until(lambda: step_of(run, status) >= 40, PATIENCE)
    workers = run.processes("ParameterWorker")
    assert len(workers) == 2
    workers[0].kill()
    run.until(lambda: "the others continue while it is replaced" in run.output, PATIENCE)
    at = step_of(run, status)
    run.until(lambda: step_of(run, status) >= at + 30 and " is back" in run.output, PATIENCE)
    # No restart of the group: the same coordinator and server, in the same attempt.
    assert len(attempts(folder)) == 1
    assert "restored" not in run.output
    assert run.output.count("2 workers, 1 parameter server and the coordinator, parameter-server") == 1
    assert all(f" {task} " in run.output for task in ("chief 0", "ps 0", "worker 0", "worker 1"))
    run.until(lambda: ", restarted" in run.output)  # the table of the one that is back comes after that line

    run.until(lambda: manifests(folder)[-1:] >= [134], PATIENCE)
    saved = manifests(folder)[-1]
    (server,) = run.processes("ParameterServer")
    server.kill()
    run.until(lambda: "restored step" in run.output, PATIENCE)
    run.until(lambda: len(attempts(folder)) == 2)  # a thread in the background writes it
    assert "parameter server 0 died; starting again" in run.output
    assert attempts(folder)[1]["from_step"] >= saved

    # At the end of the first epoch, which is in what is restored.
    run.until(lambda: manifests(folder)[-1:] >= [EPOCH], PATIENCE)
    saved = manifests(folder)[-1]
    step, updates = counted(folder)
    assert updates >= step, "updates were lost before the checkpoint"
    (coordinator,) = run.processes("CoordinatorProcess.")
    coordinator.kill()
    output = run.wait(PATIENCE)
    assert "the coordinator died; starting again" in output
    assert attempts(folder)[2]["from_step"] >= saved

    result = result_of(folder)
    assert result["metrics"]["test_accuracy"] >= 0.95
    assert (result["steps"], result["restarts"]) == (2 * EPOCH, 2)
    assert result["samples"] == 2 * RECORDS
    assert [entry["epoch"] for entry in result["history"]] == [0, 1]
    # At least once: only what was with a worker that died may have been applied twice.
    assert 0 <= result["repeated_updates"] <= 4 * 32
    assert counted(folder) == (result["steps"], result["updates"])
    steps = raytf.read_steps(str(folder))
    assert steps["step"].tolist() == list(range(1, 2 * EPOCH + 1))
    assert f"a resume restores step {result['steps']}" in raytf_command("verify", folder)
    shown = json.loads(raytf_command("show", folder, "--json"))
    assert (shown["state"], len(shown["restarts"])) == ("finished", 2)
    wait_until(lambda: not run.processes("Parameter"), "all processes have ended", 30)

    refused = start(MNIST_JOB, *flags[:2], "--epochs", 3, "--global-batch-size", 128, *flags[-6:])
    assert refused.ended() == 2
    assert "was made with --strategy parameter-server, but this command has a synchronous strategy" in refused.output


def test_a_line_is_found_and_the_run_saves_when_it_is_told_to_stop(start_there: Callable[..., Job], tmp_path: Path):
    flags = ("--storage", tmp_path, "--run", "line", "--checkpoint-every-seconds", 1000, "--records", 100_000)
    run = start_there(LINE_JOB, *flags, "--epochs", 3)
    run.until(lambda: "samples/s" in run.output, PATIENCE)
    run.process.terminate()
    assert run.ended(PATIENCE) == 128 + signal.SIGTERM, run.output
    assert "told to stop (SIGTERM): saved" in run.output
    at = manifests(tmp_path / "line")[-1]
    again = start_there(LINE_JOB, *flags, "--epochs", 3).wait(PATIENCE)
    assert f"restored step {at}" in again
    found = re.search(r"w = (\S+) \(2\), b = (\S+) \(10\)", again)
    assert found is not None, again
    assert float(found[1]) == pytest.approx(2, abs=0.05)
    assert float(found[2]) == pytest.approx(10, abs=0.05)
    document: dict[str, Any] = result_of(tmp_path / "line")
    assert document["updates"] == document["steps"] == 3 * 1563


@pytest.mark.slow
def test_synchronous_replicas_learn_what_the_default_strategy_learns(start: Callable[..., Job], tmp_path: Path):
    flags = ("--data", "digits", "--steps", 60, "--logical-shards", 4, "--storage", tmp_path, "--histograms-every", 30)
    flags += ("--scale-learning-rate", "linear", "--base-batch-size", 256, "--warmup-epochs", 2)
    start(MNIST_JOB, *flags, "--workers", 1, "--run", "plain").wait(PATIENCE)
    aggregated = ("--sync-replicas", "--replicas-to-aggregate", 2, "--workers", 3, "--ps", 2)
    start(MNIST_JOB, *flags, *SERVERS, *aggregated, "--run", "sync").wait(PATIENCE)
    plain, sync = (raytf.read_steps(str(tmp_path / name)) for name in ("plain", "sync"))
    np.testing.assert_allclose(sync["loss"], plain["loss"], atol=1e-4)
    np.testing.assert_allclose(sync["learning_rate"], plain["learning_rate"], rtol=1e-6)
    assert sync["learning_rate"][0] < sync["learning_rate"][-1]
    assert list((tmp_path / "sync" / "tensorboard").glob("events*"))
    first, second = (result_of(tmp_path / name) for name in ("plain", "sync"))
    assert second["updates"] == 60
    assert second["metrics"]["test_loss"] == pytest.approx(first["metrics"]["test_loss"], abs=1e-4)


@pytest.mark.slow
def test_callbacks_validation_augmentation_and_weights_work_alike(start: Callable[..., Job], tmp_path: Path):
    flags = ("--global-batch-size", 16, "--epochs", 6, "--storage", tmp_path, "--run", "a", "--keep-best", "val_loss")
    start(EVERYTHING, *flags, *SERVERS).wait(PATIENCE)
    result = result_of(tmp_path / "a")
    assert {"val_loss", "accuracy"} <= set(result["metrics"])
    assert (tmp_path / "a" / "files" / "best.keras").exists()
    assert result["steps"] == result["updates"]


@pytest.mark.slow
def test_a_group_waits_for_room_and_says_so_and_a_dead_driver_leaves_nothing(
    start_there: Callable[..., Job], tmp_path: Path
):
    first = start_there(MNIST_JOB, "--data", "digits", *SERVERS, "--epochs", 9999, "--storage", tmp_path, "--run", "a")
    first.until(lambda: "samples/s" in first.output, PATIENCE)
    # The head has four CPUs, and two workers, a server and the coordinator take them.
    flags = ("--data", "digits", *SERVERS, "--workers", "1:2", "--epochs", 1, "--storage", tmp_path, "--run", "b")
    second = start_there(MNIST_JOB, *flags)
    second.until(lambda: "waiting: the cluster has room for 0 workers beside 2 processes" in second.output, PATIENCE)
    first.kill()
    output = second.wait(PATIENCE)
    assert "2 workers" in output
    assert result_of(tmp_path / "b")["world_sizes"] == [2]


def test_what_no_cluster_can_give_is_refused_at_once(start_there: Callable[..., Job], tmp_path: Path):
    refused = start_there(MNIST_JOB, "--data", "digits", *SERVERS, "--ps", 3, "--storage", tmp_path)
    assert refused.ended() == 2
    (line,) = [line for line in refused.output.splitlines() if line.startswith("error:")]
    assert "has room for at most 0 beside 4 CPUs for the parameter servers and the coordinator" in line
