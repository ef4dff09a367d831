"""Batches in order: epochs, what is read twice, what is skipped, and what is no batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.data import streams, tree
from raytf.data.sources.base import Spec
from raytf.data.streams import Stream, batch_of, from_arrays, from_generator, from_iterable, from_py_dataset, misfit
from raytf.errors import DataError

LENGTH = 7


class Passes:
    """Elements (pass, place), of which it notes what was asked for."""

    def __init__(self, length: int | None = LENGTH):
        self.length, self.opened = length, list[tuple[int, int]]()

    def __call__(self, number: int, first: int) -> Iterator[Any]:
        self.opened.append((number, first))
        places = itertools.count(first) if self.length is None else range(first, self.length)
        return ((np.full((2, 1), number), np.full(2, i)) for i in places)


def told(batch: Any) -> tuple[int, int]:
    """(pass, place) of an element."""
    return int(batch[0][0, 0]), int(batch[1][0])


@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, LENGTH - 1)), max_size=8),
    depends=st.booleans(),
    peeks=st.booleans(),
)
def test_what_is_asked_for_is_read_in_whatever_order(places: list[tuple[int, int]], depends: bool, peeks: bool):
    stream = Stream("train", Passes(), LENGTH, depends_on_passes=depends)
    for epoch, index in places:
        if peeks:
            stream.peek()
        assert told(stream.read(epoch, index)) == (epoch, index)


@given(first=st.integers(0, 40), more=st.integers(0, 10))
def test_epochs_of_one_pass_begin_where_the_last_one_ended(first: int, more: int):
    stream = Stream("train", Passes(None), 5, continues=True)
    for step in (first, first + more):
        assert told(stream.read(*divmod(step, 5))) == (0, step)


def test_a_batch_that_was_looked_at_is_read_again_without_another_pass():
    passes = Passes()
    stream = Stream("train", passes, LENGTH, can_go_back=False)
    assert told(stream.peek()) == told(stream.peek()) == (0, 0)
    assert [told(stream.read(0, i)) for i in range(LENGTH)] == [(0, i) for i in range(LENGTH)]
    assert stream.read(0, LENGTH) is None
    assert passes.opened == [(0, 0)]


@pytest.mark.parametrize("lengths", [(12, 20, 8), (12,)])
@pytest.mark.parametrize("is_read_before", [False, True])
def test_lengths_that_differ_in_the_first_two_batches_may_differ_in_all(lengths: tuple[int, ...], is_read_before: bool):
    batches = [(np.zeros((2, n, 3)), np.zeros((2, 1))) for n in lengths]
    stream = Stream("train", lambda number, first: iter(batches[first:]), len(lengths), can_go_back=is_read_before)
    if is_read_before:
        assert stream.count() == len(lengths)
    x, y, _ = spec = stream.spec()
    assert (x.shape, y.shape) == ((-1 if len(lengths) > 1 else 12, 3), (1,))
    read = [stream.read(0, i) for i in range(len(lengths))]
    assert [batch[0].shape[1] for batch in read] == list(lengths)
    assert not any(misfit(batch, spec) for batch in read)
    assert stream.read(0, len(lengths)) is None


@pytest.mark.parametrize(("depends", "opened"), [(True, [(0, 0), (1, 0), (2, 3)]), (False, [(2, 3)])])
def test_passes_before_are_read_only_where_they_decide(depends: bool, opened: list[tuple[int, int]]):
    passes = Passes()
    stream = Stream("train", passes, LENGTH, depends_on_passes=depends)
    assert told(stream.read(2, 3)) == (2, 3)
    assert passes.opened == opened


def test_what_can_be_read_once_is_not_read_again():
    stream = from_generator((np.full((2, 1), i) for i in range(9)), "train", 3, 3)
    assert stream.read(0, 1) is not None
    with pytest.raises(DataError, match="from batch 1 on, but can be read only once"):
        stream.read(0, 0)


def test_a_generator_that_is_skipped_to_goes_on_from_there():
    stream = from_generator((np.full((2, 1), i) for i in itertools.count()), "train", 3, 3)
    stream.peek()
    found = [stream.read(1, i) for i in range(3)]
    assert [int(batch[0][0, 0]) for batch in found if batch is not None] == [3, 4, 5]


def test_a_generator_for_several_epochs_needs_their_length():
    with pytest.raises(DataError, match=r"can be read only once, but there are 2 epochs\. Pass steps_per_epoch"):
        from_generator(iter([]), "train", None, 2)


@pytest.mark.parametrize("kept", [1, 64 << 20])
def test_a_generator_that_was_counted_is_read_from_its_first_batch_on(kept: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(streams, "_KEPT_BYTES", kept)  # beyond which batches are in a file
    stream = from_generator(((np.full((2, 1), i), np.zeros(2)) for i in range(5)), "train", None, 1)
    stream.peek()
    stream.steps = stream.count()
    assert stream.steps == 5
    assert read(stream, 0) == read(stream, 0) == list(range(5))  # workers that start again want old batches
    assert stream.read(0, 5) is None


def test_a_first_pass_that_was_counted_is_the_first_one():
    opened = []

    def open_pass(number: int, first: int) -> Iterator[Any]:
        opened.append((number, first))
        return iter([np.full((2, 1), 10 * len(opened) + i) for i in range(first, 3)])

    stream = Stream("train", open_pass, None, depends_on_passes=True, can_go_back=False)
    stream.peek()
    stream.steps = stream.count()
    assert [read(stream, 0), read(stream, 1)] == [[10, 11, 12], [20, 21, 22]]
    assert opened == [(0, 0), (1, 0)]


class Loader:
    """As a torch.utils.data.DataLoader."""

    def __init__(self, length: int | None = 3):
        self.length, self.passes = length, 0

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("object of type 'Loader' has no len()")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter([[np.full((2, 1), 10 * self.passes + i), np.zeros(2)] for i in range(self.length or 4)])


def test_a_loader_is_read_anew_in_each_pass():
    stream = from_iterable(Loader(), "train", None)
    assert [read(stream, 0), read(stream, 1)] == [[10, 11, 12], [20, 21, 22]]
    unknown = from_iterable(Loader(None), "train", None)
    unknown.steps = unknown.count()
    assert [read(unknown, 0), read(unknown, 1)] == [[10, 11, 12, 13], [20, 21, 22, 23]]
    assert from_iterable(Loader(), "train", 2).batches == 3


@given(records=st.integers(1, 12), size=st.integers(1, 5), steps=st.integers(1, 8), draws=st.booleans())
def test_batches_of_arrays_have_each_record_once_a_pass(records: int, size: int, steps: int, draws: bool):
    arrays = {"a": np.arange(records)}, np.arange(records), None
    stream = from_arrays(arrays, size, steps, 7 if draws else None)
    batches = -(-records // size)
    assert (stream.steps, stream.batches) == (steps, None if steps == batches else batches)
    passes = [[stream.read(number, i) for i in range(batches)] for number in range(2)]
    for batches_of_pass in passes:
        found = np.concatenate([batch[1] for batch in batches_of_pass])
        assert found.tolist() == np.concatenate([batch[0]["a"] for batch in batches_of_pass]).tolist()
        assert sorted(found) == list(range(records))
        assert draws or found.tolist() == list(range(records))


class Batches:
    """As a keras.utils.PyDataset."""

    def __init__(self, num_batches: int | None = 5):
        self.num_batches, self.hooks = num_batches, list[str]()

    def __getitem__(self, index: int) -> Any:
        return np.full((3, 1), index), np.arange(3)

    def on_epoch_begin(self) -> None:
        self.hooks.append("begin")

    def on_epoch_end(self) -> None:
        self.hooks.append("end")


def read(stream: Stream, epoch: int) -> list[int]:
    return [int(stream.read(epoch, i)[0][0, 0]) for i in range(stream.steps)]


def test_a_py_dataset_has_each_batch_once_an_epoch_in_an_order_of_the_seed():
    epochs = [read(from_py_dataset(Batches(), "train", None, True, seed=3), epoch) for epoch in (0, 1)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(5))] * 2
    assert epochs[0] != epochs[1]
    again = from_py_dataset(Batches(), "train", None, True, seed=3)
    assert [read(again, 0), read(again, 1)] == epochs
    assert read(from_py_dataset(Batches(), "train", None, False, seed=3), 1) == list(range(5))


def test_a_py_dataset_is_told_of_epochs_also_of_those_that_are_skipped():
    batches = Batches()
    stream = from_py_dataset(batches, "train", None, False, 0)
    stream.read(2, 1)
    assert batches.hooks == ["end", "begin"] * 3  # Keras ends an epoch before the first one
    stream.end()
    assert batches.hooks == [*["end", "begin"] * 3, "end"]


@pytest.mark.parametrize("count", [5, None])
def test_a_py_dataset_is_told_of_epochs_that_are_parts_of_a_pass(count: int | None):
    batches = Batches(count)
    stream = from_py_dataset(batches, "train", 2, False, 0)
    assert stream.batches == count
    places = [(0, i) for i in range(5)] + [(1, 0)] if count else [divmod(i, 2) for i in range(6)]
    hooks = []
    for place in places:
        stream.read(*place)
        hooks.append(batches.hooks.count("begin"))
    assert hooks == ([1, 1, 2, 2, 3, 4] if count else [1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize(
    ("batches", "steps", "words"),
    [
        (None, None, "has no end. Pass steps_per_epoch"),
        (0, None, "has no batches"),
        (5, 0, "steps_per_epoch=0: expected 1 or more"),
    ],
)
def test_an_epoch_has_one_length(batches: int | None, steps: int | None, words: str):
    with pytest.raises(DataError, match=words):
        from_py_dataset(Batches(batches), "train", steps, False, 0)


def test_a_py_dataset_without_end_has_the_epochs_that_are_asked_for():
    stream = from_py_dataset(Batches(None), "train", 4, True, 0)
    assert [read(stream, 0), read(stream, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


X, Y = np.zeros((3, 2)), np.zeros(3)


@pytest.mark.parametrize(
    ("element", "parts"),
    [
        (X, (X, None, None)),
        ((X,), (X, None, None)),
        ([X, Y], (X, Y, None)),
        ((X, Y, Y), (X, Y, Y)),
        (({"a": X, "b": Y}, Y), ({"a": X, "b": Y}, Y, None)),
        ({"a": X}, ({"a": X}, None, None)),
    ],
)
def test_an_element_is_taken_apart_as_by_keras(element: Any, parts: Any):
    found = batch_of(element, "train")
    assert str(found) == str(parts)


def test_a_record_of_zipped_batches_has_several_rows_of_each():
    images, labels = np.arange(36).reshape(12, 3), np.arange(8)
    x, y, weight = batch_of(((images, images[:, 0]), labels), "train")
    assert weight is None
    assert [leaf.shape for _, leaf in tree.flatten((x, y))] == [(4, 3, 3), (4, 3), (4, 2)]
    assert tree.has_rows((x, y))
    back = tree.merged((x, y), lambda leaf: leaf.reshape(-1, *leaf.shape[2:]))
    assert str(back) == str(((images, images[:, 0]), labels))
    assert not misfit((x, y, None), tree.map_leaves(Spec.of, (x, y, None)))


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ((X, Y, Y, Y), "an element has 4 parts"),
        ((X, 1.0), "a single value where a batch has a row for each record"),
        ((X, np.zeros(4)), "differ in their number of records"),
        ((np.array(["2020-01-01"] * 3, "datetime64[D]"), Y), "is neither a number nor text"),
        ((None, Y), "an element has no x"),
    ],
)
def test_what_is_no_batch_is_refused(element: Any, words: str):
    with pytest.raises(DataError, match=words):
        batch_of(element, "train")


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ((np.zeros((9, 5, 2)), Y), ""),
        (
            (np.zeros((9, 5, 3)), Y),
            "a record of [0] is (5, 3) float64 where those of the first one are (None, 2) float64",
        ),
        ((np.zeros((9, 2)), Y), "a record of [0] is (2,) float64"),
        ((np.zeros((9, 5, 2), np.float32), Y), "a record of [0] is (5, 2) float32"),
        ((np.zeros((9, 5, 2)), Y, Y), "it has [0], [1], [2] where the first one has [0], [1]"),
    ],
)
def test_a_batch_that_is_not_like_the_first_one_is_told(batch: Any, words: str):
    spec = Spec((-1, 2), "float64"), Spec((), "float64"), None
    found = misfit((*batch, None)[:3], spec)
    assert found.startswith(words)
    assert bool(found) is bool(words)


def test_what_the_program_raises_is_told():
    def broken() -> Iterator[Any]:
        yield X, Y
        raise KeyError("lost")

    stream = from_generator(broken(), "train", 2, 1)
    assert stream.read(0, 0) is not None
    with pytest.raises(DataError, match="train data failed: KeyError: 'lost'"):
        stream.read(0, 1)
