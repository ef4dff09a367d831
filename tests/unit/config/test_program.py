"""The name of a run that nobody has named, and where the program lies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import raytf
from raytf.config import program

INSTALLED = "/venv/lib/python3.11/site-packages/pytest/__main__.py"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("jobs/mnist.py", "mnist"),
        ("/a/job.py", "job"),
        ("/a/my net (2).py", "my-net--2-"),
        ("/a/.hidden.py", "hidden"),
        ("/a/package/__main__.py", "package"),
        ("/a/v1.2.py", "v1.2"),
        ("/venv/bin/train", "train"),
        ("/a/Grün.py", "Grün"),
        (INSTALLED, "run"),
        ("-", "-"),
        ("/a/..py", "run"),
    ],
)
def test_the_name_of_a_file(path: str, name: str):
    assert program.name_of(path) == name
    raytf.TrainConfig.of(run=name).check()


def test_a_notebook_is_named_after_its_file(tmp_path: Path):
    file = tmp_path / "My plots.ipynb"
    file.write_text("{}")
    kernel = "/venv/lib/python3.11/site-packages/ipykernel_launcher.py"
    assert program.choose(["", str(file)], True) == program.Program("My-plots", str(file))
    assert program.choose([str(file), f"{file}-jvsc-123"], True) == program.Program("My-plots", str(file))
    assert program.choose(["", f"{file}-jvsc-123"], True) == program.Program("My-plots")
    assert program.choose(["", "work/plots.ipynb"], True) == program.Program("plots")
    for nothing in ([], ["", ""], ["", "console-1-8a7f"], [kernel]):
        assert program.choose(nothing, True) == program.Program("notebook")


def test_the_path_is_kept_where_it_lasts(tmp_path: Path):
    own, copied = (
        tmp_path / "train.py",
        tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_1" / "train.py",
    )
    for file in (own, copied):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    link = tmp_path / "link.py"
    link.symlink_to(own)
    assert program.of_file(str(own)) == program.Program("train", str(own))
    assert program.of_file(str(copied)) == program.Program("train")
    assert program.of_file(str(link)) == program.Program("link", str(own))


def test_of_a_process(tmp_path: Path):
    text = "from raytf.config import program; found = program.of_process(False); print(found.name, found.path or '-')"
    (tmp_path / "package").mkdir()
    for file in ("train.py", "package/__main__.py", "package/fine.py"):
        (tmp_path / file).write_text(text)

    def told(*words: str, input: str = "") -> str:
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, input=input, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert told("train.py") == f"train {tmp_path}/train.py"
    assert told("-m", "package") == f"package {tmp_path}/package/__main__.py"
    assert told("-m", "package.fine") == f"fine {tmp_path}/package/fine.py"
    assert told("-c", text) == told("-", input=text) == told(input=text) == "run -"
