"""Which run a program trains: the one that was named, that of its own name, or with --new another one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
from pathlib import Path

import pytest

import raytf
from raytf.config import program
from raytf.config.program import Program
from raytf.driver import run_names
from raytf.runs import start_command
from raytf.runs.start_command import StartCommand
from raytf.storage.storage import Storage

HOST = "laptop"
BEFORE = StartCommand(("train.py",), "/a", "/a/train.py", HOST)


@pytest.mark.parametrize(
    ("before", "path", "is_other"),
    [
        (BEFORE, "/b/train.py", True),
        (BEFORE, "/a/train.py", False),
        (BEFORE, "", False),  # a copy that Ray made for a job, or no file
        (dataclasses.replace(BEFORE, program=""), "/b/train.py", False),  # recorded by an earlier version, or a copy
        (dataclasses.replace(BEFORE, host="node-7"), "/b/train.py", False),  # a folder of another machine
        (dataclasses.replace(BEFORE, program="/moved/train.py"), "/b/train.py", False),  # it is not there any more
    ],
)
def test_another_program(before: StartCommand, path: str, is_other: bool):
    assert before.is_another_program(path, HOST, lambda file: file.startswith(("/a/", "/b/"))) is is_other


@pytest.mark.parametrize(
    ("entries", "is_program", "what"),
    [
        ([], False, ""),
        (["1/", "2/"], False, "the runs of a program that was started by `raytf run`"),
        (["1/", "2/"], True, ""),
        (["ledger/", "lease.json"], False, ""),
        (["ledger/", "lease.json"], True, "a run that was not started by `raytf run`"),
        (["search/", "trial-000/"], False, "a search of `raytf tune`"),
        (["search/", "trial-000/"], True, "a search of `raytf tune`"),
        (["1/", "result.json"], False, ""),
    ],
)
def test_what_is_in_the_way(entries: list[str], is_program: bool, what: str):
    assert run_names.conflict(entries, is_program) == what


def test_the_runs_of_a_name():
    taken = ["mnist-10", "mnist", "mnist-1", "mnist-2", "mnist-02", "mnist-x", "other-3", "mnist-2-2"]
    assert run_names.candidates("mnist", taken) == ["mnist", "mnist-2", "mnist-10"]


def settled(
    storage: Path, program: Path | None, first: str = "", started: set[str] | None = None, **settings: object
) -> str:
    config = raytf.TrainConfig.of(storage=str(storage), **settings)
    own = Program("train" if program is None else program.stem, str(program or ""))
    told: list[str] = []
    started = set() if started is None else started
    config = run_names.settled(
        run_names.named(config, own), own, config.run.run is not None, told.append, first, started
    )
    assert not config.run.new
    free = config.run.name
    before = f"run={settings['run']!r} and new=True" if "run" in settings else "new=True"
    line = f"new=True starts run {free}; to continue it later, replace {before} with run={free!r}"
    assert told == ([line] if settings.get("new") else [])
    return config.run.name


@pytest.fixture(autouse=True)
def replacements(monkeypatch) -> list[tuple[str, str]]:
    """What this process types in place of `--new`: nothing yet."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(program, "_replacements", found)
    return found


def test_what_continues_a_new_run(tmp_path: Path):
    assert program.from_last_checkpoint() == "the same command continues from the last checkpoint"
    settled(tmp_path, None, run="a", new=True)
    assert program.next_command() == "the same command, with run='a' in place of run='a' and new=True,"
    told: list[str] = []
    flags = raytf.TrainConfig.among({"storage": str(tmp_path), "new": True})
    own = Program("a")
    run_names.settled(run_names.named(flags, own), own, False, told.append)
    assert told == ["--new starts run a-2; to continue it later, replace --new with --run a-2"]
    text = "the same command, with --run a-2 in place of --new, continues from the last checkpoint"
    assert program.from_last_checkpoint() == text


def test_what_continues_a_submitted_run():
    assert program.next_submission("python job.py --run new") == "the same command"
    told = "the same command, with --run and the name that the job printed in place of --new,"
    assert program.next_submission("python job.py --new --workers '1:4'") == told
    assert program.next_submission("python 'job.py --new") == told


def test_a_run_keeps_the_command_of_its_own_program(tmp_path: Path):
    run, first, other = Storage(str(tmp_path / "a")), BEFORE, dataclasses.replace(BEFORE, digest="1")
    with start_command.recorded(run, first) as is_same:
        assert not is_same
    with start_command.recorded(run, first) as is_same:
        assert is_same
    with contextlib.suppress(raytf.RunMismatchError), start_command.recorded(run, other) as is_same:
        assert not is_same
        assert start_command.read(run) == other
        raise raytf.RunMismatchError
    assert start_command.read(run) == first
    with contextlib.suppress(KeyboardInterrupt), start_command.recorded(run, other):
        raise KeyboardInterrupt
    assert start_command.read(run) == other


def start(storage: Path, name: str, program: Path) -> None:
    start_command.write(Storage(str(storage / name)), StartCommand(("x",), "/", str(program), socket.gethostname()))


@pytest.fixture
def programs(tmp_path: Path) -> tuple[Path, Path]:
    both = tmp_path / "a" / "train.py", tmp_path / "b" / "train.py"
    for file in both:
        file.parent.mkdir()
        file.touch()
    return both


@pytest.mark.parametrize("first", ["", "1"])
def test_a_second_program_of_a_name_is_refused_by_its_path(tmp_path: Path, programs: tuple[Path, Path], first: str):
    storage, (one, two) = tmp_path / "runs", programs
    assert settled(storage, one, first) == "train"
    start(storage, f"train/{first}", one)
    assert settled(storage, one, first) == "train"
    with pytest.raises(raytf.RunMismatchError) as caught:
        settled(storage, two, first)
    assert str(caught.value) == (
        f"run 'train' in {storage} belongs to {one}, and this program is {two}. Name this program's run with "
        "run='NAME', start train-2 with new=True, or continue that run with run='train'."
    )
    assert settled(storage, two, first, run="train") == "train"
    assert settled(storage, two, first, new=True) == "train-2"
    os.rename(one.parent, tmp_path / "moved")
    assert settled(storage, tmp_path / "moved" / "train.py", first) == "train"


def test_a_run_and_the_runs_of_a_program_are_kept_apart(tmp_path: Path, programs: tuple[Path, Path]):
    start(tmp_path, "train/1", programs[0])
    with pytest.raises(raytf.RunMismatchError, match=r"train holds the runs of a program .* start train-2 with new"):
        settled(tmp_path, programs[0])
    start(tmp_path, "train", programs[0])
    with pytest.raises(raytf.RunMismatchError, match="train holds a run that was not started by `raytf run`"):
        settled(tmp_path, programs[0], "1")


def test_a_new_run_lies_beside_those_that_are_there(tmp_path: Path, programs: tuple[Path, Path]):
    names = [settled(tmp_path, programs[0], new=True) for _ in range(3)]
    assert names == ["train", "train-2", "train-3"]
    assert settled(tmp_path, programs[1], new=True, run="net") == "net"
    assert settled(tmp_path, None, new=True) == "train-4"
    Storage(str(tmp_path)).delete("train-2")
    assert settled(tmp_path, programs[0], new=True) == "train-2"


def test_a_program_that_trains_nothing_leaves_no_folder(tmp_path: Path, programs: tuple[Path, Path]):
    def program(trains: bool) -> list[str]:
        name = settled(tmp_path / "runs", programs[0], "1", new=True)
        with (
            contextlib.suppress(ZeroDivisionError),
            run_names.unused_removed(raytf.TrainConfig.of(storage=str(tmp_path / "runs"), run=name), True),
        ):
            if trains:
                Storage(str(tmp_path / "runs" / name / "1")).put("result.json", b"{}")
            raise ZeroDivisionError
        return os.listdir(tmp_path / "runs")

    assert program(False) == []
    assert program(True) == ["train"]
    assert program(False) == ["train"]


@pytest.mark.parametrize("first", ["", "1"])
def test_a_driver_that_is_submitted_again_continues_its_new_run(tmp_path: Path, monkeypatch, first: str):
    def submitted(job: str, fits: int = 1) -> list[str]:
        metadata, started = {"job_submission_id": job}, set[str]()
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"metadata": metadata}))
        return [settled(tmp_path, None, first, started, new=True) for _ in range(fits)]

    assert submitted("raytf-train-aaaaaa-0") == ["train"]
    assert submitted("raytf-train-bbbbbb-0") == ["train-2"]
    assert submitted("raytf-train-bbbbbb-1", fits=2) == ["train-2", "train-3"]
    assert submitted("raytf-train-aaaaaa-7") == ["train"]
    assert submitted("raysubmit_x1") == ["train-4"]
    assert submitted("raytf-train-bbbbbb-2", fits=3) == ["train-2", "train-3", "train-5"]


def test_steps_are_not_computed_again_by_another_run(monkeypatch):
    monkeypatch.setenv("RAYTF_REPLAY", "{}")
    with pytest.raises(raytf.ConfigError, match="Pass that run's name as --run instead"):
        run_names.named(raytf.TrainConfig.of(new=True), Program("train"))
