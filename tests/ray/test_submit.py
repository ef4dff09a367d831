"""Jobs through Ray's job server, on a Ray that runs already."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.ray.conftest import MNIST_JOB, PATIENCE, environment, result_of


def test_ray_job_submit(cluster: dict[str, str], tmp_path: Path):
    working = tmp_path / "project"
    working.mkdir()
    (working / "mnist.py").write_text(MNIST_JOB.read_text())
    job = ["python", "mnist.py", "--data", "digits", "--workers", "1:2", "--epochs", "12", "--storage", str(tmp_path)]
    done = subprocess.run(
        [
            sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", cluster["dashboard"],
            "--working-dir", str(working), "--", *job,
        ],
        env=environment(RAY_AUTH_MODE="disabled"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "data: handwritten digits" in done.stdout
    assert "epoch 12: loss" in done.stdout
    assert "test accuracy: 0.9" in done.stdout
    result = result_of(tmp_path / "default")
    assert (result["steps"], result["restarts"]) == (144, 0)
    assert set(result["world_sizes"]) <= {1, 2}
