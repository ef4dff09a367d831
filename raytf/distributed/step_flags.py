"""What the ranks exchange with every call of the training step: numbers that are summed over them."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import numpy as np

from raytf.distributed import replica_agreement


class StepFlag(enum.IntEnum):
    """Indices in the vector of flags."""

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
LENGTH = len(StepFlag) + replica_agreement.BITS


def vector(given: Mapping[StepFlag, float], weights_hash: int = 0) -> np.ndarray:
    """Flags and a hash, to be summed over the ranks, float32 [LENGTH]; 0 for flags that are not given."""
    flags = np.zeros(LENGTH, np.float32)
    for flag, value in given.items():
        flags[flag] = value
    flags[len(StepFlag) :] = replica_agreement.bits_of(weights_hash)
    return flags


def agree(sums: np.ndarray, world_size: int) -> bool:
    """Whether all ranks sent the same hash, given the sum of their vectors."""
    return replica_agreement.all_equal(sums[len(StepFlag) :], world_size)
