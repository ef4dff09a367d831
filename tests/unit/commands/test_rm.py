"""`raytf rm`: what it deletes, on a folder and on S3, and what it leaves alone."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from raytf.commands import rm
from raytf.errors import ConfigError, RunInUseError
from raytf.runs import inventory
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from tests.support.checkpoints import save

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]


def fill(storage: Storage) -> None:
    """A run, a program with two runs, and a search with a trial."""
    for name in ("mnist", "mnist-2", "train/1", "train/2", "tune/trial-000", "tune/best"):
        save(storage.child(name), 10)
        storage.child(name).put("result.json", json.dumps({"steps": 10, "metrics": {}, "history": []}).encode())
    storage.child("train/1").put("command.json", b"{}")
    storage.child("tune").put("search/search.json", b"{}")
    storage.child("tune/best").put("parameters.json", b"{}")


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path: Path) -> Storage:
    uri = str(tmp_path / "runs") if request.param == "folder" else request.getfixturevalue("s3")("runs")
    storage = Storage(uri)
    fill(storage)
    return storage


def test_runs_programs_and_searches_are_deleted(storage: Storage):
    for name, what in (("mnist", "a run"), ("train", "a program with 2 runs"), ("tune", "a search with 1 trial")):
        removal = rm.find(storage.child(name))
        assert removal.what == what
        assert removal.bytes == sum(file.bytes for file in storage.files(name))
        rm.remove(removal)
        assert storage.files(name) == []
        assert f"{name}/" not in storage.list()
    assert [run.name for run in inventory.survey(storage)] == ["mnist-2"]


def test_one_run_of_a_program_is_deleted(storage: Storage):
    rm.remove(rm.find(storage.child("train/2")))
    assert [run.name for run in inventory.survey(storage)] == ["mnist", "mnist-2", "train/1", "tune"]


@pytest.mark.parametrize(("run", "name"), [("mnist", "mnist"), ("train/2", "train"), ("tune/search", "tune")])
def test_a_live_run_is_refused(tmp_path: Path, run: str, name: str):
    storage = Storage(str(tmp_path))
    fill(storage)
    before = storage.files()
    removal = rm.find(storage.child(name))
    with Lease(storage.child(run)):
        with pytest.raises(RunInUseError, match=f"{run} is in use by a live process"):
            rm.find(storage.child(name))
        with pytest.raises(RunInUseError):  # which began after the question was asked
            rm.remove(removal)
    assert storage.files() == before
    rm.remove(rm.find(storage.child(name)))


@pytest.mark.parametrize(
    ("file", "name", "named"),
    [
        ("mnist/train.py", "mnist", "train.py"),
        ("mnist/src/a/b.py", "mnist", "src"),
        ("train/notes.txt", "train", "notes.txt"),
        ("train/2/x/y", "train", "2/x"),
        ("tune/plots/a.png", "tune", "plots"),
    ],
)
def test_what_raytf_has_not_written_is_not_deleted(tmp_path: Path, file: str, name: str, named: str):
    storage = Storage(str(tmp_path))
    fill(storage)
    storage.put(file, b"mine")
    with pytest.raises(ConfigError, match=f"{name} also has files that raytf did not write: {named}. Move them"):
        rm.find(storage.child(name))


def test_what_is_no_run_is_refused(tmp_path: Path):
    storage = Storage(str(tmp_path))
    fill(storage)
    for place in (storage, storage.child("missing"), storage.child("mnist/checkpoints")):
        with pytest.raises(ConfigError, match="is not a run"):
            rm.find(place)


def test_an_interrupted_deletion_can_be_repeated(tmp_path: Path):
    storage = Storage(str(tmp_path))
    fill(storage)
    for entry in ("checkpoints", "command.json"):
        storage.delete(f"train/1/{entry}")
    rm.remove(rm.find(storage.child("train")))
    assert storage.files("train") == []


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "HOME": str(folder)}
    return subprocess.run([*RAYTF, "rm", *words], capture_output=True, text=True, timeout=300, env=env, cwd=folder)


def test_the_command(tmp_path: Path):
    storage = Storage(str(tmp_path / "raytf-runs"))
    fill(storage)
    assert "No run given. Usage: raytf rm RUN" in command(tmp_path).stderr
    asks = command(tmp_path, "mnist")
    assert (asks.returncode, len(asks.stderr.splitlines())) == (2, 1)
    assert "there is no terminal to ask on. Pass --yes." in asks.stderr
    assert storage.files("mnist")
    done = command(tmp_path, "mnist", "train", "mnist", "--yes")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.partition(": ")[2].partition(",")[0] for line in lines[:2]] == ["a run", "a program with 2 runs"]
    deleted = [f"deleted {storage.locate(name)}" for name in ("mnist", "train")]
    assert [line.partition(",")[0] for line in lines[2:]] == deleted
    assert storage.list() == ["mnist-2/", "tune/"]


@pytest.mark.parametrize(("answer", "is_there"), [("y", False), ("", True), ("no", True)])
def test_a_terminal_is_asked(tmp_path: Path, answer: str, is_there: bool):
    storage = Storage(str(tmp_path))
    fill(storage)
    mine, its = pty.openpty()
    with subprocess.Popen([*RAYTF, "rm", storage.locate("mnist")], stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        os.write(mine, f"{answer}\n".encode())
        assert process.wait(300) == 0
    os.close(mine)
    assert bool(storage.files("mnist")) is is_there
