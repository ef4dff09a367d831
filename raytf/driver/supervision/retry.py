"""Decides, after each failure of a run, whether and when to retry and which nodes to avoid. Nothing here uses Ray."""

from __future__ import annotations

import dataclasses
import re
import statistics
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from raytf.driver.supervision.failures import Cause, Failure
from raytf.runs.events import FaultEvent, short

#: Failures in a row without a new step after which a run stops, because the next attempt would fail, too. Lost workers
#: and nodes do not count.
FRUITLESS_FAILURES = 5
#: The same limit for deaths of Ray Train's controllers: after three deaths, the fourth controller would die, too.
FRUITLESS_CONTROLLERS = 3
#: Errors of the job in a row without a new step after which a run stops, even if they differ.
FRUITLESS_ERRORS = 3
#: Pause in seconds after the second failure in a row without a new step, and the longest pause. Each further failure
#: doubles the pause.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
#: Longest pause after a death, in seconds: if faults are frequent, the next one can happen during a long pause.
LONGEST_DEATH_PAUSE = 10.0
#: Two attempts that fail within this many steps of each other count as failing at the same step, because a call runs
#: several steps and reports an error only at its end.
_SAME_STEP = 32
#: Faults after which a node is excluded, and seconds after which a fault is forgotten.
FAULTS, MEMORY_SECONDS = 3, 3600.0
#: A node is excluded for its faults only if it has at least this many times the median of the other nodes.
_MORE = 3.0


@dataclass(frozen=True)
class RetryVerdict:
    """The decision whether to retry, after how many seconds, and why."""

    retry: bool
    pause: float
    why: str


class Retry:
    """Decides, after each failure of a run, whether to retry.

    A failure of infrastructure is retried, after a pause that doubles while the run makes no new step. An error of the
    job's own code is retried, since a callback may depend on outside conditions, unless the run has not made a single
    step or the previous error was the same at the same step. Both stop at the limits above.
    """

    def __init__(self) -> None:
        self._reached = -1
        self._failures = self._fruitless = self._errors = 0
        self._last_error: Failure | None = None

    def go_back(self) -> None:
        """Reset the counts of failures, because the run returns to an earlier step."""
        self._reached, self._failures, self._fruitless = -1, 0, 0

    def decide(self, failure: Failure, reached: int) -> RetryVerdict:
        """Decide whether to retry after a failure of a run whose latest global step is `reached`."""
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


# -- supervisor --------------------------------------------------------------------------------------------------------
#
# A `Supervisor` decides what to do after a failure of a run, and returns the ledger's event and the user's message.


@dataclass(frozen=True)
class Scene:
    """The state of a run when an attempt has failed.

    Attributes:
        reached: latest global step that was ever reported.
        nodes: node of each rank.
        noticed: node of each rank on a node with a preemption notice.
    """

    reached: int = 0
    nodes: Mapping[int, str] = field(default_factory=dict)
    noticed: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """The supervisor's decision after a failure; `message` is empty if the error needs no explanation."""

    retry: bool
    pause: float
    fault: FaultEvent
    message: str


class Supervisor:
    """Decides, after each failure of a run, whether and when to start another attempt.

    Ray Train sends each policy separately, so copies of a supervisor in the same process are merged into one object.

    Args:
        clock: a monotonic clock, in seconds.

    Attributes:
        exclusion: decides which nodes to avoid.
        resumes_at: when the next attempt may start, by the clock.
        survivors: number of workers that continue without the lost workers; 0 if all workers start again.
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
        """Decide what to do after a failed attempt.

        Args:
            has_budget: returns whether the user allows one more attempt, and counts it.
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
                # The run rolls back and repeats the wrong steps, at most once for each node.
                self._reached = 0
                self._retry.go_back()
            if failure.is_unreachable:
                self.exclusion.is_unreachable(nodes, now)
            return self._go_on(verdict.pause, fault, failure.cause, verdict.why)
        message = ""
        if verdict.retry:
            message = f"{failure.text}; not tried again: --max-failures is used up"
        elif not failure.is_final and failure.text != verdict.why:
            message = f"not tried again: {verdict.why}"
        return Decision(False, 0.0, fault, message)

    def _go_on(self, pause: float, fault: FaultEvent, cause: Cause, message: str = "") -> Decision:
        now = self._clock()
        self.resumes_at = now + pause
        # A node that was preempted as announced, or on which the job's own code failed, is not at fault.
        if not fault.preemption and cause is not Cause.ERROR:
            self.exclusion.fault(fault.nodes, now)
        return Decision(True, pause, fault, message or f"{fault.failure}; starting again")

    def __reduce__(self) -> tuple[Callable[[str], Supervisor], tuple[str]]:
        return _of_this_process, (self._name,)


#: Supervisors that were sent to this process, by name.
_received: dict[str, Supervisor] = {}


def _of_this_process(name: str) -> Supervisor:
    return _received.setdefault(name, Supervisor())


def blamed(failure: Failure, of_ranks: Mapping[int, str]) -> list[str]:
    """Return the nodes to blame: the nodes of the ranks to blame, and the nodes that a worker has named."""
    return sorted({of_ranks[rank] for rank in failure.ranks if rank in of_ranks} | failure.nodes)


def judge_launch(failure: Failure, nodes: Collection[str], launches: KernelFailures, now: float) -> Failure:
    """Return the failure unchanged, or an error of the job if kernels have failed on these nodes and on another one."""
    if not failure.is_launch or not launches.failed(nodes, now):
        return failure
    text = f"{failure.text}. It also happened on another node's GPU, so the job's own code is at fault"
    return dataclasses.replace(failure, cause=Cause.ERROR, text=text, is_final=True)


def is_preemption(failure: Failure, noticed: Collection[int]) -> bool:
    """Return whether workers were lost because their nodes had notice, which does not count as a failure.

    Survivors may miss a peer before Ray knows which worker died. That worker is assumed to be on a node with notice.
    """
    if failure.cause is Cause.ERROR or not noticed:
        return False
    return failure.dead <= set(noticed) if failure.dead else failure.is_peer_missed


def _preemption(noticed: Mapping[int, str]) -> FaultEvent:
    nodes = sorted(set(noticed.values()))
    text = f"node {', '.join(map(short, nodes))} is gone, as announced"
    return FaultEvent(Cause.NODE_LOST, sorted(noticed), nodes, text, preemption=True)


class NodeExclusion:
    """Counts the faults of nodes, and decides which nodes to avoid.

    A node is excluded after three faults within an hour, unless other nodes have a similar number of faults, since the
    node is then not the cause. It is used again when its faults are an hour old. A node that other workers cannot reach
    is excluded at once, and used again after an hour. A node that computes wrongly is excluded for the whole run.
    """

    def __init__(self) -> None:
        self._faults: dict[str, list[float]] = {}
        self._wrong: set[str] = set()
        self._unreachable: set[str] = set()

    def fault(self, nodes: Collection[str], now: float) -> None:
        """Count a failure of workers on these nodes, at the time `now` of a monotonic clock."""
        for node in nodes:
            self._faults.setdefault(node, []).append(now)

    def is_unreachable(self, nodes: Collection[str], now: float) -> None:
        """Exclude nodes that other nodes cannot reach, because new workers there would be unreachable, too."""
        self._unreachable.update(nodes)
        for _ in range(FAULTS):
            self.fault(nodes, now)

    def computes_wrongly(self, nodes: Collection[str]) -> bool:
        """Exclude nodes on which an audit saw workers compute wrongly; return whether this is new for any of them."""
        is_new = not self._wrong.issuperset(nodes)
        self._wrong.update(nodes)
        return is_new

    def why(self, node: str, now: float) -> str:
        """Return the reason why a node is excluded, as text for the user."""
        if node in self._wrong:
            return "a worker on it computed wrongly"
        if node in self._unreachable:
            return "its workers and the other workers cannot reach each other"
        return f"workers failed on it {self.count(node, now)} times within an hour"

    def count(self, node: str, now: float) -> int:
        """Return the number of faults of a node within the last hour."""
        return sum(now - at < MEMORY_SECONDS for at in self._faults.get(node, ()))

    def excluded(self, nodes: Collection[str], now: float) -> list[str]:
        """Return the nodes to avoid, the worst first."""
        counts = {node: self.count(node, now) for node in nodes}
        out = [node for node in counts if node in self._wrong]
        for node, count in counts.items():
            if count < FAULTS or node in self._wrong:
                continue
            others = [c for other, c in counts.items() if other != node]
            if not others or count >= _MORE * statistics.median(others):
                out.append(node)
        return sorted(out, key=lambda node: (node not in self._wrong, -counts[node], node))


class KernelFailures:
    """The nodes where kernels failed. If only one node failed, its GPU may be at fault; if two did, the code is."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}

    def failed(self, nodes: Collection[str], now: float) -> bool:
        """Record that kernels failed on these nodes; return whether they failed on two nodes within an hour."""
        self._failed_at |= dict.fromkeys(nodes, now)
        return sum(now - at < MEMORY_SECONDS for at in self._failed_at.values()) > 1


def without(nodes: Iterable[str], unwanted: Sequence[str], least: int, count: Callable[[set[str]], int]) -> set[str]:
    """Return the nodes without the unwanted ones, listed from the worst. An unwanted node is kept if the other nodes
    could not run `least` workers without it."""
    kept = set(nodes)
    for node in unwanted:
        if node in kept and count(kept - {node}) >= least:
            kept.remove(node)
    return kept
