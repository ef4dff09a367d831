"""Decide which workers of a group stay where some of them cannot reach each other."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence

#: Links that are missing: each has the names of two workers.
Missing = Collection[frozenset[str]]
#: Workers with a missing link up to which all sets are tried.
_EXACT = 12


def reaching_each_other(names: Sequence[str], missing: Missing, with_state: Collection[str]) -> list[str]:
    """Return the largest set of workers that all reach each other.

    This set is a maximum clique. If more than `_EXACT` workers have a missing link, the worker with the most missing
    links is left out until no link is missing. The result may then be smaller than the largest set (greedy vertex
    cover; Johnson, Approximation Algorithms for Combinatorial Problems, 1974).

    Args:
        names: the workers, by rank. Among sets of the same size, the set with more workers that have the state is
            chosen, then the set that leaves out later names.
        missing: links between two of the workers.
        with_state: the workers that have the state. The set contains at least one of them, if there are any.

    Returns:
        The names that stay, in their order.
    """
    here = [link for link in missing if link <= set(names)]
    concerned = [name for name in names if any(name in link for link in here)]
    having = [name for name in names if name in with_state]
    chosen = _tried(concerned, here, having) if len(concerned) <= _EXACT else _greedy(concerned, here, having)
    return [name for name in names if name not in chosen]


def _tried(concerned: Sequence[str], missing: Missing, having: Collection[str]) -> set[str]:
    """Return the best set of workers to leave out; all sets are tried, the smallest first."""
    for count in range(len(concerned) + 1):
        fitting = [out for out in map(set, itertools.combinations(concerned, count)) if _fits(out, missing, having)]
        if fitting:
            return max(fitting, key=lambda out: (-sum(name in having for name in out), _places(out, concerned)))
    return set()


def _fits(out: set[str], missing: Missing, having: Collection[str]) -> bool:
    keeps_state = not having or any(name not in out for name in having)
    return keeps_state and all(link & out for link in missing)


def _places(out: set[str], names: Sequence[str]) -> list[int]:
    return sorted((names.index(name) for name in out), reverse=True)


def _greedy(concerned: Sequence[str], missing: Missing, having: Collection[str]) -> set[str]:
    out: set[str] = set()
    left = set(missing)
    while left:
        counts = Counter(name for link in left for name in link)
        last = [name for name in having if name not in out]
        free = [name for name in concerned if counts[name] and last != [name]]
        chosen = max(free, key=lambda name: (counts[name], name not in having, concerned.index(name)))
        out.add(chosen)
        left = {link for link in left if chosen not in link}
    return out
