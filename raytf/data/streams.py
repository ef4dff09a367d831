"""Streams of batches that a program makes while it runs.

A stream is read in order, in one process, and yields the batches that Keras would train on: its i-th element is the
i-th batch. `fit` makes a stream from a TensorFlow data set, a PyDataset, a generator, a data loader, or arrays whose
epochs are not whole passes.
"""

from __future__ import annotations

import itertools
import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raytf._tensorflow import datasets
from raytf.data import tree
from raytf.data.order import fold, permutation
from raytf.data.sources import arrays as array_source
from raytf.data.sources.base import Spec, as_text
from raytf.errors import DataError

#: (x, y, sample_weight), nested arrays; the first dimension of each array is the records of the batch.
Batch = tuple[Any, Any, Any]
#: The most bytes of batches that stay in memory while they are counted; more go to a file.
_KEPT_BYTES = 64 << 20
#: Domains, which separate a PyDataset's order and a pipeline's draws from other random numbers of the run's seed.
_BATCHES, _PIPELINE = 4, 5
#: TensorFlow's cardinality of a data set without end, and of one with an unknown number of batches.
_ENDLESS, _UNKNOWN = -1, -2
#: Follows the last element.
_END = object()


class Stream:
    """Batches in order. An epoch is a pass over the data, a part of a pass, or some steps of one continuing pass.

    Args:
        name: name of the data, for people.
        open_pass: (number of the pass, first batch) -> the elements of the pass from that batch on.
        steps: batches per epoch; None for all batches of a pass.
        continues: whether an epoch begins where the previous one ended.
        depends_on_passes: whether a pass differs if the passes before it were not read.
        can_go_back: whether an earlier pass can be opened again, with the same batches.

    Attributes:
        name, steps: as in the arguments.
        batches: batches of a pass, if an epoch is not a pass; as in `BatchPlan`.
        is_dataset: whether it is a `tf.data.Dataset`.
        end: call it after the last read.
        changes: why two passes may differ, for people; empty if all passes are equal, so that data can be recorded.
        free: for each leaf, which of a record's lengths vary between batches; None for a leaf of unknown rank. By
            default, the lengths that differ between the first two batches, as in Keras.
    """

    changes = "it is code of the program"
    batches: int | None = None
    is_dataset = False
    end: Callable[[], Any] = staticmethod(lambda: None)
    free: list[list[bool] | None] | None = None

    def __init__(
        self,
        name: str,
        open_pass: Callable[[int, int], Iterator[Any]],
        steps: int | None,
        continues: bool = False,
        depends_on_passes: bool = False,
        can_go_back: bool = True,
    ):
        self.name, self.steps = name, steps
        self._open, self._continues = open_pass, continues
        self._depends_on_passes, self._can_go_back = depends_on_passes, can_go_back
        #: The open pass (-1 before the first one) and its next batch.
        self._pass, self._next = -1, 0
        self._elements: Iterator[Any] = iter(())
        #: The first two batches of the first pass, once they are known. `_ahead` has the batches, by index, that were
        #: peeked at but not read yet.
        self._first: Batch | None = None
        self._second: Batch | None = None
        self._ahead: dict[int, Batch | None] = {}
        #: The first pass, if it was read for counting and cannot be read again.
        self._kept: _Kept | None = None

    def peek(self) -> Batch:
        """Return the first batch without consuming it: `read` still returns it first.

        Raises:
            DataError: there are no batches, or the first element is not a batch.
        """
        if self._first is None:
            self._first = self.read(0, 0)
            if self._first is None:
                raise DataError(f"{self.name} data has no batches.")
            self._ahead[0] = self._first
        return self._first

    def read(self, epoch: int, index: int) -> Batch | None:
        """Return a batch of an epoch, or None at the end of the data. Batches before it are skipped.

        Args:
            epoch: number of the epoch, or of the pass if an epoch is only a part of a pass.
            index: number of the batch within it.

        Raises:
            DataError: the data fails, or cannot be read again.
        """
        number = 0 if self._continues else epoch
        if self._continues:
            index += epoch * (self.steps or 0)
        if number == 0 and index in self._ahead:
            return self._ahead.pop(index)
        self._seek(number, index)
        element = self._take()
        batch = None if element is _END else batch_of(element, self.name)
        if (number, index) == (0, 1) and self._second is None:
            self._second = batch
        return batch

    def count(self) -> int:
        """Return the number of batches of the first pass, after reading it to its end.

        If the pass cannot be read again, its batches are kept in a temporary file, from which `read` returns them.

        Raises:
            DataError: the data fails, or the file for its batches cannot be written.
        """
        kept, number = None if self._can_go_back else _Kept(), 0
        while (batch := self.read(0, number)) is not None:
            number += 1
            try:
                if kept is not None:
                    kept.add(batch)
            except OSError as error:
                raise DataError(
                    f"{self.name} data has an unknown number of batches and can be read only once. Keeping it in "
                    f"{tempfile.gettempdir()} to count them failed: {error}. Pass steps_per_epoch."
                ) from None
        self._kept = kept
        return number

    def spec(self) -> tuple[Any, Any, Any]:
        """Return the spec of a record, nested as in a batch, with -1 for lengths that vary."""
        first = self.peek()
        leaves = [leaf for _, leaf in tree.flatten(first)]
        specs = []
        in_rows = [False] if tree.has_rows(first) else []  # all records have the same number of rows per part
        for leaf, free in zip(leaves, self.free or self._differing(), strict=True):
            rank = leaf.ndim - 1 - len(in_rows)
            differs = in_rows + ([True] * rank if free is None else free or [False] * rank)
            lengths = tuple(-1 if own else n for n, own in zip(leaf.shape[1:], differs, strict=True))
            specs.append(Spec(lengths, Spec.of(leaf).dtype))
        return tree.unflatten(first, specs)

    def _differing(self) -> list[list[bool]]:
        """Return, for each leaf, which lengths of a record differ between the first two batches."""
        first = self.peek()
        if 0 in self._ahead and 1 not in self._ahead and self.steps != 1:
            self._ahead[1] = self.read(0, 1)
        leaves, others = tree.flatten(first), [] if self._second is None else tree.flatten(self._second)
        ranks = [[False] * (leaf.ndim - 1) for _, leaf in leaves]
        if tree.has_rows(first) or [(path, leaf.ndim) for path, leaf in leaves] != [(p, o.ndim) for p, o in others]:
            return ranks
        pairs = [zip(a.shape[1:], b.shape[1:], strict=True) for (_, a), (_, b) in zip(leaves, others, strict=True)]
        return [[m != n for m, n in pair] for pair in pairs]

    def _seek(self, number: int, index: int) -> None:
        at = self._next
        if number < self._pass or (number == self._pass and index < at):
            if not self._can_go_back and not (self._kept is not None and number == self._pass == 0):
                raise DataError(
                    f"{self.name} data would have to be read again from batch {index + 1} on, but can be read only "
                    "once. Start the program again: it continues from the newest checkpoint."
                )
            self._pass, at = -1, 0
        if number > self._pass:
            if self._depends_on_passes:
                for passed in range(max(self._pass, 0), number):
                    if passed != self._pass:
                        self._elements = self._opened(passed, 0)
                    while self._take() is not _END:
                        pass
            self._elements = self._opened(number, index)
            self._pass, at = number, index
        while at < index and self._take() is not _END:
            at += 1
        self._next = index

    def _opened(self, number: int, first: int) -> Iterator[Any]:
        if self._kept is not None and number == 0:
            return self._kept.read(first)
        return self._asked(lambda: self._open(number, first))

    def _take(self) -> Any:
        self._next += 1
        return self._asked(lambda: next(self._elements, _END))

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            # The program's own code: its traceback shows the mistake.
            raise DataError(f"{self.name} data failed: {type(error).__name__}: {str(error)[:400]}") from error


class _Kept:
    """Batches in a temporary file, which is deleted with this object."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_KEPT_BYTES)  # noqa: SIM115 - it lives as long as this object
        self._starts = list[int]()

    def add(self, batch: Batch) -> None:
        self._starts.append(self._file.tell())
        pickle.dump(batch, self._file, pickle.HIGHEST_PROTOCOL)

    def read(self, first: int) -> Iterator[Batch]:
        for start in self._starts[first:]:
            self._file.seek(start)
            yield pickle.load(self._file)


def batch_of(element: Any, name: str) -> Batch:
    """Return an element as (x, y, sample_weight), divided as in Keras.

    Its parts may have different numbers of rows, as in zipped data sets. A record then has several rows of a part: 16
    and 8 rows make 8 records, each with 2 rows and 1 row.

    Raises:
        DataError: it is not a batch of numbers or text.
    """
    parts = tuple(element) if isinstance(element, (list, tuple)) else (element,)
    if not 1 <= len(parts) <= 3:
        raise DataError(
            f"{name} data: an element has {len(parts)} parts. Expected (x,), (x, y) or (x, y, sample_weight)."
        )
    x, y, weight = (*parts, None, None)[:3]
    batch = tuple(tree.map_leaves(lambda leaf: _array(leaf, name), part) for part in (x, y, weight))
    leaves = tree.flatten(batch)
    if not tree.flatten(batch[0]):
        raise DataError(f"{name} data: an element has no x.")
    flat = [path for path, leaf in leaves if leaf.ndim == 0]
    if flat:
        raise DataError(
            f"{name} data: an element has a single value where a batch has a row for each record. Batch the data, as "
            "with dataset.batch(32)."
        )
    lengths = [len(leaf) for _, leaf in leaves]
    records = math.gcd(*lengths)
    if len(set(lengths)) > 1 and records > 1:
        return tree.map_leaves(lambda leaf: tree.Rows([leaf.reshape(records, -1, *leaf.shape[1:])]), batch)
    if len(set(lengths)) > 1:
        listed = ", ".join(f"{path[1:]} {leaf.shape}" for path, leaf in leaves)
        raise DataError(
            f"{name} data: the parts of an element differ in their number of records: {listed}. Expected a batch with "
            "a row for each record. To batch single records, use dataset.batch(32)."
        )
    return batch


def misfit(batch: Batch, spec: tuple[Any, Any, Any]) -> str:
    """Return how a batch differs from a spec, for people; empty if it does not."""
    leaves = {path: (leaf.shape[1:], Spec.of(leaf).dtype) for path, leaf in tree.flatten(batch)}
    expected = {path: (leaf.shape, leaf.dtype) for path, leaf in tree.flatten(spec)}
    if leaves.keys() != expected.keys():
        return f"it has {', '.join(leaves)} where the first one has {', '.join(expected)}"
    for path, (shape, dtype) in leaves.items():
        like, kind = expected[path]
        if dtype != kind or len(shape) != len(like) or any(n not in (-1, m) for n, m in zip(like, shape, strict=True)):
            known = tuple(None if n < 0 else n for n in like)
            return (
                f"a record of {path} is {shape} {dtype} where those of the first one are {known} {kind}. Lengths may "
                "vary only if they differ between the first two batches; pad the others"
            )
    return ""


def _array(leaf: Any, name: str) -> np.ndarray:
    if array_source.is_ragged(leaf):
        raise array_source.ragged_error(f"{name} data has a RaggedTensor", ".map(lambda x, y: (x.to_tensor(), y))")
    array = np.asarray(array_source.dense(leaf))
    text = as_text(array)
    if text is not None:
        return text
    if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
        raise DataError(
            f"{name} data has a value of dtype {array.dtype}, which is neither a number nor text. Convert it in the "
            "pipeline."
        )
    return array


def from_py_dataset(data: Any, name: str, steps: int | None, shuffle: bool, seed: int) -> Stream:
    """Return the stream of a keras.utils.PyDataset. Shuffling reorders the batches in each pass, as in Keras.

    Args:
        steps: batches of an epoch; None for all.
        seed: the run's seed, which determines the order.

    Raises:
        DataError: it has no end, and `steps` is None.
    """
    count = data.num_batches
    length, batches = _lengths(name, count, steps)
    epochs_of_pass = 0 if count is None else -(-count // length)
    begun = 0

    def begin(epoch: int) -> None:
        """Call the hooks of all epochs up to this one; Keras calls `on_epoch_end` before the first epoch, too."""
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

    stream = Stream(name, open_pass, length, continues=count is None)
    stream.batches = batches
    stream.end = lambda: data.on_epoch_end() if begun else None
    return stream


def from_generator(data: Iterator[Any], name: str, steps: int | None, epochs: int) -> Stream:
    """Return the stream of a Python generator, which can be read only once.

    Args:
        steps: batches of an epoch; None for all its batches in a single epoch.

    Raises:
        DataError: a second epoch would have to read it again.
    """
    if steps is None and epochs > 1:
        raise DataError(
            f"{name} data is a {type(data).__name__}, which can be read only once, but there are {epochs} epochs. Pass "
            "steps_per_epoch, or a tf.data.Dataset.from_generator, which is read again for each epoch."
        )

    def open_pass(number: int, first: int) -> Iterator[Any]:
        return itertools.islice(data, first, None)

    return Stream(name, open_pass, steps, continues=True, can_go_back=False)


def from_iterable(data: Any, name: str, steps: int | None) -> Stream:
    """Return the stream of a data loader, whose `iter` begins a pass; an epoch has `steps` batches (None: a pass)."""
    try:
        count = len(data)
    except (TypeError, NotImplementedError):  # PyTorch's loaders of iterable data sets raise these
        count = None
    length, batches = (steps, None) if count is None else _lengths(name, count, steps)
    continues = count is None and steps is not None

    def open_pass(number: int, first: int) -> Iterator[Any]:
        return itertools.islice(iter(data), first, None)

    stream = Stream(name, open_pass, length, continues, depends_on_passes=True, can_go_back=False)
    stream.batches = batches
    return stream


def from_arrays(arrays: tuple[Any, ...], size: int, steps: int, seed: int | None) -> Stream:
    """Return the stream of arrays for training with `steps_per_epoch`. The last batch of a pass may be smaller.

    Args:
        arrays: x, y and sample_weight, each nested.
        size: records per batch.
        steps: batches of an epoch.
        seed: determines the order of each pass; None keeps the order of the records.
    """
    records = len(next(leaf for _, leaf in tree.flatten(arrays)))

    def open_pass(number: int, first: int) -> Iterator[Any]:
        order = np.arange(records) if seed is None else np.random.default_rng((seed, number)).permutation(records)
        for begin in range(first * size, records, size):
            yield rows_of(arrays, order[begin : begin + size])

    count = -(-records // size)
    length, batches = _lengths("train", count, steps)
    stream = Stream("train", open_pass, length)
    stream.batches = batches
    stream.changes = f"steps_per_epoch is {steps}" if batches is None else _of_other_length(length, count)
    return stream


def rows_of(arrays: tuple[Any, ...], rows: Any) -> tuple[Any, ...]:
    """Return the same rows of all arrays."""
    return tuple(None if part is None else tree.map_leaves(lambda leaf: leaf[rows], part) for part in arrays)


def _lengths(name: str, count: int | None, steps: int | None) -> tuple[int, int | None]:
    """Return the number of batches per epoch, and per pass (None if an epoch is a pass, or there is no end).

    Args:
        count: batches of a pass; None for data without end.
        steps: batches of an epoch; None for a pass.

    Raises:
        DataError: the data has no batches, or no end and `steps` is None.
    """
    if steps is not None and steps < 1:
        raise DataError(f"steps_per_epoch={steps}: expected 1 or more.")
    if count == 0:
        raise DataError(f"{name} data has no batches.")
    if count is None and steps is None:
        raise DataError(f"{name} data has no end. Pass steps_per_epoch.")
    if steps is None or steps == count:
        return count or 0, None
    return steps, count


def _of_other_length(steps: int | None, count: int) -> str:
    return f"steps_per_epoch is {steps}, and a pass has {count} batches"


def from_tf_dataset(data: Any, name: str, steps: int | None, seed: int) -> Stream:
    """Return the stream of a `tf.data.Dataset`.

    Its random numbers are drawn from (seed, number of the pass, position of the operation). So the n-th pass is the
    same in every process, and can be opened without reading earlier passes. If it keeps state that no seed determines
    (a generator, a Python function, a variable), passes must be read one after another.

    Args:
        steps: batches of an epoch; None for a pass.
        seed: the run's seed.

    Raises:
        DataError: it has no end, and `steps` is None.
    """
    count = int(data.cardinality())
    length: int | None = steps
    batches = None
    if count != _UNKNOWN:
        length, batches = _lengths(name, None if count == _ENDLESS else count, steps)
    graph = datasets.DatasetGraph(data)
    keeps, draws = graph.keeps(), graph.draws()
    # A cache in memory would be lost with each data set that is drawn; this folder lasts as long as the stream.
    is_drawn = bool(draws and not keeps)
    cache = tempfile.TemporaryDirectory(prefix="raytf-cache-", ignore_cleanup_errors=True) if is_drawn else None

    def seeds(place: int, number: int) -> tuple[int, int]:
        first, second = (int(fold(_PIPELINE, seed, number, place, i)) % (2**31 - 1) + 1 for i in range(2))
        return first, second

    def open_pass(number: int, first: int) -> Iterator[Any]:
        made = graph.ordered if cache is None else graph.drawn(seeds, number, cache.name)
        return itertools.islice(iter(made), first, None)

    continues = count == _ENDLESS or (count == _UNKNOWN and steps is not None)
    stream = Stream(name, open_pass, length, continues, depends_on_passes=bool(keeps), can_go_back=not keeps)
    stream.batches = batches
    if keeps or draws:
        stream.changes = f"it has {keeps or draws}"
    elif batches is not None:
        stream.changes = _of_other_length(steps, count)
    else:
        stream.changes = "it has no end" if continues else ""
    stream.free = _free(data.element_spec)
    stream.is_dataset = True
    return stream


def _free(spec: Any) -> list[list[bool] | None]:
    """Return, for each leaf, which of a record's lengths vary between batches; None for a leaf of unknown rank."""
    parts = tuple(spec) if isinstance(spec, (list, tuple)) else (spec,)
    shapes = [getattr(leaf, "shape", None) for _, leaf in tree.flatten(parts)]
    return [None if s is None or s.rank is None else [n is None for n in s.as_list()[1:]] for s in shapes]
