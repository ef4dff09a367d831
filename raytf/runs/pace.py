"""How fast a run goes: an average over the last seconds, so that what is shown does not jump."""

from __future__ import annotations

import math

#: Seconds after which what was seen counts about a third.
_SECONDS = 15.0


class Pace:
    """Steps per second, of which the latest count most: sums of steps and of seconds that fade exponentially.

    Args:
        seconds: after which what was added counts 1/e.
    """

    def __init__(self, seconds: float = _SECONDS):
        self._fade = seconds
        self._steps = self._seconds = 0.0

    def add(self, steps: int, seconds: float) -> float:
        """Add what was done since the last call.

        Args:
            steps: that were done; negative ones, of a run that went back, count as none.
            seconds: that passed.

        Returns:
            Steps per second; 0 before the first step.
        """
        kept = math.exp(-max(0.0, seconds) / self._fade)
        self._steps = self._steps * kept + max(0, steps)
        self._seconds = self._seconds * kept + max(0.0, seconds)
        return self._steps / self._seconds if self._steps and self._seconds else 0.0
