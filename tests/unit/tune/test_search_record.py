"""What a search keeps: another search under its name is refused, the best trial's copy is a run, damage is no end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.config.objective import MetricObjective
from raytf.errors import RunMismatchError, StorageError
from raytf.storage.storage import Storage
from raytf.tune import search_record
from raytf.tune.search_record import TrialOutcome, TrialRecord, run_name

GOAL = MetricObjective.of("max:accuracy")


@pytest.fixture(params=["folder", "s3"])
def search(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return Storage(str(tmp_path / "search"))
    s3: Callable[..., str] = request.getfixturevalue("s3")
    return Storage(s3("runs/search"))


def finished(search: Storage, number: int, value: float) -> TrialRecord:
    """A trial that is over, with the run that it left."""
    run = search.child(run_name(number))
    run.put("result.json", json.dumps({"steps": 3, "weights_sha256": f"{number:064d}"}).encode())
    run.put("export/1/saved_model.pb", b"graph of %d" % number)
    run.put("export/1/variables/variables.index", b"index of %d" % number)
    run.put("model.keras", b"keras of %d" % number)
    for step in (1, 3):
        folder = f"checkpoints/{step:012d}-20260101T000000.000-abcdef-0001"
        run.put(f"{folder}/share-00000.safetensors", b"weights of %d" % number)
        run.put(f"{folder}/MANIFEST.json", b"{}")
    record = TrialRecord(number, {"x": number}, TrialOutcome.FINISHED, value, 2, metrics={"accuracy": value})
    search_record.write(search, record)
    return record


def test_another_search_under_the_same_name_is_refused(search: Storage):
    asked = {"--search": '{"x": "uniform(0, 1)"}', "--tune-seed": "0"}
    search_record.keep_identity(search, asked, "a")
    search_record.keep_identity(search, asked, "a")
    with pytest.raises(RunMismatchError) as caught:
        search_record.keep_identity(search, {**asked, "--search": '{"x": "uniform(0, 2)"}'}, "a")
    assert "search 'a' in storage has other settings: --search: " in str(caught.value)
    assert "choose another --name" in str(caught.value)


def test_a_damaged_identity_is_told(search: Storage):
    search.put("search/search.json", b'{"--search": "un')
    with pytest.raises(StorageError, match=r"search\.json is damaged"):
        search_record.keep_identity(search, {}, "a")


def test_trials_are_read_as_they_were_written_and_damaged_ones_are_not_over(search: Storage):
    history = [{"epoch": 1, "score": 0.5}, {"epoch": 2, "score": 0.75}]
    records = {
        0: TrialRecord(0, {"x": 0.1}, TrialOutcome.FINISHED, 0.75, 2, "", history, {"accuracy": 0.75}),
        1: TrialRecord(1, {"x": 0.2}, TrialOutcome.FAILED, None, 0, "the loss became nan"),
        12: TrialRecord(12, {"x": "a"}, TrialOutcome.STOPPED, 0.1, 1, "others were better", history[:1]),
    }
    for record in records.values():
        search_record.write(search, record)
    search.put("search/trials/002.json", b'{"number": 2, "outco')
    search.put("search/trials/003.json", b'{"number": 3}')
    assert search_record.read(search) == records
    search_record.forget(search, 1)
    assert sorted(search_record.read(search)) == [0, 12]


def test_the_best_is_one_that_finished(search: Storage):
    assert search_record.best({}, GOAL) is None
    records = {
        n: TrialRecord(n, {}, o, v, 1) for n, o, v in [(0, TrialOutcome.STOPPED, 0.9), (1, TrialOutcome.FAILED, None)]
    }
    assert search_record.best(records, GOAL) is None
    records |= {n: TrialRecord(n, {}, TrialOutcome.FINISHED, v, 1) for n, v in [(2, 0.5), (3, 0.7), (10, 0.7)]}
    chosen = search_record.best(records, GOAL)
    assert chosen is not None
    assert chosen.number == 3


def test_the_copy_of_the_best_is_a_run_with_its_newest_checkpoint(search: Storage):
    first, second = finished(search, 0, 0.5), finished(search, 1, 0.7)
    copy = search_record.keep_best(search, first, GOAL)
    assert copy.get("model.keras") == b"keras of 0"
    copy = search_record.keep_best(search, second, GOAL)
    assert [file.name for file in copy.files()] == [
        "checkpoints/000000000003-20260101T000000.000-abcdef-0001/MANIFEST.json",
        "checkpoints/000000000003-20260101T000000.000-abcdef-0001/share-00000.safetensors",
        "export/1/saved_model.pb",
        "export/1/variables/variables.index",
        "model.keras",
        "parameters.json",
        "result.json",
    ]
    assert copy.get("export/1/saved_model.pb") == b"graph of 1"
    parameters = json.loads(copy.get("parameters.json"))
    assert parameters["parameters"] == {"x": 1}
    assert (parameters["trial"], parameters["metric"], parameters["value"]) == ("trial-001", "accuracy", 0.7)
    assert parameters["weights_sha256"] == f"{1:064d}"


def test_a_copy_that_was_cut_short_is_made_anew(search: Storage):
    record = finished(search, 0, 0.5)
    copy = search_record.keep_best(search, record, GOAL)
    copy.delete("result.json")
    copy.delete("model.keras")
    assert search_record.keep_best(search, record, GOAL).get("model.keras") == b"keras of 0"
