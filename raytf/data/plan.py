"""Computes the records of each step, and the rank that computes each shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


def assign(shards: int, world_size: int) -> list[range]:
    """Return contiguous ranges of the V logical shards, one for each of W ranks; the largest has ceil(V/W) shards."""
    bounds = [shards * r // world_size for r in range(world_size + 1)]
    return [range(a, b) for a, b in itertools.pairwise(bounds)]


def imbalance(shards: int, world_size: int) -> float:
    """Return the average time, in shards, that a worker waits in each step: ceil(V/W) - V/W."""
    return -(-shards // world_size) - shards / world_size


@dataclass(frozen=True)
class StepPlan:
    """The division of epochs into global steps, for N records, global batches of G and V logical shards.

    If V does not divide G, some shards have one record more than others in each step.

    Attributes:
        records: N, at least 1.
        global_batch_size: G.
        shards: V.
    """

    records: int
    global_batch_size: int
    shards: int

    @property
    def micro_batch_size(self) -> int:
        """Records in the largest shard of a full step: G/V, rounded up."""
        return -(-self.global_batch_size // self.shards)

    @property
    def is_even(self) -> bool:
        """Whether all shards of a full step have the same number of records."""
        return self.global_batch_size % self.shards == 0

    def cuts(self, rows: int) -> np.ndarray:
        """Return the boundaries [V+1] of the shards among this many records of a step."""
        return np.arange(self.shards + 1, dtype=np.int64) * rows // self.shards

    @cached_property
    def _ends(self) -> np.ndarray:
        """The boundaries [V+1] of the shards among the records of a full step."""
        return self.cuts(self.global_batch_size)

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of records [V] in each shard of a full step; 0 in some if V is larger than G."""
        return np.diff(self._ends)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.records // self.global_batch_size)

    @property
    def full_steps(self) -> int:
        """The number of steps of an epoch in which every shard is full."""
        return self.records // self.global_batch_size

    @cached_property
    def bounds(self) -> np.ndarray:
        """The boundaries [V+1] of the shards' ranges in the epoch's sequence, with lengths in proportion to `sizes`."""
        return self._ends * self.records // self.global_batch_size

    def locate(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a global step, all counted from 0."""
        return divmod(step, self.steps_per_epoch)

    def epoch_start(self, epoch: int) -> int:
        """Return the global step at which an epoch, counted from 0, begins."""
        return epoch * self.steps_per_epoch

    def is_epoch_end(self, step: int) -> bool:
        """Return whether the first `step` steps are whole epochs."""
        return self.locate(step)[1] == 0

    def pass_of(self, step: int) -> tuple[int, int]:
        """Return (pass over the data, batch within it) of a global step, all counted from 0."""
        return self.locate(step)

    def samples(self, steps: int) -> int:
        """Return the number of records in the first `steps` steps."""
        passes, rest = self.pass_of(steps)
        return passes * self.records + sum(self.records_of(step) for step in range(rest))

    def counts(self, step_in_epoch: int, shards: range | None = None) -> np.ndarray:
        """Return the number of records that each of `shards` (by default all) has at this step."""
        low, high = (0, self.shards) if shards is None else (shards.start, shards.stop)
        sizes = self.sizes[low:high]
        return np.clip(np.diff(self.bounds[low : high + 1]) - step_in_epoch * sizes, 0, sizes)

    def records_of(self, step_in_epoch: int) -> int:
        """Return the number of records that all shards together have at this step."""
        if self.is_full(step_in_epoch):
            return self.global_batch_size
        return int(self.counts(step_in_epoch).sum())

    def is_full(self, step_in_epoch: int) -> bool:
        return step_in_epoch < self.full_steps

    def full_until(self, step_in_epoch: int) -> int:
        """Return the first step after this full one that is not full, or the end of the epoch."""
        return self.full_steps

    def call_end(self, step: int, limit: int, total: int, boundary: int | None = None) -> int:
        """Return the end (exclusive) of a call that starts at `step`.

        A call has up to `limit` full steps of one epoch, or a single step that is not full. It does not continue past a
        multiple of `boundary` (the checkpoint cadence), nor past `total`.
        """
        epoch, inside = self.locate(step)
        start = self.epoch_start(epoch)
        end = min(total, self.epoch_start(epoch + 1), step + limit)
        if not self.is_full(inside):
            return step + 1
        end = min(end, start + self.full_until(inside))
        if boundary:
            end = min(end, (step // boundary + 1) * boundary)
        return end


@dataclass(frozen=True)
class BatchPlan(StepPlan):
    """The division of epochs into ready-made batches, one for each step. The shards divide the records of a batch.

    Attributes:
        records: records in a pass over the data; if unknown before reading, the number if all batches were full.
        global_batch_size: records in the largest batch.
        steps: batches in an epoch.
        rows: records in each batch of an epoch, or None if they are not known before the batch is read.
        batches: batches in a pass over the data, if an epoch is only part of a pass. Each epoch then has `steps`
            batches, but the last epoch of a pass has the remaining ones, as in Keras. None if an epoch is a pass, or
            the data has no end.
    """

    steps: int = 1
    rows: tuple[int, ...] | None = None
    batches: int | None = None

    @classmethod
    def of(cls, rows: Sequence[int], shards: int) -> BatchPlan:
        return cls(sum(rows), max(rows), shards, len(rows), tuple(rows))

    @property
    def steps_per_epoch(self) -> int:
        return self.steps

    def locate(self, step: int) -> tuple[int, int]:
        if self.batches is None:
            return super().locate(step)
        number, batch = divmod(step, self.batches)
        epoch, inside = divmod(batch, self.steps)
        return number * -(-self.batches // self.steps) + epoch, inside

    def epoch_start(self, epoch: int) -> int:
        if self.batches is None:
            return super().epoch_start(epoch)
        number, inside = divmod(epoch, -(-self.batches // self.steps))
        return number * self.batches + inside * self.steps

    def pass_of(self, step: int) -> tuple[int, int]:
        return super().pass_of(step) if self.batches is None else divmod(step, self.batches)

    def parts(self, rows: int) -> np.ndarray:
        """Return the number of records [V] of each shard in a batch of this many records."""
        return np.diff(self.cuts(rows))

    def counts(self, step_in_epoch: int, shards: range | None = None) -> np.ndarray:
        own = slice(None) if shards is None else slice(shards.start, shards.stop)
        return self.parts(self.records_of(step_in_epoch))[own]

    def records_of(self, step_in_epoch: int) -> int:
        return self.global_batch_size if self.rows is None else self.rows[step_in_epoch]

    def full_until(self, step_in_epoch: int) -> int:
        at = np.searchsorted(self._partial_steps, step_in_epoch)
        return int(self._partial_steps[at]) if at < len(self._partial_steps) else self.steps

    def is_full(self, step_in_epoch: int) -> bool:
        return self.rows is not None and self.rows[step_in_epoch] == self.global_batch_size

    @cached_property
    def _partial_steps(self) -> np.ndarray:
        """The steps of an epoch with batches that are smaller than the largest one, or of unknown size."""
        if self.rows is None:
            return np.arange(self.steps)
        return np.flatnonzero(np.asarray(self.rows) < self.global_batch_size)

    @cached_property
    def starts(self) -> np.ndarray:
        """The boundaries [steps + 1] of the batches among the epoch's records. Requires known `rows`."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(self.rows, np.int64))])
