"""Streams of the kinds of batches that `fit` takes: a data set of TensorFlow, a PyDataset, a generator, a data loader,
and arrays whose epochs are not passes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from raytf._tensorflow import datasets
from raytf.data import tree
from raytf.data.order import fold, permutation
from raytf.data.streams import Stream
from raytf.errors import DataError

#: Keep what is drawn here from the run's seed apart from all else that is: a PyDataset's order, and a pipeline's draws.
_BATCHES, _PIPELINE = 4, 5
#: What TensorFlow says of a data set without end, and of one whose end it does not know.
_ENDLESS, _UNKNOWN = -1, -2


def from_py_dataset(data: Any, name: str, steps: int | None, shuffle: bool, seed: int) -> Stream:
    """A keras.utils.PyDataset. Its batches have another order in each pass if they are shuffled, as with Keras.

    Args:
        steps: batches of an epoch; None for all.
        seed: of the run, from which the order is drawn.

    Raises:
        DataError: it has no end, and nobody says how long an epoch is.
    """
    count = data.num_batches
    length, batches = _lengths(name, count, steps)
    epochs_of_pass = 0 if count is None else -(-count // length)
    begun = 0

    def begin(epoch: int) -> None:
        """Call the hooks of all epochs up to this one; Keras ends one before the first epoch, too."""
        nonlocal begun
        while begun <= epoch:
            begun += 1
            data.on_epoch_end()
            data.on_epoch_begin()

    def open_pass(number: int, first: int) -> Iterator[Any]:
        begin(number * epochs_of_pass + first // length)
        order = np.arange(count or 0)
        if shuffle and count is not None:
            order = permutation(count, _BATCHES, seed, number)
        for i in itertools.count(first) if count is None else range(first, count):
            begin(number * epochs_of_pass + i // length)
            yield data[i if count is None else int(order[i])]

    found = Stream(name, open_pass, length, goes_on=count is None)
    found.batches = batches
    found.end = lambda: data.on_epoch_end() if begun else None
    return found


def from_generator(data: Iterator[Any], name: str, steps: int | None, epochs: int) -> Stream:
    """A generator of Python, which can be read once.

    Args:
        steps: batches of an epoch; None for all that it has, in a single epoch.

    Raises:
        DataError: it would be read for a second epoch.
    """
    if steps is None and epochs > 1:
        raise DataError(
            f"{name} data is a {type(data).__name__}, which can be read once, and there are {epochs} epochs. Give "
            "steps_per_epoch, or a tf.data.Dataset.from_generator, which is read again for each epoch."
        )

    def open_pass(number: int, first: int) -> Iterator[Any]:
        return itertools.islice(data, first, None)

    return Stream(name, open_pass, steps, goes_on=True, can_go_back=False)


def from_iterable(data: Any, name: str, steps: int | None) -> Stream:
    """A data loader: an object of which `iter` makes an iterator over the batches of a pass.

    Args:
        steps: batches of an epoch; None for a pass.
    """
    try:
        count = len(data)
    except (TypeError, NotImplementedError):  # as PyTorch's loaders of iterable data sets raise
        count = None
    length, batches = (steps, None) if count is None else _lengths(name, count, steps)
    goes_on = count is None and steps is not None

    def open_pass(number: int, first: int) -> Iterator[Any]:
        return itertools.islice(iter(data), first, None)

    found = Stream(name, open_pass, length, goes_on, depends_on_passes=True, can_go_back=False)
    found.batches = batches
    return found


def from_arrays(arrays: tuple[Any, ...], size: int, steps: int, seed: int | None) -> Stream:
    """Batches of arrays for training, where `steps_per_epoch` is given; the last batch of a pass may be smaller.

    Args:
        arrays: of x, y and sample_weight.
        size: records of a batch.
        steps: batches of an epoch.
        seed: from which each pass draws an order of its own; None for the order of the records.
    """
    records = len(next(leaf for _, leaf in tree.flatten(arrays)))

    def open_pass(number: int, first: int) -> Iterator[Any]:
        order = np.arange(records) if seed is None else np.random.default_rng((seed, number)).permutation(records)
        for begin in range(first * size, records, size):
            yield rows_of(arrays, order[begin : begin + size])

    count = -(-records // size)
    length, batches = _lengths("train", count, steps)
    found = Stream("train", open_pass, length)
    found.batches = batches
    found.changes = f"steps_per_epoch is {steps}" if batches is None else _of_other_length(length, count)
    return found


def rows_of(arrays: tuple[Any, ...], rows: Any) -> tuple[Any, ...]:
    """Return the same rows of all arrays."""
    return tuple(None if part is None else tree.map_leaves(lambda leaf: leaf[rows], part) for part in arrays)


def _lengths(name: str, count: int | None, steps: int | None) -> tuple[int, int | None]:
    """Return the batches of an epoch, and those of a pass where an epoch is not a pass.

    Args:
        count: batches of a pass; None for data without end.
        steps: batches of an epoch, if the program says so.

    Raises:
        DataError: the data has no batches, or no end and nobody says how long an epoch is.
    """
    if steps is not None and steps < 1:
        raise DataError(f"steps_per_epoch={steps}: expected 1 or more.")
    if count == 0:
        raise DataError(f"{name} data has no batches.")
    if count is None and steps is None:
        raise DataError(f"{name} data has no end. Give steps_per_epoch.")
    if steps is None or steps == count:
        return count or 0, None
    return steps, count


def _of_other_length(steps: int | None, count: int) -> str:
    return f"steps_per_epoch is {steps}, and a pass has {count} batches"


def from_tf_dataset(data: Any, name: str, steps: int | None, seed: int) -> Stream:
    """A data set of TensorFlow.

    What it draws is drawn from (seed, number of the pass, place of the operation), so that the n-th pass is the same in
    every process, and is opened without those before it. If it keeps something that no seed tells (a generator, a
    function of Python, a variable), passes are made one after another, as they come.

    Args:
        steps: batches of an epoch; None for a pass.
        seed: of the run.

    Raises:
        DataError: it has no end, and nobody says how long an epoch is.
    """
    count = int(data.cardinality())
    length: int | None = steps
    batches = None
    if count != _UNKNOWN:
        length, batches = _lengths(name, None if count == _ENDLESS else count, steps)
    graph = datasets.DatasetGraph(data)
    keeps, draws = graph.keeps(), graph.draws()
    # What the data set caches in memory would end with each of the data sets that are drawn. The folder ends with them.
    is_drawn = bool(draws and not keeps)
    cache = tempfile.TemporaryDirectory(prefix="raytf-cache-", ignore_cleanup_errors=True) if is_drawn else None

    def seeds(place: int, number: int) -> tuple[int, int]:
        first, second = (int(fold(_PIPELINE, seed, number, place, i)) % (2**31 - 1) + 1 for i in range(2))
        return first, second

    def open_pass(number: int, first: int) -> Iterator[Any]:
        made = graph.ordered if cache is None else graph.drawn(seeds, number, cache.name)
        return itertools.islice(iter(made), first, None)

    goes_on = count == _ENDLESS or (count == _UNKNOWN and steps is not None)
    found = Stream(name, open_pass, length, goes_on, depends_on_passes=bool(keeps), can_go_back=not keeps)
    found.batches = batches
    if keeps or draws:
        found.changes = f"it has {keeps or draws}"
    elif batches is not None:
        found.changes = _of_other_length(steps, count)
    else:
        found.changes = "it has no end" if goes_on else ""
    found.free = _free(data.element_spec)
    found.is_dataset = True
    return found


def _free(spec: Any) -> list[list[bool] | None]:
    """For each leaf which of a record's lengths differ from batch to batch; None where nothing is known of it."""
    parts = tuple(spec) if isinstance(spec, (list, tuple)) else (spec,)
    shapes = [getattr(leaf, "shape", None) for _, leaf in tree.flatten(parts)]
    return [None if s is None or s.rank is None else [n is None for n in s.as_list()[1:]] for s in shapes]
