"""What `fit` makes of batches: which are recorded, which are made while the run trains, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from raytf.config.train_config import TrainConfig
from raytf.data.sources.batches import BatchedSource, LiveBatches
from raytf.data.streams import Stream
from raytf.driver import keras_arguments
from raytf.driver.feed import given
from raytf.errors import ConfigError, DataError
from raytf.storage.storage import Storage

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
    config = given_.pop("config", TrainConfig()).replace(epochs=given_.pop("epochs", 2))
    usual = {"batch_size": None, "steps_per_epoch": None, "validation_steps": None, "shuffle": False}
    return keras_arguments.streams((train, validation, test), config, **(usual | given_))


def test_what_gives_batches_is_a_stream_and_all_else_is_as_it_was():
    train, validation, test = streams(Batches(), Batches(), ARRAYS)
    assert isinstance(train, Stream)
    assert isinstance(validation, Stream)
    assert test is ARRAYS
    assert given.rows_of(train) == 4


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
        found, *_ = streams(arrays, config=config, **arguments)
        assert found is arrays if rows is None else given.rows_of(found) == rows
    batches = keras_arguments._endless(arrays, 4, None)
    assert [next(batches)[1].tolist() for _ in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]
    drawn = keras_arguments._endless(arrays, 4, 7)
    passes = [np.concatenate([next(drawn)[1] for _ in range(3)]).tolist() for _ in range(2)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    _, validation, _ = streams(arrays, arrays, validation_steps=2, batch_size=3)
    assert validation[1].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("parts", "arguments", "words"),
    [
        ((Batches(),), {"batch_size": 4}, "batch_size=4 goes with arrays, and x is a Batches, which makes its batches"),
        ((ARRAYS,), {"steps_per_epoch": 0}, "steps_per_epoch=0 with tuple: expected 1 or more"),
        ((Source(),), {"steps_per_epoch": 2}, "steps_per_epoch=2 with Source: expected 1 or more, with arrays"),
        ((Batches(), Source()), {"validation_steps": 2}, "validation_steps=2 with Source: expected"),
        ((endless(),), {}, "can be read once, and there are 2 epochs"),
        ((Batches(),), {"steps_per_epoch": 2}, "has 3 batches, and steps_per_epoch is 2"),
    ],
)
def test_what_does_not_go_together_is_refused(parts: tuple[Any, ...], arguments: dict[str, Any], words: str):
    with pytest.raises(DataError, match=words):
        streams(*parts, **arguments)


def test_flags_that_batches_cannot_follow_are_refused():
    with pytest.raises(ConfigError, match="--global-batch-size 64: train data makes batches of 4 itself"):
        streams(Batches(), config=TrainConfig().replace(global_batch_size=64))
    with pytest.raises(ConfigError, match="--strategy parameter-server reads records, and x is a Batches"):
        streams(Batches(), config=TrainConfig().replace(strategy="parameter-server"))
    with pytest.raises(ConfigError, match="--strategy parameter-server reads records, and steps_per_epoch makes"):
        streams(ARRAYS, config=TrainConfig().replace(strategy="parameter-server"), steps_per_epoch=3)


def test_of_validation_data_the_first_batches_may_be_enough(tmp_path: Path):
    _, stream, _ = streams(ARRAYS, Batches(), validation_steps=2)
    assert given.evaluation_source(stream, 2, Storage(str(tmp_path)), print).records == 8
    _, stream, _ = streams(ARRAYS, endless(), validation_steps=5)
    assert given.evaluation_source(stream, 5, Storage(str(tmp_path)), print).records == 20


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
    assert isinstance(given.training_source(stream, how, Storage(str(tmp_path)), said.append), kind)
    assert len(said) == 1
    assert why in said[0]


def test_what_cannot_be_recorded_is_not_with_a_flag_that_asks_for_it(tmp_path: Path):
    with pytest.raises(ConfigError, match="--pipeline record: train data: batch 2 has"):
        given.training_source(fixed(free=True), "record", Storage(str(tmp_path)), print)


def test_data_of_unknown_length_are_counted(tmp_path: Path):
    stream, said = fixed(), list[str]()
    stream.steps = None
    source = given.training_source(stream, "live", Storage(str(tmp_path)), said.append)
    assert isinstance(source, LiveBatches)
    assert source.steps == 2
    assert "they are counted" in said[0]
