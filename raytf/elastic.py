"""When a run changes its number of workers: a decision of time and counts alone. No Ray and no TensorFlow here."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

#: Seconds without a further change of the cluster before a run follows one: nodes that were asked for together come
#: together, and a node that comes and goes is not worth a restart.
SETTLE_SECONDS = 4.0
#: Seconds after which a run follows a cluster that still changes.
PATIENCE_SECONDS = 8.0


def fitting(free: Mapping[str, float], each: Mapping[str, float]) -> int:
    """Workers that fit into what a node has free.

    Args:
        free: amounts by resource.
        each: of one worker, some of it above 0.
    """
    return int(min(free.get(name, 0) // amount for name, amount in each.items() if amount))


class Move(enum.Enum):
    """What to do with a group of workers that trains well."""

    KEEP = "keep"
    PARK = "park"  # ask all ranks to save the present step and to wait
    RELEASE = "release"  # the reason to park is gone: train on
    RESIZE = "resize"  # all ranks have saved: replace the group by one of the new size


@dataclass(frozen=True)
class View:
    """The cluster and the run at one moment.

    Attributes:
        now: seconds, of any clock that only goes forward.
        workers: that run.
        possible: that the cluster can run now, without nodes that are about to go; at most the most wanted.
        leaving: whether a node of the run was given notice.
        parked: True when all ranks have saved and wait, False when they could not save, None while neither is known.
    """

    now: float
    workers: int
    possible: int
    leaving: bool = False
    parked: bool | None = None


class Resizer:
    """Follows the cluster without haste: once a change has lasted, and at most once in so many seconds.

    Notice for a node of the run is followed at once, since the node goes anyway. What cannot be planned, the loss of a
    node without notice, is told with `started`, and counts: a node that goes and comes back within the interval costs
    one restart, not two.

    Args:
        fewest: workers below which there is no run.
        every_seconds: between two planned changes.
    """

    def __init__(self, fewest: int, every_seconds: float):
        self._fewest, self._every = fewest, every_seconds
        self._workers: int | None = None
        self._changed_at = float("-inf")
        self._seen: int | None = None
        self._seen_at = self._differs_at = self._failed_at = float("-inf")
        self._parking = False

    def started(self, workers: int, now: float) -> None:
        """A group of so many workers starts, for whatever reason."""
        if self._workers is not None and workers != self._workers:
            self._changed_at = now
        self._workers, self._seen, self._differs_at, self._parking = workers, None, now, False

    def decide(self, view: View) -> Move:
        """The next move; each is answered before the next one is asked for, or the view says otherwise."""
        if view.possible != self._seen:
            self._seen, self._seen_at = view.possible, view.now
        wanted = view.possible >= self._fewest and (view.leaving or view.possible != view.workers)
        if not wanted:
            self._differs_at = view.now
        if self._parking:
            if not wanted or view.parked is False:
                self._parking = False
                self._failed_at = view.now if view.parked is False else self._failed_at
                return Move.RELEASE
            return Move.RESIZE if view.parked else Move.KEEP
        settled = view.now - self._seen_at >= SETTLE_SECONDS or view.now - self._differs_at >= PATIENCE_SECONDS
        lasting = settled and view.now - self._changed_at >= self._every
        # Training goes on between two tries to save, else a run on failing storage would only try.
        rested = view.now - self._failed_at >= SETTLE_SECONDS
        if wanted and rested and (lasting or view.leaving):
            self._parking = True
            return Move.PARK
        return Move.KEEP
