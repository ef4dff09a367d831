"""Batches that a program makes while it runs.

A stream is read in order, in one process, and gives what Keras would train on: its i-th element is the i-th batch.
"""

from __future__ import annotations

import math
import pickle
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raytf.data import sparse_rows, tree
from raytf.data.sources.base import Spec, as_text
from raytf.errors import DataError

#: (x, y, sample_weight), nested arrays of which each has the records of the batch in its first dimension.
Batch = tuple[Any, Any, Any]
#: Bytes of batches that are kept in memory while they are counted; more are kept in a file.
_KEPT_BYTES = 64 << 20


class Stream:
    """Batches in order. An epoch is one pass over the data, a part of a pass, or a number of steps of a pass that goes
    on.

    Args:
        name: of the data, for people.
        open_pass: (number of the pass, first batch) -> its elements from that batch on.
        steps: batches of an epoch; None for as many as a pass has.
        goes_on: whether an epoch begins where the one before has ended.
        depends_on_passes: whether a pass is another one if those before it were not read.
        can_go_back: whether a pass that was opened before can be opened again, and is the same.

    Attributes:
        name, steps: as given.
        batches: batches of a pass, where an epoch is not a pass; as in `BatchPlan`.
        is_dataset: whether it is a `tf.data.Dataset`.
        end: to be called when nothing more is read.
        changes: why two passes need not be the same, for people; empty if they are, so that the data can be recorded.
        free: for each leaf which of a record's lengths differ from batch to batch; None for a leaf of which nothing is
            known. By default those that differ in the first two batches, as in Keras.
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
        #: The first two batches of the first pass, once they are known. `_ahead` has the batches of these two that were
        #: peeked at but not read yet, by index.
        self._first: Batch | None = None
        self._second: Batch | None = None
        self._ahead: dict[int, Batch | None] = {}
        #: The first pass, if it was read to be counted and cannot be read again.
        self._kept: _Kept | None = None

    def peek(self) -> Batch:
        """The first batch; if nothing was read before, it is still read as the first one.

        Raises:
            DataError: there is none, or it is not a batch.
        """
        if self._first is None:
            self._first = self.read(0, 0)
            if self._first is None:
                raise DataError(f"{self.name} data has no batches.")
            self._ahead[0] = self._first
        return self._first

    def read(self, epoch: int, index: int) -> Batch | None:
        """The batch of an epoch; those before it are skipped, and are made for it where they must be.

        Args:
            epoch: number of the epoch or, where an epoch is a part of a pass, of the pass.
            index: of the batch within it.

        Returns:
            None at the end of the data.

        Raises:
            DataError: the data fails, or would have to be read again and cannot be.
        """
        number = 0 if self._goes_on else epoch
        if self._goes_on:
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
        """Return the number of batches of the first pass, which is read to its end.

        What cannot be read again is kept in a file until the program ends, and is still the first pass.

        Raises:
            DataError: the data fails, or there is no room for it.
        """
        kept, number = None if self._can_go_back else _Kept(), 0
        while (batch := self.read(0, number)) is not None:
            number += 1
            try:
                if kept is not None:
                    kept.add(batch)
            except OSError as error:
                raise DataError(
                    f"{self.name} data does not say how many batches it has, and can be read only once. Keeping it in "
                    f"{tempfile.gettempdir()} to count them failed: {error}. Pass steps_per_epoch."
                ) from None
        self._kept = kept
        return number

    def spec(self) -> tuple[Any, Any, Any]:
        """What a record looks like, nested as in a batch, with -1 for lengths that differ."""
        first = self.peek()
        leaves = [leaf for _, leaf in tree.flatten(first)]
        found = []
        in_rows = [False] if tree.has_rows(first) else []  # how many rows of a part a record has is the same for all
        for leaf, free in zip(leaves, self.free or self._differing(), strict=True):
            rank = leaf.ndim - 1 - len(in_rows)
            differs = in_rows + ([True] * rank if free is None else free or [False] * rank)
            lengths = tuple(-1 if own else n for n, own in zip(leaf.shape[1:], differs, strict=True))
            found.append(Spec(lengths, Spec.of(leaf).dtype))
        return tree.unflatten(first, found)

    def _differing(self) -> list[list[bool]]:
        """Return which lengths of a record differ in the first two batches, for each leaf."""
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
            # The program's own code: its traceback is what somebody needs to find the mistake.
            raise DataError(f"{self.name} data failed: {type(error).__name__}: {str(error)[:400]}") from error


#: After the last element.
_END = object()


class _Kept:
    """Batches in a temporary file, which ends with this object."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(_KEPT_BYTES)  # noqa: SIM115 - it lives as long as this object
        self._starts = list[int]()

    def add(self, batch: Batch) -> None:
        self._starts.append(self._file.tell())
        pickle.dump(batch, self._file, pickle.HIGHEST_PROTOCOL)

    def read(self, first: int) -> Iterator[Batch]:
        """Batches from one on, in order."""
        for start in self._starts[first:]:
            self._file.seek(start)
            yield pickle.load(self._file)


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
            return (
                f"a record of {path} is {shape} {dtype} where those of the first one are {known} {kind}. Lengths may "
                "differ from batch to batch if they differ in the first two; pad the others"
            )
    return ""


def _array(leaf: Any, name: str) -> np.ndarray:
    if sparse_rows.is_ragged(leaf):
        raise sparse_rows.ragged_error(f"{name} data has a RaggedTensor", ".map(lambda x, y: (x.to_tensor(), y))")
    found = np.asarray(sparse_rows.dense(leaf))
    text = as_text(found)
    if text is not None:
        return text
    if found.dtype.kind not in "biufc" and found.dtype.name != "bfloat16":
        raise DataError(
            f"{name} data has a value of dtype {found.dtype}, which is neither a number nor text. Convert it in the "
            "pipeline."
        )
    return found
