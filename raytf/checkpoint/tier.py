"""The interface through which a tier (storage or memory) writes a checkpoint, and the votes of its ranks."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol, TypeVar


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


@dataclass(frozen=True)
class GroupAttempt:
    """One start of the worker group, as one of its ranks sees it.

    Attributes:
        name: as it is in the names of what it writes.
        rank, world_size: of this worker.
        earlier: names of the attempts before it, of which nobody writes any more.
        driver: id of its driver.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    earlier: tuple[str, ...] = ()
    driver: str = ""


#: What a tier saves.
Save = TypeVar("Save", contravariant=True)


class Writing(Protocol[Save]):
    """A tier that writes this rank's part of one save at a time.

    `raytf.checkpoint.commit.Commit` calls it on every rank alike, and owns the phase. No call waits for what it begins.
    """

    def begin(self, save: Save) -> None:
        """Start to write this rank's share."""
        ...

    def vote(self, phase: Phase) -> Votes:
        """Return how far this rank is, or that it failed."""
        ...

    def commit(self) -> bool:
        """Complete the checkpoint, now that all shares are written.

        Returns:
            Whether that makes the checkpoint complete; otherwise the ranks vote when it is.
        """
        ...

    def done(self) -> None:
        """Note that the checkpoint is complete, as all ranks know."""
        ...

    def abort(self) -> None:
        """Abandon the save, which failed on some rank and must not become a checkpoint."""
        ...
