"""What a call of `fit` asks for, before anything is written or started."""

from __future__ import annotations

import inspect
from dataclasses import fields

import numpy as np
import pytest

import raytf
from raytf.audit.step_replay import VARIABLE, ReplayPlan
from raytf.config.train_config import TrainConfig
from raytf.driver.resolve import FitArguments, FitCall, resolve
from raytf.errors import ConfigError, DataError, RaytfError
from raytf.training.job import Sources

X, Y = np.zeros((64, 4), np.float32), np.arange(64) % 3


def make():
    raise AssertionError("the driver builds no model")


def job_of(call: FitCall, **settings):
    sources = Sources(*(call.data.parts[name] for name in ("train", "validation", "test")))
    return call.job(call.config.replace(**settings), call.code(), sources, "/runs/a", False)


def test_the_arguments_are_those_of_fit():
    assert [field.name for field in fields(FitArguments)] == list(inspect.signature(raytf.fit).parameters)
    for name, parameter in inspect.signature(raytf.fit).parameters.items():
        if parameter.default is not parameter.empty:
            assert getattr(FitArguments(make), name) == parameter.default


@pytest.mark.parametrize(
    ("arguments", "batch", "steps", "shuffle"),
    [
        ({"x": X, "y": Y}, 32, 2, True),
        ({"x": X, "y": Y, "batch_size": 16, "epochs": 3, "shuffle": False}, 16, 12, False),
        ({"x": X, "y": Y, "epochs": 5, "initial_epoch": 3}, 32, 4, True),
        ({"train": (X, Y), "settings": {"steps": 7, "workers": 2}}, 128, 7, True),
        ({"x": X, "y": Y, "config": TrainConfig(epochs=2, global_batch_size=8)}, 8, 16, True),
        ({"x": X, "y": Y, "validation_split": 0.5}, 32, 1, True),
    ],
)
def test_the_job_of_a_call(arguments, batch, steps, shuffle):
    call = resolve(FitArguments(make, **arguments))
    job = job_of(call, run="a")
    assert (job.config.batch.global_batch_size, job.total_steps, job.shuffle) == (batch, steps, shuffle)
    assert (job.run_uri, job.stop_step, job.first_epoch) == ("/runs/a", None, arguments.get("initial_epoch", 0))
    assert job.code.get().model is make
    assert not call.is_named
    assert call.config.run.name == call.program.name


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({}, DataError, "there is no training data"),
        ({"x": X, "y": Y, "train": X}, DataError, "x and train"),
        ({"x": X, "y": Y, "settings": {"wrokers": 2}}, ConfigError, "Did you mean 'workers'"),
        ({"x": X, "y": Y, "settings": {"workers": 0}}, ConfigError, "workers=0"),
        ({"x": X, "y": Y, "epochs": 2, "initial_epoch": 2}, DataError, "initial_epoch is 2"),
        ({"x": X, "y": Y, "settings": {"keep_best": "val_loss"}}, ConfigError, "keep_best='val_loss': there is no"),
    ],
)
def test_wrong_arguments_are_refused_in_the_words_of_the_program(arguments, kind, words):
    with pytest.raises(kind, match=words):
        resolve(FitArguments(make, **arguments))


def test_a_replay_trains_up_to_its_step_in_another_folder(monkeypatch, tmp_path):
    plan = ReplayPlan(str(tmp_path / "runs" / "a"), 3, 1, str(tmp_path / "again"))
    for name, text in plan.environment().items():
        monkeypatch.setenv(name, text)
    config = TrainConfig(run="a", storage=str(tmp_path / "runs"), workers="1:4")
    call = resolve(FitArguments(make, X, Y, batch_size=16, config=config))
    assert call.replay == plan
    assert (call.config.run.name, call.config.run.storage) == ("replay", plan.folder)
    assert (job_of(call).end_step, job_of(call).total_steps) == (3, 4)
    monkeypatch.delenv(VARIABLE)
    assert resolve(FitArguments(make, X, Y, config=config)).replay is None


def test_errors_of_a_cluster_name_arguments_where_a_program_passed_them():
    config = TrainConfig(workers="1:4")
    error = raytf.ClusterError("--workers 1:4 with 1 CPU each: use --no-use-gpu")
    with pytest.raises(RaytfError) as raised, config.named_as_typed():
        raise error
    assert str(raised.value) == "workers='1:4' with 1 CPU each: use use_gpu=False"
    assert config.as_typed("pass --new") == "pass new=True"
    assert TrainConfig.among({"workers": "2"}).as_typed("pass --new") == "pass --new"
