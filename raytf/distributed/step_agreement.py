"""The vector that ranks exchange in every step: flags, and the bits of a hash of their replica of the weights.

A hash has 64 bits. The ranks exchange these bits with the flags of the next call, which are summed over the ranks
anyway. All hashes are equal exactly if the sum of each bit is 0 or the number of ranks. Only if they differ do the
ranks exchange the hashes themselves.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

BITS = 64
#: The bit that marks a hash made on a device, which uses another hash function than a CPU does.
DEVICE_BIT = 1 << 63


def bits_of(value: int) -> np.ndarray:
    """Return the bits of a hash as float32 [64] of 0 and 1, the highest bit first."""
    return np.unpackbits(np.frombuffer(value.to_bytes(BITS // 8), np.uint8)).astype(np.float32)


def all_equal(sums: np.ndarray, world_size: int) -> bool:
    """Return whether all ranks sent the same hash, from the sums [64] of its bits over the ranks."""
    counts = np.rint(sums)
    if 0 < counts[0] < world_size:  # hashes of CPUs and of devices cannot be compared
        return True
    return bool(((counts == 0) | (counts == world_size)).all())


@dataclass(frozen=True)
class ReplicaVerdict:
    """The decision about replicas that differ.

    Attributes:
        apart: ranks whose weights differ from the majority; all ranks if there is no majority.
        donor: rank whose state the ranks `apart` receive; None if there is no majority.
    """

    apart: tuple[int, ...]
    donor: int | None


def judge(hashes: Sequence[int]) -> ReplicaVerdict | None:
    """Find the majority (more than half of the ranks); return None if all hashes are equal or cannot be compared."""
    if len({value & DEVICE_BIT for value in hashes}) > 1:  # hashes made on CPUs and on devices cannot be compared
        return None
    (most, count), *others = Counter(hashes).most_common()
    if not others:
        return None
    if 2 * count <= len(hashes):
        return ReplicaVerdict(tuple(range(len(hashes))), None)
    return ReplicaVerdict(tuple(r for r, value in enumerate(hashes) if value != most), list(hashes).index(most))


class StepFlag(enum.IntEnum):
    """Index of each flag in the vector."""

    WANT_SAVE = 0
    WRITTEN = 1
    COMMITTED = 2
    FAILED = 3
    CALL_STEPS = 4
    PARK = 5
    COPY = 6
    SHARE = 7
    PROBE = 8
    UNSEALED = 9
    REGROUP = 10


#: Length of the vector: the flags, followed by the bits of a hash of the weights.
LENGTH = len(StepFlag) + BITS


def vector(values: Mapping[StepFlag, float], weights_hash: int = 0) -> np.ndarray:
    """Return the vector of flags and hash, float32 [LENGTH], to be summed over the ranks. Missing flags are 0."""
    flags = np.zeros(LENGTH, np.float32)
    for flag, value in values.items():
        flags[flag] = value
    flags[len(StepFlag) :] = bits_of(weights_hash)
    return flags


def agree(sums: np.ndarray, world_size: int) -> bool:
    """Return whether all ranks sent the same hash, from the sum of their vectors."""
    return all_equal(sums[len(StepFlag) :], world_size)
