"""The package that the registry calls `raytf` in one folder with this one. Stands in for it: its first module, and its
empty `__init__.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import raytf
from raytf.errors import FOREIGN

OURS = Path(raytf.__file__).parent


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=folder, check=False
    )


def both(folder: Path, init: str) -> None:
    (folder / "raytf").mkdir()
    for path in OURS.iterdir():
        if path.name not in ("__init__.py", "__pycache__"):
            (folder / "raytf" / path.name).symlink_to(path)
    (folder / "raytf" / "raytf_driver.py").touch()
    (folder / "raytf" / "__init__.py").write_text(init)


def test_import_says_that_the_other_one_lies_below(tmp_path: Path):
    both(tmp_path, (OURS / "__init__.py").read_text())
    done = python("import raytf; print(raytf.__version__)", tmp_path)
    assert done.stdout == f"{raytf.__version__}\n"
    assert f"RuntimeWarning: {FOREIGN}" in done.stderr


def test_the_command_says_that_the_other_one_lies_above(tmp_path: Path):
    both(tmp_path, "")
    done = python("from raytf.commands.main import main; main(['runs'])", tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: {FOREIGN}\n")


def test_nothing_is_said_otherwise(tmp_path: Path):
    done = python("import raytf", tmp_path)
    assert done.stderr == ""
