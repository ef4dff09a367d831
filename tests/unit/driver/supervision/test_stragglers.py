"""Who is slow is found by measurements that last, and only then."""

from __future__ import annotations

import dataclasses
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.supervision.watchdog import SLOW, Straggler, Stragglers
from raytf.training.process.heartbeat_types import HeartbeatState


class World:
    """Ranks with this many seconds for a shard each, measured every so often."""

    def __init__(self, costs: list[float], shards: list[int] | None = None, inputs: list[float] | None = None):
        self.costs, self.inputs = costs, inputs or [0.0] * len(costs)
        self.shards = shards or [1] * len(costs)
        self.stragglers = Stragglers()
        self.beats = [
            HeartbeatState(1, r, len(costs), f"n{r}", f"10.0.0.{r}", r, shards=s) for r, s in enumerate(self.shards)
        ]

    def measure(self, noise: float = 0.0, rng: random.Random | None = None) -> list[int]:
        """Ranks named by one more measurement."""
        return [s.rank for s in self.found(noise, rng)]

    def found(self, noise: float = 0.0, rng: random.Random | None = None) -> list[Straggler]:
        """What one more measurement finds."""
        rng, beats = rng or random.Random(0), []
        for last, cost, wait in zip(self.beats, self.costs, self.inputs, strict=True):
            seconds = cost * (1 + noise * rng.random())
            beats.append(
                HeartbeatState(
                    *(1, last.rank, last.world_size, last.node, last.address, last.pid, last.step + 100),
                    shards=last.shards,
                    probes=last.probes + 1,
                    probe_seconds=last.probe_seconds + seconds,
                    input_seconds=last.input_seconds + 100 * wait,
                )
            )
        self.beats = beats
        return self.stragglers.find_new(beats)

    def named(self, times: int = 20, **noise) -> list[int]:
        return [rank for _ in range(times) for rank in self.measure(**noise)]


def test_a_rank_three_times_slower_is_named_once_after_some_measurements():
    world = World([0.1, 0.1, 0.3])
    assert [world.measure() for _ in range(7)] == [[], [], [], [], [], [], [2]]
    assert world.named() == []


def test_a_rank_that_joins_is_compared_after_enough_measurements():
    world = World([0.1, 0.1])
    world.named(10)
    grown = World([0.1, 0.1, 0.3])
    grown.stragglers = world.stragglers
    assert [grown.measure() for _ in range(7)] == [[], [], [], [], [], [], [2]]
    shrunk = World([0.1, 0.1])
    shrunk.stragglers = world.stragglers
    assert shrunk.named(10) == []


def test_a_process_that_takes_a_rank_is_measured_anew():
    world = World([0.1, 0.1, 0.3])
    assert world.named(10) == [2]
    world.beats[2] = dataclasses.replace(world.beats[2], pid=99, probes=0, probe_seconds=0.0)
    world.costs[2] = 0.1
    assert world.named(10) == []
    world.costs[2] = 0.5
    assert world.named(40) == [2]


@given(st.lists(st.sampled_from([0.5, 1.0, 1.25, 2.0, 8.0]), min_size=2, max_size=9))
def test_a_rank_is_compared_with_the_median_of_its_peers(costs):
    world = World(costs)
    found = [slow for _ in range(20) for slow in world.found()]
    for slow in found:
        peers = statistics.median(costs[: slow.rank] + costs[slow.rank + 1 :])
        assert slow.ratio == pytest.approx(costs[slow.rank] / peers)
    expected = [r for r, cost in enumerate(costs) if cost >= SLOW * statistics.median(costs[:r] + costs[r + 1 :])]
    assert [slow.rank for slow in found] == expected


def test_of_two_the_slower_is_named():
    assert World([0.3, 0.1]).named() == [0]


def test_who_has_more_shards_is_not_slow():
    assert World([0.1, 0.1, 0.1], shards=[2, 1, 1]).named() == []


def test_who_waits_long_for_its_records_is_slow():
    assert World([0.1, 0.1, 0.1], inputs=[0.0, 0.2, 0.01]).named() == [1]


def test_one_long_measurement_is_no_slow_rank():
    world = World([0.1, 0.1])
    assert world.named(10) == []
    world.costs = [0.1, 30.0]
    assert world.measure() == []
    world.costs = [0.1, 0.1]
    assert world.named() == []


def test_who_was_slow_and_is_again_is_named_again():
    world = World([0.1, 0.3])
    assert world.named() == [1]
    world.costs = [0.1, 0.1]
    assert world.named() == []
    world.costs = [0.1, 0.3]
    assert world.named() == [1]


def test_beats_between_measurements_and_of_few_ranks_say_nothing():
    world = World([0.1, 0.3])
    world.named(6)
    for _ in range(10):
        assert world.stragglers.find_new(world.beats) == []
        assert world.stragglers.find_new(world.beats[:1]) == []
    assert world.named() == [1]


@given(seed=st.integers(0, 10_000), ranks=st.integers(2, 8))
def test_equal_ranks_with_noise_are_never_named(seed, ranks):
    assert World([0.1] * ranks).named(40, noise=SLOW - 1.01, rng=random.Random(seed)) == []


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_slow_one_is_found_in_spite_of_noise(ranks):
    assert World([0.1] * (ranks - 1) + [0.3]).named(40, noise=0.3, rng=random.Random(1)) == [ranks - 1]
