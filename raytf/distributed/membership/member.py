"""A worker's membership in a group that repairs itself, decided from the arbiter's messages and from failed meetings.

The methods take events and return messages to send; nothing here uses time, sockets or processes.
`raytf.distributed.membership.arbiter_link` talks to the arbiter, `raytf.training.synchronous` meets the other ranks,
and `tests.stress.simulate` tests both in a simulated world.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from raytf.distributed.membership.arbiter_messages import News
from raytf.distributed.membership.generations import Generation, node_of
from raytf.errors import WorkerLostError

#: Number of meetings in a row that may fail before the worker gives up.
_MEETINGS = 10


class LeftBehindError(WorkerLostError):
    """The other workers continue without this one, or have lost the driver."""


class UnreachableError(LeftBehindError):
    """This worker, on `node` (Ray's id), and others cannot reach each other, so the others continue without it."""

    def __init__(self, message: str, node: str):
        super().__init__(message)
        self.node = node


class DismissedError(Exception):
    """This worker has left as planned, and the others continue without it."""


class RunOverError(Exception):
    """The run was over, with this result, when this worker joined."""

    def __init__(self, result: dict[str, Any]):
        super().__init__("the run is over")
        self.result = result


class Member:
    """A worker's view of its group.

    Args:
        name: name of the worker.

    Attributes:
        number: number of the worker's generation; 0 before the first one.
        is_lost: whether the worker no longer belongs to the group, because it has lost the arbiter.
    """

    def __init__(self, name: str):
        self.name, self.number, self.is_lost = name, 0, False
        #: Numbers of the latest generations that should pause, that lost a member, and that a member has left.
        self._paused = self._broken = self._left = -1
        #: Number of meetings that have failed in a row, and the members that were not reached in the latest one.
        self._failed, self._unreached = 0, list[str]()
        #: Whether the ranks of the current generation have met, or had connected before their meeting failed.
        self._has_met = False

    @property
    def has_joined(self) -> bool:
        return self.number > 0

    @property
    def is_pause_wanted(self) -> bool:
        """Whether the members should leave their generation between two steps, because a worker wants to join or
        should leave."""
        return self.has_joined and self._paused == self.number

    def is_broken(self, number: int) -> bool:
        """Return whether a member of a generation, or this worker, is known to be lost."""
        return self.is_lost or self._broken == number

    def is_over(self, number: int) -> bool:
        """Return whether a member of a generation is known to be lost or to have left."""
        return self.is_broken(number) or self._left == number

    def hear(self, news: News) -> None:
        """Record the arbiter's news about generations. Answers are passed to `take`."""
        self._paused = news.numbers.get("pause", self._paused)
        self._broken = news.numbers.get("lost", self._broken)
        self._left = news.numbers.get("left", self._left)

    def joining(self, address: str, wanted: int, order: int) -> dict[str, Any]:
        """Return the message in which this worker, listening at `address`, requests to join the next generation; see
        `Membership.join`."""
        return {"join": {"address": address, "wanted": wanted, "order": order}}

    def leaving(self, address: str, step: int) -> dict[str, Any]:
        """Return the message in which this worker, now listening at `address`, leaves the current generation after a
        step (-1 if it has no state) and requests to join the next one."""
        met = {"unreached": sorted(self._unreached), "met": self._has_met}
        return {"leave": {"number": self.number, "address": address, "step": step} | met}

    def take(self, answer: Mapping[str, Any]) -> Generation:
        """Process the arbiter's answer to a request.

        Args:
            answer: see `News`.

        Returns:
            The generation that this worker belongs to from now on.

        Raises:
            LeftBehindError: the arbiter is gone, or the others continue without this worker.
            RunOverError: the run is over.
            DismissedError: this worker has left for good, as planned.
        """
        if "end" in answer:
            if answer.get("unreachable"):
                raise UnreachableError(answer["end"], node_of(self.name))
            raise LeftBehindError(answer["end"])
        if "over" in answer:
            raise RunOverError(answer["over"])
        if "dismissed" in answer:
            raise DismissedError("the others continue without this worker, as planned")
        generation: Generation = answer["generation"]
        self.number, self._has_met = generation.number, False
        return generation

    def met(self) -> None:
        self._failed, self._unreached, self._has_met = 0, [], True

    def not_met(self, generation: Generation, unreached: Collection[int], are_connected: bool = False) -> None:
        """Record that the meeting of the generation failed, so this worker leaves it; raise a WorkerLostError after too
        many failures in a row. If all ranks had connected, no missing link explains the failure."""
        self._failed, self._unreached = self._failed + 1, [generation.members[rank] for rank in unreached]
        self._has_met = are_connected
        if self._failed >= _MEETINGS:
            raise WorkerLostError(f"the ranks have not met in {_MEETINGS} tries")


class Transfer(NamedTuple):
    """The ranks that send the state after a rendezvous, and the ranks that receive it.

    Attributes:
        giver: the rank that sends the parts of the state that are not variables.
        givers: the most advanced ranks.
        takers: the ranks that are behind or have no state.
    """

    giver: int
    givers: tuple[int, ...]
    takers: tuple[int, ...]


def transfer(steps: Sequence[int]) -> Transfer:
    """Decide which ranks send the state to which, from each rank's last finished step (-1 without state)."""
    furthest = max(steps)
    givers = tuple(rank for rank, step in enumerate(steps) if step == furthest)
    return Transfer(givers[0], givers, tuple(rank for rank, step in enumerate(steps) if step < furthest))


def step_after_broken_transfer(step: int, steps: Sequence[int]) -> int:
    """Return a rank's last finished step after an incomplete transfer, from all ranks' steps before it. Return -1 for a
    taker, because a partly received state is unusable."""
    return -1 if step < max(steps) else step
