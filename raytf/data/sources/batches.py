"""Data sets of batches as sources: recorded in memory or in files, or made by the program while the run trains."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raytf.data import tree
from raytf.data.plan import BatchPlan, StepPlan
from raytf.data.sources.arrays import ArraySource
from raytf.data.sources.base import SMALL_BYTES, TEXT, Source, Spec, crc_of
from raytf.data.sources.parquet import ParquetSource
from raytf.data.sources.schema import Schema
from raytf.data.sources.writer import FILE_BYTES, BatchQueue, DatasetFolder, FileLayout
from raytf.data.streams import Batch, Stream, misfit
from raytf.errors import DataError

_BLOCK_BYTES = 1 << 20
#: A file with the number of records in each batch, written after all other files.
_ROWS = "_raytf_batches.json"

#: (global step, shards) -> leaves of those shards' records, one after another, and the number of records of the batch.
Fetch = Callable[[int, range], tuple[list[np.ndarray], int]]


class BatchedSource:
    """The records of a data set of batches.

    Args:
        records: source of all batches' records, with leaves in the order of `spec`.
        spec: spec of a record, nested as in a batch.
        rows: number of records in each batch.
    """

    block_sizes = None
    window = 1

    def __init__(self, records: Source, spec: tuple[Any, Any, Any], rows: list[int]):
        self._records, self.spec, self.rows = records, spec, rows
        self.name, self.records = records.name, records.records

    @property
    def crc(self) -> int:
        """The CRC-32 of the sizes of all batches and of some records."""
        some = np.unique(np.linspace(0, self.records - 1, 16).astype(np.int64))
        return crc_of([np.asarray(self.rows, np.int64), *self._records.take(some)])

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return self._records.take(records)

    def reader(self, shards: int) -> Source:
        own = self._records.reader(shards) if hasattr(self._records, "reader") else self._records
        return BatchedSource(own, self.spec, self.rows)

    def label_range(self) -> tuple[float, float] | None:
        return self._records.label_range() if isinstance(self.spec[1], Spec) else None


@dataclass(eq=False)
class LiveBatches:
    """Batches that the driver's program makes while the run trains.

    Attributes:
        name: name of the data, for people.
        first: leaves of the first batch, in the order of `tree.flatten`.
        spec: spec of a record, nested as in a batch; a length that varies between batches is -1.
        steps: batches of an epoch.
        batches: batches of a pass over the data, if an epoch is not a pass; as in `BatchPlan`.
        fetch: fetches a batch; None before the run starts.
        records: number of records in the first batch, which represents all batches until training starts.
    """

    block_sizes = None
    window = 1

    name: str
    first: list[np.ndarray]
    spec: tuple[Any, Any, Any]
    steps: int
    batches: int | None = None
    fetch: Fetch | None = None
    records: int = field(init=False)

    def __post_init__(self) -> None:
        self.records = len(self.first[0])

    @property
    def identity(self) -> str:
        """A text that must be the same after a restart. It does not depend on records, which may be shuffled."""
        passes = "" if self.batches is None else f" and {self.batches} a pass"
        return f"{self.steps} batches an epoch{passes}, which the program makes"

    def fed(self, fetch: Fetch) -> LiveBatches:
        return replace(self, fetch=fetch)

    def reader(self, shards: int) -> LiveBatches:
        return self if self.fetch is None else self.fed(copy.copy(self.fetch))

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self.first]

    def label_range(self) -> tuple[float, float] | None:
        return None


def plan_of(source: Source, global_batch_size: int, shards: int) -> StepPlan:
    """Return the step plan for training on a source."""
    if isinstance(source, BatchedSource):
        return BatchPlan.of(source.rows, shards)
    if isinstance(source, LiveBatches):
        size = global_batch_size
        return BatchPlan((source.batches or source.steps) * size, size, shards, source.steps, batches=source.batches)
    return StepPlan(source.records, global_batch_size, shards)


class NotRecordableError(DataError):
    """Batches cannot be rows of one table; `why` is a clause that can end a sentence."""

    def __init__(self, message: str, why: str):
        super().__init__(message)
        self.why = why


def recorded(
    stream: Stream, storage: Any, say: Callable[[str], object], most: int | None = None, small: int = SMALL_BYTES
) -> BatchedSource:
    """Return the batches of one pass: in memory up to `small` bytes, otherwise written to a folder and read from there.

    Files that an earlier start wrote are reused.

    Args:
        stream: the batches.
        storage: the folder for large data.
        say: receives a message for each file.
        most: the number of batches to record; None for all.
        small: the most bytes to keep in memory.

    Raises:
        NotRecordableError: the batches' records have different shapes, or there are more than `small` bytes of text.
        ConfigError: the folder contains something else.
        DataError: there is no batch, or the data fails.
        StorageError: storage refuses a request.
    """
    spec = tree.map_leaves(Spec.of, stream.peek())
    has_text = any(leaf.dtype == TEXT for _, leaf in tree.flatten(spec))
    folder = None if has_text else _folder(stream, spec, storage, most)
    if folder is not None and folder.is_finished:
        return _from_files(storage, spec)
    kept: list[list[np.ndarray]] = []
    size, batches = 0, _batches(stream, spec, most)
    for leaves in batches:
        kept.append(leaves)
        size += sum(leaf.nbytes for leaf in leaves)
        if size > small:
            break
    if size <= small:
        whole = [np.concatenate(parts) for parts in zip(*kept, strict=True)]
        x, y, weight = tree.unflatten(spec, whole)
        records = ArraySource(x, y, weight, name=stream.name)
        return BatchedSource(records, spec, [len(leaves[0]) for leaves in kept])
    name = f"{stream.name} data"
    if folder is None:
        why = f"it has more than {small >> 20} MiB with text"
        raise NotRecordableError(f"{name}: {why}, which are not written to files.", why)
    steps, about = most or stream.steps, "of unknown size"
    if steps:
        about = f"about {size / len(kept) * steps / 2**30:.1f} GiB"
    say(f"{name}, {about}, is written once to {storage.locate('')}, and read from there")
    queue = BatchQueue(itertools.chain(kept, batches))
    folder.write_queue(queue, lambda: say(f"{name}: {sum(queue.rows)} records are written"))
    storage.put(_ROWS, json.dumps(queue.rows).encode())
    folder.finish()
    return _from_files(storage, spec)


def _batches(stream: Stream, spec: Any, most: int | None) -> Iterator[list[np.ndarray]]:
    """Yield the leaves of each batch, in the order of `tree.flatten`."""
    for i in itertools.count() if most is None else range(most):
        batch = stream.read(0, i)
        if batch is None:
            return
        if misfit(batch, spec):
            raise NotRecordableError(
                f"{stream.name} data: batch {i + 1} has {_shapes(batch)}, the first has {_shapes(stream.peek())}. Pad "
                "them to one length.",
                "its batches have records of different shapes",
            )
        yield [leaf for _, leaf in tree.flatten(batch)]


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{path} {leaf.shape[1:]} {Spec.of(leaf).dtype}" for path, leaf in tree.flatten(batch))


def _folder(stream: Stream, spec: Any, storage: Any, most: int | None) -> DatasetFolder:
    """Return the folder for the records of a stream's batches as Parquet."""
    specs = [leaf for _, leaf in tree.flatten(spec)]
    names = [f"leaf{i:04}" for i in range(len(specs))]  # a structure may nest deeper than columns can
    first = [leaf for _, leaf in tree.flatten(stream.peek())]
    known = {"first batch": crc_of(first), "batches": stream.steps if most is None else most}
    identity = json.dumps(known | {"record": _shapes(stream.peek())})
    columns = dict(zip(names, names, strict=True)), None, None
    layout = FileLayout.of("parquet", spec, None, FILE_BYTES, _BLOCK_BYTES)
    return DatasetFolder(storage, Schema(columns, dict(zip(names, specs, strict=True)), None, {}, identity), layout)


def _from_files(storage: Any, spec: Any) -> BatchedSource:
    return BatchedSource(ParquetSource(storage.uri), spec, json.loads(storage.get(_ROWS)))
