"""How fast a run goes. `samples/s` has one definition everywhere: records of the steps that were made, divided by the
time in which steps were made.

That time begins after the first call of each group of workers, which traces the step. Traces of other graphs, stops to
save or copy the state, validation, and pauses because of a failure or a resize are not part of it. On a terminal it is
an average over the last seconds (`Pace`), so that what is shown does not jump; for a finished run it covers all of the
ledger's time in `training` (see `timeline.steps_per_second`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Seconds after which what was seen counts about a third.
_SECONDS = 15.0
#: Seconds and steps of training after which the pace is known well enough to estimate the time left.
_KNOWN_SECONDS, _KNOWN_STEPS = 2.0, 3


@dataclass(frozen=True)
class Moment:
    """Where a group of workers is at a moment.

    Attributes:
        step: global steps done.
        now: seconds, of any clock that never goes back, and stands still while the group traces a graph.
        is_training: whether it makes steps from now on.
        stall: seconds for which it has stood still to save or copy the state, in total.
    """

    step: int
    now: float
    is_training: bool
    stall: float = 0.0


class Pace:
    """Steps per second of a group of workers, of which the latest count most: sums of steps and of seconds that fade
    exponentially.

    Args:
        seconds: after which what was added counts 1/e.

    Attributes:
        steps_per_second: while steps are made; 0 where that is not known.
    """

    def __init__(self, seconds: float = _SECONDS):
        self._fade = seconds
        self._before: Moment | None = None
        self._steps = self._seconds = 0.0
        #: Since the first call, without fading: all seconds, those in which steps were made, and the steps.
        self._all_seconds = self._training_seconds = 0.0
        self._all_steps = 0
        self.steps_per_second = 0.0

    def see(self, moment: Moment) -> None:
        """Take where the group is now."""
        before, self._before = self._before, moment
        if before is None or not (before.is_training or self._all_seconds):
            return
        passed = max(0.0, moment.now - before.now)
        self._all_seconds += passed
        if not before.is_training:
            return
        seconds = max(0.0, passed - max(0.0, moment.stall - before.stall))
        steps, kept = max(0, moment.step - before.step), math.exp(-seconds / self._fade)
        self._all_steps += steps
        self._steps = self._steps * kept + steps
        self._seconds = self._seconds * kept + seconds
        self._training_seconds += seconds
        self.steps_per_second = self._steps / self._seconds if self._seconds else 0.0

    def seconds_left(self, steps: int) -> float | None:
        """Return how long the run takes for more steps, if its pace is known: at the latest pace, with as large a share
        of other things (validation, saves) as since its first step."""
        is_known = self._training_seconds >= _KNOWN_SECONDS and self._all_steps >= _KNOWN_STEPS
        if not is_known or not self.steps_per_second:
            return None
        return steps / self.steps_per_second * self._all_seconds / self._training_seconds
