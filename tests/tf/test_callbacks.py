"""Callbacks on several ranks, and over restarts."""

from __future__ import annotations

import csv

import keras
import numpy as np
import pytest

from raytf.errors import JobError
from raytf.runs.program_output import Printed, ProgramOutput
from raytf.storage.storage import Storage
from raytf.training.user.callbacks import Callbacks, give_back
from tests.tf.ranks import Alone


def model(optimizer=None) -> keras.Model:
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    return made


def callbacks(make, tmp_path, epoch=None, made=None, said=None) -> Callbacks:
    say = (said if said is not None else []).append
    ready = Callbacks(make, made or model(), Alone(), say, str(tmp_path), {"epochs": 9, "steps": 3}, epoch)
    ready.run("on_train_begin")
    return ready


def restart(before: Callbacks, make, tmp_path, epoch: int) -> Callbacks:
    after = callbacks(make, tmp_path, epoch)
    after.load_state(*before.state())
    return after


LOSSES = [1.0, 0.95, 0.8, 0.79, 0.78, 0.77, 0.9, 0.95]


def stops_at(make, tmp_path, restart_after: int | None) -> int:
    running = callbacks(make, tmp_path)
    for epoch, loss in enumerate(LOSSES):
        running.run("on_epoch_begin", epoch)
        running.run("on_epoch_end", epoch, {"loss": loss})
        if running.stopped:
            return epoch
        if epoch == restart_after:
            running = restart(running, make, tmp_path, epoch + 1)
    return len(LOSSES)


@pytest.mark.parametrize("restart_after", [0, 1, 2, 3])
def test_early_stopping_with_min_delta_stops_where_it_would_have(tmp_path, restart_after):
    def make():
        return [keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=2, restore_best_weights=True)]

    # A list is made again by every attempt, as on a worker.
    whole = stops_at(lambda files: make(), tmp_path, None)
    assert whole == 4
    assert stops_at(lambda files: make(), tmp_path, restart_after) == whole


def test_reduce_on_plateau_remembers_its_wait(tmp_path):
    def make(files):
        return [keras.callbacks.ReduceLROnPlateau("loss", patience=3, min_delta=0.1)]

    first = callbacks(make, tmp_path)
    for epoch, loss in enumerate([1.0, 0.99]):
        first.run("on_epoch_end", epoch, {"loss": loss})
    second = restart(first, make, tmp_path, 2)
    for epoch, loss in enumerate([0.98, 0.97], start=2):
        second.run("on_epoch_end", epoch, {"loss": loss})
    assert float(second._model.optimizer.learning_rate) == pytest.approx(0.01)


class Best(keras.callbacks.Callback):
    """Keeps what is an array later, and what is one from the start."""

    def __init__(self, start=0.0):
        super().__init__()
        self.best, self.start, self.history = None, start, []

    def on_epoch_end(self, epoch, logs=None):
        self.best = self.start = np.arange(3.0) + epoch
        self.history = [self.best]


def test_values_that_become_arrays_are_no_reason_to_fail(tmp_path):
    running = callbacks(lambda files: [Best()], tmp_path)
    running.run("on_epoch_end", 1, {"loss": 1.0})
    values, arrays = running.state()
    assert set(values["objects"]["callbacks[0] Best"]["attributes"]) == {"best", "start", "history"}
    assert [array.view(np.float64).tolist() for array in arrays.values()] == [[1.0, 2.0, 3.0]]


class Picky(keras.callbacks.Callback):
    """Takes a state that is whole, as `get_state` gives it."""

    count = 0

    def on_epoch_end(self, epoch, logs=None):
        self.count += 1

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_a_callback_that_is_new_since_the_checkpoint_keeps_its_state(tmp_path):
    running = callbacks(lambda files: [keras.callbacks.History()], tmp_path)
    new = Picky()
    after = callbacks(lambda files: [keras.callbacks.History(), new], tmp_path, 1)
    after.load_state(*running.state())
    assert new.count == 0
    after.run("on_epoch_end", 1, {"loss": 1.0})
    later = Picky()
    callbacks(lambda files: [keras.callbacks.History(), later], tmp_path, 2).load_state(*after.state())
    assert later.count == 1


class Steering(keras.callbacks.TensorBoard):
    """Derived from one that changes nothing, and changes the weights."""

    def set_model(self, model):
        self._model = model

    def on_train_begin(self, logs=None):
        pass

    def on_train_end(self, logs=None):
        pass

    def on_epoch_end(self, epoch, logs=None):
        for weight in self._model.weights:
            weight.assign(weight + 1)


class Asked(Alone):
    """One rank, which notes whether weights were sent to the others."""

    def __init__(self):
        self.sent = 0

    def broadcast(self, arrays):
        self.sent += 1
        return list(arrays)


def test_a_class_derived_from_a_harmless_callback_may_change_weights(tmp_path):
    group = Asked()
    made = Callbacks(lambda files: [Steering(str(tmp_path))], model(), group, print, str(tmp_path), {"epochs": 9}, None)
    made.run("on_train_begin")
    made.run("on_epoch_end", 0, {"loss": 1.0})
    assert group.sent == 1


def test_paths_are_those_of_the_new_attempt(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"

    def make(files):
        return [keras.callbacks.TensorBoard(files), keras.callbacks.ModelCheckpoint(f"{files}/best.keras", "loss")]

    first = callbacks(make, old)
    first.run("on_epoch_end", 0, {"loss": 1.0})
    second = callbacks(make, new, 1)
    second.load_state(*first.state())
    for callback in second._list:
        for name, value in vars(callback).items():
            assert str(old) not in str(value), name


def test_rows_that_are_done_once_more_leave_the_log(tmp_path):
    def make(files):
        return [keras.callbacks.CSVLogger(f"{files}/log.csv")]

    first = callbacks(make, tmp_path)
    for epoch in range(3):
        first.run("on_epoch_end", epoch, {"loss": float(epoch)})
    second = restart(first, make, tmp_path, 2)
    second.run("on_epoch_end", 2, {"loss": 7.0})
    second.run("on_train_end", {})
    with (tmp_path / "log.csv").open() as file:
        rows = [(row["epoch"], row["loss"]) for row in csv.DictReader(file)]
    assert rows == [("0", "0.0"), ("1", "1.0"), ("2", "7.0")]


def test_a_scheduled_rate_inside_a_loss_scale_is_left_alone(tmp_path):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    made = model(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule)))

    class Second(Alone):
        rank = 1

    other = Callbacks([keras.callbacks.History()], made, Second(), print, "", {}, None)
    other.run("on_epoch_end", 0, {})


def test_what_callbacks_print_is_said_and_what_they_raise_is_named(tmp_path):
    def end(epoch, logs):
        print("hello\nworld")
        if epoch:
            raise ValueError("broken")

    said: list[ProgramOutput] = []
    ready = callbacks([keras.callbacks.LambdaCallback(on_epoch_end=end)], tmp_path, said=said)
    ready.run("on_epoch_end", 0, {})
    assert said == [Printed("hello\nworld\n")]
    with pytest.raises(JobError, match="a callback's on_epoch_end raised ValueError: broken"):
        ready.run("on_epoch_end", 1, {})


def test_backup_and_restore_and_the_bar_do_nothing_and_a_line_says_so(tmp_path):
    said: list[str] = []

    class OwnBackup(keras.callbacks.BackupAndRestore):
        pass

    given = [OwnBackup(str(tmp_path / "b")), keras.callbacks.ProgbarLogger()]
    ready = callbacks(given, tmp_path, said=said)
    ready.run("on_epoch_end", 0, {})
    assert said == [
        "BackupAndRestore does nothing here: raytf itself saves and restores",
        "ProgbarLogger does nothing here: raytf itself shows the progress",
    ]
    assert not (tmp_path / "b").exists()


class Recorder(keras.callbacks.Callback):
    """What a program looks at after `fit`."""

    def on_train_begin(self, logs=None):
        self.seen, self.weights = [], []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, np.float32(logs["loss"])))
        self.weights.append(self.model.get_weights()[1])


def test_the_program_s_callbacks_have_what_theirs_have_kept(tmp_path):
    def make():
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "b"))
        return [backup, Recorder(), keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)]

    theirs = callbacks(make(), tmp_path)
    for epoch, loss in enumerate((1.0, 2.0, 3.0)):
        theirs.run("on_epoch_end", epoch, {"loss": loss})
    assert theirs.stopped
    run = Storage(str(tmp_path / "run"))
    theirs.keep(run)
    mine, trained = make(), model()
    give_back(run, mine, trained, {"epochs": 9})
    assert mine[1].model is trained
    assert [tuple(pair) for pair in mine[1].seen] == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert [w.tolist() for w in mine[1].weights] == [[0.0]] * 3
    assert (mine[2].best, mine[2].wait, mine[2].stopped_epoch) == (1.0, 2, 2)
    assert mine[2].monitor_op is keras.ops.less
    assert [w.shape for w in mine[2].best_weights] == [(2, 1), (1,)]
    give_back(Storage(str(tmp_path / "none")), mine, trained, {"epochs": 9})
