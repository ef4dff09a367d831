"""Calls of `fit`: the same batches, steps of an epoch and losses as in Keras, for every kind of data."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from raytf.data import tree
from raytf.data.sources import ArraySource
from raytf.data.sources.batches import LiveBatches, plan_of
from raytf.driver import inputs, resolve
from raytf.driver.inputs import are_batches, rows_of
from raytf.storage.storage import Storage
from tests.tf.ranks import train

pytestmark = pytest.mark.gate  # some minutes, which .ci/run has

RNG = np.random.default_rng(0)
X = np.where(RNG.random((40, 6)) > 0.4, RNG.normal(size=(40, 6)), 0).astype("float32")
Y = (X[:, :1] > 0).astype("float32")
SOFT, POSITIONS = Y * 0.9 + 0.05, RNG.integers(0, 3, (40, 3))
WEIGHTS = {0: 0.5, 1: 3.0}


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return model


def three() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def sparse_input() -> keras.Model:
    inner = keras.Input((6,), sparse=True)
    model = keras.Model(inner, layers.Dense(1, "sigmoid")(inner))
    model.compile(keras.optimizers.SGD(0.5), "binary_crossentropy")
    return model


class Batches(keras.utils.PyDataset):
    """Batches of 10 records."""

    def __init__(self, y: Any = Y, count: int | None = 4):
        super().__init__()
        self.y, self.count = y, count

    @property
    def num_batches(self) -> int | None:
        return self.count

    def __getitem__(self, index: int) -> Any:
        begin = 10 * index % 40
        return X[begin : begin + 10], self.y[begin : begin + 10]


def generated() -> Iterator[Any]:
    for begin in range(0, 40, 8):
        yield X[begin : begin + 8], Y[begin : begin + 8]


def dataset(*parts: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts or (X, Y))


def over_a_generator() -> tf.data.Dataset:
    once = generated()
    signature = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 1])
    return tf.data.Dataset.from_generator(lambda: once, output_signature=signature)


def scipy_matrix() -> Any:
    return pytest.importorskip("scipy").sparse.csr_matrix(X)


def column(values: np.ndarray) -> Any:
    return pytest.importorskip("pandas").Series(values)


#: Model, and what makes the arguments.
CASES: dict[str, tuple[Callable[[], keras.Model], Callable[[], dict[str, Any]]]] = {
    "arrays": (dense, lambda: {"x": X, "y": Y, "epochs": 2}),
    "arrays, fewer steps": (dense, lambda: {"x": X, "y": Y, "batch_size": 9, "steps_per_epoch": 3, "epochs": 4}),
    "arrays, more steps": (dense, lambda: {"x": X, "y": Y, "batch_size": 9, "steps_per_epoch": 9, "epochs": 2}),
    "arrays, steps alone": (dense, lambda: {"x": X, "y": Y, "steps_per_epoch": 3, "epochs": 2}),
    "arrays, many steps alone": (dense, lambda: {"x": X, "y": Y, "steps_per_epoch": 27, "epochs": 1}),
    "PyDataset, fewer steps": (dense, lambda: {"x": Batches(), "steps_per_epoch": 3, "epochs": 4}),
    "PyDataset, half the steps": (dense, lambda: {"x": Batches(), "steps_per_epoch": 2, "epochs": 4}),
    "PyDataset, more steps": (dense, lambda: {"x": Batches(), "steps_per_epoch": 6, "epochs": 2}),
    "PyDataset without end": (dense, lambda: {"x": Batches(count=None), "steps_per_epoch": 3, "epochs": 3}),
    "PyDataset, batch_size": (dense, lambda: {"x": Batches(), "batch_size": 3, "epochs": 2}),
    "data set, fewer steps": (dense, lambda: {"x": dataset().batch(9), "steps_per_epoch": 2, "epochs": 4}),
    "data set, more steps": (dense, lambda: {"x": dataset().batch(9), "steps_per_epoch": 7, "epochs": 2}),
    "data set, batch_size": (dense, lambda: {"x": dataset().batch(9), "batch_size": 16, "epochs": 2}),
    "data set without end": (dense, lambda: {"x": dataset().repeat().batch(9), "steps_per_epoch": 3, "epochs": 3}),
    "data set of unknown size": (dense, lambda: {"x": dataset().filter(lambda x, y: True).batch(9), "epochs": 2}),
    "cached, of unknown size": (
        dense,
        lambda: {"x": dataset().filter(lambda x, y: True).batch(9).cache().prefetch(1), "epochs": 2},
    ),
    "zipped": (
        dense,
        lambda: {"x": tf.data.Dataset.zip((dataset(X).map(lambda x: x), dataset(Y).map(lambda y: y))).batch(9)},
    ),
    "generator": (dense, lambda: {"x": generated()}),
    "generator, steps": (dense, lambda: {"x": generated(), "steps_per_epoch": 2, "epochs": 2}),
    "data set over a generator": (dense, lambda: {"x": over_a_generator()}),
    "shuffle by batch": (dense, lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": "batch", "epochs": 2}),
    "soft labels": (dense, lambda: {"x": X, "y": SOFT, "class_weight": WEIGHTS}),
    "soft labels of a PyDataset": (dense, lambda: {"x": Batches(SOFT), "class_weight": WEIGHTS}),
    "soft labels of a data set": (dense, lambda: {"x": dataset(X, SOFT[:, 0]).batch(9), "class_weight": WEIGHTS}),
    "classes of positions": (three, lambda: {"x": X, "y": POSITIONS, "class_weight": WEIGHTS}),
    "classes of positions of a data set": (
        three,
        lambda: {"x": dataset(X, POSITIONS).batch(9), "class_weight": WEIGHTS | {2: 2.0}},
    ),
    "scipy": (dense, lambda: {"x": scipy_matrix(), "y": Y, "batch_size": 9, "epochs": 2}),
    "scipy, steps": (dense, lambda: {"x": scipy_matrix(), "y": Y, "steps_per_epoch": 3, "epochs": 2}),
    "scipy of a generator": (dense, lambda: {"x": iter_of([(scipy_matrix()[:8], Y[:8])] * 3)}),
    "sparse": (dense, lambda: {"x": tf.sparse.from_dense(X), "y": Y, "batch_size": 9, "epochs": 2}),
    "sparse input": (sparse_input, lambda: {"x": tf.sparse.from_dense(X), "y": Y, "batch_size": 9}),
    "sparse data set": (dense, lambda: {"x": dataset(tf.sparse.from_dense(X), Y).batch(9), "epochs": 2}),
    "columns of pandas": (
        dense,
        lambda: {"x": X, "y": column(Y[:, 0]), "sample_weight": column(Y[:, 0] + 1), "batch_size": 9},
    ),
    "weights of a data set": (dense, lambda: {"x": dataset(X, Y, Y[:, 0] + 1).batch(9), "epochs": 2}),
}


def iter_of(batches: list[Any]) -> Iterator[Any]:
    yield from batches


def of_keras(make: Callable[[], keras.Model], given: dict[str, Any]) -> tuple[list[tuple[int, int]], list[float]]:
    """(epoch, batch) and loss of each step of `keras.Model.fit`."""
    places, losses = list[tuple[int, int]](), list[float]()
    keras.utils.set_random_seed(0)
    model = make()

    class Steps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            model.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            places.append((self.epoch, batch))
            losses.append(logs["loss"])

    model.fit(**{"shuffle": False, **given}, verbose=0, callbacks=[Steps()])
    return places, losses


def of_raytf(
    make: Callable[[], keras.Model], given: dict[str, Any], folder: str
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """The same of raytf, with what stands between a call of `raytf.fit` and a step."""
    x, size, steps, epochs = (given.get(name) for name in ("x", "batch_size", "steps_per_epoch", "epochs"))
    shuffle = given.get("shuffle", False)
    is_whole = not are_batches(x) and steps is None
    asked = {"batch_size": None if are_batches(x) else size, "epochs": epochs}
    config, _ = resolve.settings(None, asked, is_whole)
    data, _ = inputs.training_data(x, given.get("y"), given.get("sample_weight"), 0.0)
    made, _, _ = inputs.streams((data, None, None), config, size, steps, None, shuffle, None, epochs or 1)
    run_data = inputs.RunData.of(made, None, None)
    stream, source = run_data.stream, run_data.sources(Storage(folder), verbose=0).train
    rows = config.batch.global_batch_size if stream is None else rows_of(stream)
    weights = inputs.class_weights_of(given.get("class_weight"), made, source.spec)
    shards = 1 if isinstance(source, ArraySource) else 4  # each of which has its own records of arrays
    plan = plan_of(source, rows, shards)
    total = plan.epoch_start(epochs or 1)
    if isinstance(source, LiveBatches):
        batches = [[leaf for _, leaf in tree.flatten(stream.read(*plan.pass_of(step)))] for step in range(total)]

        def fetch(step: int, own: range) -> tuple[list[np.ndarray], int]:
            count = len(batches[step][0])
            cuts = plan.cuts(count)
            return [leaf[cuts[own.start] : cuts[own.stop]] for leaf in batches[step]], count

        source = source.fed(fetch)
    options = {"shuffle": inputs.draws_order(shuffle), "class_weight": weights}
    keras.utils.set_random_seed(0)
    found = train(make, source, plan.global_batch_size, shards, total, **options)
    return [plan.locate(step) for step in range(total)], found[0][1]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_each_step_of_a_call_is_that_of_keras(name: str, tmp_path: Path):
    make, given = CASES[name]
    places, losses = of_keras(make, given())
    found, own = of_raytf(make, given(), str(tmp_path))
    assert found == places
    np.testing.assert_allclose(own, losses, rtol=1e-5, atol=1e-6)


REFUSED: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "3-D targets": (
        lambda: {"x": X, "y": np.zeros((40, 3, 2)), "class_weight": WEIGHTS},
        "class_weight needs one class",
    ),
    "several targets": (
        lambda: {"x": X, "y": {"a": Y, "b": Y}, "class_weight": WEIGHTS},
        "class_weight needs one target",
    ),
    "weights of both kinds": (
        lambda: {"x": X, "y": Y, "sample_weight": Y[:, 0], "class_weight": WEIGHTS},
        "class_weight and sample_weight",
    ),
    "weights in a data set": (
        lambda: {"x": dataset(X, Y, Y[:, 0]).batch(9), "class_weight": WEIGHTS},
        "class_weight and sample_weight",
    ),
    "targets beside a data set": (lambda: {"x": dataset().batch(9), "y": Y}, "includes its targets and weights"),
    "lists of numbers": (lambda: {"x": [1.0, 2.0], "y": Y}, r"Convert lists of numbers with np\.array"),
    "sparse targets": (lambda: {"x": X, "y": tf.sparse.from_dense(Y)}, "y is a SparseTensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_keras_refuses_is_refused_in_one_line(name: str, tmp_path: Path):
    given, words = REFUSED[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, TypeError, AttributeError)):
            dense().fit(**given(), verbose=0)
    with pytest.raises(inputs.DataError, match=words):
        of_raytf(dense, given(), str(tmp_path))
