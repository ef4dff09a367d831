"""The commit of one checkpoint: every rank votes, and the same event follows on all of them."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic

from raytf.checkpoint.tier import Phase, Save, Votes, Writing


class Event(enum.Enum):
    """The next action of a rank."""

    NOTHING = "nothing"
    BEGIN = "begin"  # write your share of the state as it is now
    COMMIT = "commit"  # all shares are there: rank 0 writes the manifest
    DONE = "done"  # the checkpoint can be restored
    FAILED = "failed"  # given up; training goes on


def advance(phase: Phase, votes: Votes, world_size: int) -> tuple[Phase, Event]:
    """Return the next phase of a save. Every rank sees the same votes, so every rank takes the same way."""
    if phase is Phase.IDLE:
        return (Phase.WRITING, Event.BEGIN) if votes.want else (phase, Event.NOTHING)
    if votes.failed:
        return Phase.IDLE, Event.FAILED
    if phase is Phase.WRITING and votes.written >= world_size:
        return Phase.COMMITTING, Event.COMMIT
    if phase is Phase.COMMITTING and votes.committed:
        return Phase.IDLE, Event.DONE
    return phase, Event.NOTHING


class Commit(Generic[Save]):
    """The saves of one tier, one at a time. It alone knows the phase, and has the tier do what follows from votes.

    Args:
        tier: of this rank.
        world_size: ranks that vote.
        on_failure: called before a save that failed is aborted.

    Attributes:
        save: the one under way, or the last one; None before the first.
    """

    def __init__(self, tier: Writing[Save], world_size: int, on_failure: Callable[[], None] = lambda: None):
        self._tier = tier
        self._world_size = world_size
        self._on_failure = on_failure
        self._phase = Phase.IDLE
        self.save: Save | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way."""
        return self._phase is Phase.IDLE

    @property
    def under_way(self) -> Save | None:
        """The save that is being written or committed.

        Returns:
            None when idle.
        """
        return None if self.is_idle else self.save

    def votes(self) -> Votes:
        """Return this rank's part of the votes."""
        return self._tier.vote(self._phase)

    def begin(self, save: Save) -> None:
        """Begin a save on which the ranks agree already; one of the same step may begin over itself."""
        self._phase, self.save = Phase.WRITING, save
        self._tier.begin(save)

    def advance(self, votes: Votes, make: Callable[[], Save] | None = None) -> Event:
        """Do what all ranks agreed on.

        Args:
            votes: of all ranks, added.
            make: the next save, where one is wanted; None where all begin by `begin`.

        Returns:
            What was done: DONE also where the last share already made the checkpoint complete.
        """
        phase, event = advance(self._phase, votes, self._world_size)
        if event is Event.BEGIN:
            assert make is not None, "votes for a save that nobody can make"
            self.begin(make())
        elif event is Event.COMMIT:
            self._phase = phase
            if self._tier.commit():
                return self._end()
        elif event is Event.DONE:
            return self._end()
        elif event is Event.FAILED:
            self.give_up()
        return event

    def give_up(self) -> None:
        """End the save under way as a failed one, or distrust the last one; every rank must do it at the same time."""
        self._phase = Phase.IDLE
        self._on_failure()
        self._tier.abort()

    def _end(self) -> Event:
        self._phase = Phase.IDLE
        self._tier.done()
        return Event.DONE
