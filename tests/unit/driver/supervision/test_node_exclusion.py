"""Nodes are done without when workers fail there again and again, and never so many that the run cannot go on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raytf.driver.supervision.retry import FAULTS, MEMORY_SECONDS, NodeExclusion, without

NODES = ["a", "b", "c"]


def test_three_faults_within_an_hour_exclude_a_node_until_they_are_forgotten():
    exclusion = NodeExclusion()
    for now in (0.0, 100.0, 200.0):
        assert exclusion.excluded(NODES, now) == []
        exclusion.fault(["a"], now)
    assert exclusion.excluded(NODES, 200.0) == ["a"]
    assert exclusion.excluded(NODES, MEMORY_SECONDS - 1) == ["a"]
    assert exclusion.excluded(NODES, MEMORY_SECONDS) == []


def test_where_all_nodes_fail_it_is_not_the_node():
    exclusion = NodeExclusion()
    for now in range(6):
        exclusion.fault(NODES, float(now))
    assert exclusion.excluded(NODES, 10.0) == []


def test_the_worst_comes_first():
    exclusion = NodeExclusion()
    for now in range(4):
        exclusion.fault(["b"], float(now))
        exclusion.fault(["a"] if now else [], float(now))
    assert exclusion.excluded([*NODES, "d", "e"], 5.0) == ["b", "a"]


def test_a_node_that_computes_wrongly_is_excluded_at_once_for_good_and_first():
    exclusion = NodeExclusion()
    for now in range(3):
        exclusion.fault(["a"], float(now))
    exclusion.computes_wrongly(["c"])
    assert exclusion.excluded(NODES, 10.0) == ["c", "a"]
    assert exclusion.excluded(NODES, 10 * MEMORY_SECONDS) == ["c"]
    assert exclusion.why("c", 10.0) == "a worker on it computed wrongly"
    assert exclusion.why("a", 10.0) == "workers failed on it 3 times within an hour"


def test_a_fault_now_and_then_excludes_nobody():
    exclusion = NodeExclusion()
    for hour in range(50):
        exclusion.fault(["a"], hour * MEMORY_SECONDS / (FAULTS - 1))
        assert exclusion.excluded(NODES, hour * MEMORY_SECONDS / (FAULTS - 1)) == []


@given(
    workers=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 3)),
    unwanted=st.lists(st.sampled_from("abcdefx"), unique=True),
    least=st.integers(0, 6),
)
def test_enough_workers_stay_where_there_were_enough(workers, unwanted, least):
    def count(nodes: set[str]) -> int:
        return sum(workers[n] for n in nodes)

    kept = without(workers, unwanted, least, count)
    assert kept <= set(workers)
    assert set(workers) - kept <= set(unwanted)
    assert count(kept) >= min(least, count(set(workers)))
    if count(set(workers) - set(unwanted)) >= least:
        assert not kept & set(unwanted)


def test_a_node_that_others_cannot_reach_is_avoided_at_once_and_for_an_hour():
    exclusion = NodeExclusion()
    exclusion.is_unreachable(["b"], 10.0)
    assert exclusion.excluded(["a", "b"], 11.0) == ["b"]
    assert "cannot reach each other" in exclusion.why("b", 11.0)
    assert exclusion.excluded(["a", "b"], 10.0 + MEMORY_SECONDS) == []
