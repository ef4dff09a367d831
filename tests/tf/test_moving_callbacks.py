"""Callbacks whose rank 0 is lost: the next one goes on with what all ranks know of them."""

from __future__ import annotations

import csv
import pickle
from collections import deque

import keras
import numpy as np
import pytest

from raytf.errors import WorkerLostError
from raytf.training.user.failover_callbacks import MovingCallbacks

LOSSES = [1.0, 0.95, 0.8, 0.79, 0.78, 0.77, 0.9, 0.95]


class Pair:
    """Two ranks whose calls are made one after the other: the second gets what the first has told."""

    def __init__(self):
        self.told: deque = deque()


class First:
    rank = 0

    def __init__(self, pair: Pair):
        self._pair = pair
        self.is_alive = True

    def _tell(self, value):
        if not self.is_alive:
            raise ConnectionError("rank 0 is dead")
        self._pair.told.append(value)
        return value

    def sum(self, values):
        return self._tell(np.array(values))

    def share(self, data):
        return self._tell(data)

    def broadcast(self, arrays):
        return self._tell([np.array(a) for a in arrays])


class Second:
    rank = 1

    def __init__(self, pair: Pair):
        self._pair = pair

    def sum(self, values):
        return values + (self._pair.told.popleft() if self.rank else 0)

    def share(self, data):
        return self._pair.told.popleft() if self.rank else data

    def broadcast(self, arrays):
        return self._pair.told.popleft() if self.rank else arrays


def model() -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    made.compile(keras.optimizers.SGD(0.1), "mse")
    made.optimizer.build(made.trainable_variables)
    return made


class Ranks:
    """Rank 0, its successor, and the folder of each."""

    def __init__(self, make, tmp_path, pack=lambda: {}):
        pair = Pair()
        self.groups = First(pair), Second(pair)
        self.folders = tmp_path / "first", tmp_path / "second"
        for folder in self.folders:
            folder.mkdir()
        self.models = model(), model()
        self.ranks = [
            MovingCallbacks(make, m, g, print, str(f), {"epochs": 9, "steps": 3}, None, pack=pack)
            for m, g, f in zip(self.models, self.groups, self.folders, strict=True)
        ]
        self.run("on_train_begin")

    def begin(self, what: str, step: int) -> None:
        for each in self.ranks:
            each.begin(what, step)

    def run(self, hook: str, *args) -> None:
        for each in self.ranks:
            each.run(hook, *args)

    def lose_first(self, epoch: int, is_inside: bool, has_end: bool = True) -> MovingCallbacks:
        """The second is rank 0 from now on."""
        self.groups[1].rank = 0
        left = self.ranks[1]
        assert left.lacks_hooks
        left.take_over(str(self.folders[1]), epoch, is_inside, has_end)
        left.resume()
        self.ranks = [left]
        return left


def stops_at(make, tmp_path, lost_after: int | None) -> int:
    ranks = Ranks(make, tmp_path)
    for epoch, loss in enumerate(LOSSES):
        ranks.begin("epoch", 3 * epoch)
        ranks.run("on_epoch_begin", epoch)
        if epoch == lost_after:
            ranks.lose_first(epoch, is_inside=True)
        ranks.begin("end", 3 * epoch + 3)
        ranks.run("on_epoch_end", epoch, {"loss": loss})
        if ranks.ranks[-1].stopped:
            return epoch
    return len(LOSSES)


@pytest.mark.parametrize("lost_after", [0, 1, 2, 3, 4])
def test_early_stopping_stops_where_it_would_have(tmp_path, lost_after):
    def make(files):
        return [keras.callbacks.EarlyStopping("loss", min_delta=0.1, patience=2)]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole = stops_at(make, tmp_path / "a", None)
    assert whole == 4
    assert stops_at(make, tmp_path / "b", lost_after) == whole


class Counting(keras.callbacks.Callback):
    """Counts epochs, in a state of its own."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_end(self, epoch, logs=None):
        self.epochs = [*self.epochs, epoch]


def test_a_hook_known_to_all_is_not_run_again_and_one_known_to_none_is(tmp_path):
    ranks = Ranks(lambda files: [Counting()], tmp_path)
    for epoch in range(2):
        ranks.begin("end", 3 * epoch + 3)
        ranks.run("on_epoch_end", epoch, {"loss": 1.0})
    left = ranks.lose_first(2, is_inside=False)
    left.run("on_epoch_end", 1, {"loss": 1.0})
    assert left._list[0].epochs == [0, 1]
    left.run("on_epoch_end", 1, {"loss": 1.0})  # a second one of this number was not run before
    assert left._list[0].epochs == [0, 1, 1]


def test_a_hook_whose_rank_dies_before_it_could_tell_is_run_by_the_next(tmp_path):
    ranks = Ranks(lambda files: [Counting()], tmp_path)
    ranks.begin("end", 3)
    ranks.groups[0].is_alive = False
    with pytest.raises(ConnectionError):
        ranks.ranks[0].run("on_epoch_end", 0, {"loss": 1.0})
    left = ranks.lose_first(1, is_inside=False, has_end=False)
    left.run("on_epoch_end", 0, {"loss": 1.0})
    assert left._list[0].epochs == [0]


def test_a_row_of_a_log_is_there_once(tmp_path):
    def make(files):
        return [keras.callbacks.CSVLogger(f"{files}/log.csv")]

    ranks = Ranks(make, tmp_path)
    for epoch in range(2):
        ranks.begin("end", 3 * epoch + 3)
        ranks.run("on_epoch_end", epoch, {"loss": float(epoch)})
    (tmp_path / "second" / "log.csv").write_bytes((tmp_path / "first" / "log.csv").read_bytes())
    left = ranks.lose_first(2, is_inside=True)
    left.begin("end", 9)
    left.run("on_epoch_end", 2, {"loss": 2.0})
    left.run("on_train_end")
    with (tmp_path / "second" / "log.csv").open() as file:
        assert [(row["epoch"], row["loss"]) for row in csv.DictReader(file)] == [
            ("0", "0.0"),
            ("1", "1.0"),
            ("2", "2.0"),
        ]


class Shifting(keras.callbacks.Callback):
    """Changes weights."""

    def on_epoch_end(self, epoch, logs=None):
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel + 1.0)


def test_weights_that_a_hook_changed_come_with_the_rest_of_what_it_did(tmp_path):
    ranks = Ranks(lambda files: [Shifting()], tmp_path)
    ranks.begin("end", 3)
    ranks.run("on_epoch_end", 0, {})
    first, second = (np.array(m.layers[0].kernel) for m in ranks.models)
    assert np.array_equal(first, second)
    ranks.groups[0].is_alive = False  # it dies after its hook, before it could tell the others
    ranks.begin("end", 6)
    with pytest.raises(ConnectionError):
        ranks.ranks[0].run("on_epoch_end", 1, {})
    left = ranks.lose_first(2, is_inside=False)
    assert np.array_equal(ranks.models[1].layers[0].kernel, second)
    left.begin("end", 6)
    left.run("on_epoch_end", 1, {})
    assert np.array_equal(ranks.models[1].layers[0].kernel, second + 1.0)


def test_weights_that_could_not_be_sent_are_sent_at_the_next_rendezvous(tmp_path):
    """Another rank died while rank 0 told what its hook had changed."""
    ranks = Ranks(lambda files: [Shifting()], tmp_path)
    ranks.groups[0].is_alive = False
    ranks.begin("end", 3)
    with pytest.raises(ConnectionError):
        ranks.ranks[0].run("on_epoch_end", 0, {})
    ranks.groups[0].is_alive = True
    for each in ranks.ranks:
        each.resume()
    first, second = (np.array(m.layers[0].kernel) for m in ranks.models)
    assert np.array_equal(first, second)
    ranks.run("on_epoch_end", 0, {})  # it has run, and does not run again
    assert np.array_equal(ranks.models[0].layers[0].kernel, first)


def test_files_that_are_too_large_to_be_sent_are_lost_with_their_rank(tmp_path):
    ranks = Ranks(lambda files: [Counting()], tmp_path, pack=lambda: None)
    ranks.begin("end", 3)
    ranks.run("on_epoch_end", 0, {})
    with pytest.raises(WorkerLostError, match="files of callbacks that are too large"):
        ranks.ranks[1].packed_files  # noqa: B018


def test_what_one_rank_alone_was_told_all_know_before_they_go_on(tmp_path):
    """The second rank and a third one, of which only the third has heard the last word of rank 0."""
    ranks = Ranks(lambda files: [Counting()], tmp_path)
    second, old = ranks.ranks[1], ranks.ranks[1].known
    ranks.begin("end", 3)
    ranks.run("on_epoch_end", 0, {})
    heard, second.known = second.known, old
    assert heard.version > old.version

    class Left:
        rank, world_size = 0, 2

        def sum(self, values):
            return values + np.array([0, heard.version])

        def share(self, data, giver):
            assert (data, giver) == (b"", 1)
            return pickle.dumps(heard)

    second._group = Left()
    second.agree_on_known()
    assert second.known == heard
