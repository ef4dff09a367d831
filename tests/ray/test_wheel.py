"""The built wheel alone, in an empty folder: `raytf init` begins a project that trains, and whose cluster is right."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import ROOT, result_of

pytestmark = pytest.mark.gate


def alone() -> dict[str, str]:
    """The environment, without a path on which a checkout counts as installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel in the place of the checkout, and the packages of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".git", "build", ".*cache*", "*.egg-info", "docs", "tests")
    )
    pip, env = [sys.executable, "-m", "pip", "--quiet"], alone()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True, timeout=300, env=env)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True, timeout=120)
    (wheel,) = folder.glob("raytf_train-*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True, timeout=120, env=env)
    own = subprocess.run(
        [python, "-c", "import site; print(site.getsitepackages()[0])"],
        check=True,
        capture_output=True,
        text=True,
        env=env,
    ).stdout.strip()
    # A folder that a .pth file names is searched, and its own .pth files, which lead to the checkout, are not read.
    Path(own, "others.pth").write_text("\n".join(site.getsitepackages()))
    return python.parent


def test_a_project_begins_trains_and_has_a_cluster_that_is_right(released: Path, tmp_path: Path):
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("t" * 40)
    env = alone() | {"HOME": str(tmp_path), "PATH": f"{released}:{os.environ['PATH']}"}

    def run(*words: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(
            words,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("python", "-c", "import raytf; print(raytf.__file__)")
    assert where.startswith(str(released.parent))
    run("raytf", "init", "x", "--cluster", "aws-gpu-spot")
    project = tmp_path / "x"
    assert "cluster.yaml: nothing found" in run("raytf", "check", "cluster.yaml", "--offline", folder=project)
    assert "test accuracy" in run("python", "job.py", "--epochs", "2", "--workers", "1", folder=project)
    assert result_of(tmp_path / "raytf-runs" / "default")["steps"] == 24
    assert "finished" in run("raytf", "runs")
