"""Batches that a program makes while it runs: a data set of TensorFlow, a PyDataset, a generator.

A stream is read in order, in one process, and gives what Keras would train on: its i-th element is the i-th batch.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raytf._tensorflow import datasets
from raytf.data import tree
from raytf.data.order import fold, permutation
from raytf.data.sources.base import Spec, as_text
from raytf.errors import DataError

#: (x, y, sample_weight), nested arrays of which each has the records of the batch in its first dimension.
Batch = tuple[Any, Any, Any]
#: Keep what is drawn here from the run's seed apart from all else that is: a PyDataset's order, and a pipeline's draws.
_BATCHES, _PIPELINE = 4, 5
#: What TensorFlow says of a data set without end, and of one whose end it does not know.
_ENDLESS, _UNKNOWN = -1, -2


class Stream:
    """Batches in order. An epoch is one pass over the data, or a number of steps of a pass that goes on.

    Args:
        name: of the data, for people.
        open_pass: (number of the pass, first batch) -> its elements from that batch on.
        steps: batches of an epoch; None for as many as a pass has.
        goes_on: whether an epoch begins where the one before has ended.
        depends_on_passes: whether a pass is another one if those before it were not read.
        can_go_back: whether a pass that was opened before can be opened again, and is the same.

    Attributes:
        name, steps: as given.
        changes: why two passes need not be the same, for people; empty if they are, so that the data can be recorded.
        free: for each leaf which of a record's lengths differ from batch to batch; None for a leaf of which nothing is
            known. By default none differs.
    """

    changes = "it is code of the program"
    free: list[list[bool] | None] | None = None

    def __init__(
        self,
        name: str,
        open_pass: Callable[[int, int], Iterator[Any]],
        steps: int | None,
        goes_on: bool = False,
        depends_on_passes: bool = False,
        can_go_back: bool = True,
    ):
        self.name, self.steps = name, steps
        self._open, self._goes_on = open_pass, goes_on
        self._depends_on_passes, self._can_go_back = depends_on_passes, can_go_back
        #: The open pass, and the batch of it that comes next; -1 before the first one.
        self._pass, self._next = -1, 0
        self._elements: Iterator[Any] = iter(())
        #: The first batch of all, and whether it was looked at and not read yet.
        self._first: Batch | None = None
        self._is_ahead = False

    def peek(self) -> Batch:
        """The first batch; if nothing was read before, it is still read as the first one.

        Raises:
            DataError: there is none, or it is not a batch.
        """
        if self._first is None:
            self._first = self.read(0, 0)
            if self._first is None:
                raise DataError(f"{self.name} data has no batches.")
            self._is_ahead, self._next = True, 0
        return self._first

    def read(self, epoch: int, index: int) -> Batch | None:
        """The batch of an epoch; those before it are skipped, and are made for it where they must be.

        Returns:
            None at the end of the data.

        Raises:
            DataError: the data fails, or would have to be read again and cannot be.
        """
        number = 0 if self._goes_on else epoch
        if self._goes_on:
            index += epoch * (self.steps or 0)
        if self._is_ahead and (number, index) == (0, 0):
            self._is_ahead, self._next = False, 1
            return self._first
        self._seek(number, index)
        element = self._take()
        return None if element is _END else batch_of(element, self.name)

    def count(self) -> int:
        """Batches of a pass, which is read for it, and is the first one no longer where passes depend on each other."""
        return sum(1 for _ in self._opened(0, 0))

    def spec(self) -> tuple[Any, Any, Any]:
        """What a record looks like, nested as in a batch, with -1 for lengths that differ."""
        first = self.peek()
        leaves = [leaf for _, leaf in tree.flatten(first)]
        found = []
        in_rows = [False] if tree.has_rows(first) else []  # how many rows of a part a record has is the same for all
        for leaf, free in zip(leaves, self.free or [[]] * len(leaves), strict=True):
            rank = leaf.ndim - 1 - len(in_rows)
            differs = in_rows + ([True] * rank if free is None else free or [False] * rank)
            lengths = tuple(-1 if own else n for n, own in zip(leaf.shape[1:], differs, strict=True))
            found.append(Spec(lengths, Spec.of(leaf).dtype))
        return tree.unflatten(first, found)

    def _seek(self, number: int, index: int) -> None:
        at = 1 if self._is_ahead else self._next
        self._is_ahead = False
        if number < self._pass or (number == self._pass and index < at):
            if not self._can_go_back:
                raise DataError(
                    f"{self.name} data would have to be read again from batch {index + 1} on, and it can be read once "
                    "only. Start the program again: it goes on from the newest checkpoint."
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
        return self._asked(lambda: self._open(number, first))

    def _take(self) -> Any:
        self._next += 1
        return self._asked(lambda: next(self._elements, _END))

    def _asked(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            # The program's own code: its traceback is what somebody needs to find the mistake.
            raise DataError(f"{self.name} data failed: {type(error).__name__}: {str(error)[:400]}") from error


#: After the last element.
_END = object()


def batch_of(element: Any, name: str) -> Batch:
    """(x, y, sample_weight) of an element, as Keras takes it apart.

    Its parts may have different numbers of rows, as those of zipped data sets have. Then a record has several rows of
    each of them: of 16 and 8 rows there are 8 records, with 2 rows and 1.

    Raises:
        DataError: it is not a batch of numbers.
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
            f"{name} data: the parts of an element differ in their number of records: {listed}. Expected a batch, with "
            "a row for each record: dataset.batch(32) makes one of records."
        )
    return batch


def misfit(batch: Batch, spec: tuple[Any, Any, Any]) -> str:
    """How a batch differs from what all are to be like, for people; empty if it does not."""
    found = {path: (leaf.shape[1:], Spec.of(leaf).dtype) for path, leaf in tree.flatten(batch)}
    wanted = {path: (one.shape, one.dtype) for path, one in tree.flatten(spec)}
    if found.keys() != wanted.keys():
        return f"it has {', '.join(found)} where the first one has {', '.join(wanted)}"
    for path, (shape, dtype) in found.items():
        like, kind = wanted[path]
        if dtype != kind or len(shape) != len(like) or any(n not in (-1, m) for n, m in zip(like, shape, strict=True)):
            known = tuple(None if n < 0 else n for n in like)
            return f"a record of {path} is {shape} {dtype} where those of the first one are {known} {kind}"
    return ""


def _array(leaf: Any, name: str) -> np.ndarray:
    if hasattr(leaf, "to_tensor") or hasattr(leaf, "dense_shape"):
        raise DataError(
            f"{name} data has a {type(leaf).__name__}. Make it dense in the pipeline, as with "
            ".map(lambda x: x.to_tensor()) or tf.sparse.to_dense."
        )
    found = np.asarray(leaf)
    text = as_text(found)
    if text is not None:
        return text
    if found.dtype.kind not in "biufc" and found.dtype.name != "bfloat16":
        raise DataError(
            f"{name} data has a value of dtype {found.dtype}, which is neither a number nor text. Convert it in the "
            "pipeline."
        )
    return found


def from_py_dataset(data: Any, name: str, steps: int | None, shuffle: bool, seed: int) -> Stream:
    """A keras.utils.PyDataset. Its batches have another order in each epoch if they are shuffled, as with Keras.

    Args:
        steps: batches of an epoch; None for all.
        seed: of the run, from which the order is drawn.

    Raises:
        DataError: it has no end, and nobody says how long an epoch is.
    """
    batches = data.num_batches
    told = -1

    def open_pass(number: int, first: int) -> Iterator[Any]:
        nonlocal told
        for passed in range(told + 1, number + 1):  # of passes that are skipped as well
            if passed:
                data.on_epoch_end()
            data.on_epoch_begin()
        told = max(told, number)
        if batches is None:
            return (data[i] for i in itertools.count(first))
        order = permutation(batches, _BATCHES, seed, number) if shuffle else np.arange(batches)
        return (data[int(i)] for i in order[first:])

    return Stream(name, open_pass, _steps(name, batches, steps), goes_on=batches is None)


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


def _steps(name: str, batches: int | None, steps: int | None) -> int:
    """Batches of an epoch, for data that knows how many it has.

    Raises:
        DataError: nobody says it, or Keras would end an epoch before its time.
    """
    if batches is None:
        if steps is None:
            raise DataError(f"{name} data has no end. Give steps_per_epoch.")
        return steps
    if batches == 0:
        raise DataError(f"{name} data has no batches.")
    if steps not in (None, batches):
        raise DataError(
            f"{name} data has {batches} batches, and steps_per_epoch is {steps}. Leave it out for epochs of {batches} "
            "steps, or make data without end, as with dataset.repeat()."
        )
    return batches


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
    length = steps if count == _UNKNOWN else _steps(name, None if count == _ENDLESS else count, steps)
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
    found.changes = f"it has {keeps or draws}" if keeps or draws else "it has no end" if goes_on else ""
    found.free = _free(data.element_spec)
    return found


def _free(spec: Any) -> list[list[bool] | None]:
    """For each leaf which of a record's lengths differ from batch to batch; None where nothing is known of it."""
    parts = tuple(spec) if isinstance(spec, (list, tuple)) else (spec,)
    shapes = [getattr(leaf, "shape", None) for _, leaf in tree.flatten(parts)]
    return [None if s is None or s.rank is None else [n is None for n in s.as_list()[1:]] for s in shapes]
