"""What to do after a failure, decided in one place, for Ray Train's policies and for parameter servers.

A `Supervisor` gets what failed (`diagnose`) and what is known about the run. It decides whether to try again, when, and
on which nodes; and what to tell the ledger and the user about it.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from raytf.driver.supervision.failures import Cause, Failure
from raytf.driver.supervision.node_exclusion import KernelFailures, NodeExclusion
from raytf.driver.supervision.retry import Retry
from raytf.runs.events import FaultEvent, short


@dataclass(frozen=True)
class Scene:
    """What is known about a run when an attempt has failed.

    Attributes:
        reached: the latest global step that was ever reported.
        nodes: rank -> Ray's id of its node.
        noticed: rank on a node with notice -> Ray's id of the node.
    """

    reached: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    noticed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What to do after a failure.

    Attributes:
        retry: whether to try again.
        pause: seconds to wait before that.
        fault: for the ledger.
        said: a line for the user; empty if the error itself says everything.
    """

    retry: bool
    pause: float
    fault: FaultEvent
    said: str


class Supervisor:
    """Decides after each failure of one run.

    Copies of it that are sent to the same process become one object there: Ray Train sends each policy separately.

    Args:
        clock: seconds, of any clock that only goes forward.

    Attributes:
        exclusion: which nodes to avoid.
        resumes_at: when the next attempt may start, by the clock.
        survivors: workers that go on without those that are lost; 0 where all start again.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._name = clock, uuid.uuid4().hex
        self.exclusion = NodeExclusion()
        self.resumes_at = float("-inf")
        self.survivors = 0
        self._retry = Retry()
        self._launches = KernelFailures()
        self._reached = 0

    def decide(self, failure: Failure, scene: Scene, has_budget: Callable[[], bool] = lambda: True) -> Decision:
        """What to do after the end of an attempt.

        Args:
            failure: what failed.
            scene: what is known about the run.
            has_budget: whether the user allows one more attempt; asking counts it.
        """
        if is_preemption(failure, scene.noticed.keys()):
            return self._go_on(0.0, _preemption(scene.noticed), Cause.NODE_LOST)
        now = self._clock()
        nodes = blamed(failure, scene.nodes)
        failure = judge_launch(failure, nodes, self._launches, now)
        self._reached = max(self._reached, scene.reached, failure.step or 0)
        verdict = self._retry.decide(failure, self._reached)
        goes_on = verdict.retry and has_budget()
        fault = FaultEvent(failure.cause, failure.ranks, nodes, failure.text, goes_on)
        if goes_on:
            if failure.computes_wrongly and self.exclusion.computes_wrongly(nodes):
                # The run goes back, and makes the steps since then once more; with each node once at most.
                self._reached = 0
                self._retry.go_back()
            if failure.is_unreachable:
                self.exclusion.is_unreachable(nodes, now)
            return self._go_on(verdict.pause, fault, failure.cause, verdict.why)
        said = ""
        if verdict.retry:
            said = f"{failure.text}; not tried again: --max-failures is used up"
        elif not failure.is_final and failure.text != verdict.why:
            said = f"not tried again: {verdict.why}"
        return Decision(False, 0.0, fault, said)

    def _go_on(self, pause: float, fault: FaultEvent, cause: Cause, said: str = "") -> Decision:
        now = self._clock()
        self.resumes_at = now + pause
        # A node that went as announced, or on which the job's own code failed, is not at fault.
        if not fault.preemption and cause is not Cause.ERROR:
            self.exclusion.fault(fault.nodes, now)
        return Decision(True, pause, fault, said or f"{fault.failure}; starting again")

    def __reduce__(self) -> tuple[Callable[[str], Supervisor], tuple[str]]:
        return _of_this_process, (self._name,)


#: Supervisors that were sent to this process, by name.
_received: dict[str, Supervisor] = {}


def _of_this_process(name: str) -> Supervisor:
    return _received.setdefault(name, Supervisor())


def blamed(failure: Failure, of_ranks: Mapping[int, str]) -> list[str]:
    """Nodes to blame: those of the ranks to blame, and those that a worker has named.

    Args:
        failure: what failed.
        of_ranks: rank -> Ray's id of its node.
    """
    return sorted({of_ranks[rank] for rank in failure.ranks if rank in of_ranks} | failure.nodes)


def judge_launch(failure: Failure, nodes: Collection[str], launches: KernelFailures, now: float) -> Failure:
    """The failure unchanged, or an error of the job if kernels have failed on these nodes and on another one."""
    if not failure.is_launch or not launches.failed(nodes, now):
        return failure
    text = f"{failure.text}. That has happened on another node's GPU as well: it is the job's own code"
    return dataclasses.replace(failure, cause=Cause.ERROR, text=text, is_final=True)


def is_preemption(failure: Failure, noticed: Collection[int]) -> bool:
    """Whether workers were lost because their nodes had notice, which does not count as a failure.

    The survivors miss a peer before Ray knows which one has died; then it is assumed to be on the node with notice.

    Args:
        failure: what failed.
        noticed: ranks on nodes with notice.
    """
    if failure.cause is Cause.ERROR or not noticed:
        return False
    return failure.dead <= set(noticed) if failure.dead else failure.is_peer_missed


def _preemption(noticed: Mapping[int, str]) -> FaultEvent:
    nodes = sorted(set(noticed.values()))
    text = f"node {', '.join(map(short, nodes))} is gone, as announced"
    return FaultEvent(Cause.NODE_LOST, sorted(noticed), nodes, text, preemption=True)
