"""What parameter servers have to decide: which gradients make an update, and which server holds what. No TensorFlow.

With synchronous aggregation a global batch is cut into N parts. Each part's gradient is computed from the same
weights, and the mean of all N is one update. Where there are more than N workers, those that would be idle compute
parts a second time; the first gradient of a part counts. So it does not matter who is slow, no record is left out, and
what an update learns does not depend on who was first: TF1's SyncReplicasOptimizer dropped the records of the slowest.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Arrival(enum.Enum):
    """What becomes of a gradient."""

    TAKEN = "taken"
    DUPLICATE = "duplicate"  # a backup of a part that another worker has computed already
    STALE = "stale"  # of weights that have been updated since


class Aggregation:
    """Which part of a step to compute next, and which gradients count.

    Args:
        parts: N, gradients that make an update.
        workers: that compute; those beyond N are backups.
    """

    def __init__(self, parts: int, workers: int):
        self._parts, self._workers = parts, workers
        self._step = -1
        self._copies = [0] * parts
        self._done: set[int] = set()
        #: Computations that were asked for and have not arrived, those of earlier steps too.
        self.under_way = 0

    def begin(self, step: int) -> None:
        """The weights are those of a step; gradients of all others are stale from now on."""
        self._step = step
        self._copies, self._done = [0] * self._parts, set()

    def ask(self) -> int | None:
        """The part that the next idle worker computes.

        Parts that nobody has begun come first. Then the ones that were begun least often, as many as there are backups.

        Returns:
            None where there is nothing to do, or nobody idle.
        """
        if self.under_way >= self._workers:
            return None
        waiting = [part for part in range(self._parts) if part not in self._done]
        if not waiting:
            return None
        part = min(waiting, key=lambda p: (self._copies[p], p))
        backups = sum(self._copies) - sum(copies > 0 for copies in self._copies)
        if self._copies[part] and backups >= self._workers - self._parts:
            return None
        self._copies[part] += 1
        self.under_way += 1
        return part

    def lose(self, step: int, part: int) -> None:
        """A gradient will never arrive: it was lost with its worker, and somebody has to compute it again."""
        self.under_way -= 1
        if step == self._step:
            self._copies[part] -= 1

    def arrive(self, step: int, part: int) -> Arrival:
        """A gradient is there."""
        self.under_way -= 1
        if step != self._step:
            return Arrival.STALE
        if part in self._done:
            return Arrival.DUPLICATE
        self._done.add(part)
        return Arrival.TAKEN

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all parts have been taken."""
        return len(self._done) == self._parts


def spread(sizes: Sequence[int], servers: int) -> list[int]:
    """The server of each variable: the largest first, each to the server that has least.

    Args:
        sizes: bytes of each.
        servers: how many there are.
    """
    loads, places = [0] * servers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[i] = min(range(servers), key=lambda s: (loads[s], s))
        loads[places[i]] += max(1, sizes[i])
    return places


def rows(length: int, parts: int) -> list[int]:
    """Rows of each part of a variable that is cut along its first axis; they differ by at most one."""
    parts = max(1, min(parts, length))
    return [length // parts + (i < length % parts) for i in range(parts)]
