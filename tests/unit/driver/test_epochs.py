"""Epochs that are counted from another one than the first."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest

import raytf
from raytf.config.train_config import TrainConfig
from raytf.data.plan import StepPlan
from raytf.driver.result import Result
from raytf.errors import DataError
from raytf.training.job import TrainingJob


def job(first_epoch: int, total_steps: int) -> TrainingJob:
    fields: dict[str, Any] = dict.fromkeys(("code", "sources", "monitor", "class_weight"))
    plan = StepPlan(records=10, global_batch_size=4, shards=4)  # 3 steps an epoch
    return TrainingJob(
        **fields,
        config=TrainConfig(),
        run_uri="",
        plan=plan,
        total_steps=total_steps,
        validation_freq=1,
        first_epoch=first_epoch,
    )


@pytest.mark.parametrize(
    ("first", "total", "step", "epoch", "epochs"),
    [(0, 6, 0, 0, 2), (0, 6, 5, 1, 2), (4, 6, 0, 4, 6), (4, 6, 3, 5, 6), (4, 7, 6, 6, 7)],
)
def test_a_step_s_epoch_and_the_one_after_the_last(first: int, total: int, step: int, epoch: int, epochs: int):
    made = job(first, total)
    assert (made.epoch_of(step), made.epochs) == (epoch, epochs)


@pytest.mark.parametrize(("frequency", "epochs"), [(1, [1, 2, 3, 4]), (2, [2, 4]), ([1, 4, 9], [1, 4]), ([], [])])
def test_validation_runs_at_the_epochs_at_which_it_does_in_keras(frequency: int | list[int], epochs: list[int]):
    made = dataclasses.replace(job(0, 6), validation_freq=frequency)
    assert [epoch + 1 for epoch in range(4) if made.validates_after(epoch)] == epochs
    assert [e + 1 for e in range(4) if keras.Model()._should_eval(e, frequency)] == epochs


@pytest.mark.parametrize("frequency", [0, -1, "2", None])
def test_another_frequency_of_validation_is_refused(frequency: Any):
    x = np.zeros((8, 2), np.float32)
    with pytest.raises(DataError, match=r"validation_freq is .* or a list of epochs"):
        raytf.fit(lambda: None, x, x, validation_freq=frequency)


@pytest.mark.parametrize(("initial", "epochs"), [(3, 3), (-1, 3), (1, None)])
def test_a_first_epoch_that_is_not_before_the_last_one_is_refused(initial: int, epochs: int | None):
    x = np.zeros((8, 2), np.float32)
    with pytest.raises(DataError, match=rf"initial_epoch is {initial}, and epochs is {epochs or 1}\."):
        raytf.fit(lambda: None, x, x, epochs=epochs, initial_epoch=initial)


def test_a_history_says_what_keras_would_say():
    history = [{"epoch": 4, "step": 3, "loss": 1.0}, {"epoch": 5, "step": 6, "loss": 0.5}]
    result = Result({}, 6, "", "", {"history": history}, params=job(4, 6).params)
    assert result.epoch == [4, 5]
    assert result.history == {"loss": [1.0, 0.5]}
    assert result.params == {"verbose": "auto", "epochs": 6, "steps": 3}


def test_a_result_is_shown_in_five_lines():
    document = {"history": [{"epoch": 0, "step": 700, "loss": 1.0}, {"epoch": 1, "step": 1407, "loss": 0.5}]}
    result = Result({"loss": 0.04119, "val_accuracy": 0.5}, 1407, "/runs/a", "ab" * 32, document)
    assert repr(result).splitlines() == [
        "raytf.Result of /runs/a",
        "  steps:   1,407 in 2 epochs",
        "  metrics: loss 0.04119, val_accuracy 0.5",
        f"  weights: SHA-256 {'ab' * 32}",
        "  more:    .history, .model, .load_model(), .document",
    ]
