"""What the ranks tell each other with every call of the training step: numbers that are added over them."""

from __future__ import annotations

import enum


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
