"""Decide when a run changes its number of workers, which nodes it uses, which workers leave, and how long to wait for
them. Nothing here uses Ray."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from raytf.driver.supervision.retry import without

#: Seconds for which the cluster must be stable before a run follows a change. Nodes that were requested together arrive
#: at about the same time, and a node that appears only briefly is not worth a restart.
SETTLE_SECONDS = 4.0
#: Seconds after which a run follows a cluster that keeps changing.
PATIENCE_SECONDS = 8.0
#: A run that cannot leave a node with notice saves once more this many seconds before the node disappears.
LAST_SAVE_SECONDS = 10.0
#: Seconds for new workers to join and for dismissed workers to leave, before the cluster is checked again.
_LEAVE_SECONDS = 120.0
#: Seconds to wait before adding workers again after there was no room for them.
_FULL_SECONDS = 10.0


class ResizeDecision(enum.Enum):
    """The next action for a worker group that trains without failures."""

    KEEP = "keep"
    PARK = "park"  # ask all ranks to save the current step and to wait
    RELEASE = "release"  # parking is no longer needed, or was only meant to save: continue training
    RESIZE = "resize"  # all ranks have saved, or need not: change the group, or replace it with one of the new size


@dataclass(frozen=True)
class ClusterView:
    """The cluster and the run at one moment.

    Attributes:
        now: time in seconds of a monotonic clock.
        workers: number of the run's workers.
        possible: workers that the cluster can run now on nodes without notice; at most the maximum.
        leaving: whether a node of the run has a preemption notice.
        parked: True if all ranks have saved and wait, False if they could not save, None until one of these is known.
        deadline: time by the same clock at which the first node with notice disappears; None if unknown.
    """

    now: float
    workers: int
    possible: int
    leaving: bool = False
    parked: bool | None = None
    deadline: float | None = None


class Resizer:
    """Decides when to follow a change of the cluster: after it has lasted, and at most once in `every_seconds`.

    A notice for a node of the run is followed at once, because the node disappears anyway. If too few nodes stay, the
    run saves at once and again shortly before the deadline. Until then it continues to train, because new nodes may
    join. A node lost without notice is reported with `started` and counts as a change, so a node that disappears and
    returns within the interval costs one restart, not two.

    Args:
        fewest: fewest workers with which the run can train.
        every_seconds: shortest time between two planned changes.
        is_partial: whether workers join and leave while the others train, so that no worker has to save and wait.
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
        """Record that a group of this many workers starts, for any reason."""
        if self._workers is not None and workers != self._workers:
            self._changed_at = now
        self._workers, self._seen, self._differs_at, self._parking = workers, None, now, False
        self._saved_at = None

    def decide(self, view: ClusterView) -> ResizeDecision:
        """Return the next action. Carry it out before the next call, whose view shows whether it succeeded."""
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
    """The nodes on which workers may start, and the nodes left out because workers fail there or because they have
    another kind of GPU."""

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
    """Choose nodes, avoiding those on which workers fail and slow ones that can be replaced.

    Args:
        usable: all usable nodes.
        unwanted: nodes on which workers fail, the worst first; used only if the run could not start without them.
        slow: nodes of stragglers.
        fewest: fewest workers with which the run can train.
        count: returns how many workers some nodes can run.
        of_one_kind: returns the nodes, of those passed, whose GPUs are of the run's kind.
    """
    sound = without(usable, unwanted, fewest, lambda some: count(of_one_kind(some)))
    alike = of_one_kind(sound)
    others = frozenset(node for node in sound - alike if count([node]))
    return NodeChoice(without(alike, slow, count(alike), count), frozenset(set(usable) - sound), others)


def next_size(possible: int | None, survivors: int, fewest: int) -> int | None:
    """Return the number of workers in the next group, or None while the cluster can run too few.

    Args:
        possible: workers that the cluster can run; None if unknown.
        survivors: workers that continue to train, even if fewer than `fewest`; 0 if all workers restart.
        fewest: fewest workers with which the run can train.
    """
    if survivors:
        return max(survivors, possible or 0)
    return None if possible is None or possible < fewest else possible


def ranks_to_replace(nodes: Sequence[str], lost: Collection[int], wanted: int, usable: Collection[str]) -> list[int]:
    """Return the lost ranks to replace with new workers on the same, usable nodes. The group continues without the
    other lost ranks.

    Args:
        nodes: node of each worker, by rank.
        wanted: number of workers that the group should have.
    """
    room = wanted - (len(nodes) - len(lost))
    return [rank for rank in sorted(lost) if nodes[rank] in usable][: max(0, room)]


def planned_change(nodes: Sequence[str], wanted: int, usable: Collection[str]) -> tuple[list[int], int]:
    """Return the ranks that leave, those on unusable nodes first, and how many workers to add before they leave.

    Args:
        nodes: node of each worker, by rank.
        wanted: number of workers that the group should have.
    """
    going = [rank for rank, node in enumerate(nodes) if node not in usable]
    more = wanted - (len(nodes) - len(going))
    if more < 0:  # the group must shrink further: the last ranks leave
        going += [rank for rank in reversed(range(len(nodes))) if rank not in going][:-more]
    return going, max(0, more)


# -- departures --------------------------------------------------------------------------------------------------------
#
# `raytf.driver.ray_train.scaling_policy` passes them to the arbiter.


class Departures:
    """Records which workers were dismissed, by their places, and which have left. `clock` is monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forget everything, because a new group starts."""
        self._dismissed, self._gone = set[Hashable](), set[int]()
        self.go_on()

    @property
    def are_awaited(self) -> bool:
        """Whether the group must not be changed in any other way yet."""
        return self._clock() < self._rests_until

    def go_on(self) -> None:
        """End the wait, because the group has changed and its next change is decided anew."""
        self._rests_until = float("-inf")

    def wait_for_room(self) -> None:
        """Delay the next addition, because there was no room for new workers, or they did not start."""
        self._rests_until = self._clock() + _FULL_SECONDS

    def dismiss(self, workers: Collection[Hashable]) -> None:
        """Record that the arbiter has dismissed workers."""
        self._dismissed, self._rests_until = set(workers), self._clock() + _LEAVE_SECONDS

    def left(self, places: Sequence[Hashable], ended: Collection[int]) -> set[int]:
        """Return the dismissed ranks that have left, from the place of each rank and the ranks that have ended. Return
        none if all have left."""
        self._gone = {rank for rank, place in enumerate(places) if place in self._dismissed and rank in ended}
        if len(self._gone) == len(places):
            self._gone = set()
        self._dismissed -= {places[rank] for rank in self._gone}
        return self._gone

    def take(self) -> set[int]:
        """Return the ranks that `left` returned last, and forget them."""
        gone, self._gone = self._gone, set()
        return gone
