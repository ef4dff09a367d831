"""Decide from measurements which rank is slower than its peers. No Ray and no TensorFlow here.

Ranks wait for the slowest one in each step, so the time of a step does not show who that is. Now and then all ranks
therefore measure, at the same time, how long each takes for one logical shard and has waited for its records.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raytf.training.process.heartbeat_types import HeartbeatState

#: A rank is slow from this many times its peers' median on, and has recovered below the second number.
SLOW, RECOVERED = 1.5, 1.25
#: Measurements that are averaged, without the longest one.
_WINDOW = 6
#: The fewest measurements that say anything.
_LEAST = 4
#: The number of times in a row that a rank must be slow.
_PERSISTENT = 3


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow: `ratio` is its seconds for a shard, divided by the median of its peers."""

    rank: int
    node: str
    address: str
    ratio: float


class Stragglers:
    """Finds slow ranks of one worker group, and begins anew when its ranks become others, or others take them."""

    def __init__(self) -> None:
        self._before: dict[int, HeartbeatState] = {}
        self._costs: dict[int, deque[float]] = {}
        self._slow: dict[int, int] = {}
        self._named: set[int] = set()

    def find_new(self, beats: Sequence[HeartbeatState]) -> list[Straggler]:
        """Return the ranks that have become slow, by the latest heartbeat of each rank."""
        if len(beats) < 2 or len(beats) < beats[0].world_size:
            return []
        before = self._before
        if {(b.rank, b.node, b.pid) for b in before.values()} != {(b.rank, b.node, b.pid) for b in beats}:
            self._before = {b.rank: b for b in beats}
            self._costs, self._slow, self._named = {}, {}, set()
            return []
        if not all(b.probes > before[b.rank].probes for b in beats):
            return []
        for beat in beats:
            costs = self._costs.setdefault(beat.rank, deque(maxlen=_WINDOW))
            costs.append(_shard_seconds(before[beat.rank], beat))
        self._before = {b.rank: b for b in beats}
        if len(self._costs[beats[0].rank]) < _LEAST:
            return []
        stragglers = []
        usual = {rank: (sum(costs) - max(costs)) / (len(costs) - 1) for rank, costs in self._costs.items()}
        in_order = sorted(usual.values())
        for beat in beats:
            peers = _median_without(in_order, usual[beat.rank])
            ratio = usual[beat.rank] / peers if peers else 1.0
            self._slow[beat.rank] = self._slow.get(beat.rank, 0) + 1 if ratio >= SLOW else 0
            if ratio < RECOVERED:
                self._named.discard(beat.rank)
            if self._slow[beat.rank] >= _PERSISTENT and beat.rank not in self._named:
                self._named.add(beat.rank)
                stragglers.append(Straggler(beat.rank, beat.node, beat.address, ratio))
        return stragglers


def _median_without(in_order: Sequence[float], one: float) -> float:
    """Return the median of at least two sorted numbers, without one of them."""
    left, place = len(in_order) - 1, bisect.bisect_left(in_order, one)

    def at(i: int) -> float:
        return in_order[i if i < place else i + 1]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2


def _shard_seconds(before: HeartbeatState, beat: HeartbeatState) -> float:
    """Return the seconds that a shard costs a rank: for computing it, and for waiting for its records."""
    computing = (beat.probe_seconds - before.probe_seconds) / (beat.probes - before.probes)
    steps = beat.step - before.step
    waiting = (beat.input_seconds - before.input_seconds) / (steps * beat.shards) if steps > 0 else 0.0
    return computing + waiting
