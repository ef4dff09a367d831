"""Which runs there are and how far each is; real owners that live, are killed, or are far away."""

import json
import subprocess
import sys

import pytest

from raytf.checkpoint import manifest
from raytf.runs import inventory, ledger
from raytf.runs.lease import LEASE_FILE, Lease
from raytf.runs.run_state import RunState, main_goal
from raytf.storage.storage import Storage
from tests.support.checkpoints import save

HOLD = """
import sys
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage

with Lease(Storage(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
HISTORY = [{"epoch": 0, "val_accuracy": 0.5}, {"epoch": 1, "val_accuracy": 0.9}, {"epoch": 2, "val_accuracy": 0.8}]


@pytest.fixture(params=["folder", "s3"])
def storage(request, tmp_path):
    return Storage(str(tmp_path / "runs") if request.param == "folder" else request.getfixturevalue("s3")("runs"))


@pytest.fixture
def folder(tmp_path):
    return Storage(str(tmp_path / "runs"))


def result(steps):
    return json.dumps({"steps": steps, "history": HISTORY}).encode()


def one(storage, **more):
    (run,) = inventory.survey(storage, **more)
    return run


def test_runs_and_what_is_none(storage):
    save(storage.child("b"), 5, history=HISTORY[:1])
    save(storage.child("b"), 9, history=HISTORY)
    save(storage.child("b"), 12, complete=False)
    storage.put("a/result.json", result(20))
    storage.put("data/train.parquet", b"x" * 100)
    storage.put("README", b"x")
    a, b = inventory.survey(storage)
    assert (a.name, a.state, a.step, a.checkpoints) == ("a", RunState.FINISHED, 20, 0)
    assert (b.name, b.state, b.step, b.checkpoints) == ("b", RunState.STOPPED, 9, 2)
    for run in (a, b):
        assert (run.metric, run.best, run.epoch, run.last) == ("val_accuracy", 0.9, 1, 0.8)
    assert b.bytes == sum(f.bytes for f in storage.files("b"))
    assert b.modified > 1.7e9


def test_a_run_that_ended_before_its_first_step(storage):
    book = ledger.Ledger(storage.child("train/1"), "000000-a")
    ended = {"time": 2.0, "kind": "driver", "state": "ended", "outcome": "failed", "text": "the labels are strings"}
    book.add([{"time": 1.0, "kind": "driver", "state": "started"}, ended])
    book.flush()
    run = one(storage)
    assert (run.name, run.state, run.step, run.why) == ("train/1", RunState.FAILED, None, "the labels are strings")


def test_a_storage_without_runs(storage):
    assert inventory.survey(storage) == []


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["loss", "val_loss", "accuracy", "val_accuracy"], "val_accuracy"),
        (["loss", "val_loss"], "val_loss"),
        (["loss", "accuracy"], "accuracy"),
        (["seconds", "learning_rate"], None),
        ([], None),
    ],
)
def test_what_a_run_is_judged_by(names, chosen):
    goal = main_goal([{"epoch": 0, **dict.fromkeys(names, 0.5)}])
    assert (goal and goal.metric) == chosen


def test_the_best_loss_is_the_smallest(folder):
    save(folder.child("a"), 9, history=[{"epoch": e, "loss": v} for e, v in enumerate([0.5, 0.2, 0.3, float("nan")])])
    run = one(folder)
    assert (run.metric, run.best, run.epoch, run.last) == ("loss", 0.2, 1, None)


def test_owners_on_this_machine(folder):
    run = folder.child("a")
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, run.root], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout.readline() == "held\n"
        assert one(folder).state is RunState.RUNNING
        owner.kill()
        owner.wait()
        assert one(folder).state is RunState.KILLED
    finally:
        owner.kill()
        owner.communicate()


@pytest.mark.parametrize(("renews", "state"), [(True, RunState.RUNNING), (False, RunState.KILLED)])
def test_owners_on_other_machines_are_watched_once_for_all(storage, renews, state):
    for name in ("a", "b"):
        owner = Lease(storage.child(name)).owner
        far = {**owner, "boot": "another", "beat": 1}
        storage.put(f"{name}/{LEASE_FILE}", json.dumps(far).encode())
    slept, said = [], []

    def sleep(seconds):
        slept.append(seconds)
        for name in ("a", "b") if renews else ():
            storage.put(f"{name}/{LEASE_FILE}", json.dumps({**far, "beat": 2}).encode())

    found = inventory.survey(storage, say=said.append, sleep=sleep)
    assert [run.state for run in found] == [state, state]
    assert slept == [inventory.WATCH_SECONDS]
    assert len(said) == 1
    assert "2 runs" in said[0]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"steps": "many"}', b"7", b'{"steps": 3, "history": [1]}'])
def test_files_that_are_damaged_do_not_hide_a_run(folder, text):
    run = folder.child("a")
    save(run, 5, history=HISTORY)
    name = save(run, 9)
    run.put("result.json", text)
    run.put(f"{manifest.FOLDER}/{name}/{manifest.FILE}", b"{")
    found = one(folder)
    assert (found.state, found.step, found.checkpoints, found.best) == (RunState.DAMAGED, 5, 2, 0.9)
    result, newest = found.problems
    assert result.startswith("result.json: ")
    assert newest.startswith(f"checkpoints/{name}: the manifest cannot be read (it is not JSON")


def test_the_runs_of_a_program_and_a_search_as_one(storage):
    for name in ("train/1", "train/2"):
        storage.put(f"{name}/result.json", result(20))
    storage.put("train/notes.txt", b"x")
    storage.put("hpo/search/search.json", b"{}")
    for number in range(3):
        storage.put(f"hpo/trial-{number:03d}/result.json", result(20 + number))
    assert [(r.name, r.state, r.step, r.trials) for r in inventory.survey(storage)] == [
        ("hpo", RunState.STOPPED, None, 3),
        ("train/1", RunState.FINISHED, 20, None),
        ("train/2", RunState.FINISHED, 20, None),
    ]
    storage.put("hpo/best/parameters.json", json.dumps({"metric": "val_accuracy", "value": 0.9}).encode())
    found = inventory.survey(storage)[0]
    assert (found.state, found.metric, found.best) == (RunState.FINISHED, "val_accuracy", 0.9)
    with Lease(storage.child("hpo/search")):
        assert inventory.survey(storage)[0].state is RunState.RUNNING
