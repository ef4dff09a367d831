"""Copies in memory: one that a rank cannot complete counts on no rank, and the one before it stays."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint import snapshot_slot, variables
from raytf.checkpoint.codec import DeviceTensor
from raytf.checkpoint.memory import MemoryTier
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.slot_ledger import HeldShare, generations
from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.training.saving.checkpointer import MemoryCopies

ATTEMPT = "20260101T000000.000-aaaaaa"


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, size: int):
        self.size, self._parts = size, [np.zeros(0)] * size
        self._barrier = threading.Barrier(size, timeout=30)

    def sum(self, rank: int, values: np.ndarray) -> np.ndarray:
        self._parts[rank] = values
        self._barrier.wait()
        total = np.sum(self._parts, 0, dtype=values.dtype)
        self._barrier.wait()
        return total


class Device:
    """A tensor that is fetched from a device, which raises the errors in `broken`, by step."""

    nbytes = 40

    def __init__(self, progress: TrainingState, broken: Mapping[int, Exception]):
        self._progress, self._broken = progress, broken

    def now(self) -> variables.TensorValues:
        tensor = DeviceTensor(np.dtype("f4"), (10,), self._fetch)
        return variables.TensorValues({"w": tensor}, is_held=True, is_here=False)

    def _fetch(self) -> np.ndarray:
        if self._progress.step in self._broken:
            raise self._broken[self._progress.step]
        return np.full(10, self._progress.step, np.float32)


class Rank:
    """One of the ranks of a node, with memory of its own; Ray is not started."""

    def __init__(self, rank: int, threads: Threads, broken: Mapping[int, Exception]):
        self.said: list[str] = []
        group: Any = SimpleNamespace(rank=rank, world_size=threads.size, sum=lambda values: threads.sum(rank, values))
        attempt = GroupAttempt(ATTEMPT, rank, threads.size)
        self.tier = MemoryTier("run", group, attempt, 10, None, self.said.append, (rank, threads.size))
        self.progress = TrainingState()
        self.tier._source = Device(self.progress, broken)
        self.tier._keeping = SimpleNamespace(is_lost=False, poll=lambda: None)  # type: ignore[assignment]
        self.tier._is_tidy = True
        self.files = [os.memfd_create("slot") for _ in range(2)]
        self.tier._slots = [snapshot_slot.Slot(f"/proc/{os.getpid()}/fd/{file}") for file in self.files]
        log = SimpleNamespace(since=lambda step: StepRows())
        source: Any = SimpleNamespace(progress=self.progress, identity={}, log=log)
        self.copies = MemoryCopies(source, self.tier, group, None)

    def copy(self, step: int) -> None:
        self.progress.step = step
        self.copies.make(share_rank_zero=False)
        self.tier.settle()

    def held(self) -> Iterator[HeldShare]:
        for file in self.files:
            size = os.fstat(file).st_size
            share = snapshot_slot.head(mmap.mmap(file, size, prot=mmap.PROT_READ)) if size else None
            if share is not None:
                yield HeldShare(share.step, share.attempt, share.share, share.shares, share.bytes)


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("kind", [OSError, RuntimeError])
def test_a_copy_that_one_rank_cannot_complete_counts_on_no_rank(where: int, kind: type[Exception]):
    threads, broken = Threads(2), {20: kind("out of memory")}
    ranks = [Rank(rank, threads, broken if rank == where else {}) for rank in range(2)]

    def steps() -> list[int]:
        """Those of which the node holds the whole state."""
        return [g.step for g in generations({"node": [held for rank in ranks for held in rank.held()]}, None)]

    with ThreadPoolExecutor(2) as pool:
        for step, whole in ((10, [10]), (20, [10]), (30, [10])):
            list(pool.map(lambda rank, step=step: rank.copy(step), ranks))
            assert steps() == whole
    assert [rank.said for rank in ranks] == [
        [
            f"rank {rank}: the state cannot be copied into memory: out of memory; after a failure the run "
            "continues from storage or other nodes"
        ]
        if rank == where
        else []
        for rank in range(2)
    ]


def test_a_copy_over_itself_that_fails_leaves_the_one_before():
    threads = Threads(1)
    rank = Rank(0, threads, {20: OSError("out of memory")})
    for step in (10, 20, 20):
        rank.copy(step)
        assert [held.step for held in rank.held()] == [10]
    assert len(rank.said) == 1
