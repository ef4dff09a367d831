"""Runs that are killed go on from their newest checkpoint, as if nothing had happened."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import raytf
from tests.ray.conftest import EVERYTHING, MNIST_JOB, Bucket, manifests, result_of


def attempts(folder: Path) -> list[dict]:
    return [json.loads(p.read_text()) for p in sorted(folder.glob("attempts/*.json"))]


@pytest.mark.slow  # test_each_process.py kills a driver, and compares bits; test_memory.py has a callback's rows
def test_kill_of_driver_and_workers_in_mid_epoch(start, start_there, tmp_path: Path):
    flags = ("--global-batch-size", 16, "--epochs", 4, "--checkpoint-every-steps", 20, "--steps-per-call", 5)
    flags = (*flags, "--storage", tmp_path)
    start_there(EVERYTHING, *flags, "--run", "undisturbed").wait()
    killed = tmp_path / "killed"
    run = start(EVERYTHING, *flags, "--run", "killed", "--no-warm-workers")
    run.until(lambda: manifests(killed)[-1:] >= [80])
    run.kill()
    at = manifests(killed)[-1]
    assert at % 63, "killed at the end of an epoch, not inside one"

    output = start_there(EVERYTHING, *flags, "--run", "killed").wait()

    assert f"restored step {at}" in output
    assert [a["from_step"] for a in attempts(killed)] == [0, at]
    whole, resumed = (raytf.read_steps(str(tmp_path / name)) for name in ("undisturbed", "killed"))
    assert resumed["step"].tolist() == list(range(1, 253))
    np.testing.assert_allclose(resumed["loss"], whole["loss"], rtol=1e-4)
    first, second = result_of(tmp_path / "undisturbed"), result_of(killed)
    for name, value in first["metrics"].items():
        assert second["metrics"][name] == pytest.approx(value, abs=1e-4), name
    assert second["restarts"] == 1
    with (killed / "files" / "log.csv").open() as log:
        assert [row["epoch"] for row in csv.DictReader(log)] == ["0", "1", "2", "3"]


@pytest.mark.core
def test_kill_of_one_worker_is_survived_without_a_word_from_the_user(start, tmp_path: Path):
    folder = tmp_path / "a"
    flags = ("--global-batch-size", 16, "--epochs", 8, "--checkpoint-every-steps", 20, "--steps-per-call", 5)
    flags = (*flags, "--no-warm-workers")  # test_each_process.py kills one beside warm processes
    run = start(EVERYTHING, *flags, "--patience", 50, "--storage", tmp_path, "--run", "a")
    run.until(lambda: "run a in" in run.output)
    began = time.monotonic()
    run.until(lambda: manifests(folder)[-1:] >= [60])
    workers = run.processes("RayTrainWorker")
    assert len(workers) == 2
    workers[-1].kill()
    run.until(lambda: "\nfinished: " in run.output)
    outside = time.monotonic() - began
    output = run.wait()
    assert "workers were lost (1 worker process died); the others continue" in output
    assert "1 worker continues after " in output
    assert "restored step" not in output
    result = result_of(folder)
    # Once without the one that was lost, and once more if another one came in time.
    assert result["restarts"] == result["regroups"] in (1, 2)
    assert result["steps"] == 8 * 63
    assert raytf.read_steps(str(folder))["step"].tolist() == list(range(1, 8 * 63 + 1))

    show = [sys.executable, "-c", "from raytf.commands.main import main; main()", "show", str(folder)]
    shown = json.loads(subprocess.run([*show, "--json"], check=True, capture_output=True, timeout=60).stdout)
    assert (shown["state"], shown["step"], len(shown["restarts"])) == ("finished", 8 * 63, result["restarts"])
    # All that the ledger books is what somebody with a watch has seen.
    assert sum(shown["seconds"].values()) == pytest.approx(outside, rel=0.01)
    assert shown["seconds"].items() >= result["seconds"].items()
    assert shown["seconds"]["restart"] > 0
    assert "1 worker process died" in shown["restarts"][0]["cause"]
    assert {restart["redone"] for restart in shown["restarts"]} == {0}
    # What came before the last sign of life, at which a pause may have begun already, is booked as training.
    phases = sum(sum(restart["phases"].values()) for restart in shown["restarts"])
    assert shown["seconds"]["restart"] <= phases + 0.05
    text = subprocess.run(show, check=True, capture_output=True, text=True, timeout=60).stdout
    assert f"goodput {result['goodput']:.1%}" in text
    assert "1 worker process died" in text

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    assert {"batch_loss", "goodput", "restarts", "world_size"} <= set(board.Tags()["tensors"])
    assert {float(make_ndarray(e.tensor_proto)) for e in board.Tensors("world_size")} == {1.0, 2.0}
    assert all(0 <= float(make_ndarray(e.tensor_proto)) < 1 for e in board.Tensors("goodput"))


def test_s3_kill_and_resume_by_another_machine(start, tmp_path: Path, bucket: Bucket):
    env = {**bucket.env, "HOME": str(tmp_path / "laptop")}
    storage = bucket.uri("runs")
    flags = (
        "--data",
        "digits",
        "--workers",
        1,
        "--no-warm-workers",
        "--checkpoint-every-steps",
        12,
        "--steps-per-call",
        4,
        "--storage",
        storage,
        "--run",
        "a",
    )
    run = start(MNIST_JOB, *flags, **env)
    prefix = "runs/a/checkpoints/"
    run.until(lambda: any(k.endswith("MANIFEST.json") for k in bucket.keys(prefix)))
    run.kill()
    # Another machine's process cannot see that the first one is dead, so its lease has to be watched for a while.
    lease = json.loads(bucket.get("runs/a/lease.json"))
    bucket.put("runs/a/lease.json", json.dumps({**lease, "host": "elsewhere", "boot": "another"}).encode())

    output = start(MNIST_JOB, *flags, **{**env, "HOME": str(tmp_path / "other")}).wait()

    assert "watching for up to" in output
    assert "restored step" in output
    result = json.loads(bucket.get("runs/a/result.json"))
    assert result["metrics"]["test_accuracy"] >= 0.95
    assert result["restarts"] == 1
    keys = bucket.keys("runs/a/")
    assert "runs/a/export/1/saved_model.pb" in keys
    assert "runs/a/model.keras" in keys
    assert any(k.startswith("runs/a/tensorboard/events") for k in keys)
    assert len([k for k in keys if k.endswith("MANIFEST.json")]) == 3
    assert not any("secret" in bucket.get(k).decode(errors="ignore") for k in keys if k.endswith(".json"))


@pytest.mark.slow  # tests/unit/storage has gs://, and the test above a run in a bucket
def test_gcs_train_and_go_on(start_there, tmp_path: Path, gcs: str):
    flags = ("--data", "digits", "--workers", 1, "--storage", gcs, "--run", "a")
    start_there(MNIST_JOB, *flags, "--steps", 24).wait()
    output = start_there(MNIST_JOB, *flags, "--steps", 36).wait()
    assert "restored step 24" in output
    place, _, query = gcs.partition("?")
    assert raytf.read_steps(f"{place}/a?{query}")["step"].tolist() == list(range(1, 37))


def test_damaged_checkpoint_is_reported_and_the_one_before_it_restored(start_there, tmp_path: Path):
    flags = ("--data", "digits", "--checkpoint-every-steps", 12, "--storage", tmp_path, "--run", "a")
    start_there(MNIST_JOB, *flags, "--steps", 60).wait()
    kept = sorted((tmp_path / "a" / "checkpoints").iterdir())
    assert len(kept) == 3
    share = kept[-1] / "share-00000.safetensors"
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    (kept[-2] / "share-00001.safetensors").unlink()
    output = start_there(MNIST_JOB, *flags, "--workers", 1, "--steps", 72).wait()
    assert f"checkpoint {kept[-1].name} is skipped" in output
    assert "share-00000.safetensors has a wrong checksum" in output
    assert f"checkpoint {kept[-2].name} is skipped" in output
    assert f"from checkpoint {kept[-3].name}" in output
    result = result_of(tmp_path / "a")
    assert (result["steps"], result["restarts"], result["world_sizes"]) == (72, 1, [1, 2])
    assert raytf.read_steps(str(tmp_path / "a"))["step"].tolist() == list(range(1, 73))


@pytest.mark.slow  # tests/tf/test_callbacks.py restores each callback's state
def test_early_stopping_keeps_its_memory_over_a_restart(start_there, tmp_path: Path):
    flags = ("--global-batch-size", 64, "--patience", 1, "--workers", 1, "--storage", tmp_path)
    start_there(EVERYTHING, *flags, "--run", "whole", "--epochs", 40, "--keep", 1, "--keep-best", "val_loss").wait()
    whole = result_of(tmp_path / "whole")
    best = min(whole["history"], key=lambda logs: logs["val_loss"])
    assert best["step"] < whole["steps"]
    kept = sorted((tmp_path / "whole" / "checkpoints").iterdir())
    assert [int(folder.name[:12]) for folder in kept] == [best["step"], whole["steps"]]
    assert whole["stopped_early"]
    epochs = len(whole["history"])
    assert epochs > 2
    # One epoch at a time: every epoch is a restart, and what EarlyStopping remembers must survive each.
    start_there(EVERYTHING, *flags, "--run", "parts", "--epochs", epochs - 1).wait()
    output = start_there(EVERYTHING, *flags, "--run", "parts", "--epochs", 40).wait()
    parts = result_of(tmp_path / "parts")
    assert parts["stopped_early"], output
    assert [round(e["val_loss"], 4) for e in parts["history"]] == [round(e["val_loss"], 4) for e in whole["history"]]
    assert "nothing to do" in start_there(EVERYTHING, *flags, "--run", "parts", "--epochs", 60).wait()
