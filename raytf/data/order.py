"""Assigns records to logical shards and steps: pure arithmetic, without state and for any world size.

An epoch of N records is ordered as follows. The source's blocks are permuted. The records, block after block, form one
sequence. The sequence is cut into V ranges, one for each logical shard, whose lengths differ by at most one. Each range
is shuffled within windows of bounded length. Step s of the epoch takes records [s*b, (s+1)*b) of every range, where
b = G/V. All steps except the last are full. If V does not divide G, shard v takes b(v) = floor((v+1)*G/V) -
floor(v*G/V) records of each step, and the length of its range is in proportion to b(v).

The remainder rule: if N is not a multiple of G, the last step of an epoch is smaller. It takes the rest of each range
(0 to b records, with a difference of at most one between shards), and its loss is the mean over its records. So every
record is used exactly once in each epoch, and an epoch has ceil(N/G) steps, as in Keras.

Random numbers come from splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014),
written out here so that no library update can change an order.
"""

from __future__ import annotations

import copy

import numpy as np

from raytf.data.plan import BatchPlan, StepPlan

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
#: Domains, which separate random streams with the same seed.
_BLOCKS, _WINDOW, _STEP = 1, 2, 3


def mix(x: np.ndarray) -> np.ndarray:
    """Apply the splitmix64 finalizer to each uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def fold(*parts: int | np.ndarray) -> np.ndarray:
    """Hash integers (broadcast against each other) into uint64."""
    key = np.zeros((), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = mix(key + _GOLDEN + mix(np.asarray(part).astype(np.uint64) + _GOLDEN))
    return key


def permutation(n: int, *key: int) -> np.ndarray:
    """Return a permutation of range(n), int64, drawn from the key."""
    return argsort(fold(*key, np.arange(n)))


def argsort(keys: np.ndarray) -> np.ndarray:
    """Return np.argsort(keys, kind="stable") of uint64, in two thirds of the time: values sort fastest.

    The low bits of each key are replaced by its index. Keys that differ only in these few bits are sorted afterwards;
    among random keys, at most one pair in a million does.
    """
    low = np.uint64((1 << max(1, (len(keys) - 1).bit_length())) - 1)
    packed = keys & ~low
    packed |= np.arange(len(keys), dtype=np.uint64)
    packed.sort()
    tied = (packed[1:] ^ packed[:-1]) <= low
    order = (packed & low).astype(np.int64)
    if tied.any():
        places = np.flatnonzero(np.append(tied, False) | np.append(False, tied))
        some = order[places]
        order[places] = some[np.argsort(keys[some], kind="stable")]
    return order


def step_seeds(seed: int, steps: np.ndarray, shards: np.ndarray, count: int) -> np.ndarray:
    """Return the seeds of all random operations in a micro-batch.

    Args:
        seed: the run's seed.
        steps: [K] global steps.
        shards: [L] logical shards.
        count: the number of seeds for each micro-batch.

    Returns:
        [K, L, count, 2] non-negative int32.
    """
    parts = fold(
        _STEP,
        seed,
        np.asarray(steps)[:, None, None, None],
        np.asarray(shards)[None, :, None, None],
        np.arange(count)[None, None, :, None],
        np.arange(2)[None, None, None, :],
    )
    return (parts & np.uint64(0x7FFFFFFF)).astype(np.int32)


class EpochOrder:
    """The order of one epoch.

    Args:
        plan: the sizes of shards and steps.
        block_sizes: [B] records in each block of the source, or None if records can be read one by one.
        seed: the run's seed.
        epoch: counted from 0.
        window: number of records within which a range is shuffled after the blocks; 1 for no such shuffling.
        shuffle: False keeps the source's own order.
    """

    def __init__(
        self,
        plan: StepPlan,
        block_sizes: np.ndarray | None,
        seed: int,
        epoch: int,
        window: int = 1,
        shuffle: bool = True,
    ):
        self.plan = plan
        self._seed, self._epoch = seed, epoch
        self._window = window if shuffle else 1
        blocks = plan.records if block_sizes is None else len(block_sizes)
        order = permutation(blocks, _BLOCKS, seed, epoch) if shuffle else np.arange(blocks)
        #: Where each block of the epoch's sequence begins, in the source and in the sequence.
        self._first_record, self._first_position = order, order
        self._unit_blocks = block_sizes is None
        if block_sizes is not None:  # single records need only their permutation, 8 bytes each
            sizes = np.asarray(block_sizes, np.int64)
            self._first_record = (np.cumsum(sizes) - sizes)[order]
            self._first_position = np.cumsum(sizes[order]) - sizes[order]
        self._windows: dict[tuple[int, int], np.ndarray] = {}

    def for_another_thread(self) -> EpochOrder:
        """Return a copy of this order for another thread, without computing it again."""
        other = copy.copy(self)
        other._windows = {}
        return other

    def records(self, shard: int, start: int, stop: int) -> np.ndarray:
        """Return the record numbers, int64, at positions [start, stop) of a shard's range."""
        low, high = self.plan.bounds[shard], self.plan.bounds[shard + 1]
        positions = np.arange(start, min(stop, high - low), dtype=np.int64)
        if self._window > 1:
            positions = self._shuffle_windows(shard, positions, int(high - low))
        positions = positions + low
        if self._unit_blocks:
            return self._first_record[positions]
        block = np.searchsorted(self._first_position, positions, side="right") - 1
        return self._first_record[block] + positions - self._first_position[block]

    def of_steps(self, shard: int, first: int, stop: int) -> np.ndarray:
        """Return the record numbers, int64, of a shard at steps [first, stop) of the epoch."""
        size = int(self.plan.sizes[shard])
        return self.records(shard, first * size, stop * size)

    def coming(self, shard: int, step: int, most: int) -> np.ndarray:
        """Return the first records of the blocks that a shard will need after its current window.

        They cover as much of the next window as the shard has taken of the current one, so that the next window is not
        read all at once when it begins.

        Args:
            step: the epoch's step that the shard takes next.
            most: the largest number of records.
        """
        position = step * int(self.plan.sizes[shard])
        if self._unit_blocks or self._window <= 1:
            return np.zeros(0, np.int64)
        low, high = self.plan.bounds[shard], self.plan.bounds[shard + 1]
        window, taken = divmod(position, self._window)
        start = (window + 1) * self._window
        stop = min(start + min(taken, most), high - low)
        if stop <= start:
            return np.zeros(0, np.int64)
        first, last = np.searchsorted(self._first_position, [low + start, low + stop - 1], side="right") - 1
        return self._first_record[first : last + 1]

    def _shuffle_windows(self, shard: int, positions: np.ndarray, length: int) -> np.ndarray:
        out = np.empty_like(positions)
        for w in np.unique(positions // self._window):
            here = positions // self._window == w
            base = int(w) * self._window
            out[here] = base + self._window_permutation(shard, int(w), length)[positions[here] - base]
        return out

    def _window_permutation(self, shard: int, w: int, length: int) -> np.ndarray:
        if (shard, w) not in self._windows:
            # A shard only moves forward: its earlier windows are not needed again.
            self._windows = {k: v for k, v in self._windows.items() if k[0] != shard}
            size = min(self._window, length - w * self._window)
            self._windows[shard, w] = permutation(size, _WINDOW, self._seed, self._epoch, shard, w)
        return self._windows[shard, w]


class BatchOrder:
    """The order of an epoch of batches with known sizes: step s has the s-th batch, for any number of shards."""

    def __init__(self, plan: BatchPlan):
        self.plan = plan

    def for_another_thread(self) -> BatchOrder:
        return self

    def of_steps(self, shard: int, first: int, stop: int) -> np.ndarray:
        records = [np.zeros(0, np.int64)]
        for step in range(first, stop):
            cuts = self.plan.starts[step] + self.plan.cuts(self.plan.records_of(step))
            records.append(np.arange(cuts[shard], cuts[shard + 1], dtype=np.int64))
        return np.concatenate(records)

    def coming(self, shard: int, step: int, most: int) -> np.ndarray:
        return np.zeros(0, np.int64)


#: The records of each logical shard at each step of an epoch.
Order = EpochOrder | BatchOrder
