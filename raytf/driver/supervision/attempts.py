"""One attempt after another, until one succeeds or the supervisor makes no further one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from raytf.driver.supervision.diagnosis import diagnose
from raytf.driver.supervision.retry import Scene, Supervisor
from raytf.errors import ClusterError
from raytf.training.process.monitor_client import MonitorClient

Outcome = TypeVar("Outcome")
#: Seconds to wait for an answer of the monitor.
_ANSWER_SECONDS = 30.0


class Budget:
    """Counts the attempts that the user allows after failures.

    Args:
        failures: after how many failures to try again; negative for any number.
    """

    def __init__(self, failures: int):
        self._most, self._used = failures, 0

    def __call__(self) -> bool:
        """Return whether another attempt is allowed, which is then counted."""
        self._used += 1
        return self._most < 0 or self._used <= self._most


def until_done(
    attempt: Callable[[], Outcome],
    of: tuple[type[Exception], ...],
    monitor: MonitorClient,
    has_budget: Callable[[], bool],
    say: Callable[[str], None],
) -> Outcome:
    """Repeat the attempt until it succeeds.

    Args:
        attempt: raises the error that ends it.
        of: errors that end an attempt; any other error ends the run.
        monitor: is told of each failure, for the ledger.
        has_budget: whether the user allows another attempt.
        say: takes a line for the user.

    Returns:
        What the successful attempt returns.

    Raises:
        RaytfError: another attempt would fail in the same way.
        RayError: the monitor does not answer, so this process has lost Ray.
    """
    supervisor = Supervisor()
    while True:
        try:
            return attempt()
        except of as error:
            failure = diagnose(error)
        decision = supervisor.decide(failure, Scene(monitor.reached(_ANSWER_SECONDS)), has_budget)
        monitor.book(decision.fault)
        if decision.message:
            say(decision.message)
        if not decision.retry:
            raise failure.error or ClusterError(f"training failed: {failure.text}", passes=True) from None
        time.sleep(decision.pause)
