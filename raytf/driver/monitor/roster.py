"""Which ranks of the present group are alive, which hang, and which are on nodes with notice."""

from __future__ import annotations

from collections.abc import Collection

from raytf.driver.supervision.hang_detector import Heartbeats
from raytf.training.process.heartbeat_types import HangFinding, HeartbeatState, LastHeartbeat


class Roster:
    """The ranks of the present group, as far as they have sent heartbeats.

    Attributes:
        blamed: who hangs; None while no rank is blamed.
        noticed: ranks on nodes with notice -> Ray's ids of these nodes.
        ends: Ray's ids of nodes whose workers reported a notice -> when they go, by the clock of `sightings`.
    """

    def __init__(self) -> None:
        self._beats = Heartbeats()
        self.blamed: HangFinding | None = None
        self.noticed: dict[int, str] = {}
        self.ends: dict[str, float] = {}

    @property
    def group(self) -> int:
        """The number of the present group, which its heartbeats carry."""
        return self._beats.group

    def begin_group(self) -> int:
        """A group starts, of which nothing is known yet; returns its number."""
        self.blamed, self.noticed = None, {}
        return self._beats.begin()

    def hear(self, beat: HeartbeatState, now: float) -> None:
        """Take a rank's heartbeat."""
        self._beats.hear(beat, now)

    def forget(self, ranks: Collection[int]) -> None:
        """Other workers have these ranks now, and nobody is blamed any more."""
        self._beats.forget(ranks)
        self.blamed, self.noticed = None, {}

    def forgive(self, now: float) -> None:
        """Do not count the time until now as silence: no heartbeats could arrive."""
        self._beats.forgive(now)

    def sightings(self, now: float) -> list[LastHeartbeat]:
        """The latest heartbeat of each rank."""
        return self._beats.sightings(now)
