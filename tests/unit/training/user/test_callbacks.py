"""Which callbacks need the hook of every batch."""

from __future__ import annotations

import pytest
from keras import callbacks
from keras.callbacks import Callback

from raytf.training.user.callbacks import BatchHooks

NONE, END = BatchHooks(), BatchHooks(each=True, steer=True)


class Ends(Callback):
    def on_train_batch_end(self, batch, logs=None):
        pass


class Begins(Callback):
    def on_batch_begin(self, batch, logs=None):
        pass


class OfTests(Callback):
    def on_test_batch_end(self, batch, logs=None):
        pass


class Epochs(callbacks.TensorBoard):
    def on_epoch_end(self, epoch, logs=None):
        pass


class Batches(callbacks.TensorBoard):
    def on_train_batch_end(self, batch, logs=None):
        pass


CASES = {
    "none": ([], NONE),
    "of epochs": ([callbacks.History(), callbacks.EarlyStopping(), callbacks.ReduceLROnPlateau()], NONE),
    "own end": ([Ends()], END),
    "own begin": ([Begins()], END._replace(steer_begin=True)),
    "a lambda": ([callbacks.LambdaCallback(on_train_batch_end=print)], END),
    "a lambda of epochs": ([callbacks.LambdaCallback(on_epoch_end=print)], NONE),
    "own, of a test": ([OfTests()], BatchHooks(test=True)),
    "checkpoints of epochs": ([callbacks.ModelCheckpoint("x.keras")], NONE),
    "checkpoints of batches": ([callbacks.ModelCheckpoint("x.keras", save_freq=3)], END),
    "TensorBoard": ([callbacks.TensorBoard("x")], NONE),
    "TensorBoard of batches": (
        [callbacks.TensorBoard("x", update_freq=2)],
        END._replace(steer_begin=True, test=True),
    ),
    "TensorBoard that profiles": (
        [callbacks.TensorBoard("x", profile_batch=(2, 3))],
        END._replace(steer_begin=True, test=True),
    ),
    "derived, of epochs": ([Epochs("x")], NONE),
    "derived, of batches": ([Batches("x")], END._replace(steer_begin=True, test=True)),
    "TerminateOnNaN": ([callbacks.TerminateOnNaN()], END._replace(take_nan=True)),
}


@pytest.mark.parametrize("case", CASES)
def test_only_callbacks_that_need_each_batch_make_calls_short(case: str):
    made, expected = CASES[case]
    assert BatchHooks.of(made) == expected
