"""Which failures are worth another attempt, and when: decided by what failed and how far the run came. No Ray here."""

from __future__ import annotations

import re
from dataclasses import dataclass

from raytf.driver.supervision.failures import Cause, Failure

#: Failures in a row without a new step after which a run stops: the next would be the same. Deaths do not count.
FRUITLESS_FAILURES = 5
#: The same for deaths of Ray Train's controllers: what kills three of them will kill the fourth.
FRUITLESS_CONTROLLERS = 3
#: Errors of the job in a row without a new step after which a run stops, even if they differ.
FRUITLESS_ERRORS = 3
#: Seconds before the second attempt in a row without a new step, doubled for each further one, and the most.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: The most after deaths: if faults are frequent, each second of a pause is one in which the next fault can come.
LONGEST_DEATH_PAUSE = 10.0
#: Steps by which two attempts may differ in where they see the same error: it shows at the end of a call of several.
_SAME_STEP = 32


@dataclass(frozen=True)
class RetryVerdict:
    """What to do after a failure.

    Attributes:
        retry: whether to make another attempt.
        pause: seconds before it.
        why: for the user.
    """

    retry: bool
    pause: float
    why: str


class Retry:
    """Decides after each failure of one run.

    Failures of infrastructure are retried again and again, after a pause that doubles while the run makes no new step.
    An error of the job's own code is retried once, since a callback may depend on outside conditions, but not if it
    raises the same at the same step again, nor if the run has not made a single step.
    """

    def __init__(self) -> None:
        self._reached = -1
        self._failures = self._fruitless = self._errors = 0
        self._last_error: Failure | None = None

    def go_back(self) -> None:
        """The run goes back: what it reaches from now on counts anew."""
        self._reached, self._failures, self._fruitless = -1, 0, 0

    def decide(self, failure: Failure, reached: int) -> RetryVerdict:
        """What to do after a failure.

        Args:
            failure: what failed.
            reached: latest global step that the run has ever reached.
        """
        if failure.is_final:
            return RetryVerdict(False, 0.0, failure.text)
        is_new = reached > self._reached
        self._reached = max(reached, self._reached)
        if failure.cause is Cause.ERROR:
            return self._after_error(failure, is_new)
        self._failures = 1 if is_new else self._failures + 1
        is_death = failure.cause in (Cause.WORKER_DIED, Cause.NODE_LOST)
        if is_death or is_new:
            self._fruitless = 0
        elif not failure.is_wait:
            self._fruitless += 1
        is_controller = failure.cause is Cause.CONTROLLER_DIED
        limit = FRUITLESS_CONTROLLERS if is_controller else FRUITLESS_FAILURES
        if self._fruitless >= limit:
            return RetryVerdict(False, 0.0, f"{failure.text}, {limit} times in a row without a new step")
        most = LONGEST_DEATH_PAUSE if is_death or failure.is_wait else LONGEST_PAUSE
        pause = 0.0 if self._failures == 1 else min(most, FIRST_PAUSE * 2.0 ** min(self._failures - 2, 32))
        again = "starting another one" if is_controller else "starting again"
        if pause:
            again += f" in {pause:.0f} s, failure number {self._failures} without a new step"
        return RetryVerdict(True, pause, f"{failure.text}; {again}")

    def _after_error(self, failure: Failure, is_new: bool) -> RetryVerdict:
        last, self._last_error = self._last_error, failure
        self._errors = 1 if is_new else self._errors + 1
        if self._reached <= 0:
            return RetryVerdict(False, 0.0, failure.text)
        if last is not None and _is_same(last, failure):
            return RetryVerdict(False, 0.0, f"{failure.text}, the same as before at the same step")
        if self._errors >= FRUITLESS_ERRORS:
            return RetryVerdict(False, 0.0, f"{failure.text}, error number {self._errors} without a new step")
        return RetryVerdict(True, 0.0, f"the job's own code failed ({failure.text}); trying it once more")


def _is_same(a: Failure, b: Failure) -> bool:
    if _without_numbers(a.signature) != _without_numbers(b.signature):
        return False
    return a.step == b.step if a.step is None or b.step is None else abs(a.step - b.step) <= _SAME_STEP


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "#", text)
