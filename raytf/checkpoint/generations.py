"""Copies of the state in the memory of nodes that belong together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryShare:
    """One rank's share of a snapshot in memory.

    Attributes:
        step: global steps that the state has seen.
        attempt: name of the start of the worker group that wrote it.
        share, shares: which part of how many the ranks of its node wrote.
        bytes: that it takes.
    """

    step: int
    attempt: str
    share: int
    shares: int
    bytes: int = 0


@dataclass(frozen=True)
class HeldShare(MemoryShare):
    """A share that a node holds, and the path under which processes of that node find it."""

    path: str = ""


@dataclass(frozen=True)
class Generation:
    """A snapshot that at least one node holds whole.

    Attributes:
        holders: node -> its shares, in order.
    """

    step: int
    attempt: str
    holders: dict[str, list[HeldShare]]


def generations(answers: Mapping[str, Collection[HeldShare]], attempts: Collection[str] | None) -> list[Generation]:
    """Return snapshots in memory that can be restored, best first: the latest step, then the latest attempt.

    Args:
        answers: what each node holds.
        attempts: those of this run, where it is known; what others wrote is of a run that was deleted.
    """
    whole: dict[tuple[int, str], dict[str, list[HeldShare]]] = {}
    for node, held in answers.items():
        for key in {(h.step, h.attempt) for h in held}:
            shares = {h.share: h for h in held if (h.step, h.attempt) == key}  # both slots of a rank may hold one
            own = sorted(shares.values(), key=lambda h: h.share)
            if [h.share for h in own] == list(range(own[0].shares)) and (attempts is None or key[1] in attempts):
                whole.setdefault(key, {})[node] = own
    return [Generation(step, attempt, holders) for (step, attempt), holders in sorted(whole.items(), reverse=True)]


def is_latest(answers: Mapping[str, Collection[HeldShare]], attempts: Collection[str]) -> bool:
    """Return whether some nodes hold a whole copy of the latest attempt, so that waiting for others is needless.

    All nodes of an attempt copy after the same steps, so another one can have one copy more at most, of a few steps.
    Names of attempts sort by their numbers.
    """
    return any(g.attempt == max(attempts) for g in generations(answers, attempts))
