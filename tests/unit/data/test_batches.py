"""Batches that are the same in each pass are recorded: their sizes stay, and a killed recording goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.data.plan import BatchPlan
from raytf.data.sources import batches
from raytf.data.sources.arrays import ArraySource
from raytf.data.sources.batches import BatchedSource, plan_of
from raytf.data.sources.writer import FileLayout
from raytf.data.streams import Stream
from raytf.errors import DataError
from raytf.storage.storage import Storage

SIZES = [4, 4, 3, 4, 1]


class Data:
    """Batches of these sizes, whose records are numbered; counts those that were made."""

    def __init__(self, sizes: list[int] = SIZES):
        self.sizes, self.made, self.fails_at = sizes, 0, -1

    def stream(self) -> Stream:
        return Stream("train", self._open, len(self.sizes))

    def _open(self, number: int, first: int) -> Iterator[Any]:
        starts = np.cumsum([0, *self.sizes])
        for i in range(first, len(self.sizes)):
            if i == self.fails_at:
                raise OSError("gone")
            self.made += 1
            ids = np.arange(starts[i], starts[i + 1])
            yield (
                {"b": {"deep": np.repeat(ids[:, None], 3, 1)}, "a": ids.astype(np.float32)},
                ids % 2,
                np.ones(len(ids)),
            )


def check(source: BatchedSource) -> None:
    """All records of all batches are there, in order."""
    assert source.rows == SIZES
    deep, a, y, weight = (leaf for _, leaf in _sorted(source))
    ids = np.arange(16)
    np.testing.assert_array_equal(a, ids)
    np.testing.assert_array_equal(deep, np.repeat(ids[:, None], 3, 1))
    np.testing.assert_array_equal(y, ids % 2)
    np.testing.assert_array_equal(weight, np.ones(16))


def _sorted(source: BatchedSource) -> list[tuple[str, np.ndarray]]:
    a, deep, y, weight = source.reader(2).take(np.arange(source.records))
    return [("deep", deep), ("a", a), ("y", y), ("weight", weight)]


def test_small_data_stay_in_memory(tmp_path: Path):
    said: list[str] = []
    source = batches.recorded(Data().stream(), Storage(str(tmp_path / "data")), said.append)
    check(source)
    assert isinstance(source._records, ArraySource)
    assert not list(tmp_path.rglob("*.parquet"))
    assert said == []


def test_large_data_are_written_once(tmp_path: Path):
    storage, said = Storage(str(tmp_path / "data")), list[str]()
    check(batches.recorded(Data().stream(), storage, said.append, small=10))
    assert f"is written once to {tmp_path / 'data'}" in said[0]
    again = Data()
    check(batches.recorded(again.stream(), storage, said.append, small=10))
    assert again.made == 1, "the first batch, by which it is known"


def test_a_recording_that_was_killed_goes_on_after_its_last_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # One file for each two batches, as larger data have.
    monkeypatch.setattr(batches.FileLayout, "of", lambda *args: FileLayout("parquet", 7, 4))
    storage, data = Storage(str(tmp_path / "data")), Data()
    data.fails_at = 3
    with pytest.raises(DataError, match="train data failed: OSError: gone"):
        batches.recorded(data.stream(), storage, print, small=10)
    [first] = (tmp_path / "data").glob("*.parquet")
    written = first.stat().st_mtime_ns
    check(batches.recorded(Data().stream(), storage, print, small=10))
    assert first.stat().st_mtime_ns == written
    assert len(list((tmp_path / "data").glob("*.parquet"))) == 3


def test_records_of_different_shapes_are_not_recorded(tmp_path: Path):
    stream = Stream("train", lambda number, first: iter([np.zeros((2, 3)), np.zeros((2, 4))][first:]), 2)
    with pytest.raises(batches.NotRecordableError, match=r"batch 2 has .*\(4,\).*the first has .*\(3,\)"):
        batches.recorded(stream, Storage(str(tmp_path)), print)


def test_as_many_batches_as_are_wanted(tmp_path: Path):
    endless = Stream("x", lambda number, first: (np.full((2, 1), i) for i in itertools.count(first)), 5, continues=True)
    source = batches.recorded(endless, Storage(str(tmp_path)), print, most=3)
    assert source.rows == [2, 2, 2]


def test_a_step_has_its_batch_for_every_number_of_shards():
    source = BatchedSource(ArraySource(np.arange(16)), (None, None, None), SIZES)
    for shards in (1, 3, 8):
        plan = plan_of(source, 4, shards)
        assert isinstance(plan, BatchPlan)
        assert (plan.steps_per_epoch, plan.records, plan.global_batch_size) == (5, 16, 4)
