"""raytf as it is installed: by its wheel alone, and from a clone that a script lies beside."""

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


def copied_checkout(folder: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".venv", "build", ".*cache*", "*.egg-info", "docs", "tests")
    shutil.copytree(ROOT, folder, ignore=ignored)


def environment(folder: Path, *installed: str | Path) -> Path:
    """The programs of an environment that has what is installed in the place of the checkout, and the packages of this
    one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120)
    python, env = folder / "bin" / "python", alone()
    install = [sys.executable, "-m", "pip", "--quiet", "--python", python, "install", "--no-deps", *installed]
    subprocess.run(install, check=True, timeout=300, env=env)
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


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copied_checkout(folder / "source")
    build = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "--wheel-dir", folder, folder / "source"]
    subprocess.run(build, check=True, timeout=300, env=alone())
    return environment(folder / "venv", *folder.glob("raytf_train-*.whl"))


def test_a_script_beside_a_clone_has_raytf_and_its_types(tmp_path: Path):
    copied_checkout(tmp_path / "raytf")
    programs = environment(tmp_path / "venv", "-e", tmp_path / "raytf")
    script = tmp_path / "script.py"
    script.write_text("import raytf\n\nprint(raytf.__file__, raytf.fit)\nwrong: int = raytf.TrainConfig.of()\n")

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=alone(), capture_output=True, text=True, timeout=300, check=False
        )
        return done.stdout + done.stderr

    assert run(programs / "python", script).startswith(str(tmp_path / "raytf" / "raytf" / "__init__.py"))
    told = run(sys.executable, "-m", "mypy", "--python-executable", programs / "python", script)
    assert 'expression has type "TrainConfig", variable has type "int"' in told


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
