"""Which failures of a worker group are worth another attempt, in Ray Train's controller."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import ray

from raytf._ray.train import DefaultFailurePolicy, FailureDecision
from raytf.driver.ray_train.node_exclusion import Launches
from raytf.driver.ray_train.resizing import is_preemption
from raytf.driver.supervision.failures import classify, gpu_errors, worker_errors
from raytf.driver.supervision.retry import Cause, Failure, Retry
from raytf.driver.supervision.watchdog import explain_loss
from raytf.errors import WorkerLostError


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the failure policy found, on its way to the scaling policy: seconds to wait, and nodes to blame."""

    pause: float
    nodes: list[str]


def judge_launch(failure: Failure, nodes: list[str], launches: Launches, now: float) -> Failure:
    """A failure as it is, or the job's own where kernels have failed on these nodes and on another one."""
    if not failure.is_launch or not launches.failed(nodes, now):
        return failure
    text = f"{failure.text}. That has happened on another node's GPU as well: it is the job's own code"
    return dataclasses.replace(failure, cause=Cause.ERROR, text=text, is_final=True)


def blamed(failure: Failure, of_ranks: set[str], error: Any) -> list[str]:
    """Nodes to blame: those of the ranks to blame, and those whose GPU failed.

    Where a rank is dead, or hangs, others may say of their own GPUs what they only have of that.
    """
    told = {e.node for e in gpu_errors(error) if e.node} if failure.cause is Cause.GPU else set()
    return sorted(of_ranks | told)


class FailurePolicy(DefaultFailurePolicy):
    """Ray Train's retry budgets, and reasons to stop sooner (`Retry` decides); it tells user and ledger what failed.

    Args:
        failure_config: Ray Train's.
        monitor: a Monitor's handle.
        run_uri: the run's folder, to which stacks of frozen workers are written; None looks for none.
    """

    def __init__(self, failure_config: Any, monitor: Any, run_uri: str | None):
        super().__init__(failure_config)
        self._run_monitor, self._run_uri = monitor, run_uri
        self._retry, self._reached = Retry(), 0
        self._launches = Launches()

    def make_decision(self, training_failed_error: Any) -> FailureDecision:
        error = training_failed_error
        sightings = self._ask("sightings", [])
        hung = self._frozen(error)
        if hung is not None:
            error.worker_failures = hung.worker_failures
        ranks, failure = classify(error)
        if failure.cause is not Cause.ERROR and self._is_preemption(error):
            error.raytf_verdict = Verdict(0.0, [])
            return FailureDecision.RETRY  # its node had notice: that is no failure, and counts as none
        nodes = blamed(failure, {s.beat.node for s in sightings if s.beat.rank in ranks}, error)
        failure = judge_launch(failure, nodes, self._launches, time.monotonic())
        self._reached = max(self._ask("reached", self._reached), failure.step or 0)
        decided = self._retry.decide(failure, self._reached)
        goes_on = decided.retry and super().make_decision(error) is FailureDecision.RETRY
        fields = {"cause": failure.cause.value, "ranks": ranks, "nodes": nodes, "text": failure.text}
        self._run_monitor.event.remote("fault", {**fields, "retry": goes_on, "preemption": False})
        if not goes_on:
            if decided.retry:
                self._run_monitor.say.remote(f"{failure.text}; not tried again: --max-failures is used up")
            elif not failure.is_final and failure.text != decided.why:
                self._run_monitor.say.remote(f"not tried again: {decided.why}")
            return FailureDecision.RAISE
        error.raytf_verdict = Verdict(decided.pause, [] if failure.cause is Cause.ERROR else nodes)
        self._run_monitor.say.remote(decided.why)
        return FailureDecision.RETRY

    def _is_preemption(self, training_failed_error: Any) -> bool:
        ranks = sorted(getattr(training_failed_error, "worker_failures", {}))
        errors = dict(zip(ranks, worker_errors(training_failed_error), strict=True))
        dead = {rank for rank, error in errors.items() if isinstance(error, ray.exceptions.RayActorError)}
        is_peer_missed = bool(errors) and all(isinstance(errors[r], WorkerLostError) for r in errors.keys() - dead)
        noticed = self._ask("noticed", {})
        if not is_preemption(dead, is_peer_missed, noticed.keys()):
            return False
        ranks, nodes = sorted(noticed), sorted(set(noticed.values()))
        text = f"node {', '.join(node[:8] for node in nodes)} is gone, as announced"
        fields = {"cause": "node_lost", "ranks": ranks, "nodes": nodes, "text": text, "preemption": True}
        self._run_monitor.event.remote("fault", fields)
        self._run_monitor.say.remote(f"{text}; starting again")
        return True

    def _frozen(self, error: Any) -> Any:
        """What to say instead, where all that is known is that ranks have lost a peer, and the peer is frozen."""
        failures = getattr(error, "worker_failures", {})
        unknown = all(isinstance(e, WorkerLostError) for e in worker_errors(error))
        if self._run_uri is None or not failures or not unknown:
            return None
        with contextlib.suppress(ray.exceptions.RayError):
            return explain_loss(self._run_monitor, self._run_uri, list(failures))
        return None

    def _ask(self, question: str, otherwise: Any) -> Any:
        try:
            return ray.get(getattr(self._run_monitor, question).remote(), timeout=10)
        except ray.exceptions.RayError:
            return otherwise
