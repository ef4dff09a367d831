"""Workers that leave a group while the others go on, and how long that is waited for. No Ray here.

`raytf.driver.ray_train.dismissal` tells the arbiter of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Sequence

#: Seconds for workers that come to join, and those that they come for to leave, before the cluster is looked at anew.
_LEAVE_SECONDS = 120.0
#: Seconds until workers are added again after there was no room for them.
_FULL_SECONDS = 10.0


class Departures:
    """Notes who is to leave, and who has left. Whatever names a worker is its place.

    Args:
        clock: seconds, of any clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._dismissed: set[Hashable] = set()
        self._gone: set[int] = set()
        self._rests_until = float("-inf")

    def reset(self) -> None:
        """A new group begins."""
        self._dismissed, self._gone = set(), set()
        self.go_on()

    @property
    def are_awaited(self) -> bool:
        """Whether the group must not be changed otherwise yet."""
        return self._clock() < self._rests_until

    def go_on(self) -> None:
        """The group has changed: what it needs is decided anew."""
        self._rests_until = float("-inf")

    def wait_for_room(self) -> None:
        """There was no room for workers that were to be added, or they did not start."""
        self._rests_until = self._clock() + _FULL_SECONDS

    def dismiss(self, workers: Collection[Hashable]) -> None:
        """The arbiter was told that workers are to leave."""
        self._dismissed, self._rests_until = set(workers), self._clock() + _LEAVE_SECONDS

    def left(self, places: Sequence[Hashable], ended: Collection[int]) -> set[int]:
        """Ranks of workers that have left as they were told to, never all.

        Args:
            places: of the workers, by rank.
            ended: ranks of the workers that do not run any more.
        """
        self._gone = {rank for rank, place in enumerate(places) if place in self._dismissed and rank in ended}
        if len(self._gone) == len(places):
            self._gone = set()
        self._dismissed -= {places[rank] for rank in self._gone}
        return self._gone

    def take(self) -> set[int]:
        """What `left` has found; once."""
        gone, self._gone = self._gone, set()
        return gone
