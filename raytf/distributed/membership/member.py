"""A worker's place in a group that repairs itself: a decision from what its arbiter has told it and how meetings ended.

Events go in, and what to ask or to do comes out; nothing here knows time, sockets or processes.
`raytf.distributed.membership.arbiter_link` talks with the arbiter, `raytf.training.synchronous` meets the other ranks,
and `tests.stress.simulate` tries both in a simulated world.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from raytf.distributed.membership.arbiter_messages import News
from raytf.distributed.membership.generations import Generation, node_of
from raytf.errors import WorkerLostError

#: The number of times that ranks meet again if they lose another rank while they meet.
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
        name: of the worker.

    Attributes:
        number: of the generation that the worker belongs to; 0 before the first one.
        is_lost: whether the worker no longer belongs to the group, since the arbiter does not hear it.
    """

    def __init__(self, name: str):
        self.name, self.number, self.is_lost = name, 0, False
        #: The numbers of the generation that pauses after a step, of the one that lost a member, and of the one that a
        #: member has left.
        self._paused = self._broken = self._left = -1
        #: Meetings that have failed since the last one that did not, and whom this worker did not reach in the last.
        self._failed, self._unreached = 0, list[str]()
        #: Whether the ranks of the present generation have met, or had connected before their meeting failed.
        self._has_met = False

    @property
    def has_joined(self) -> bool:
        return self.number > 0

    @property
    def is_pause_wanted(self) -> bool:
        """Whether the members should leave their generation between two steps, since somebody wants to join or to
        leave."""
        return self.has_joined and self._paused == self.number

    def is_broken(self, number: int) -> bool:
        """Return whether a member of a generation is known to be lost, or this worker is."""
        return self.is_lost or self._broken == number

    def is_over(self, number: int) -> bool:
        """Return whether a generation is known to have lost a member, or to have been left by one."""
        return self.is_broken(number) or self._left == number

    def hear(self, news: News) -> None:
        """Note what the arbiter says of generations. What answers a question belongs to `take`."""
        self._paused = news.numbers.get("pause", self._paused)
        self._broken = news.numbers.get("lost", self._broken)
        self._left = news.numbers.get("left", self._left)

    def joining(self, address: str, wanted: int, order: int) -> dict[str, Any]:
        """Return the message with which this worker, which listens at an address, asks to become a member of the next
        generation; see `Membership.join`."""
        return {"join": {"address": address, "wanted": wanted, "order": order}}

    def leaving(self, address: str, step: int) -> dict[str, Any]:
        """Return the message with which this worker, which listens at an address from now on, leaves the present
        generation after a step, -1 if it has no state, and asks for the next one."""
        met = {"unreached": sorted(self._unreached), "met": self._has_met}
        return {"leave": {"number": self.number, "address": address, "step": step} | met}

    def take(self, answer: Mapping[str, Any]) -> Generation:
        """Take the arbiter's answer to a question.

        Args:
            answer: of `News`.

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
        """Note that the ranks of the generation have not met, so that this worker leaves it: some were unreached, or
        all had connected, so that no missing link explains it. After several tries raise a WorkerLostError."""
        self._failed, self._unreached = self._failed + 1, [generation.members[rank] for rank in unreached]
        self._has_met = are_connected
        if self._failed >= _MEETINGS:
            raise WorkerLostError(f"the ranks have not met in {_MEETINGS} tries")


class Transfer(NamedTuple):
    """The ranks that give the state to others after a rendezvous, and those that take it.

    Attributes:
        giver: the rank that tells the others what is not a variable.
        givers: the ranks that are furthest.
        takers: the ranks that are behind, or have no state.
    """

    giver: int
    givers: tuple[int, ...]
    takers: tuple[int, ...]


def transfer(steps: Sequence[int]) -> Transfer:
    """Decide who gives the state to whom, by the last step that each rank has finished; -1 for one without a state."""
    furthest = max(steps)
    givers = tuple(rank for rank, step in enumerate(steps) if step == furthest)
    return Transfer(givers[0], givers, tuple(rank for rank, step in enumerate(steps) if step < furthest))


def step_after_broken_transfer(step: int, steps: Sequence[int]) -> int:
    """Return the last step that a rank has finished after a transfer that did not end, from all ranks' steps before it;
    -1 if it has no state any more: a state that was only taken in part is none."""
    return -1 if step < max(steps) else step
