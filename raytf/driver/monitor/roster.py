"""Who of the present group is alive, who hangs, and whose node will go."""

from __future__ import annotations

from raytf.driver.supervision.hang_detector import Heartbeats
from raytf.training.beat import HangFinding, HeartbeatState, LastHeartbeat


class Roster:
    """The ranks of the present group, as far as they were heard of.

    Attributes:
        blamed: who hangs; None as long as nobody is blamed.
        noticed: ranks on nodes with notice -> Ray's ids of these nodes.
    """

    def __init__(self) -> None:
        self._beats = Heartbeats()
        self.blamed: HangFinding | None = None
        self.noticed: dict[int, str] = {}

    @property
    def group(self) -> int:
        """The number of the present group, which its beats carry."""
        return self._beats.group

    def begin_group(self) -> int:
        """A group starts, of which nothing is known yet; its number."""
        self.blamed, self.noticed = None, {}
        return self._beats.begin()

    def hear(self, beat: HeartbeatState, now: float) -> None:
        """A rank's sign of life."""
        self._beats.hear(beat, now)

    def forgive(self, now: float) -> None:
        """Nobody could be heard until now."""
        self._beats.forgive(now)

    def sightings(self, now: float) -> list[LastHeartbeat]:
        """The latest sign of life of each rank."""
        return self._beats.sightings(now)
