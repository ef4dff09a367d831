"""Workers that leave a group while the others go on, and how long that is waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raytf._ray.partial_group import WorkerPlace, place_of
from raytf.distributed.arbiter_link import ArbiterAddress, ArbiterLink, worker_name
from raytf.errors import WorkerLostError

#: Seconds for workers that come to join, and those that they come for to leave, before the cluster is looked at anew.
_LEAVE_SECONDS = 120.0
#: Seconds until workers are added again after there was no room for them.
_FULL_SECONDS = 10.0


class Departures:
    """Tells the arbiter who is to leave, and notes who has left.

    Args:
        arbiter: of the run; None where workers do not leave while others train.
        clock: seconds, of any clock that only goes forward.
    """

    def __init__(self, arbiter: ArbiterAddress | None, clock: Callable[[], float] = time.monotonic):
        self._arbiter, self._clock = arbiter, clock
        self._dismissed: set[WorkerPlace] = set()
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

    def dismiss(self, workers: Sequence[WorkerPlace], after: Sequence[WorkerPlace]) -> None:
        """Have workers leave, once others have come."""
        assert self._arbiter is not None
        with contextlib.suppress(WorkerLostError):  # it ends with the driver
            link = ArbiterLink.connect(self._arbiter, "the controller")
            link.dismiss([worker_name(*each) for each in workers], [worker_name(*each) for each in after])
            link.close()
        self._dismissed, self._rests_until = set(workers), self._clock() + _LEAVE_SECONDS

    def left(self, workers: Sequence[Any], statuses: Mapping[int, Any]) -> set[int]:
        """Ranks of workers that have left as they were told to, never all.

        Args:
            workers: Ray Train's, by rank.
            statuses: rank -> how it is.
        """
        places = [place_of(worker) for worker in workers]
        self._gone = {r for r, place in enumerate(places) if place in self._dismissed and not statuses[r].running}
        if len(self._gone) == len(workers):
            self._gone = set()
        self._dismissed -= {places[rank] for rank in self._gone}
        return self._gone

    def take(self) -> set[int]:
        """What `left` has found; once."""
        gone, self._gone = self._gone, set()
        return gone
