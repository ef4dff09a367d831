"""A rank's meeting with the other ranks of its generation: whom it calls, whom it answers, and when it gives up.

A rank calls all ranks before it, in their order, then answers all ranks after it, and then waits for the answers to its
calls. Events go in, and the next thing to do comes out, or an error that ends the meeting. Nothing here knows sockets
or clocks: whoever reports an event passes the time. `raytf.distributed.peer_connections` carries the decisions out, and
`tests.stress.simulate` tries them in a simulated world.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

#: What a connection is for.
DATA, HEARTBEATS = 0, 1
#: Seconds for all ranks to connect, on a loaded machine.
MEET_SECONDS = 60.0
#: Seconds for another host to take a connection. A kernel takes connections also while its processes are busy or
#: stopped, so a host that takes none is cut off.
REACH_SECONDS = 10.0

#: A connection with another rank: the rank, and what the connection is for.
Link = tuple[int, int]


class UnreachedError(ConnectionError):
    """Some ranks did not answer while the group met.

    Attributes:
        ranks: the ranks that did not answer.
    """

    def __init__(self, message: str, ranks: Iterable[int]):
        super().__init__(message)
        self.ranks = frozenset(ranks)


class MeetingPoint:
    """One rank's meeting with the others. Times are seconds of any clock that only goes forward.

    Args:
        rank: this rank.
        addresses: HOST:PORT of each rank, for messages.
        deadline: the time at which the meeting has failed.
    """

    def __init__(self, rank: int, addresses: Sequence[str], deadline: float):
        self._rank, self._addresses, self._deadline = rank, addresses, deadline
        purposes = DATA, HEARTBEATS
        self._uncalled = [(other, purpose) for other in range(rank) for purpose in purposes]
        self._awaited = {(other, purpose) for other in range(rank + 1, len(addresses)) for purpose in purposes}
        self._unheard = list(self._uncalled)
        self._reach_until = deadline

    @property
    def to_call(self) -> Link | None:
        """The next connection to make; None once all were made."""
        return self._uncalled[0] if self._uncalled else None

    @property
    def awaits_calls(self) -> bool:
        """Whether ranks after this one have yet to call. This rank answers them once it has made its own calls."""
        return bool(self._awaited)

    @property
    def to_hear(self) -> Link | None:
        """The next connection on which an answer has to come; None once all have answered."""
        return self._unheard[0] if self._unheard else None

    def dial(self, now: float) -> None:
        """Note that this rank tries to make the connection `to_call`."""
        self._reach_until = min(self._deadline, now + REACH_SECONDS)

    def called(self) -> None:
        """Note that the connection `to_call` was made, and the call sent."""
        del self._uncalled[0]

    def not_reached(self, error: OSError, now: float, is_over: bool) -> None:
        """Note that the connection `to_call` could not be made. It is to be tried again, unless this raises an error.

        Args:
            error: why. A host that refuses may not listen yet.
            now: the time.
            is_over: whether the generation is known to be over.

        Raises:
            ConnectionAbortedError, UnreachedError: as `look`.
        """
        self._check_over(is_over)
        if now >= self._deadline or not isinstance(error, ConnectionRefusedError):
            self._give_up({self._uncalled[0][0]}, f"cannot be reached: {error}")

    def answers(self, caller: Link, called: int, is_of_group: bool) -> bool:
        """Return whether to answer a caller. Otherwise it is a stranger, and this rank hangs up.

        Args:
            caller: the rank that the caller says it is, and what the connection is for.
            called: the rank that the caller wants.
            is_of_group: whether the caller has proved that it knows the group's key.
        """
        is_welcome = is_of_group and called == self._rank and caller in self._awaited
        if is_welcome:
            self._awaited.remove(caller)
        return is_welcome

    def heard(self, is_of_group: bool) -> None:
        """Note that an answer has come on the connection `to_hear`.

        Args:
            is_of_group: whether the answer proves that the other rank knows the group's key.

        Raises:
            ConnectionError: it does not.
        """
        rank, _ = self._unheard.pop(0)
        if not is_of_group:
            raise ConnectionError(f"{self._names({rank})} is not of this group")

    def lose(self, rank: int, text: str) -> NoReturn:
        """End the meeting because a connection has ended. A rank that was reached does not count as unreached.

        Args:
            rank: the other side of the connection.
            text: what has happened, as a predicate.

        Raises:
            ConnectionError: always.
        """
        raise ConnectionError(f"{self._names({rank})} {text}")

    def look(self, now: float, is_over: bool) -> None:
        """Check whether to wait any longer; to be called again and again while this rank waits.

        Args:
            now: the time.
            is_over: whether the generation is known to be over.

        Raises:
            ConnectionAbortedError: the generation is over.
            UnreachedError: ranks have not answered in time.
        """
        self._check_over(is_over)
        if self._uncalled:
            if now >= self._reach_until:
                self._give_up({self._uncalled[0][0]}, "cannot be reached: no answer")
        elif now >= self._deadline:
            if self._awaited:
                self._give_up({rank for rank, _ in self._awaited}, "did not connect in time")
            if self._unheard:
                self._give_up({self._unheard[0][0]}, "did not answer in time")

    def _check_over(self, is_over: bool) -> None:
        if is_over:
            raise ConnectionAbortedError("another rank is lost")

    def _give_up(self, ranks: set[int], text: str) -> NoReturn:
        raise UnreachedError(f"{self._names(ranks)} {text}", ranks)

    def _names(self, ranks: set[int]) -> str:
        return ", ".join(f"rank {rank} at {self._addresses[rank]}" for rank in sorted(ranks))
