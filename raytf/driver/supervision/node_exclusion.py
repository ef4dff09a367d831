"""Decides which nodes a run avoids: those on which workers fail again and again, and slow ones. No Ray here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Sequence

#: Faults that exclude a node, and seconds after which a fault is forgotten.
FAULTS, MEMORY_SECONDS = 3, 3600.0
#: An excluded node must have this many times the faults of the median of the other nodes.
_MORE = 3.0


class NodeExclusion:
    """Counts the faults of nodes.

    A node is excluded after three faults within an hour, unless the other nodes have faults too: then the node is not
    the reason. It comes back when its faults are an hour old. A node that other workers cannot reach is excluded at
    once, and comes back in the same way; one that computes wrongly is excluded at once and for the whole run.
    """

    def __init__(self) -> None:
        self._faults: dict[str, list[float]] = {}
        self._wrong: set[str] = set()
        self._unreachable: set[str] = set()

    def fault(self, nodes: Collection[str], now: float) -> None:
        """Count a failure of workers on these nodes, at a time of a clock that only goes forward."""
        for node in nodes:
            self._faults.setdefault(node, []).append(now)

    def is_unreachable(self, nodes: Collection[str], now: float) -> None:
        """Exclude nodes whose workers and others cannot reach each other: the next workers there could not, either."""
        self._unreachable.update(nodes)
        for _ in range(FAULTS):
            self.fault(nodes, now)

    def computes_wrongly(self, nodes: Collection[str]) -> bool:
        """Exclude nodes on which an audit has seen workers compute wrongly; return whether that is new of one of
        them."""
        is_new = not self._wrong.issuperset(nodes)
        self._wrong.update(nodes)
        return is_new

    def why(self, node: str, now: float) -> str:
        """Return why a node is excluded, for people."""
        if node in self._wrong:
            return "a worker on it computed wrongly"
        if node in self._unreachable:
            return "other workers and those on it cannot reach each other"
        return f"workers failed on it {self.count(node, now)} times within an hour"

    def count(self, node: str, now: float) -> int:
        """Return the faults of a node within the last hour."""
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
    """Kernels that failed, by node: on one node it may be the GPU; on a second one within an hour, it is the code."""

    def __init__(self) -> None:
        self._failed_at: dict[str, float] = {}

    def failed(self, nodes: Collection[str], now: float) -> bool:
        """Note that kernels failed on these nodes; returns whether they have now failed on two nodes."""
        self._failed_at |= dict.fromkeys(nodes, now)
        return sum(now - at < MEMORY_SECONDS for at in self._failed_at.values()) > 1


def without(nodes: Iterable[str], unwanted: Sequence[str], least: int, count: Callable[[set[str]], int]) -> set[str]:
    """Return the nodes without the unwanted ones, which are left out one after another, the most unwanted first, as
    long as they can run `least` workers."""
    kept = set(nodes)
    for node in unwanted:
        if node in kept and count(kept - {node}) >= least:
            kept.remove(node)
    return kept
