"""The base of sources that read records block by block, with a bounded cache and a reader for each pipeline."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from raytf.data.sources.base import Order, Spec, is_by_record, record_bytes, window_of

#: Blocks that one reader reads concurrently.
_THREADS = 2


class BlockSource:
    """Records in blocks, each of which is read as a whole. A subclass defines `_read`.

    Args:
        name: the source's name in messages.
        window: number of records in a shuffle window; None for 8,192, or 64 MiB of them.

    Attributes:
        crc: a checksum of the records and their order; None unless they are permuted by blocks.
    """

    spec: tuple[Any, Any, Any]
    crc: int | None = None
    #: Attributes that are not pickled, such as open files.
    _own: tuple[str, ...] = ("_cache", "_taken", "_used_up", "_cached_rows", "_rows_read", "_ahead", "_pool")
    #: Whether several threads may call `_read` at once.
    _reads_beside = False

    def __init__(self, name: str, window: int | None):
        self.name, self._window = name, window
        self._by_record = False
        self._shards = 0
        self._leaf_specs: list[Spec] = []
        self._forget()

    def _lay_out(self, sizes: np.ndarray) -> None:
        self._sizes = np.asarray(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._largest = int(self._sizes.max(initial=0))
        self.records = int(self._sizes.sum())

    def _order_by(self, order: Order, size: int) -> None:
        """Choose the order for data of this many bytes in storage; set `spec` first."""
        self._by_record = is_by_record(order, max(size, self.records * record_bytes(self.spec)))

    @property
    def window(self) -> int:
        if self._by_record:
            return 1
        return window_of(self.spec) if self._window is None else self._window

    def _read(self, b: int) -> list[np.ndarray]:
        """Read the leaves of a block, each [records, *shape], from storage."""
        raise NotImplementedError

    @property
    def block_sizes(self) -> np.ndarray | None:
        return None if self._by_record else self._sizes

    @property
    def edges(self) -> list[int]:
        """The boundaries [B+1] of the blocks, even if records are permuted one by one."""
        return [*self._starts.tolist(), self.records]

    def reader(self, shards: int) -> Self:
        """Return a source for one thread, with a cache for this many logical shards that are read side by side."""
        reader = copy.copy(self)
        rows_read = self._rows_read
        reader._forget()
        reader._shards, reader._rows_read = shards, rows_read
        return reader

    @property
    def rows_read(self) -> int:
        """Records read from storage so far by this source and its readers, for measuring."""
        return self._rows_read[0]

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        out = [np.empty((len(records), *spec.shape), spec.dtype) for spec in self._leaf_specs]
        if not len(records):
            return out
        blocks = np.searchsorted(self._starts, records, side="right") - 1
        by_block = np.argsort(blocks, kind="stable")
        inside, blocks = (records - self._starts[blocks])[by_block], blocks[by_block]
        edges = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), len(blocks)]
        parts = list(zip(blocks[edges[:-1]].tolist(), itertools.pairwise(edges), strict=True))
        # Cached blocks first: reading the others may evict them.
        parts.sort(key=lambda part: part[0] not in self._cache)
        missing = deque(b for b, _ in parts if b not in self._cache)
        most = len(self._ahead) + _THREADS  # limits the memory of blocks read ahead
        for b, (low, high) in parts:
            while missing and len(self._ahead) < most:
                self._begin(missing.popleft())
            here = by_block[low:high]
            for target, leaf in zip(out, self._block(b), strict=True):
                target[here] = leaf[inside[low:high]]
            self._count(b, high - low)
            self._evict()
        return out

    def expect(self, records: np.ndarray) -> None:
        """Start reading, in other threads, the blocks of records that will be taken soon, in any order."""
        if not self._reads_beside or (self._by_record and self._shards):
            return
        for b in np.unique(np.searchsorted(self._starts, records, side="right") - 1).tolist():
            if b not in self._cache:
                self._begin(b)

    def _begin(self, b: int) -> None:
        """Start reading a block in a thread, if threads may read and none is reading it."""
        if not self._reads_beside or b in self._ahead:
            return
        if not self._pool:
            self._pool.append(ThreadPoolExecutor(_THREADS, thread_name_prefix="raytf-blocks"))
        self._ahead[b] = self._pool[0].submit(self._read, b)

    def label_range(self) -> tuple[float, float] | None:
        return None

    def _forget(self) -> None:
        self._cache: OrderedDict[int, list[np.ndarray]] = OrderedDict()
        #: How many records of each cached block were taken, and the blocks whose records were all taken.
        self._taken: dict[int, int] = {}
        self._used_up: OrderedDict[int, None] = OrderedDict()
        self._cached_rows = 0
        self._rows_read = [0]
        #: Blocks that threads are reading, or have read but `_block` has not used yet.
        self._ahead: dict[int, Future[list[np.ndarray]]] = {}
        self._pool: list[ThreadPoolExecutor] = []

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k not in self._own}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._forget()

    def _block(self, b: int) -> list[np.ndarray]:
        if b in self._cache:
            self._cache.move_to_end(b)
            return self._cache[b]
        ahead = self._ahead.pop(b, None)
        leaves = self._read(b) if ahead is None else ahead.result()
        self._cache[b], self._taken[b] = leaves, 0
        self._cached_rows += len(leaves[0])
        self._rows_read[0] += len(leaves[0])
        return leaves

    def _count(self, b: int, records: int) -> None:
        taken = self._taken[b] + records
        self._taken[b] = taken % int(self._sizes[b])
        if taken >= self._sizes[b]:
            self._used_up[b] = None
        else:
            self._used_up.pop(b, None)

    def _evict(self) -> None:
        """Drop blocks that no shard needs: each shard needs the blocks that overlap its window.

        An epoch takes every record once, so a block whose records were all taken is dropped first. If records are
        permuted one by one, any block may be needed at any time, so all blocks stay.
        """
        if self._by_record and self._shards:
            return
        capacity = self._shards * (self.window + 2 * self._largest)
        while self._cached_rows > capacity and len(self._cache) > 1:
            b = next(iter(self._used_up or self._cache))
            self._cached_rows -= int(self._sizes[b])
            del self._cache[b], self._taken[b]
            self._used_up.pop(b, None)
