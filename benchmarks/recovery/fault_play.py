"""Plays a trace of faults on a cluster, at its moments and whatever the program makes of it; and what came of it."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from benchmarks.recovery.disturbed import BATCH, Group, add_node
from benchmarks.recovery.fault_trace import Event, Kind, Trace
from raytf.testing import ElasticCluster, Node


@dataclass(frozen=True)
class Played:
    """The faults that were played.

    Attributes:
        began: on the monotonic clock.
        seconds: that it lasted.
        faults: that hit somebody.
        node_seconds: that a cloud would charge: from the order of a node to its end.
        log: a line for each event.
    """

    began: float
    seconds: float
    faults: int
    node_seconds: float
    log: tuple[str, ...]


class Player:
    """Does to a cluster what traces say."""

    def __init__(self, cluster: ElasticCluster):
        self._cluster = cluster
        self._doomed: set[str] = set()

    def resize(self, nodes: int) -> None:
        """Have so many nodes."""
        for node in self._staying()[nodes:]:
            node.kill()
        while len(self._staying()) < nodes:
            add_node(self._cluster)

    def play(self, trace: Trace, check: Callable[[], None]) -> Played:
        """Play all of a trace.

        Args:
            trace: what to do.
            check: called again and again; raises where the program has ended.
        """
        began = time.monotonic()
        paid = {node.id: [began, float("inf")] for node in self._staying()}
        log: list[str] = []
        hits = 0
        order = itertools.count()
        due: list[tuple[float, int, Callable[[], str]]] = []
        # Joins come one at a time, as ElasticCluster has them; a notice takes a process of its own.
        joins, notices = ThreadPoolExecutor(1), ThreadPoolExecutor(4)

        def join(asked: float) -> None:
            node = add_node(self._cluster)
            paid[node.id] = [asked, float("inf")]

        def end(node: Node) -> str:
            node.kill()
            paid.setdefault(node.id, [began, 0.0])[1] = time.monotonic()
            return f"node {node.id[:8]} ends"

        def hit(event: Event) -> str:
            nonlocal hits
            if event.kind is Kind.JOIN:
                joins.submit(join, time.monotonic())
                return "a node is ordered"
            if event.kind is Kind.WORKER:
                workers = self._cluster.workers()
                if not workers:
                    return "no worker to kill"
                workers[event.target % len(workers)].kill()
                hits += 1
                return "SIGKILL to a worker"
            nodes = self._staying()
            if not nodes:
                return "no node to take"
            node = nodes[event.target % len(nodes)]
            hits += 1
            self._doomed.add(node.id)
            if event.kind is Kind.NODE:
                return end(node)
            notices.submit(node.drain, event.seconds)
            heapq.heappush(due, (began + event.at + event.seconds, next(order), lambda: end(node)))
            return f"notice for node {node.id[:8]}"

        for event in trace.events:
            heapq.heappush(due, (began + event.at, next(order), lambda event=event: hit(event)))
        try:
            while (now := time.monotonic()) < began + trace.seconds:
                check()
                if due and due[0][0] <= now:
                    late, _, action = heapq.heappop(due)
                    delay = f", {now - late:.1f} s late" if now > late + 1 else ""
                    log.append(f"{now - began:6.1f} s: {action()}{delay}")
                else:
                    time.sleep(min(0.1, max(0.0, (due[0][0] if due else now + 1) - now)))
            finished = time.monotonic()
        finally:  # nothing may join a cluster that is closed
            joins.shutdown(wait=True, cancel_futures=True)
            notices.shutdown(wait=True)
        for node in self._cluster.nodes:
            if node.id in self._doomed:  # its end would have come after that of the trace
                node.kill()
        charged = sum(max(0.0, min(until, finished) - since) for since, until in paid.values())
        return Played(began, finished - began, hits, charged, tuple(log))

    def _staying(self) -> list[Node]:
        return [node for node in self._cluster.nodes if node.id not in self._doomed]


@dataclass(frozen=True)
class Account:
    """The result of a part of a program's time.

    Attributes:
        seconds: of the part.
        new: steps above all that were made before.
        redone: steps that were not.
        goodput: share of the time that the new steps take where nothing disturbs them: each counts as long as the
            median of the steps with the same number of workers.
        training: share of the time between calls that made new steps, however long they took.
    """

    seconds: float
    new: int
    redone: int
    goodput: float
    training: float

    @property
    def samples_per_second(self) -> float:
        return self.new * BATCH / self.seconds

    def cost(self, node_seconds: float, price: float) -> float:
        """Return the cost of a million new samples, at a price per node and hour."""
        return node_seconds / 3600 * price / max(self.new * BATCH / 1e6, 1e-9)


def steady(groups: Sequence[Group]) -> dict[int, float]:
    """Median seconds of a step for each number of workers."""
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for group in groups:
        for (before, since), (step, at) in itertools.pairwise(group.calls):
            found[group.workers].append(((at - since) / max(1, step - before), max(1, step - before)))
    medians = {}
    for workers, steps in found.items():
        seconds, weights = np.array(sorted(steps)).T
        medians[workers] = float(seconds[np.searchsorted(weights.cumsum(), weights.sum() / 2)])
    return medians


def account(groups: Sequence[Group], begin: float, end: float, step_seconds: dict[int, float]) -> Account:
    """Return the account of the time between two moments.

    Args:
        groups: all of the run, also those before.
        begin, end: on the clock of the notes.
        step_seconds: from `steady`.
    """
    highest = new = redone = 0
    useful = training = 0.0
    for group in groups:
        # The first call's steps are known only from those that follow: calls are alike, but for the last of an epoch.
        lengths = [step - before for (before, _), (step, _) in itertools.pairwise(group.calls)]
        before = group.calls[0][0] - max(1, min(lengths, default=1)) if group.calls else 0
        since = group.began
        for step, at in group.calls:
            made, fresh = step - before, max(0, step - max(before, highest))
            if begin <= at < end:
                new, redone = new + fresh, redone + made - fresh
                useful += fresh * step_seconds.get(group.workers, 0.0)
                training += (at - max(since, begin)) * fresh / made if made > 0 else 0.0
            highest, before, since = max(highest, step), step, at
    seconds = end - begin
    return Account(seconds, new, redone, useful / seconds, training / seconds)
