"""The monitor's knowledge of worker groups: the ranks of the present group, records of earlier groups, and requests to
save and wait."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raytf.driver.supervision.hang_detector import Heartbeats
from raytf.training.process.heartbeat_types import HangFinding

#: In place of a process: those of an earlier group.
_GONE = 0


class Roster(Heartbeats):
    """The ranks of the present group, as far as they have sent heartbeats.

    Attributes:
        blamed: who hangs; None while no rank is blamed.
        noticed: ranks on nodes with notice -> Ray's ids of these nodes.
        ends: Ray's ids of nodes whose workers reported a notice -> when they go, by the clock of `sightings`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blamed: HangFinding | None = None
        self.noticed: dict[int, str] = {}
        self.ends: dict[str, float] = {}

    def begin_group(self) -> int:
        """Start a group, of which nothing is known yet; returns its number."""
        self.blamed, self.noticed = None, {}
        return self.begin()

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks that other workers have now; nobody is blamed any more."""
        super().forget(ranks)
        self.blamed, self.noticed = None, {}


class GroupHistory:
    """Kept as long as the driver lives.

    Args:
        void: of the run's folder, as `raytf.checkpoint.invalidated_states.VoidStates.entries` has them.
    """

    def __init__(self, void: Sequence[tuple[int, Sequence[str]]] = ()):
        self._void = [(after, list(attempts)) for after, attempts in void]
        #: Node -> process -> the step at which it began to train, and that of the latest audit that has agreed with it.
        self._standings: dict[str, dict[int, tuple[int, int]]] = {}

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """Mark states after a step, of these attempts, as void."""
        entry = after, list(attempts)
        if entry not in self._void:
            self._void.append(entry)

    def stand(self, node: str, process: int, joined: int, vouched: int) -> None:
        """Record since which step a process of a node trains, and at which step an audit has agreed with it last."""
        standings = self._standings.setdefault(node, {})
        standings.pop(_GONE, None)  # this process has begun with that
        standings[process] = (joined, vouched)

    def begin_group(self) -> None:
        """Forget all processes; those of the new group begin with what is known of their nodes."""
        self._standings = {node: {_GONE: standing} for node, standing in self._worst().items()}

    def for_new_ranks(self) -> tuple[list[tuple[int, list[str]]], dict[str, tuple[int, int]]]:
        """Return void states, and the standing of each node, which is that of its worst process."""
        return list(self._void), self._worst()

    def _worst(self) -> dict[str, tuple[int, int]]:
        return {
            node: (min(joined for joined, _ in standings.values()), min(vouched for _, vouched in standings.values()))
            for node, standings in self._standings.items()
        }


class Parking:
    """The latest request that the ranks save and wait, and their answer. Each request has a number, its ticket.

    Attributes:
        phase: what the ranks do because of it, for people.
    """

    def __init__(self) -> None:
        self.phase = "resizing"
        self._ticket = self._tickets = self._released = 0
        self._parked: bool | None = None

    def begin_group(self) -> None:
        """Start a group, without a request yet."""
        # Not released: ranks of the last group that wait would otherwise train on until they are ended.
        self._ticket = 0

    def park(self, is_stop: bool = False) -> int:
        """Ask the ranks to save and wait, even those that already wait; returns the ticket of this request.

        Args:
            is_stop: whether the run stops then, rather than changes the number of workers.
        """
        self.phase = "saving" if is_stop else "resizing"
        self._released = self._tickets
        self._tickets += 1
        self._ticket, self._parked = self._tickets, None
        return self._ticket

    def release(self, ticket: int) -> None:
        """End the wait, unless there was another request after the one with this ticket."""
        if ticket == self._tickets:
            self._released, self._ticket = self._tickets, 0

    def is_released(self, ticket: int) -> bool:
        """Return whether ranks that wait because of a request may train on."""
        return ticket <= self._released

    def wanted(self) -> int:
        """Return the ticket of the request to save and wait; 0 if there is none."""
        return self._ticket

    def answer(self, ticket: int, saved: bool) -> None:
        """Take the answer of the ranks: they wait, and could or could not save. Answers to old requests, perhaps of
        dead ranks, are ignored."""
        if ticket == self._ticket:
            self._parked = saved

    def parked(self, ticket: int) -> bool | None:
        """Return the answer to a request.

        Returns:
            None until there is one.
        """
        return self._parked if ticket and ticket == self._ticket else None
