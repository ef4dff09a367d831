"""A new run's model, tried before workers start: what is found, and what of it ends the run."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from raytf.config import precision
from raytf.config.train_config import TrainConfig
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.driver.rehearsal import Rehearsal, is_busy, is_decisive, rehearsing
from raytf.errors import DataError, JobError, ModelError, RaytfError, WholeBatchError
from raytf.training import elsewhere
from raytf.training.job import UserCode
from raytf.training.parcel import Parcel

MISTAKE = JobError("the model function raised TypeError", error=TypeError())
MISSING = JobError("the model function raised FileNotFoundError", error=FileNotFoundError())


@pytest.mark.parametrize(
    ("error", "has_gpus", "is_here", "is_told"),
    [
        (ModelError("the model has no loss"), False, False, True),
        (DataError("labels go from 0 to 5"), False, True, True),
        (MISTAKE, False, False, True),
        (MISSING, False, True, True),
        (MISSING, False, False, False),  # other machines may have the file
        (MISTAKE, True, True, False),  # a CPU may not do what a GPU does
        (WholeBatchError("whole batches"), False, True, False),  # which leads to other settings
    ],
)
def test_what_ends_a_run(error, has_gpus, is_here, is_told):
    assert is_decisive(error, has_gpus, is_here) is is_told

    class Asked:
        def answer(self, seconds: float) -> Any:
            raise error

    rehearsal = Rehearsal(Asked())  # type: ignore[arg-type]
    if is_told:
        with pytest.raises(type(error)):
            rehearsal.look(has_gpus, is_here)
    rehearsal.look(has_gpus, is_here)


@pytest.mark.parametrize(
    ("load", "cpus", "busy"), [(0.0, 2, False), (3.0, 2, False), (3.1, 2, True), (12.0, 16, False)]
)
def test_a_busy_machine_tries_nothing(load, cpus, busy):
    assert is_busy(load, cpus) is busy


def model(loss: str = "sparse_categorical_crossentropy", width: int = 4):
    import keras

    made = keras.Sequential([keras.Input((width,)), keras.layers.Dense(3, activation="softmax")])
    made.compile("adam", loss)
    return made


def broken():
    raise TypeError("boom")


X, Y = np.zeros((64, 4), np.float32), np.arange(64) % 3


@pytest.mark.parametrize(
    ("make", "labels", "kind", "words"),
    [
        (model, Y, None, ""),
        (broken, Y, JobError, "the model function raised TypeError: boom"),
        (lambda: model("sparse_categorical_crosentropy"), Y, DataError, "Could not interpret loss identifier"),
        (lambda: model("mse"), np.zeros((64, 5), np.float32), DataError, "do not take the labels"),
        (model, np.where(np.arange(64) == 63, 5, Y), DataError, "labels go from 0 to 5, but the model has 3 outputs"),
        (lambda: model(width=7), Y, RaytfError, "7"),
    ],
)
def test_a_mistake_is_found_in_another_process(make, labels, kind, words, monkeypatch):
    config = TrainConfig()
    source = ArraySource(X, labels)
    job: Any = types.SimpleNamespace(
        code=Parcel(UserCode(make, None, None)),
        config=config,
        plan=StepPlan(64, 32, 4),
        class_weight=None,
        precision=precision.DEFAULT,
    )
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with rehearsing(job, source, config) as rehearsal:
        asked = rehearsal._asked
        assert asked is not None
        if kind is None:
            assert elsewhere.CANNOT not in (asked.answer(300) or {})
            rehearsal.look(False, True)
            return
        with pytest.raises(kind, match=words):
            asked.answer(300)
        with pytest.raises(kind):
            rehearsal.look(False, True)
