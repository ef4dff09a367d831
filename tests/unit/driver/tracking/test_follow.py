"""Trackers hear of each committed step once, whatever is killed."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.config.train_config import TrainConfig
from raytf.data.plan import StepPlan
from raytf.driver.tracking import follow, trackers
from raytf.driver.tracking.follow import Following
from raytf.driver.tracking.trackers import CallbackTracker, FileTracker, Point, committed, unknown
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob, UserCode
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.user.user_code import Parcel

CONFIG = TrainConfig.of(run="a", epochs=2, workers="1:3")
EPOCH = 5


def ended(folder: Path, steps: int) -> Storage:
    """A run that has ended, with an epoch for every five steps."""
    run = Storage(str(folder))
    log = run_log.StepLog(run, "20260101T000000.000-aaaaaa")
    log.add(1, 0, np.arange(steps) / 8, np.full(steps, 0.5))
    log.write(log.take())
    history = [{"epoch": e, "step": (e + 1) * EPOCH, "loss": 1.0, "val_loss": 2.0} for e in range(steps // EPOCH)]
    run.put(run_log.RESULT, json.dumps({"steps": steps, "history": history, "metrics": {}}).encode())
    return run


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if "step" in row]


def test_points_have_steps_and_the_metrics_of_epochs(tmp_path: Path):
    points = committed(ended(tmp_path, 7))
    assert [point.step for point in points] == [1, 2, 3, 4, 5, 6, 7]
    assert points[0].values == {"loss": 0.0, "learning_rate": 0.5}
    assert points[4].values == {"loss": 0.5, "learning_rate": 0.5, "epoch_loss": 1.0, "val_loss": 2.0}
    assert committed(Storage(str(tmp_path / "none"))) == []


@given(
    st.dictionaries(st.sampled_from("ab"), st.integers(0, 9)),
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=9),
)
def test_what_is_unknown_is_told_once(told: dict[str, int], names: list[str]):
    points = [Point(step, dict.fromkeys(own, float(step))) for step, own in enumerate(names, 1)]
    found = unknown(points, told)
    assert all(point.values for point in found)
    every = Counter((name, point.step) for point in points for name in point.values)
    new = Counter((name, point.step) for point in found for name in point.values)
    assert new == Counter({key: 1 for key in every if key[1] > told.get(key[0], 0)})


@given(cut=st.floats(0, 1), first=st.integers(1, 12), more=st.integers(0, 8))
def test_a_file_has_each_step_once_wherever_it_was_cut(tmp_path_factory: Any, cut: float, first: int, more: int):
    folder = tmp_path_factory.mktemp("run")
    file = folder / "metrics.jsonl"
    said: list[str] = []

    def start(steps: int) -> None:
        run = ended(folder / "run", steps)
        following = Following(run, FileTracker(str(file)), str(file), said.append)
        following.open(CONFIG)
        following.finish()
        following.close(True)

    start(first)
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * cut)])  # killed while it wrote
    start(first + more)
    start(first + more)
    assert [row["step"] for row in rows(file)] == list(range(1, first + more + 1))
    assert [row["step"] for row in rows(file) if "val_loss" in row] == [
        step for step in range(1, first + more + 1) if step % EPOCH == 0
    ]
    assert sum("parameters" in line for line in file.read_text().splitlines()) == 1
    assert not said


def test_runs_share_a_file_and_foreign_files_are_refused(tmp_path: Path):
    file = tmp_path / "all.jsonl"
    for name in ("a", "b"):
        with follow.tracked(CONFIG.replace(run=name, track=str(file)), ended(tmp_path / name, 3), print):
            pass
    assert [(row["run"], row["step"]) for row in rows(file)] == [(n, step) for n in "ab" for step in (1, 2, 3)]
    (other := tmp_path / "other.jsonl").write_text("step,loss\n")
    with pytest.raises(ConfigError, match="line 1 was not written by raytf"):
        FileTracker(str(other)).open("k", "a", {})


class Failing(FileTracker):
    """Its server is away some of the time."""

    def __init__(self, path: str, failures: int):
        super().__init__(path)
        self.failures = failures

    def tell(self, points: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise ConnectionError("no route to the server")
        super().tell(points)


def test_a_tracker_that_fails_is_told_later_and_stops_nothing(tmp_path: Path):
    said: list[str] = []
    run = ended(tmp_path / "run", 4)
    following = Following(run, Failing(str(tmp_path / "m.jsonl"), 2), "m.jsonl", said.append)
    following.open(CONFIG)
    following.advance()
    following.advance()
    following.finish()
    assert said == ["--track m.jsonl: ConnectionError: no route to the server; retrying later"]
    assert [row["step"] for row in rows(tmp_path / "m.jsonl")] == [1, 2, 3, 4]
    assert follow.has_all(CONFIG.replace(track="m.jsonl"), run)
    assert not follow.has_all(CONFIG.replace(track="n.jsonl"), run)


def test_what_cannot_track_is_refused_before_anything_runs():
    for flag, words in (("comet", "Expected mlflow, wandb, tensorboard, or a file"), ("a.csv", "ends with .jsonl")):
        with pytest.raises(ConfigError, match=words):
            trackers.check(flag)
    for flag in (None, "tensorboard", "~/a.jsonl"):
        trackers.check(flag)


def test_tensorboard_reads_each_step_once(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (4, 6):  # the second start begins again
        with follow.tracked(CONFIG.replace(track="tensorboard"), ended(tmp_path, steps), print):
            pass
    found = EventAccumulator(str(tmp_path / "tensorboard" / "steps"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(n, (n - 1) / 8) for n in range(1, 7)]
    assert [(e.step, e.value) for e in found.Scalars("val_loss")] == [(5, 2.0)]
    assert b'"workers": "1:3"' in found.Tensors("settings")[0].tensor_proto.string_val[0]


def test_mlflow_has_one_run_for_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "raytf")
    with (
        pytest.raises(KeyboardInterrupt),
        follow.tracked(CONFIG.replace(track="mlflow"), ended(tmp_path / "run", 4), print),
    ):
        raise KeyboardInterrupt
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("raytf").experiment_id])
    assert run.info.status == "KILLED"
    for _ in range(2):
        with follow.tracked(CONFIG.replace(track="mlflow"), ended(tmp_path / "run", 12), print):
            pass
    (run,) = client.search_runs([client.get_experiment_by_name("raytf").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "run")
    assert run.data.params["workers"] == "1:3"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(n, (n - 1) / 8) for n in range(1, 13)]
    assert [one.step for one in client.get_metric_history(run.info.run_id, "val_loss")] == [5, 10]
    assert [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"]


class Number:
    """A variable."""

    def __init__(self, value: int):
        self.value = value

    def __int__(self) -> int:
        return self.value

    def assign(self, value: int) -> None:
        self.value = value


def compiled() -> Any:
    """A model that has made 30 updates, as a tracker's callback sees it."""
    return SimpleNamespace(optimizer=SimpleNamespace(iterations=Number(30)))


def job(steps: int) -> TrainingJob:
    plan = StepPlan(records=EPOCH * 4, global_batch_size=4, shards=1)
    return TrainingJob(Parcel(UserCode(None)), CONFIG, None, MonitorClient(None), "", plan, steps, None, 1)


class Told:
    """A callback of a tracker, as far as it is told."""

    def __init__(self, fails_at: int = 0):
        self.heard: list[tuple[Any, ...]] = []
        self.fails_at = fails_at

    def set_params(self, params):
        self.params = params

    def set_model(self, model):
        self.model = model

    def on_train_begin(self):
        self.heard.append(("begin",))

    def on_epoch_begin(self, epoch):
        self.heard.append(("epoch", epoch))

    def on_train_batch_begin(self, batch):
        pass

    def on_train_batch_end(self, batch, logs):
        step = int(self.model.optimizer.iterations)
        if step == self.fails_at:
            self.fails_at = 0
            raise ConnectionError("no route to the server")
        self.heard.append((batch, step, logs))

    def on_epoch_end(self, epoch, logs):
        self.heard.append((epoch, logs))

    def on_train_end(self):
        self.heard.append(("end",))


Told.__module__ = "wandb.integration.keras"


def followed(folder: Path, steps: int, told: Told, said: list[str]) -> Any:
    model, run = compiled(), ended(folder, steps)
    own = CallbackTracker(run, [told], model, job(steps))
    if not follow.has_all(CONFIG, run, own):
        with follow.tracked(CONFIG, run, said.append, own):
            pass
    return model


def test_a_tracker_s_own_callback_hears_of_each_step_once_whatever_fails(tmp_path: Path):
    said: list[str] = []
    one = Told(fails_at=33)
    followed(tmp_path, 7, one, said)
    assert said == ["the tracker's callback: ConnectionError: no route to the server; retrying later"]
    assert one.params == {"verbose": "auto", "epochs": 2, "steps": EPOCH}
    assert one.heard[:4] == [("begin",), ("epoch", 0), (0, 31, {"loss": 0.0}), (1, 32, {"loss": 0.125})]
    two = Told()
    model = followed(tmp_path, 7, two, said)
    assert two.heard[2:6] == [
        (2, 33, {"loss": 0.25}),
        (3, 34, {"loss": 0.375}),
        (4, 35, {"loss": 0.5}),
        (0, {"loss": 1.0, "val_loss": 2.0}),
    ]
    assert two.heard[-3:] == [(0, 36, {"loss": 0.625}), (1, 37, {"loss": 0.75}), ("end",)]
    assert int(model.optimizer.iterations) == 30  # its weights are still those of before
    assert len(said) == 1
    followed(tmp_path, 7, three := Told(), said)
    assert not three.heard


class Refusing:
    """In place of the program's callbacks: a tracker that does not begin."""

    def open(self, key: str, name: str, parameters: dict[str, str]) -> None:
        raise ConnectionError("no server")


def test_a_tracker_is_closed_again_where_the_next_one_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    refusing: Any = Refusing()
    with (
        pytest.raises(ConfigError, match="the tracker's callback: ConnectionError: no server"),
        follow.tracked(CONFIG.replace(track="mlflow"), ended(tmp_path / "run", 4), print, refusing),
    ):
        pass
    (run,) = mlflow.MlflowClient((tmp_path / "mlflow").as_uri()).search_runs(["0"])
    assert run.info.status != "RUNNING"


def test_callbacks_that_report_run_in_the_driver_and_others_on_rank_0():
    class Saves(Told):
        pass

    class ModelCheckpoint(Told):
        pass

    Saves.__module__ = __name__
    ModelCheckpoint.__module__ = "wandb.integration.keras"
    told, saves, checkpoint, other = Told(), Saves(), ModelCheckpoint(), object()
    model = type("Model", (), {"compile": None, "__call__": None})()
    assert trackers.split([other, told, saves, checkpoint], model) == ([other, checkpoint], [told, saves])
    assert trackers.split([told], lambda: model) == ([told], [])
    assert trackers.split(None, model) == (None, [])


def test_mlflow_s_own_callback_reports_to_the_program_s_active_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    class Reports(Told):
        def on_epoch_end(self, epoch, logs):
            mlflow.log_metrics(logs, step=epoch)

    with mlflow.start_run() as active:
        own = CallbackTracker(Storage(str(tmp_path / "run")), [Reports()], compiled(), job(10))
        own.open("key", "a", {})
        with ThreadPoolExecutor(1) as pool:
            points = [Point(n, {"loss": 0.0, "epoch_loss": float(n)}) for n in (5, 10)]
            pool.submit(own.tell, points).result()
    history = mlflow.MlflowClient().get_metric_history(active.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(0, 5.0), (1, 10.0)]
    assert len(mlflow.MlflowClient().search_runs(["0"])) == 1
