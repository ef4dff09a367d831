"""Decides which gradients make an update, and which parameter server holds which variable. No TensorFlow here.

With synchronous aggregation a global batch is divided into N parts. Each part's gradient is computed from the same
weights, and the mean of all N is one update. If there are more than N workers, those that would be idle compute parts
again; the first gradient of a part counts. So a slow worker does not matter, no record is left out, and an update does
not depend on which worker was first. TF1's SyncReplicasOptimizer dropped the records of the slowest worker.
"""

from __future__ import annotations

from collections.abc import Sequence


class Aggregation:
    """Decides which part of a step to compute next, and which of the gradients, N of which make an update, count.
    Workers beyond N compute backups."""

    def __init__(self, parts: int, workers: int):
        self._parts, self._workers = parts, workers
        self._step = -1
        #: The number of times that each part of the step was handed out and not lost.
        self._copies = [0] * parts
        #: Parts of the step whose gradient was taken.
        self._done: set[int] = set()
        #: Number of gradients that were asked for and have not arrived, including those of earlier steps.
        self.under_way = 0

    def begin(self, step: int) -> None:
        """Begin a step; gradients of all other steps are stale from now on."""
        self._step = step
        self._copies, self._done = [0] * self._parts, set()

    def ask(self) -> int | None:
        """Return the part that the next idle worker computes; None if there is nothing to do, or no worker is idle.
        Parts that no worker has begun come first, then those begun least often, as long as there are backup workers."""
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
        """Note that a gradient was lost with its worker; its part has to be computed again."""
        self.under_way -= 1
        if step == self._step:
            self._copies[part] -= 1

    def arrive(self, step: int, part: int) -> bool:
        """Note that a gradient has arrived, and return whether it counts.

        It does not if its weights have been updated since, or if another worker has computed its part before.
        """
        self.under_way -= 1
        if step != self._step or part in self._done:
            return False
        self._done.add(part)
        return True

    @property
    def is_complete(self) -> bool:
        """Return whether the gradients of all parts have been taken."""
        return len(self._done) == self._parts


def spread(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each variable: the largest first, each to the server with the fewest bytes so far."""
    loads, places = [0] * servers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[i] = min(range(servers), key=lambda s: (loads[s], s))
        loads[places[i]] += max(1, sizes[i])
    return places


def rows(length: int, parts: int) -> list[int]:
    """Number of rows in each part of a variable that is divided along its first axis; they differ by at most one."""
    parts = max(1, min(parts, length))
    return [length // parts + (i < length % parts) for i in range(parts)]
