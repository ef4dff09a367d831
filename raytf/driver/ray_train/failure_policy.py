"""Decide in Ray Train's controller which failures of a worker group are worth another attempt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray.train import WorkerGroupError

from raytf._ray.train import DefaultFailurePolicy, FailureDecision
from raytf.distributed.membership.member import LeftBehindError
from raytf.driver.supervision.diagnosis import diagnose, worker_errors
from raytf.driver.supervision.failures import lost_ranks
from raytf.driver.supervision.retry import Scene, Supervisor
from raytf.driver.supervision.watchdog import explain_loss
from raytf.errors import WorkerLostError
from raytf.training.process.heartbeat_types import LastHeartbeat
from raytf.training.process.monitor_client import MonitorClient

Answer = TypeVar("Answer")
#: Seconds to wait for an answer of the monitor.
_ANSWER_SECONDS = 10.0


class FailurePolicy(DefaultFailurePolicy):
    """Ray Train's retry budgets, and the Supervisor's decisions; reports to user and ledger what failed.

    Args:
        run_uri: the run's folder, to which stacks of frozen workers are written; None to not look for frozen workers.
        supervisor: of the run, shared with the scaling policy.
        is_partial: the workers that are left when others are lost continue.

    Attributes:
        lost: ranks that are gone while the others continue; None where all have to start again.
        size: how many workers there are; the controller sets it.
        left: ranks of workers that have left as planned; the controller sets it.
    """

    def __init__(
        self,
        failure_config: Any,
        monitor: MonitorClient,
        run_uri: str | None,
        supervisor: Supervisor,
        is_partial: bool = False,
    ):
        super().__init__(failure_config)
        self._is_partial = is_partial
        self.lost: set[int] | None = set()
        self.size, self.left = 0, set[int]()
        self._run_monitor, self._run_uri, self._supervisor = monitor, run_uri, supervisor
        self._reached = 0

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        error, monitor = training_failed_error, self._run_monitor
        none: list[LastHeartbeat] = []
        sightings = _or_else(none, monitor.sightings)
        hung = self._frozen(error)
        if hung is not None:  # the driver raises Ray's error, which must say who hung
            error.worker_failures = hung.worker_failures
        self._reached = _or_else(self._reached, monitor.reached)
        scene = Scene(self._reached, {s.beat.rank: s.beat.node for s in sightings}, _or_else({}, monitor.noticed))

        def has_budget() -> bool:
            return super(FailurePolicy, self).make_decision(error) is FailureDecision.RETRY

        failure = diagnose(error)
        decision = self._supervisor.decide(failure, scene, has_budget)
        if isinstance(error, WorkerGroupError):
            goes_on = self._is_partial and decision.retry
            self.lost = lost_ranks(failure, worker_errors(error), self.left) if goes_on else None
        survivors = max(0, self.size - len(self.lost)) if self.lost else 0
        self._supervisor.survivors = survivors
        fault = dataclasses.replace(decision.fault, survived=survivors > 0)
        monitor.book(fault)
        if survivors > 0 and decision.retry:
            monitor.say(f"{fault.failure}; the others continue")
        elif decision.message:
            monitor.say(decision.message)
        return FailureDecision.RETRY if decision.retry else FailureDecision.RAISE

    def _frozen(self, error: Any) -> WorkerGroupError | None:
        """Return the error to raise instead if ranks only report the loss of a peer, and that peer is frozen."""
        errors = worker_errors(error)
        unknown = all(isinstance(e, WorkerLostError) and not isinstance(e, LeftBehindError) for e in errors.values())
        if self._run_uri is None or not errors or not unknown:
            return None
        with contextlib.suppress(ray.exceptions.RayError):
            return explain_loss(self._run_monitor, self._run_uri, list(errors))
        return None


def _or_else(otherwise: Answer, question: Callable[[float], Answer]) -> Answer:
    """Return an answer of the monitor, or a default if there is none."""
    try:
        return question(_ANSWER_SECONDS)
    except ray.exceptions.RayError:
        return otherwise
