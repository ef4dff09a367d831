"""The commit of one checkpoint: every rank votes, and the same event follows on all of them. Arithmetic alone."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    """Where a rank is in a save."""

    IDLE = "idle"
    WRITING = "writing"  # every rank writes its share
    COMMITTING = "committing"  # rank 0 writes the manifest


@dataclass(frozen=True)
class Votes:
    """What all ranks together said about the save under way: sums over ranks, equal on every rank."""

    want: float = 0
    written: float = 0
    committed: float = 0
    failed: float = 0


class Event(enum.Enum):
    """What a rank does next."""

    NOTHING = "nothing"
    BEGIN = "begin"  # write your share of the state as it is now
    COMMIT = "commit"  # all shares are there: rank 0 writes the manifest
    DONE = "done"  # the checkpoint can be restored
    FAILED = "failed"  # given up; training goes on


def advance(phase: Phase, votes: Votes, world_size: int) -> tuple[Phase, Event]:
    """The next phase of a save. Every rank sees the same votes, so every rank takes the same way."""
    if phase is Phase.IDLE:
        return (Phase.WRITING, Event.BEGIN) if votes.want else (phase, Event.NOTHING)
    if votes.failed:
        return Phase.IDLE, Event.FAILED
    if phase is Phase.WRITING and votes.written >= world_size:
        return Phase.COMMITTING, Event.COMMIT
    if phase is Phase.COMMITTING and votes.committed:
        return Phase.IDLE, Event.DONE
    return phase, Event.NOTHING
