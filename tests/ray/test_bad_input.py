"""What goes wrong is said in one line that names the cause and the fix, and the exit code tells."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytf.checkpoint import manifest
from raytf.config.command_line import EXIT_AGAIN, EXIT_FAILED
from tests.laws.mutations import signed
from tests.ray.conftest import EVERYTHING, MNIST_JOB, Bucket, manifests, result_of

FAULTY = Path(__file__).parent / "jobs" / "faulty.py"


def refused(run, code: int = 2) -> str:
    """The one line with which a run was refused."""
    assert run.ended() == code, run.output
    errors = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, run.output
    if code != 1:
        assert "Traceback" not in run.output
    return errors[0]


def test_a_loss_that_is_not_finite(start_there, tmp_path: Path):
    line = refused(start_there(FAULTY, "--fault", "nan", "--storage", tmp_path, "--workers", 1), EXIT_FAILED)
    for word in ("became", "at step", "epoch 1, batch", "no checkpoint was written yet"):
        assert word in line, line


@pytest.mark.slow  # tests/tf/test_exact.py names such layers
def test_what_cannot_be_exact_is_refused_by_name_and_trains_without(start_there, tmp_path: Path):
    flags = ("--fault", "noise", "--workers", 1, "--storage", tmp_path, "--steps", 4)
    line = refused(start_there(FAULTY, *flags, "--exact"))
    for word in ("--exact: the model", "RandomStandardNormal", "noise", "keras.random"):
        assert word in line, line
    start_there(FAULTY, *flags).wait()
    line = refused(start_there(FAULTY, *flags, "--steps", 8, "--exact"))
    assert "--exact: False in storage, True now" in line


@pytest.mark.slow  # tests/tf/test_callbacks.py has the error, tests/unit/driver/supervision/test_retry.py the retry
def test_a_callback_that_raises_ends_the_run_with_its_name(start_there, tmp_path: Path):
    run = start_there(EVERYTHING, "--fail-after", 2, "--storage", tmp_path, "--workers", 2)
    line = refused(run, code=1)
    assert "a callback's on_epoch_end raised RuntimeError: the callback broke" in line
    assert "trying it once more" in run.output
    assert "the same as before at the same step" in run.output
    assert run.output.count("trying it once more") == 1


@pytest.mark.core
def test_more_workers_than_the_cluster_can_ever_give(start_there, tmp_path: Path):
    began = time.monotonic()
    run = start_there(FAULTY, "--workers", 64, "--storage", tmp_path)
    line = refused(run)
    assert "--workers 64" in line
    assert "has room for at most 4" in line
    assert time.monotonic() - began < 60


@pytest.mark.core
def test_a_ray_that_does_not_answer(start, tmp_path: Path):
    line = refused(start(FAULTY, "--storage", tmp_path, RAY_ADDRESS="127.0.0.1:1"))
    assert "No Ray answers at RAY_ADDRESS=127.0.0.1:1" in line


def test_gpus_that_are_not_there(start_there, tmp_path: Path):
    run = start_there(FAULTY, "--use-gpu", "--storage", tmp_path)
    assert "no node of this cluster has a GPU" in refused(run)


@pytest.mark.slow  # test_finished.py refuses another rate, tests/unit/driver/test_preflight.py all that differs
def test_a_run_resumed_under_changed_settings_is_refused_with_the_difference(start_there, tmp_path: Path):
    flags = ("--storage", tmp_path, "--workers", 1, "--global-batch-size", 64)
    start_there(EVERYTHING, *flags, "--epochs", 1).wait()

    batch = refused(start_there(EVERYTHING, *flags[:-1], 32, "--epochs", 2))
    assert "--global-batch-size: 64 in storage, 32 now" in batch

    model = refused(start_there(EVERYTHING, *flags, "--epochs", 2, "--units", 25))
    assert "model structure" in model
    assert "24" in model
    assert "25" in model

    accepted = start_there(EVERYTHING, *flags, "--epochs", 2, "--keep", 1, "--checkpoint-every-steps", 7).wait()
    assert "restored step 16" in accepted


def test_two_live_runs_of_one_name(start, tmp_path: Path):
    flags = ("--data", "digits", "--workers", 1, "--storage", tmp_path, "--run", "a", "--epochs", 2000)
    first = start(MNIST_JOB, *flags, "--no-warm-workers")
    first.until((tmp_path / "a" / "lease.json").exists)
    began = time.monotonic()
    line = refused(start(MNIST_JOB, *flags), EXIT_AGAIN)
    assert f"is in use by process {first.process.pid}" in line
    assert time.monotonic() - began < 30
    assert first.process.poll() is None

    first.until(lambda: "epoch 2: " in first.output)
    first.process.send_signal(signal.SIGINT)
    assert first.ended() == 130
    assert re.search(r"^interrupted: saved step \d+$", first.output, re.MULTILINE)
    assert first.output.splitlines()[-1] == "interrupted; the same command continues from the last checkpoint."
    assert not (tmp_path / "a" / "lease.json").exists()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """An endpoint that accepts connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(64)
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.core
def test_storage_that_does_not_answer(start, bucket: Bucket):
    with silent_server() as endpoint:
        began = time.monotonic()
        storage = f"s3://bucket/runs?endpoint_override={endpoint}&scheme=http"
        line = refused(start(MNIST_JOB, "--data", "digits", "--storage", storage, **bucket.env), EXIT_AGAIN)
    assert "did not answer within" in line
    assert time.monotonic() - began < 40  # 20 s, and the start of Python on a loaded machine


@pytest.mark.core
def test_bucket_that_does_not_exist(start, bucket: Bucket):
    storage = bucket.uri("runs").replace(bucket.name, "no-such-bucket")
    began = time.monotonic()
    line = refused(start(MNIST_JOB, "--data", "digits", "--storage", storage, **bucket.env))
    assert "no-such-bucket" in line
    assert "Create the bucket" in line
    assert time.monotonic() - began < 40


def test_disk_full_while_saving_does_not_stop_training(start, start_there, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        flags = ("--data", "digits", "--workers", 1, "--storage", disk, "--run", "a", "--checkpoint-every-steps", 12)
        flags = (*flags, "--keep", 1)
        run = start(MNIST_JOB, *flags, "--no-warm-workers", "--epochs", 400)
        run.until(lambda: manifests(disk / "a"))
        ballast = disk / "ballast"
        with ballast.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
                file.flush()
                os.fsync(file.fileno())
        run.until(lambda: "was NOT saved; training continues" in run.output)
        assert "No space left" in run.output
        good = manifests(disk / "a")
        assert good, "the last good checkpoint is gone"
        ballast.unlink()
        run.until(lambda: manifests(disk / "a")[-1:] > good)
        run.kill()
        output = start_there(MNIST_JOB, *flags, "--epochs", 1).wait()
        assert "restored step" in output
        assert result_of(disk / "a")["steps"] > good[-1]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.slow  # tests/laws/test_hostile_runs.py opens folders that are worse
def test_a_hostile_folder_is_gone_on_from_or_refused_in_a_line(start_there, tmp_path: Path):
    """What is small is replaced, the newest checkpoint that is whole is taken, and what leads elsewhere is refused."""
    flags = ("--workers", 1, "--global-batch-size", 16, "--checkpoint-every-steps", 20)
    flags = (*flags, "--storage", tmp_path, "--run", "evil")
    start_there(EVERYTHING, *flags, "--steps", 60).wait()
    run = tmp_path / "evil"
    *_, whole, last = manifests(run)
    assert last == 60
    newest = max((run / "checkpoints").iterdir()) / manifest.FILE
    body = json.loads(newest.read_text())["body"]
    body["document"]["identity"] = ["a list"]
    newest.write_text(signed(body))
    (run / "result.json").write_text("[" * 5000)
    (run / "lease.json").write_text('{"id": "x", "pid": "²", "boot": []}')
    (run / "architecture.json").write_bytes(b'{"config": \xff')
    (next((run / "attempts").iterdir())).write_text("7")
    (run / "ledger" / "000000-a-0000.jsonl").write_text('{"time": NaN, "kind": []}\n' * 3)
    (run / "checkpoints" / "²-a-0001").mkdir()

    output = start_there(EVERYTHING, *flags, "--steps", 80).wait()

    assert f"restored step {whole}" in output
    assert "identity" in output
    assert "Traceback" not in output
    assert result_of(run)["steps"] == 80

    (tmp_path / "other").mkdir()
    (run / "files").rename(tmp_path / "files")
    (run / "files").symlink_to(tmp_path / "other")
    said = refused(start_there(EVERYTHING, *flags, "--steps", 100))
    assert "it is a link" in said
    assert list((tmp_path / "other").iterdir()) == []
