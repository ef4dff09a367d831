"""Whether the ranks' replicas of the weights are equal, decided from a hash of each; arithmetic alone.

A hash has 64 bits. The ranks tell each other its bits with the flags of the next call, which are added over them
anyway: all hashes are equal exactly where each bit's sum is 0 or the number of ranks. Only where they are not do ranks
meet to see each other's hash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BITS = 64
#: Of the bits, the one that says that a hash was made on a device, which uses another law than a CPU does.
DEVICE_BIT = 1 << 63


def bits_of(value: int) -> np.ndarray:
    """The bits of a hash, float32 [64] of 0 and 1; the highest first."""
    return np.unpackbits(np.frombuffer(value.to_bytes(BITS // 8), np.uint8)).astype(np.float32)


def value_of(bits: np.ndarray) -> int:
    """The hash with some bits."""
    return int.from_bytes(np.packbits(np.asarray(bits) > 0.5).tobytes())


def all_equal(sums: np.ndarray, world_size: int) -> bool:
    """Whether all ranks told the same hash.

    Args:
        sums: [64] of bits over the ranks.
    """
    told = np.rint(sums)
    if 0 < told[0] < world_size:  # some of a CPU, some of a device: there is nothing that could be compared
        return True
    return bool(((told == 0) | (told == world_size)).all())


@dataclass(frozen=True)
class ReplicaVerdict:
    """What becomes of replicas that are not equal.

    Attributes:
        apart: ranks whose weights are others than those of most; where nobody can say who is right, all.
        donor: rank whose state those that are apart get; None where nobody can say who is right.
    """

    apart: tuple[int, ...]
    donor: int | None


def judge(hashes: Sequence[int]) -> ReplicaVerdict | None:
    """Who is right: more than half of the ranks, where their hashes are equal. None where all are equal."""
    (most, count), *others = Counter(hashes).most_common()
    if not others:
        return None
    if 2 * count <= len(hashes):
        return ReplicaVerdict(tuple(range(len(hashes))), None)
    return ReplicaVerdict(tuple(r for r, value in enumerate(hashes) if value != most), list(hashes).index(most))
