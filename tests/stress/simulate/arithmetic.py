"""What simulated workers train: whole numbers, so that the state after a step is known beforehand."""

from __future__ import annotations

from functools import cache

#: Of each step; ranks divide them.
SHARDS = 6
_MODULUS = (1 << 61) - 1


def own_shards(rank: int, world_size: int) -> range:
    """Return the shards of a rank."""
    return range(SHARDS * rank // world_size, SHARDS * (rank + 1) // world_size)


def gradient(step: int, shards: range) -> int:
    """Return the sum of some shards' gradients in a step."""
    return sum((step * 1_000_003 + shard * 7_919 + 1) ** 2 for shard in shards)


def updated(state: int, step: int, total: int) -> int:
    """Return the state after a step: the order of steps counts, and so does each step."""
    return (state * 31 + total + step) % _MODULUS


@cache
def expected(step: int) -> int:
    """Return the state after a step of an undisturbed run."""
    return 1 if step == 0 else updated(expected(step - 1), step, gradient(step, range(SHARDS)))
