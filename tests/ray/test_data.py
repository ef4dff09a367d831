"""Where records lie changes nothing that a run learns: real runs on files of every kind."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raytf
from raytf.data import ParquetSource
from tests.ray.conftest import MNIST_JOB, ROOT, result_of

RAY_DATASET = Path(__file__).parent / "jobs" / "ray_dataset.py"


def convert(source: object, target: object, to: str, **env: str) -> None:
    command = [sys.executable, "-c", "from raytf.commands.main import main; main()", "data", "convert"]
    subprocess.run(
        [*command, str(source), str(target), "--to", to],
        cwd=ROOT,
        env={**os.environ, **env},
        check=True,
        timeout=300,
    )


def subset(folder: Path, target: Path, records: int) -> Path:
    """The first records of MNIST's IDX files; of the test's at most all."""
    target.mkdir()
    for path in folder.glob("*-ubyte.gz"):
        data = gzip.decompress(path.read_bytes())
        head = 4 + 4 * data[3]
        there = int.from_bytes(data[4:8], "big")
        each, kept = (len(data) - head) // there, min(records, there)
        cut = data[:4] + kept.to_bytes(4, "big") + data[8:head] + data[head : head + each * kept]
        (target / path.name).write_bytes(gzip.compress(cut, 1))
    return target


def same_run(one: Path, other: Path) -> None:
    before, after = raytf.read_steps(str(one)), raytf.read_steps(str(other))
    assert before["loss"].tolist() == after["loss"].tolist()
    a, b = result_of(one), result_of(other)
    assert a["weights_sha256"] == b["weights_sha256"]
    assert a["metrics"] == b["metrics"]


@pytest.mark.slow  # tests/tf and tests/unit/data read each kind of file, bit for bit
@pytest.mark.timeout(1000)
def test_tfrecords_on_s3_train_as_the_idx_files_they_were_made_of(
    start, start_there, bucket, tmp_path: Path, mnist_dir: Path
):
    """Two epochs, one worker and two, to the last bit: losses, metrics and weights."""
    small = subset(mnist_dir, tmp_path / "idx", 1000)
    convert(small, bucket.uri("mnist"), "tfrecord", **bucket.env)
    flags = ("--epochs", 2, "--exact", "--storage", tmp_path / "runs", "--run")
    runs = [start_there(MNIST_JOB, "--data", small, *flags, "idx", "--workers", 1).wait(480)]
    own = (*flags, "tfrecord", "--workers", 2, "--no-warm-workers")  # the bucket's keys are in its environment
    runs.append(start(MNIST_JOB, "--data", bucket.uri("mnist"), *own, "--no-warm-workers", **bucket.env).wait(480))
    assert ["IDX" in runs[0], "TFRecord" in runs[1]] == [True, True]
    same_run(tmp_path / "runs" / "idx", tmp_path / "runs" / "tfrecord")
    assert len(raytf.read_steps(str(tmp_path / "runs" / "idx"))["loss"]) == 16


@pytest.mark.slow
def test_all_of_mnist_as_tfrecords_trains_as_its_idx_files(start, tmp_path: Path, mnist_dir: Path):
    convert(mnist_dir, tmp_path / "tf", "tfrecord")
    flags = ("--epochs", 2, "--workers", 2, "--exact", "--storage", tmp_path / "runs", "--run")
    for run, data in (("idx", mnist_dir), ("tfrecord", tmp_path / "tf")):
        start(MNIST_JOB, "--data", data, *flags, run).wait(1800)
    same_run(tmp_path / "runs" / "idx", tmp_path / "runs" / "tfrecord")


def test_a_run_on_a_ray_dataset_goes_on_with_the_records_that_it_began_with(start_there, tmp_path: Path):
    """What it computes is random: were it computed again, the records would be others, and the run be refused."""
    run = tmp_path / "runs" / "a"
    flags = ("--workers", 1, "--global-batch-size", 100, "--storage", tmp_path / "runs", "--run", "a")
    output = start_there(RAY_DATASET, *flags, "--epochs", 1).wait()
    assert f"the Ray Dataset is written once to {run / 'data' / 'train'} as Parquet, and read from there" in output
    records = ParquetSource(str(run / "data" / "train"))
    x, y = records.take(np.arange(records.records))
    assert (x.shape, y.tolist()) == ((1200, 4), (x.sum(1) > 2).astype(int).tolist())
    output = start_there(RAY_DATASET, *flags, "--epochs", 2).wait()
    assert f"the Ray Dataset was written to {run / 'data' / 'train'} before, and is read from there" in output
    assert "restored step 12" in output
    assert result_of(run)["steps"] == 24
    assert raytf.read_steps(str(run))["step"].tolist() == list(range(1, 25))
    assert ParquetSource(str(run / "data" / "train")).take(np.arange(1200))[0].tobytes() == x.tobytes()
