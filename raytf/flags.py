"""What the ranks tell each other with every call of the training step: numbers that are added over them."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import numpy as np


class Flag(enum.IntEnum):
    """Places in the vector of flags."""

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


def vector(given: Mapping[Flag, float]) -> np.ndarray:
    """Flags as they are added over the ranks, float32 [F]; 0 for those that are not given."""
    flags = np.zeros(len(Flag), np.float32)
    for flag, value in given.items():
        flags[flag] = value
    return flags
