"""What `fit` makes of batches: which are recorded, which are made while the run trains, and what is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.config.train_config import TrainConfig
from raytf.data.sources.arrays import SparseRows
from raytf.data.sources.batches import BatchedSource, LiveBatches
from raytf.data.streams import Stream
from raytf.driver import inputs
from raytf.errors import ConfigError, DataError
from raytf.storage.storage import Storage
from raytf.training import run_identity

ARRAYS = np.zeros((8, 2)), np.zeros(8)


class Source:
    """Records that are no arrays."""


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return np.full((4, 2), index), np.zeros(4)


def endless() -> Iterator[Any]:
    while True:
        yield np.zeros((4, 2)), np.zeros(4)


def streams(train: Any = None, validation: Any = None, test: Any = None, **given_: Any) -> tuple[Any, Any, Any]:
    config = given_.pop("config", TrainConfig())
    usual = {"batch_size": None, "steps_per_epoch": None, "validation_steps": None, "shuffle": False}
    return inputs.streams((train, validation, test), config, **(usual | given_))


def test_what_gives_batches_is_a_stream_and_all_else_is_as_it_was():
    train, validation, test = streams(Batches(), Batches(), ARRAYS)
    assert isinstance(train, Stream)
    assert isinstance(validation, Stream)
    assert test is ARRAYS
    assert inputs.rows_of(train) == 4


def test_arrays_with_steps_are_batches_as_in_keras():
    arrays = np.arange(10.0).reshape(10, 1), np.arange(10), None
    kinds = [
        ({"steps_per_epoch": 4}, 3),  # Keras's own size where none is given
        ({"steps_per_epoch": 3, "batch_size": 4}, None),  # a pass, as without it
        ({"steps_per_epoch": 2, "batch_size": 4}, 4),
    ]
    for arguments, rows in kinds:
        size = arguments.get("batch_size")
        config = TrainConfig() if size is None else TrainConfig().replace(global_batch_size=size)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, *_ = streams(arrays, config=config, **arguments)
        assert found is arrays if rows is None else inputs.rows_of(found) == rows


@pytest.mark.parametrize(
    ("sizes", "records"),
    [
        ({"batch_size": 3}, 6),
        ({"batch_size": 3, "validation_batch_size": 2}, 4),
        ({"batch_size": 8}, 10),
        ({}, 10),  # as many batches of equal size as are asked for
    ],
)
def test_validation_steps_of_arrays_are_batches_as_in_keras(sizes: dict[str, int], records: int):
    arrays = np.arange(10.0).reshape(10, 1), np.arange(10), None
    _, validation, _ = streams(arrays, arrays, validation_steps=2, **sizes)
    assert validation[1].tolist() == list(range(records))
    _, validation, _ = streams(Batches(), arrays, validation_steps=2, **sizes)
    assert validation[1].tolist() == list(range(records))


@pytest.mark.parametrize(("steps", "epochs", "warns"), [(2, 1, False), (2, 2, True), (5, 1, True), (3, 9, False)])
def test_epochs_that_will_be_short_are_told_as_in_keras(steps: int, epochs: int, warns: bool):
    context = pytest.warns(UserWarning, match="ran out of data") if warns else warnings.catch_warnings(action="error")
    with context:
        train, *_ = streams(Batches(), steps_per_epoch=steps, epochs=epochs)
    assert (train.steps, train.batches) == (steps, None if steps == 3 else 3)


def test_a_batch_size_beside_batches_is_ignored_as_in_keras():
    train, *_ = streams(Batches(), batch_size=99)
    assert inputs.rows_of(train) == 4


@pytest.mark.parametrize("how", ["tensor", "scipy"])
def test_sparse_arrays_stay_sparse_until_their_rows_are_taken(how: str):
    dense = np.where(np.random.default_rng(0).random((10, 4)) > 0.7, 1.5, 0.0)
    sparse = pytest.importorskip("scipy").sparse.csr_matrix(dense) if how == "scipy" else tf.sparse.from_dense(dense)
    train, held_out = inputs.training_data(sparse, np.arange(10), None, 0.3)
    source = inputs.source(train, "train")
    assert isinstance(train[0], SparseRows)
    assert source.take(np.array([5, 0]))[0].tolist() == dense[[5, 0]].tolist()
    assert inputs.source(held_out, "validation").take(np.arange(3))[0].tolist() == dense[7:].tolist()
    assert run_identity.contents(source) == run_identity.contents(inputs.source((dense[:7], np.arange(7)), "train"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tf.sparse.eye(4), r"y is a SparseTensor\. .*tf\.sparse\.to_dense"),
        (lambda: tf.ragged.constant([[1], [2, 3]]), r"y is a RaggedTensor, .*y\.to_tensor"),
        (lambda: pytest.importorskip("scipy").sparse.eye(4), r"y is a .*\. .*y\.toarray"),
    ],
)
def test_targets_that_are_not_dense_are_refused_by_their_kind(make: Any, words: str):
    with pytest.raises(DataError, match=words):
        inputs.training_data(np.zeros((4, 2)), make(), None, 0.0)


def test_ragged_inputs_are_refused_by_their_kind():
    ragged = tf.ragged.constant([[1], [2, 3]])
    with pytest.raises(DataError, match=r"^x\['a'\] is a RaggedTensor, .* Pad it first, as with x\['a'\]\.to_tensor"):
        inputs.training_data({"a": ragged}, np.zeros(2), None, 0.0)
    with pytest.raises(DataError, match=r"^x is a RaggedTensor"):
        inputs.training_data(ragged, np.zeros(2), None, 0.0)


@pytest.mark.parametrize(
    ("parts", "arguments", "words"),
    [
        ((ARRAYS,), {"steps_per_epoch": 0}, "steps_per_epoch=0 with tuple: expected 1 or more"),
        ((Source(),), {"steps_per_epoch": 2}, "steps_per_epoch=2 with Source: expected 1 or more, with arrays"),
        ((Batches(), Source()), {"validation_steps": 2}, "validation_steps=2 with Source: expected"),
        ((endless(),), {"epochs": 2}, "can be read only once, but there are 2 epochs"),
    ],
)
def test_what_does_not_go_together_is_refused(parts: tuple[Any, ...], arguments: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        streams(*parts, **arguments)


def test_flags_that_batches_cannot_follow_are_refused():
    with pytest.raises(ConfigError, match="--global-batch-size 64: train data makes batches of 4 itself"):
        streams(Batches(), config=TrainConfig().replace(global_batch_size=64))
    with pytest.raises(ConfigError, match="--strategy parameter-server reads records, but x is a Batches"):
        streams(Batches(), config=TrainConfig().replace(strategy="parameter-server"))
    with pytest.raises(ConfigError, match="--strategy parameter-server reads records, but steps_per_epoch makes"):
        streams(ARRAYS, config=TrainConfig().replace(strategy="parameter-server"), steps_per_epoch=3)


def test_of_validation_data_the_first_batches_may_be_enough(tmp_path: Path):
    _, stream, _ = streams(ARRAYS, Batches(), validation_steps=2)
    assert inputs.evaluation_source(stream, 2, Storage(str(tmp_path)), print).records == 8
    _, stream, _ = streams(ARRAYS, endless(), validation_steps=5)
    assert inputs.evaluation_source(stream, 5, Storage(str(tmp_path)), print).records == 20


def fixed(changes: str = "", free: bool = False) -> Stream:
    shapes = [(4, 2), (4, 3) if free else (4, 2)]
    stream = Stream("train", lambda number, first: iter([np.zeros(shape) for shape in shapes[first:]]), 2)
    stream.changes = changes
    return stream


@pytest.mark.parametrize(
    ("stream", "how", "kind", "why"),
    [
        (fixed(), "auto", BatchedSource, "2 batches, recorded, since each pass is the same"),
        (fixed(), "live", LiveBatches, "since --pipeline live asks for it"),
        (fixed("it has ShuffleDatasetV3"), "auto", LiveBatches, "since it has ShuffleDatasetV3"),
        (fixed("it has ShuffleDatasetV3"), "record", BatchedSource, "all epochs have the batches of the first"),
        (fixed(free=True), "auto", LiveBatches, "since its batches have records of different shapes"),
    ],
)
def test_which_of_the_two_is_chosen_and_why_is_one_line(stream: Any, how: str, kind: type, why: str, tmp_path: Path):
    said: list[str] = []
    assert isinstance(inputs.training_source(stream, how, Storage(str(tmp_path)), said.append), kind)
    assert len(said) == 1
    assert why in said[0]


def test_epochs_that_are_parts_of_a_pass_are_not_recorded(tmp_path: Path):
    stream = fixed("steps_per_epoch is 1")
    stream.steps, stream.batches = 1, 2
    with pytest.raises(ConfigError, match="a pass over train data has 2 batches and steps_per_epoch is 1"):
        inputs.training_source(stream, "record", Storage(str(tmp_path)), print)
    found = inputs.training_source(stream, "auto", Storage(str(tmp_path)), print)
    assert (found.steps, found.batches, found.identity[:38]) == (1, 2, "1 batches an epoch and 2 a pass, which")


def test_records_of_data_without_end_are_those_of_an_epoch(tmp_path: Path):
    stream = inputs.stream_of(endless(), "train", 3, TrainConfig(), 5)
    assert inputs.training_source(stream, "record", Storage(str(tmp_path)), print).rows == [4, 4, 4]


def test_what_cannot_be_recorded_is_not_with_a_flag_that_asks_for_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="--pipeline record: train data: batch 2 has"):
        inputs.training_source(fixed(free=True), "record", Storage(str(tmp_path)), print)


def test_data_of_unknown_length_are_counted(tmp_path: Path):
    stream, said = fixed(), list[str]()
    stream.steps = None
    source = inputs.training_source(stream, "live", Storage(str(tmp_path)), said.append)
    assert isinstance(source, LiveBatches)
    assert source.steps == 2
    assert "counting them" in said[0]
