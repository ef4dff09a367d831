"""Decides on the members of a group that repairs itself, even if some workers cannot reach each other.

A group is a sequence of generations. A generation ends for all of its members at once. Either a member is lost, which
the others notice in the middle of a sum, or a worker wants to join or should leave, for which they stop between two
steps. The next generation has the surviving members in order of rank, followed by the workers that joined. Nothing here
uses time, sockets or processes; `raytf.driver.arbiter` does.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

#: Missing links, each with the names of two workers.
Missing = Collection[frozenset[str]]
#: All sets are tried for up to this many workers with a missing link.
_EXACT = 12


@dataclass(frozen=True)
class Generation:
    """A group of workers between two changes.

    Attributes:
        number: 1, 2, ...
        members: names of its workers, by rank.
        addresses: HOST:PORT at which each member listens, by rank.
        steps: the last step that each member has finished, by rank; -1 for a worker that has joined.
        dismissed: members of the previous generation that have left for good.
        lost: number of members lost since the last finished step; 0 after a planned change.
        unreachable: workers that are left out because they and other members cannot reach each other.
    """

    number: int
    members: tuple[str, ...]
    addresses: tuple[str, ...]
    steps: tuple[int, ...]
    dismissed: tuple[str, ...] = ()
    lost: int = 0
    unreachable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """The address and progress of a worker.

    Attributes:
        address: HOST:PORT.
        step: last step that the worker has finished; -1 if it has no state.
        order: sort key for the members of a first generation.
    """

    address: str
    step: int = -1
    order: int = 0


def node_of(name: str) -> str:
    """Return Ray's id of a worker's node, from the worker's name."""
    return name.rpartition("-")[0]


@dataclass
class Membership:
    """The workers of a run, as its arbiter sees them.

    Attributes:
        most: most members of a generation; workers that join wait until there is room.
        refuse_looks: number of the arbiter's checks during which newcomers from an unresponsive node are refused.
        generation: the current generation; None before the first one, and if no member is left.
    """

    most: int = sys.maxsize
    refuse_looks: float = math.inf
    generation: Generation | None = None
    _number: int = 0
    #: Number of workers with which a generation starts if it does not continue another one.
    _wanted: int = 0
    #: Workers that have joined and are not in a generation yet.
    _joining: dict[str, Place] = field(default_factory=dict)
    #: Members that have left the current generation and wait for the next one.
    _ready: dict[str, Place] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)
    #: Members that should leave for good at the end of a step -> workers that must have joined before.
    _dismissed: dict[str, frozenset[str]] = field(default_factory=dict)
    #: Member of the current generation -> members that it could not reach at the rendezvous.
    _unreached: dict[str, set[str]] = field(default_factory=dict)
    #: Newcomer that was the first to leave the current generation, without having met the others; empty for none.
    _fled: str = ""
    #: Node of a worker that did not answer at a rendezvous -> checks until newcomers from this node are accepted again.
    _cut_off: dict[str, float] = field(default_factory=dict)
    #: News that the members of the current generation have received; see `news`.
    _told: set[str] = field(default_factory=set)

    @property
    def joining(self) -> list[str]:
        return list(self._joining)

    @property
    def lost(self) -> frozenset[str]:
        return frozenset(self._lost)

    @property
    def living(self) -> list[str]:
        """Members of the current generation that are not lost, by rank."""
        return [] if self.generation is None else [n for n in self.generation.members if n not in self._lost]

    @property
    def is_pause_wanted(self) -> bool:
        """Whether the members should leave the generation at the end of a step, because a worker wants to join or
        should leave."""
        if self.generation is None or not (self._joining or self._dismissed):
            return False
        return bool(self._coming() or self._leaving())

    def news(self) -> list[str]:
        """Return the news that the members must receive about their generation, each only once.

        Returns:
            "pause": see `is_pause_wanted`. "lost": a member is gone. "left": a member has left the generation, so the
            others must end its rendezvous.
        """
        if self.generation is None:
            return []
        known = {"pause": lambda: self.is_pause_wanted, "lost": lambda: self._lost, "left": lambda: self._ready}
        kinds = [kind for kind, is_so in known.items() if kind not in self._told and is_so()]
        self._told.update(kinds)
        return kinds

    def join(self, name: str, place: Place, wanted: int) -> Generation | None:
        """Record that a worker wants to join, and return the next generation if it can start.

        Args:
            name: name of the worker.
            place: address of the worker.
            wanted: number of workers that start together if no generation is left to continue.
        """
        self._joining[name], self._wanted = place, wanted
        return self._next()

    def dismiss(self, names: Collection[str], after: Collection[str] = ()) -> None:
        """Make members leave for good at the end of a step, once the workers `after` have joined, but never all members
        that have the state. This replaces earlier dismissals."""
        self._dismissed = dict.fromkeys(names, frozenset(after))

    def want(self, wanted: int) -> Generation | None:
        """Set how many workers start together, and return the next generation if it can start."""
        self._wanted = wanted
        return self._next()

    def leave(
        self, name: str, number: int, place: Place, unreached: Collection[str] = (), has_met: bool = False
    ) -> Generation | None:
        """Record that a worker has left a generation, and return the next generation if it can start.

        Args:
            name: name of the worker.
            number: number of the generation.
            place: address and last step of the worker.
            unreached: members that did not answer this worker at the rendezvous.
            has_met: whether the worker has met all members of the generation.

        Raises:
            StaleError: the generation has ended without this worker.
        """
        is_member = self.generation is not None and number == self.generation.number and name in self.generation.members
        if not is_member or name in self._lost:
            raise StaleError(f"{name} comes from generation {number}, which has ended without it")
        self._ready[name] = place
        assert self.generation is not None
        if unreached:
            self._unreached[name] = set(unreached) & set(self.generation.members) - {name}
        elif place.step < 0 and not has_met and len(self._ready) == 1:
            self._fled = name
        return self._next()

    def is_cut_off(self, name: str) -> bool:
        """Return whether a worker on the same node recently did not answer members, and no member is on that node."""
        node = node_of(name)
        return node in self._cut_off and node not in map(node_of, self.living)

    def count_look(self) -> None:
        """Count a check of the arbiter. After enough checks, newcomers from a node that was cut off are accepted."""
        self._cut_off = {node: looks - 1 for node, looks in self._cut_off.items() if looks > 1}

    def lose(self, name: str) -> Generation | None:
        """Record that a worker is gone, and return the next generation if it can start."""
        self._joining.pop(name, None)
        self._ready.pop(name, None)
        if self.generation is not None and name in self.generation.members:
            self._lost.add(name)
            if self._lost.issuperset(self.generation.members):
                self.generation = None  # workers that join now start from a checkpoint
                self._cut_off.clear()  # no member is left that would wait for an unreachable newcomer
        return self._next()

    def missing(self) -> list[str]:
        """Return the members, by rank, that have not left the current generation although others have."""
        if self.generation is None or not self._ready:
            return []
        return [name for name in self.generation.members if name not in self._ready and name not in self._lost]

    def _next(self) -> Generation | None:
        leaving: set[str] = set()
        if self.generation is None:
            coming = sorted(self._coming(), key=lambda name: self._joining[name].order)
            members = {n: self._joining[n] for n in coming} if len(self._joining) >= self._wanted else {}
        else:
            # The next generation starts when all living members have left. Only their number is compared, because this
            # runs at each departure.
            if not self._ready or len(self._ready) < len(self.generation.members) - len(self._lost):
                return None
            leaving, coming = self._leaving(), self._coming()
            places_of = {n: self._ready[n] for n in self.living if n not in leaving}
            places_of |= {n: self._joining[n] for n in coming}
            members = {n: places_of[n] for n in self._reaching(places_of)}
        if not members:
            return None
        self._number += 1
        places, nodes = list(members.values()), set(map(node_of, members))
        refused = [name for name in self._joining if node_of(name) in self._cut_off.keys() - nodes]
        self.generation = Generation(
            self._number,
            tuple(members),
            tuple(p.address for p in places),
            tuple(p.step for p in places),
            tuple(name for name in self._ready if name in leaving),
            self._lost_since_a_step(max(p.step for p in places)),
            tuple(name for name in [*self._ready, *refused] if name not in members and name not in leaving),
        )
        self._joining = {name: place for name, place in self._joining.items() if name not in members}
        for name in self.generation.dismissed:
            del self._dismissed[name]
        self._ready, self._lost, self._unreached, self._fled, self._told = {}, set(), {}, "", set()
        return self.generation

    def _reaching(self, places: dict[str, Place]) -> list[str]:
        """Return the workers that stay in the next generation, and mark nodes for which members waited in vain."""
        with_state = [name for name, place in places.items() if place.step >= 0]
        if self._fled and not (self._lost or self._unreached):  # it did not meet the members with the state
            self._unreached.setdefault(self._fled, set(with_state))
        stay = reaching_each_other(list(places), self._apart(places), with_state)
        awaited = {other for one in stay for other in self._unreached.get(one, ())}
        self._cut_off |= dict.fromkeys(map(node_of, awaited.difference(stay)), self.refuse_looks)
        return stay

    def _apart(self, names: Collection[str]) -> set[frozenset[str]]:
        """Return the pairs of workers that cannot reach each other: all workers of two nodes if two of them cannot."""
        pairs = {frozenset((one, other)) for one, others in self._unreached.items() for other in others}
        nodes = {frozenset(map(node_of, pair)) for pair in pairs}
        concerned = [name for name in names if any(node_of(name) in both for both in nodes)]
        return {
            pair
            for pair in map(frozenset, itertools.combinations(concerned, 2))
            # Two workers on one node count only if they themselves cannot reach each other.
            if pair in pairs or (len(both := frozenset(map(node_of, pair))) == 2 and both in nodes)
        }

    def _lost_since_a_step(self, step: int) -> int:
        """Return how many members were lost since `step`, including earlier generations that got no further."""
        before = self.generation
        earlier = 0 if before is None or max(before.steps) < step else before.lost
        return earlier + len(self._lost)

    def _leaving(self) -> set[str]:
        """Return the members that can leave now, because others have the state."""
        living = self.living
        here = {*living, *self._joining}
        leaving = {name for name in living if name in self._dismissed and self._dismissed[name] <= here}
        # While a generation trains, all members have the state; after a failed rendezvous, some may not.
        having = {name for name in living if name not in self._ready or self._ready[name].step >= 0}
        return leaving if (having or set(living)) - leaving else set()

    def _coming(self) -> list[str]:
        staying = len(self.living) - len(self._leaving())
        return list(self._joining)[: max(0, self.most - staying)]


class StaleError(RuntimeError):
    """A worker must stop, because its generation has ended without it."""


def reaching_each_other(names: Sequence[str], missing: Missing, with_state: Collection[str]) -> list[str]:
    """Return the largest set of workers that can all reach each other.

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
    """Return the best set of workers to leave out, trying all sets from the smallest."""
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
