"""Decide when a run changes its number of workers, on which nodes they are, which ones leave, and how long that is
waited for. No Ray here."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from raytf.driver.supervision.retry import without

#: Seconds without a further change of the cluster before a run follows one: nodes that were requested together arrive
#: together, and a node that comes and goes is not worth a restart.
SETTLE_SECONDS = 4.0
#: Seconds after which a run follows a cluster that keeps changing.
PATIENCE_SECONDS = 8.0
#: A run that cannot leave a node with notice saves once more this many seconds before the node goes.
LAST_SAVE_SECONDS = 10.0
#: Seconds for workers that come to join, and those that they come for to leave, before the cluster is looked at anew.
_LEAVE_SECONDS = 120.0
#: Seconds until workers are added again after there was no room for them.
_FULL_SECONDS = 10.0


class ResizeDecision(enum.Enum):
    """The next step for a worker group that trains well."""

    KEEP = "keep"
    PARK = "park"  # ask all ranks to save the present step and to wait
    RELEASE = "release"  # the reason to park is gone, or it was only to save: train on
    RESIZE = "resize"  # all ranks have saved, or need not: replace the group by one of the new size, or change it


@dataclass(frozen=True)
class ClusterView:
    """The cluster and the run at one moment.

    Attributes:
        now: seconds, of any clock that only goes forward.
        workers: that the run has.
        possible: workers that the cluster can run now, without nodes that are about to go; at most the maximum.
        leaving: whether a node of the run was given notice.
        parked: True when all ranks have saved and wait, False when they could not save, None until either is known.
        deadline: when the first of the nodes with notice goes, by the same clock; None if that is not known.
    """

    now: float
    workers: int
    possible: int
    leaving: bool = False
    parked: bool | None = None
    deadline: float | None = None


class Resizer:
    """Follows the cluster's changes: only once a change has lasted, and at most once in `every_seconds`.

    Notice for a node of the run is followed at once, since the node goes anyway. If the nodes that stay are too few,
    the run saves at once and again shortly before the end, and trains on meanwhile: new nodes may come. What cannot be
    planned, the loss of a node without notice, is reported with `started` and counts as a change: a node that goes and
    comes back within the interval costs one restart, not two.

    Args:
        fewest: workers that a run needs at least.
        every_seconds: between two planned changes.
        is_partial: workers come and go while the others train, so that nobody has to save and wait.
    """

    def __init__(self, fewest: int, every_seconds: float, is_partial: bool = False):
        self._fewest, self._every, self._is_partial = fewest, every_seconds, is_partial
        self._workers: int | None = None
        self._changed_at = float("-inf")
        self._seen: int | None = None
        self._seen_at = self._differs_at = self._failed_at = float("-inf")
        self._parking = False
        #: When the run last saved because of a notice that it could not follow.
        self._saved_at: float | None = None

    def started(self, workers: int, now: float) -> None:
        """Take note that a group of this many workers starts, for any reason."""
        if self._workers is not None and workers != self._workers:
            self._changed_at = now
        self._workers, self._seen, self._differs_at, self._parking = workers, None, now, False
        self._saved_at = None

    def decide(self, view: ClusterView) -> ResizeDecision:
        """Return the next move. Carry it out before asking for the next one; if it failed, the view says so."""
        if view.possible != self._seen:
            self._seen, self._seen_at = view.possible, view.now
        has_room = view.possible >= self._fewest
        wanted = has_room and (view.leaving or view.possible != view.workers)
        is_stuck = view.leaving and not has_room
        if not wanted:
            self._differs_at = view.now
        if not view.leaving:
            self._saved_at = None
        if self._parking:
            if view.parked and wanted and not self._is_partial:
                return ResizeDecision.RESIZE
            if view.parked is None and (wanted or is_stuck):
                return ResizeDecision.KEEP
            self._parking = False
            if view.parked is False:
                self._failed_at = view.now
            elif view.parked and is_stuck:
                self._saved_at = view.now
            return ResizeDecision.RELEASE
        settled = view.now - self._seen_at >= SETTLE_SECONDS or view.now - self._differs_at >= PATIENCE_SECONDS
        lasting = settled and view.now - self._changed_at >= self._every
        # Training continues between two attempts to save; otherwise a run on failing storage would do nothing else.
        rested = view.now - self._failed_at >= SETTLE_SECONDS
        if self._is_partial and wanted and (lasting or view.leaving):
            return ResizeDecision.RESIZE
        if rested and ((wanted and (lasting or view.leaving)) or (is_stuck and self._is_save_due(view))):
            self._parking = True
            return ResizeDecision.PARK
        return ResizeDecision.KEEP

    def _is_save_due(self, view: ClusterView) -> bool:
        if self._saved_at is None:
            return True
        last = None if view.deadline is None else view.deadline - LAST_SAVE_SECONDS
        return last is not None and self._saved_at < last <= view.now


@dataclass(frozen=True)
class NodeChoice:
    """The nodes on which workers may start, and those that are left out: workers fail on them, or their GPUs are of
    another kind."""

    nodes: set[str]
    failing: frozenset[str]
    other_kinds: frozenset[str]


def choose_nodes(
    usable: Collection[str],
    unwanted: Sequence[str],
    slow: Sequence[str],
    fewest: int,
    count: Callable[[Collection[str]], int],
    of_one_kind: Callable[[set[str]], set[str]],
) -> NodeChoice:
    """Choose nodes without those on which workers fail, and without slow ones that can be replaced.

    Args:
        usable: all of them.
        unwanted: nodes on which workers fail, the worst first; they are used where a run could not start without them.
        slow: nodes of stragglers.
        fewest: workers that a run needs at least.
        count: returns how many workers nodes can run.
        of_one_kind: returns those of some nodes whose GPUs have the kind of the run.
    """
    sound = without(usable, unwanted, fewest, lambda some: count(of_one_kind(some)))
    alike = of_one_kind(sound)
    others = frozenset(node for node in sound - alike if count([node]))
    return NodeChoice(without(alike, slow, count(alike), count), frozenset(set(usable) - sound), others)


def next_size(possible: int | None, survivors: int, fewest: int) -> int | None:
    """Return how many workers the next group has; None while there are too few.

    Args:
        possible: workers that the cluster can run; None if that is not known.
        survivors: workers that train already, with however few they are; 0 where all start again.
        fewest: workers that a run needs at least.
    """
    if survivors:
        return max(survivors, possible or 0)
    return None if possible is None or possible < fewest else possible


def ranks_to_replace(nodes: Sequence[str], lost: Collection[int], wanted: int, usable: Collection[str]) -> list[int]:
    """Return the lost ranks that new workers take on the same nodes, which must be usable; the group continues without
    the other lost ones.

    Args:
        nodes: of the workers, by rank.
        wanted: how many workers the group should have.
    """
    room = wanted - (len(nodes) - len(lost))
    return [rank for rank in sorted(lost) if nodes[rank] in usable][: max(0, room)]


def planned_change(nodes: Sequence[str], wanted: int, usable: Collection[str]) -> tuple[list[int], int]:
    """Return the ranks that leave, those on unusable nodes first, and how many workers are added before that.

    Args:
        nodes: of the workers, by rank.
        wanted: how many workers the group should have.
    """
    going = [rank for rank, node in enumerate(nodes) if node not in usable]
    more = wanted - (len(nodes) - len(going))
    if more < 0:  # with fewer workers and no node that goes, the last ones leave
        going += [rank for rank in reversed(range(len(nodes))) if rank not in going][:-more]
    return going, max(0, more)


# -- departures --------------------------------------------------------------------------------------------------------
#
# `raytf.driver.ray_train.scaling_policy` tells the arbiter of them.


class Departures:
    """Notes which workers were dismissed, by their places, and which have left. `clock` only goes forward."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget everything: a new group starts."""
        self._dismissed, self._gone = set[Hashable](), set[int]()
        self.go_on()

    @property
    def are_awaited(self) -> bool:
        """Return whether the group must not be changed otherwise yet."""
        return self._clock() < self._rests_until

    def go_on(self) -> None:
        """End the wait after the group has changed: what it needs is decided anew."""
        self._rests_until = float("-inf")

    def wait_for_room(self) -> None:
        """Delay the next addition, because there was no room for new workers, or they did not start."""
        self._rests_until = self._clock() + _FULL_SECONDS

    def dismiss(self, workers: Collection[Hashable]) -> None:
        """Take note that the arbiter has told workers to leave."""
        self._dismissed, self._rests_until = set(workers), self._clock() + _LEAVE_SECONDS

    def left(self, places: Sequence[Hashable], ended: Collection[int]) -> set[int]:
        """Return the ranks that have left as dismissed, never all: of the workers at these places, by rank, of which
        some have ended."""
        self._gone = {rank for rank, place in enumerate(places) if place in self._dismissed and rank in ended}
        if len(self._gone) == len(places):
            self._gone = set()
        self._dismissed -= {places[rank] for rank in self._gone}
        return self._gone

    def take(self) -> set[int]:
        """Return the ranks that `left` returned last; only once."""
        gone, self._gone = self._gone, set()
        return gone
