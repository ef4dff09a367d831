"""Saving together: the driver or the scaling policy asks the ranks to save and wait, and they answer."""

from __future__ import annotations


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
        """A group starts, without a request yet."""
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
        """Whether ranks that wait because of a request may train on."""
        return ticket <= self._released

    def wanted(self) -> int:
        """The ticket of the request to save and wait; 0 if there is none."""
        return self._ticket

    def answer(self, ticket: int, saved: bool) -> None:
        """The ranks wait, and could or could not save. Answers to old requests, perhaps of dead ranks, are ignored."""
        if ticket == self._ticket:
            self._parked = saved

    def parked(self, ticket: int) -> bool | None:
        """The answer to a request.

        Returns:
            None until there is one.
        """
        return self._parked if ticket and ticket == self._ticket else None
