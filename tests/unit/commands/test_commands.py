"""`raytf verify` and `raytf runs` as a user starts them."""

import json
import subprocess
import sys

import pytest

from raytf import __version__ as version
from raytf.commands._table import age_text, fitting, size_text
from raytf.storage.storage import Storage
from tests.support.checkpoints import save, share

HISTORY = [{"epoch": 0, "val_accuracy": 0.875}]


def raytf(*args):
    return subprocess.run(
        [sys.executable, "-c", "from raytf.commands.main import main; main()", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def storage(tmp_path):
    storage = Storage(str(tmp_path / "runs"))
    for step in (10, 20):
        save(storage.child("a"), step, history=HISTORY)
    return storage


def test_verify_of_a_whole_run(storage):
    done = raytf("verify", f"{storage.root}/a")
    assert done.returncode == 0, done.stderr
    head, *rows, last = done.stdout.splitlines()
    assert head.split() == ["checkpoint", "step", "size", "state", "problems"]
    assert [row.split()[1] for row in rows] == ["20", "10"]
    assert all(row.split()[4] == "whole" for row in rows)
    assert last.startswith("a resume restores step 20 from 000000000020-a")


def test_verify_of_damage(storage):
    run = storage.child("a")
    name = share("000000000020-a-0000")
    run.put(name, b"9" + run.get(name)[1:])
    done = raytf("verify", run.root)
    assert done.returncode == 1
    assert "share-00000.safetensors has a wrong checksum" in done.stdout
    assert "a resume restores step 10" in done.stdout
    document = json.loads(raytf("verify", run.root, "--json").stdout)
    assert [c["state"] for c in document["checkpoints"]] == ["damaged", "whole"]
    assert document["restores"] == "000000000010-a-0000"


def test_verify_on_s3(s3):
    save(Storage(s3("runs/a")), 3)
    done = raytf("verify", s3("runs/a"))
    assert done.returncode == 0, done.stderr
    assert "a resume restores step 3" in done.stdout


def test_verify_where_nothing_can_be_restored(storage):
    save(storage.child("b"), 5, complete=False)
    done = raytf("verify", f"{storage.root}/b")
    assert done.returncode == 1
    assert "unfinished" in done.stdout
    assert "a resume starts from the beginning" in done.stdout


@pytest.mark.parametrize(("folder", "words"), [("none", "there is nothing in"), ("", "is not a run")])
def test_verify_of_what_is_no_run(storage, folder, words):
    done = raytf("verify", f"{storage.root}/{folder}")
    assert done.returncode == 2
    assert words in done.stderr
    assert "raytf runs STORAGE" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_runs(storage):
    storage.put("b/result.json", json.dumps({"steps": 7, "history": []}).encode())
    done = raytf("runs", storage.root)
    assert done.returncode == 0, done.stderr
    head, a, b = done.stdout.splitlines()
    assert head.split() == ["run", "state", "step", "metric", "best", "last", "checkpoints", "size", "changed"]
    assert a.split()[:8] == ["a", "stopped", "20", "val_accuracy", "0.875", "(epoch", "1)", "0.875"]
    assert b.split()[:7] == ["b", "finished", "7", "-", "-", "-", "0"]
    document = json.loads(raytf("runs", storage.root, "--json").stdout)
    assert [(run["name"], run["state"]) for run in document] == [("a", "stopped"), ("b", "finished")]


def test_runs_where_there_are_none(tmp_path):
    done = raytf("runs", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"no runs in {tmp_path}\n")


def test_runs_of_a_folder_that_is_not_there(tmp_path):
    done = raytf("runs", tmp_path / "typo")
    assert (done.returncode, done.stdout) == (2, "")
    expected = f"error: there is no folder {tmp_path / 'typo'}. Expected a folder in which runs are kept.\n"
    assert done.stderr == expected


def test_a_run_is_found_by_the_name_that_runs_lists(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    save(Storage(str(tmp_path / "raytf-runs" / "first")), 3, history=HISTORY)
    by_name, by_place = raytf("verify", "first", "--json"), raytf("verify", "~/raytf-runs/first", "--json")
    assert by_name.returncode == 0, by_name.stderr
    assert by_name.stdout == by_place.stdout
    # A folder of that name here comes first, unless it is no run.
    (tmp_path / "first" / "images").mkdir(parents=True)
    assert raytf("verify", "first", "--json").stdout == by_name.stdout
    save(Storage(str(tmp_path / "first")), 5, history=HISTORY)
    assert raytf("verify", "first", "--json").stdout == raytf("verify", "./first", "--json").stdout != by_name.stdout
    gone = raytf("show", "second")
    assert gone.returncode == 2
    assert f"there is no run in {tmp_path}/raytf-runs/second" in gone.stderr


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sho", "Did you mean raytf show?"),
        ("train", "Did you mean raytf run?"),
        ("zzz", "raytf --help lists the commands."),
    ],
)
def test_a_command_that_is_none_is_one_line(name, hint):
    done = raytf(name)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: raytf {name}: unknown command. {hint}\n"


def test_the_version_is_told():
    assert raytf("--version").stdout == f"raytf {version}\n"
    module = subprocess.run([sys.executable, "-m", "raytf", "--version"], capture_output=True, text=True, check=True)
    assert module.stdout == f"raytf {version}\n"


def test_runs_on_s3(s3):
    save(Storage(s3("runs/a")), 3, history=HISTORY)
    done = raytf("runs", s3("runs"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split()[:5] == ["a", "stopped", "3", "val_accuracy", "0.875"]


def test_commands_load_neither_ray_nor_tensorflow():
    code = (
        "import json, sys\nimport raytf.commands.verify, raytf.commands.runs\n"
        "print(json.dumps(sorted(m for m in ('ray', 'tensorflow', 'keras', 'boto3') if m in sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 30, "5.0 GiB"), (1 << 60, "1048576.0 TiB")],
)
def test_sizes(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(-3, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (200000, "2 d")]
)
def test_ages(seconds, text):
    assert age_text(seconds) == text


@pytest.mark.parametrize(
    ("width", "shown"),
    [
        (200, "run step metric size"),
        (35, "run step metric size"),
        (34, "run step metric"),
        (25, "run step metric"),
        (24, "run step"),
        (5, "run step"),
    ],
)
def test_a_narrow_terminal_does_without_the_least_important_columns(width, shown):
    columns = ("run", "step", "metric", "size")
    rows = [("mnist", "1", "accuracy", "12.5 MiB"), ("spirals-2", "40", "-", "1 B")]
    found = fitting(columns, rows, width, ("size", "metric"))
    assert [columns[i] for i in found] == shown.split()


def test_a_long_name_is_folded_and_takes_no_column_away():
    assert fitting(("run", "state"), [("x" * 99, "finished")], 34, ("state",)) == [0, 1]
    assert fitting(("run", "state"), [("x" * 99, "finished")], 33, ("state",)) == [0]
