"""The main job from command to exported model, on a Ray of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raytf
from tests.ray.conftest import EVERYTHING, MNIST_JOB, result_of

SERVE = """
import json, sys
import numpy as np
import tensorflow as tf
images, labels = np.load(sys.argv[2]), np.load(sys.argv[3])
signature = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
(name,) = signature.structured_input_signature[1]
scores = list(signature(**{name: tf.constant(images, tf.float32)}).values())[0].numpy()
assert not any(m == "raytf" or m.startswith("raytf.") for m in sys.modules)
print(json.dumps(float((scores.argmax(-1) == labels).mean())))
"""


# test_endings.py gives the same command again, and test_resume.py goes on with other workers.
def test_a_run_trains_and_exports(start, tmp_path: Path):
    folder = tmp_path / "runs" / "a"
    flags = ("--data", "digits", "--storage", tmp_path / "runs", "--run", "a")
    output = start(MNIST_JOB, *flags, "--no-warm-workers").wait()

    lines = output.splitlines()
    assert lines[0].startswith("data: handwritten digits of scikit-learn")
    assert str(folder) in lines[1]
    assert lines[2] == f"its page, at any time: raytf ui {folder.parent}"
    assert "test accuracy: 0.9" in lines[-1]
    result = result_of(folder)
    assert result["metrics"]["test_accuracy"] >= 0.95
    assert (result["steps"], result["samples"], result["restarts"]) == (360, 30 * 1437, 0)
    assert result["world_sizes"] == [2]
    assert len(result["weights_sha256"]) == 64
    assert list(folder.glob("tensorboard/events*"))
    assert (folder / "model.keras").stat().st_size > 0
    assert "WARNING" not in output
    assert "oneDNN" not in output

    images = raytf.load_images("digits").test
    x, y = images.take(np.arange(images.records))
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    served = subprocess.run(
        [sys.executable, "-c", SERVE, folder / "export" / "1", tmp_path / "x.npy", tmp_path / "y.npy"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert abs(json.loads(served.stdout) - result["metrics"]["test_accuracy"]) < 1e-6


@pytest.mark.slow
def test_one_two_and_three_workers_learn_the_same_on_mnist(start_there, tmp_path: Path, mnist_dir: Path):
    losses = {}
    for workers in (1, 2, 3):
        flags = (
            "--data",
            mnist_dir,
            "--steps",
            50,
            "--workers",
            workers,
            "--storage",
            tmp_path,
            "--run",
            f"w{workers}",
        )
        start_there(MNIST_JOB, *flags).wait()
        losses[workers] = raytf.read_steps(str(tmp_path / f"w{workers}"))["loss"]
    assert len(losses[1]) == 50
    for workers in (2, 3):
        np.testing.assert_allclose(losses[workers], losses[1], rtol=1e-4)


@pytest.mark.slow  # test_lost_ray.py ends with equal bits for one and two workers, and kills in between
def test_a_model_with_everything_learns_the_same_on_one_and_three_workers(start_there, tmp_path: Path):
    runs = {}
    for workers in (1, 3):
        flags = ("--workers", workers, "--global-batch-size", 64, "--epochs", 3)
        output = start_there(EVERYTHING, *flags, "--storage", tmp_path, "--run", f"w{workers}").wait()
        assert [line for line in output.splitlines() if line.startswith("callback:")] == [
            f"callback: epoch {e}" for e in range(3)
        ]
        runs[workers] = result_of(tmp_path / f"w{workers}"), raytf.read_steps(str(tmp_path / f"w{workers}"))
    first, steps = runs[1]
    # 1003 records, 64 a step: the last step of an epoch has 43 of them, no shard more than one more than another.
    assert (first["steps"], first["samples"]) == (48, 3009)
    result, other = runs[3]
    np.testing.assert_allclose(other["loss"], steps["loss"], rtol=1e-4)
    for name, value in first["metrics"].items():
        assert abs(result["metrics"][name] - value) < 1e-4, name
    assert result["world_sizes"] == [3]
