"""The commit of one checkpoint: every rank votes, and all ranks then act on the same event."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

#: The data of one save.
Save = TypeVar("Save", contravariant=True)


class Phase(enum.Enum):
    """The phase of a save on a rank."""

    IDLE = "idle"
    WRITING = "writing"  # every rank writes its share
    COMMITTING = "committing"  # rank 0 writes the manifest


@dataclass(frozen=True)
class Votes:
    """The votes of one rank about the save under way, or their sums over all ranks, which are equal on every rank."""

    want: float = 0
    written: float = 0
    committed: float = 0
    failed: float = 0

    def __add__(self, other: Votes) -> Votes:
        return Votes(
            self.want + other.want,
            self.written + other.written,
            self.committed + other.committed,
            self.failed + other.failed,
        )


class Event(enum.Enum):
    """The next action of a rank."""

    NOTHING = "nothing"
    BEGIN = "begin"  # write this rank's share of the present state
    COMMIT = "commit"  # all shares are written: rank 0 writes the manifest
    DONE = "done"  # the checkpoint can be restored
    FAILED = "failed"  # the save is given up; training continues


def advance(phase: Phase, votes: Votes, world_size: int) -> tuple[Phase, Event]:
    """Return the next phase of a save and the event. All ranks have the same votes, so they get the same result."""
    if phase is Phase.IDLE:
        return (Phase.WRITING, Event.BEGIN) if votes.want else (phase, Event.NOTHING)
    if votes.failed:
        return Phase.IDLE, Event.FAILED
    if phase is Phase.WRITING and votes.written >= world_size:
        return Phase.COMMITTING, Event.COMMIT
    if phase is Phase.COMMITTING and votes.committed:
        return Phase.IDLE, Event.DONE
    return phase, Event.NOTHING


class Writing(Protocol[Save]):
    """Writes this rank's part of a save, one save at a time, as `raytf.checkpoint.durable.DurableTier` does.

    `Commit` makes the same calls on every rank, and owns the phase. No call waits for the work that it starts.
    """

    def begin(self, save: Save) -> None: ...

    def vote(self, phase: Phase) -> Votes:
        """Return this rank's progress or failure as votes."""
        ...

    def commit(self) -> None:
        """Start to complete the checkpoint, now that all shares are written."""
        ...

    def done(self) -> None: ...

    def abort(self) -> None:
        """Abandon the save, which failed on some rank and must not become a checkpoint."""
        ...


class Commit(Generic[Save]):
    """Runs the saves of a tier, one at a time. It owns the phase, and calls the tier according to the votes.

    Args:
        tier: this rank's tier.
        world_size: the number of ranks that vote.
        on_failure: called before a failed save is aborted.

    Attributes:
        save: the save under way, or the last one; None before the first.
    """

    def __init__(self, tier: Writing[Save], world_size: int, on_failure: Callable[[], None] = lambda: None):
        self._tier = tier
        self._world_size = world_size
        self._on_failure = on_failure
        self._phase = Phase.IDLE
        self.save: Save | None = None

    @property
    def is_idle(self) -> bool:
        return self._phase is Phase.IDLE

    @property
    def under_way(self) -> Save | None:
        return None if self.is_idle else self.save

    def votes(self) -> Votes:
        return self._tier.vote(self._phase)

    def begin(self, save: Save) -> None:
        self._phase, self.save = Phase.WRITING, save
        self._tier.begin(save)

    def advance(self, votes: Votes, make: Callable[[], Save] | None = None) -> Event:
        """Act on the votes, and return the event.

        Args:
            votes: the sum of all ranks' votes.
            make: returns the next save, if the votes request one; None if every save starts with `begin`.
        """
        phase, event = advance(self._phase, votes, self._world_size)
        if event is Event.BEGIN:
            assert make is not None, "votes for a save that nobody can make"
            self.begin(make())
        elif event is Event.COMMIT:
            self._phase = phase
            self._tier.commit()
        elif event is Event.DONE:
            self._phase = phase
            self._tier.done()
        elif event is Event.FAILED:
            self.give_up()
        return event

    def give_up(self) -> None:
        """Abort the save under way as failed. Every rank must do it at the same point."""
        self._phase = Phase.IDLE
        self._on_failure()
        self._tier.abort()
