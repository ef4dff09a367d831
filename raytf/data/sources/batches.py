"""Data sets of batches as sources: their records with random access, or batches that arrive while the run trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from raytf.data.plan import BatchPlan, StepPlan
from raytf.data.sources.base import Source, Spec, crc_of

#: (global step, shards) -> leaves of those shards' records, one after another, and the number of records of the batch.
Fetch = Callable[[int, range], tuple[list[np.ndarray], int]]


class BatchedSource:
    """The records of a data set of batches.

    Args:
        records: of all batches, with leaves in the order of `spec`.
        spec: of a record, nested as in a batch.
        rows: records in each batch.
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
        """Return a source for one pipeline."""
        own = self._records.reader(shards) if hasattr(self._records, "reader") else self._records
        return BatchedSource(own, self.spec, self.rows)

    def label_range(self) -> tuple[float, float] | None:
        return self._records.label_range() if isinstance(self.spec[1], Spec) else None


@dataclass(eq=False)
class LiveBatches:
    """Batches that the driver's program makes while the run trains.

    Attributes:
        name: of the data, for people.
        first: leaves of the first batch, in the order of `tree.flatten`.
        spec: of a record, nested as in a batch; a length that differs from batch to batch is -1.
        steps: batches of an epoch.
        batches: batches of a pass over the data, if an epoch is not a pass; as in `BatchPlan`.
        fetch: gets a batch; None before the run starts.
        records: the number in the first batch, which represents all others before training starts.
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
        """A text that must be the same when the program is started again; its records may be shuffled."""
        passes = "" if self.batches is None else f" and {self.batches} a pass"
        return f"{self.steps} batches an epoch{passes}, which the program makes"

    def fed(self, fetch: Fetch) -> LiveBatches:
        """Return the same batches, with a way to get them."""
        return replace(self, fetch=fetch)

    def reader(self, shards: int) -> LiveBatches:
        """Return the same batches for another thread."""
        return self if self.fetch is None else self.fed(copy.copy(self.fetch))

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self.first]

    def label_range(self) -> tuple[float, float] | None:
        return None


def plan_of(source: Source, global_batch_size: int, shards: int) -> StepPlan:
    """Return the plan of the steps of training on a source."""
    if isinstance(source, BatchedSource):
        return BatchPlan.of(source.rows, shards)
    if isinstance(source, LiveBatches):
        size = global_batch_size
        return BatchPlan((source.batches or source.steps) * size, size, shards, source.steps, batches=source.batches)
    return StepPlan(source.records, global_batch_size, shards)
