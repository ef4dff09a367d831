"""What a run leaves beside its checkpoints: the history that the weights have seen."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from raytf.checkpoint import naming
from raytf.checkpoint.step_rows import StepRows
from raytf.errors import DamagedFileError
from raytf.runs import run_log
from raytf.storage.storage import Storage

FIRST, SECOND = "20260101T000000-ffffff", "20260101T000001-000000"


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


def write(run, attempt, first_step, losses, epoch=0):
    log = run_log.StepLog(run, attempt)
    log.add(first_step, epoch, np.array(losses, float), np.full(len(losses), 0.5))
    log.write(log.take())


def test_nothing_yet(run):
    steps = run_log.read_steps(run.uri)
    assert {name: len(column) for name, column in steps.items()} == {
        "step": 0,
        "epoch": 0,
        "loss": 0,
        "learning_rate": 0,
        "gradient_norm": 0,
    }


def test_rows_come_back_as_they_were(run):
    log = run_log.StepLog(run, FIRST)
    log.add(1, 0, np.array([0.1, 1 / 3]), np.array([1e-3, 1e-4]), None, np.array([12.0, 0.123449]))
    log.add(3, 1, np.array([0.3]), np.array([1e-5]))
    log.write(log.take())
    steps = run_log.read_steps(run.uri)
    assert steps["step"].tolist() == [1, 2, 3]
    assert steps["epoch"].tolist() == [0, 0, 1]
    assert steps["loss"].tolist() == [0.1, 1 / 3, 0.3]
    assert steps["learning_rate"].tolist() == [1e-3, 1e-4, 1e-5]
    assert steps["gradient_norm"][:2].tolist() == [12.0, 0.1234]
    assert np.isnan(steps["gradient_norm"][2])


def test_a_segment_grows_until_the_next_save(run):
    log = run_log.StepLog(run, FIRST)
    log.add(1, 0, np.array([1.0]), np.array([0.5]))
    log.write(log.take())
    log.add(2, 0, np.array([2.0]), np.array([0.5]))
    log.write(log.take())
    assert run_log.read_steps(run.uri)["loss"].tolist() == [1.0, 2.0]
    assert len(run.list(run_log.STEPS)) == 1


def test_a_long_segment_is_closed(run):
    log, rows = run_log.StepLog(run, FIRST), run_log.SEGMENT_ROWS
    log.add(1, 0, np.zeros(rows), np.zeros(rows))
    log.write(log.take())
    log.add(rows + 1, 0, np.ones(2), np.zeros(2))
    tail = log.take()
    assert len(tail) == 2
    log.write(tail)
    assert len(run.list(run_log.STEPS)) == 2
    assert len(run_log.read_steps(run.uri)["step"]) == rows + 2


def test_a_later_attempt_replaces_rows_from_its_start(run):
    write(run, FIRST, 1, [1, 2, 3, 4, 5])
    write(run, SECOND, 3, [30, 40])
    steps = run_log.read_steps(run.uri)
    assert steps["step"].tolist() == [1, 2, 3, 4]
    assert steps["loss"].tolist() == [1, 2, 30, 40]


def test_a_later_attempt_from_the_beginning_replaces_all(run):
    write(run, FIRST, 1, [1, 2, 3])
    write(run, FIRST, 4, [4, 5])
    write(run, SECOND, 1, [10])
    assert run_log.read_steps(run.uri)["loss"].tolist() == [10]


def test_attempts_count_by_name_not_by_step(run):
    write(run, SECOND, 2, [20])
    write(run, FIRST, 1, [1, 2, 3])
    write(run, FIRST, 4, [4])
    assert run_log.read_steps(run.uri)["loss"].tolist() == [1, 20]


def test_nan_losses_survive(run):
    write(run, FIRST, 1, [float("nan"), float("inf")])
    assert np.array_equal(run_log.read_steps(run.uri)["loss"], [np.nan, np.inf], equal_nan=True)


def test_nothing_is_written_for_no_rows(run):
    run_log.StepLog(run, FIRST).write(StepRows())
    assert run.list() == []


def test_rows_that_were_not_written_go_on_in_the_next_attempt(run):
    log = run_log.StepLog(run, FIRST)
    log.add(1, 0, np.array([1.0, 2.0]), np.full(2, 0.5))
    log.write(log.take())
    log.add(3, 0, np.array([3.0, 4.0]), np.full(2, 0.5))
    left = log.since(2)
    assert left.numbers[:, :4].tolist() == [[3, 0, 3, 0.5], [4, 0, 4, 0.5]]
    assert log.since(3).numbers[:, :4].tolist() == [[4, 0, 4, 0.5]]
    assert len(log.since(9)) == 0
    after = run_log.StepLog(run, SECOND)
    after.restore(left)
    after.add(5, 1, np.array([5.0]), np.array([0.5]))
    after.write(after.take())
    assert run_log.read_steps(run.uri)["loss"].tolist() == [1, 2, 3, 4, 5]


def test_rows_that_somebody_else_wrote_are_forgotten(run):
    log = run_log.StepLog(run, FIRST)
    for step in (1, 3, 5):
        log.add(step, 0, np.array([0.0, 0.0]), np.zeros(2))
    log.forget(3)
    assert log.since(-1).numbers[:, 0].tolist() == [3, 4, 5, 6]
    log.forget(6)
    assert len(log.since(-1)) == 0
    log.restore(StepRows())
    assert len(log.take()) == 0


def test_read_steps_from_s3(s3):
    write(Storage(s3("run")), FIRST, 1, [1, 2])
    assert run_log.read_steps(s3("run"))["loss"].tolist() == [1, 2]


def test_names_of_attempts_sort_in_the_order_in_which_a_process_makes_them():
    names = [run_log.new_attempt(now) for now in (1.7e9, 0.0, 1.0, 1e9)]
    assert names == sorted(names)
    assert run_log.new_attempt(5.0) != run_log.new_attempt(5.0)


def test_attempts(run):
    run_log.write_attempt(run, SECOND, 3, (10, "memory"), 20.5)
    run_log.write_attempt(run, FIRST, 4, (0, "new"), 10.5)
    attempts = run_log.read_attempts(run)
    assert [(a["attempt"], a["world_size"], a["from_step"]) for a in attempts] == [(FIRST, 4, 0), (SECOND, 3, 10)]
    assert [a["tier"] for a in attempts] == ["new", "memory"]


def test_result(run):
    assert run_log.read_result(run) is None
    run.put(run_log.RESULT, b'{"steps": 3}')
    assert run_log.read_result(run) == {"steps": 3}
    run.put(run_log.RESULT, b"{")
    with pytest.raises(DamagedFileError, match=r"result\.json is damaged: it is not JSON"):
        run_log.read_result(run)


@pytest.mark.parametrize("number", ["null", "NaN"])  # as it is written, and as it was written before
def test_a_result_of_a_run_whose_loss_was_none_any_more(run, number):
    text = '{"steps": 3, "metrics": {"loss": NUMBER}, "history": [{"step": 3, "loss": NUMBER}]}'
    run.put(run_log.RESULT, text.replace("NUMBER", number).encode())
    result = run_log.read_result(run)
    assert math.isnan(result["metrics"]["loss"])
    assert math.isnan(result["history"][0]["loss"])
    assert result["history"][0]["step"] == 3


def test_a_folder_on_local_storage_is_the_folder_itself(run):
    folder = run_log.MirroredFolder(run, "logs")
    with open(f"{folder.path}/a", "w") as file:
        file.write("x")
    assert folder.pack(100) == {}
    folder.upload()
    folder.fetch()
    assert run.get("logs/a") == b"x"


def test_a_folder_on_s3_is_uploaded_and_fetched(s3, tmp_path):
    run = Storage(s3("run"))
    first = run_log.MirroredFolder(run, "logs")
    with open(f"{first.path}/a", "w") as file:
        file.write("x")
    first.upload()
    assert run.get("logs/a") == b"x"
    second = run_log.MirroredFolder(run, "logs")
    second.fetch()
    with open(f"{second.path}/a") as file:
        assert file.read() == "x"
    run.delete("logs/a")
    second.upload()  # nothing changed since
    assert not run.exists("logs/a")
    for folder in (first, second):
        shutil.rmtree(folder.path)


def test_small_files_are_packed_and_come_back_without_storage(s3):
    folder = run_log.MirroredFolder(Storage(s3("run")), "files")
    (Path(folder.path) / "sub").mkdir()
    (Path(folder.path) / "sub" / "log.csv").write_text("epoch\n0\n")
    packed = folder.pack(100)
    assert packed == {"sub/log.csv": b"epoch\n0\n"}
    assert folder.pack(5) is None
    other = run_log.MirroredFolder(
        Storage("s3://no-such-bucket/run?endpoint_override=127.0.0.1:9&scheme=http"), "files"
    )
    other.fetch(packed)
    assert (Path(other.path) / "sub" / "log.csv").read_text() == "epoch\n0\n"


def test_a_renewed_log_replaces_what_the_old_one_writes_later(run):
    old = run_log.StepLog(run, "20260101T000000.000-aaaaaa")
    old.add(1, 0, np.array([1.0, 2.0]), np.array([0.1, 0.1]))
    rows = old.take()
    log = old.renewed()
    log.add(3, 0, np.array([3.0]), np.array([0.1]))
    log.write(log.take())
    old.write(rows)  # hung until now
    assert run_log.read_steps(run.uri)["loss"].tolist() == [1, 2, 3]
    later = run_log.StepLog(run, "20260101T000001.000-000000")
    later.add(3, 0, np.array([9.0]), np.array([0.1]))
    later.write(later.take())
    assert run_log.read_steps(run.uri)["loss"].tolist() == [1, 2, 9]


def test_what_a_killed_command_had_begun_to_upload_is_aborted(s3, s3_endpoint):
    import boto3

    uri = s3("runs/a")
    bucket = uri.split("/")[2]
    client = boto3.client("s3", endpoint_url=f"http://{s3_endpoint}", region_name="us-east-1")
    dead = [
        "attempts/x.json",
        "steps/000000000001-x.csv",
        "tensorboard/events.1",
        "checkpoints/1-x-1/share-00000.safetensors",
    ]
    others = ["runs/a/export/1/saved_model.pb", "runs/ab/attempts/x.json", "runs/a/attempts"]
    for key in [*(f"runs/a/{name}" for name in dead), *others]:
        client.create_multipart_upload(Bucket=bucket, Key=key)
    run_log.abort_uploads(Storage(uri))
    left = [upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])]
    assert sorted(left) == sorted(others)


def test_which_attempts_are_dead():
    present = "20260102T000000.000-bbbbbb"
    assert naming.is_of_dead_attempt("attempts/20260101T000000.000-aaaaaa.json", present)
    assert naming.is_of_dead_attempt("steps/1-20270101T000000.000-cccccc.csv", present, ["20270101T000000.000-cccccc"])
    assert not naming.is_of_dead_attempt("steps/1-20270101T000000.000-cccccc.csv", present)
    assert not naming.is_of_dead_attempt(f"attempts/{present}.json", present, [present])
    assert not naming.is_of_dead_attempt("export/1/saved_model.pb", present)
