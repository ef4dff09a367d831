"""Copies in memory: how often, into which of a rank's two slots, and until when the copy before stays.

Pure decisions: `raytf.checkpoint.memory` copies into slots, `raytf.training.saving.checkpointer` has the ranks agree.
"""

from __future__ import annotations

import math

#: Share of the run time that copies in memory may cost, if the user sets no cadence.
SNAPSHOT_SHARE = 0.008
#: Steps between two copies as long as their cost is not known.
SNAPSHOT_STEPS = 10


def snapshot_every(asked: int | None, copy_seconds: float, step_seconds: float) -> int:
    """Return the number of steps between two copies in memory; 0 for no copies.

    Args:
        asked: by the user; None chooses it so that copying takes at most SNAPSHOT_SHARE of the time.
        copy_seconds: for which one copy stops training; 0 if not known yet.
        step_seconds: of one step; likewise.
    """
    if asked is not None:
        return asked
    if not (copy_seconds and step_seconds):
        return SNAPSHOT_STEPS
    return max(1, math.ceil(copy_seconds / (SNAPSHOT_SHARE * step_seconds)))


class CopyTurns:
    """One rank's turns: a copy never takes the slot of the newest one that all ranks have completed.

    Attributes:
        copied: step of this rank's newest copy; None if there is none.
        asked: step of the newest copy that the ranks were asked for, also on a rank without memory.
        is_settled: whether the ranks have agreed that this copy is complete, or that it counts for nothing.
    """

    def __init__(self) -> None:
        self.copied: int | None = None
        self.asked: int | None = None
        self.is_settled = True
        self._next = 0
        self._is_aborted = False

    def is_pending(self, step: int) -> bool:
        """Return whether the newest copy is of another step than this one, and its ranks have not agreed on it yet.

        A copy of the step then has to wait: a rank could drop its older copy while another rank's newer one is not
        complete, and no step would have copies of all ranks. A copy of the same step only takes the newest one's place.
        """
        return not self.is_settled and self.asked != step

    def ask(self, step: int) -> None:
        """Note that the ranks copy the state after a step."""
        self.asked, self.is_settled = step, False

    def take(self, step: int) -> int:
        """Return the slot, 0 or 1, into which to copy the state after a step. A copy of the step that was copied last
        goes over that: the one of an earlier step stays until this one is complete on all ranks."""
        if step != self.copied or self._is_aborted:
            slot, self._next = self._next, 1 - self._next
        else:
            slot = 1 - self._next
        self.copied, self._is_aborted = step, False
        return slot

    def commit(self) -> None:
        """Note that the newest copy is complete on all ranks. The one before it stays until the next is made."""
        self.is_settled = True

    def abort(self) -> None:
        """Discard the newest copy: the next one takes its slot, and the one before it stays until then."""
        self.is_settled = True
        if self.copied is not None and not self._is_aborted:
            self._next, self._is_aborted = 1 - self._next, True

    def lose(self) -> None:
        """Note that the memory is gone, and all copies with it."""
        self.copied, self._next, self._is_aborted = None, 0, False
