"""`scripts/in-environment`: which environment it takes, and what it says where there is none."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Builds a package of no files that is called raytf-train, without asking a registry for anything.
BACKEND = """
import zipfile

def build_wheel(folder, config_settings=None, metadata_directory=None):
    name, info = "raytf_train-0-py3-none-any.whl", "raytf_train-0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: raytf-train\\nVersion: 0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name

build_editable = build_wheel
"""
PROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
#: A Python of Debian whose package for virtual environments is missing.
LACKING = '#!/bin/sh\ncase "$*" in *version_info*) echo 3.12 ;; *) exit 1 ;; esac\n'


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A checkout whose package has no dependencies, with a job that says where it runs."""
    folder = tmp_path / "clone"
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    (folder / "jobs").mkdir()
    (folder / "jobs" / "mnist.py").write_text("import sys\nprint(sys.prefix, *sys.argv[1:])\n")
    for name, text in (("pyproject.toml", PROJECT), ("backend.py", BACKEND), ("constraints.txt", "")):
        (folder / name).write_text(text)
    return folder


def programs(folder: Path, **texts: str) -> Path:
    """A folder for PATH that has no Python but what `texts` writes."""
    folder.mkdir()
    for name in ("sh", "dirname", "touch", "rm", "env"):
        (folder / name).symlink_to(str(shutil.which(name)))
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(script: Path, *words: str, path: Path, **env: str) -> tuple[int, str]:
    """Run a script from another folder; its exit code and what it printed."""
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [script, *words],
        cwd="/",
        env=kept | {"PATH": str(path), "PIP_NO_INDEX": "1"} | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ({}, "no Python 3.11, 3.12 or 3.13 was found"),
        ({"python3": "#!/bin/sh\necho 3.10\n"}, "no Python 3.11, 3.12 or 3.13 was found"),
        ({"python3": LACKING}, "Type: sudo apt install python3.12-venv"),
    ],
    ids=["no Python", "too old", "no venv"],
)
def test_a_python_that_is_missing_is_said_in_one_line(clone: Path, tmp_path: Path, texts: dict[str, str], says: str):
    code, printed = run(clone / "scripts" / "demo", path=programs(tmp_path / "bin", **texts))
    assert (code, printed.count("\n"), says in printed) == (1, 1, True), printed
    assert not (clone / ".venv").exists()


def test_without_an_environment_one_is_made_and_found_again(clone: Path, tmp_path: Path):
    demo = clone / "scripts" / "demo"
    path = programs(tmp_path / "bin", python3=f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    code, printed = run(demo, "--epochs", "1", path=path)
    assert code == 0, printed
    assert printed.endswith(f"{clone / '.venv'} --epochs 1\n")
    assert ". .venv/bin/activate" in printed
    assert run(demo, path=path) == (0, f"{clone / '.venv'}\n")
    (clone / ".venv" / "raytf-install-unfinished").touch()  # as an installation leaves it that is killed
    assert "installing raytf" in run(demo, path=path)[1]
    assert run(demo, path=path) == (0, f"{clone / '.venv'}\n")


def test_an_active_environment_with_raytf_is_used_as_it_is(clone: Path, tmp_path: Path):
    path = programs(tmp_path / "bin", python=f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    code, printed = run(clone / "scripts" / "test", "--version", path=path, VIRTUAL_ENV=str(tmp_path))
    assert (code, printed) == (0, f"pytest {pytest.__version__}\n")
    assert not (clone / ".venv").exists()
