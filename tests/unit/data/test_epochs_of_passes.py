"""Epochs that are parts of a pass over the data: as many steps in each epoch as in Keras."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data.plan import BatchPlan


class Batches(keras.utils.PyDataset):
    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 1), index, np.float32), np.zeros((2, 1), np.float32)


class Noting(keras.Model):
    """Notes which batches it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def train_step(self, data: Any) -> Any:
        self.seen.append(int(data[0][0, 0]))
        return {"loss": 0.0}


def epochs_of_keras(count: int, steps: int, epochs: int) -> list[list[int]]:
    """The batches in each epoch of `keras.Model.fit`."""
    model, found = Noting(), list[list[int]]()
    model.compile("sgd", "mse", run_eagerly=True)

    class Epochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found.append(list(model.seen))
            model.seen.clear()

    options = {"steps_per_epoch": steps, "epochs": epochs, "shuffle": False, "verbose": 0, "callbacks": [Epochs()]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(Batches(count), **options)
    return found


@pytest.mark.parametrize(("count", "steps"), [(7, 3), (6, 3), (4, 4), (3, 5), (5, 1)])
def test_epochs_have_the_batches_that_they_have_in_keras(count: int, steps: int):
    plan, epochs = BatchPlan(count, 1, 1, steps, batches=None if steps == count else count), 7
    places = [(plan.locate(step)[0], plan.pass_of(step)[1]) for step in range(plan.epoch_start(epochs))]
    found = [[batch for _, batch in own] for _, own in itertools.groupby(places, lambda place: place[0])]
    assert found == epochs_of_keras(count, steps, epochs)


@given(count=st.integers(1, 12), steps=st.integers(1, 14), epoch=st.integers(0, 30), limit=st.integers(1, 5))
def test_steps_lie_in_the_epochs_that_begin_before_them(count: int, steps: int, epoch: int, limit: int):
    plan = BatchPlan(count * 2, 2, 3, steps, batches=count)
    first, end = plan.epoch_start(epoch), plan.epoch_start(epoch + 1)
    assert 1 <= end - first <= min(steps, count)
    for step in range(first, end):
        assert plan.locate(step) == (epoch, step - first)
        assert plan.pass_of(step) == divmod(step, count)
        assert plan.is_epoch_end(step) is (step == first)
        assert step < plan.call_end(step, limit, 10**9) <= end
        assert plan.samples(step) == 2 * step
