"""The model of docs/evidence/scaling.md: its formulas where the answer is known; the page says what the code says."""

import dataclasses
import math

import pytest

from benchmarks import harness, performance
from benchmarks.scale import model as scale_model
from benchmarks.scale.model import MACHINES, MODELS, Model

PAGE = harness.ROOT / "docs" / "evidence" / "scaling.md"


def test_the_page_has_the_tables_of_the_code():
    text = PAGE.read_text()
    assert all(f"<!-- table {name} -->" in text for name in scale_model.TABLES)
    filled = performance.filled(text, scale_model.markdown)
    assert filled == text, "run python -m benchmarks.scale.model --write docs/evidence/scaling.md"


def test_a_ring_of_two_sends_all_bytes_once():
    assert scale_model.ring(2, 100.0, 10.0, 0.5) == 100 / 10 + 2 * 0.5
    assert scale_model.ring(1, 100.0, 10.0, 0.5) == 0
    assert scale_model.ring(1000, 100.0, 10.0, 0.0) == pytest.approx(2 * 100 / 10, rel=0.002)


def test_a_tree_has_fewer_hops_than_a_ring():
    assert scale_model.tree(512, 0.0, 1.0, 1.0) == 18
    assert scale_model.ring(512, 0.0, 1.0, 1.0) == 1022
    assert scale_model.tree(1, 100.0, 1.0, 1.0) == 0


@pytest.mark.parametrize("machine", MACHINES)
def test_more_nodes_and_bytes_and_slower_networks_take_longer(machine):
    base = scale_model.all_reduce(machine, 8, 1e8)
    assert scale_model.all_reduce(machine, 16, 1e8) > base
    assert scale_model.all_reduce(machine, 8, 2e8) > base
    assert scale_model.all_reduce(dataclasses.replace(machine, network=machine.network / 2), 8, 1e8) > base
    assert (scale_model.all_reduce(machine, 1, 1e8) == 0) == (machine.gpus == 1)


def test_a_share_is_no_smaller_than_the_largest_tensor():
    model = Model("m", 100.0, 10, 30.0)
    assert [scale_model.share(model, parts) for parts in (1, 2, 10, 100)] == [1200, 600, 120, 120]


def test_more_ranks_save_sooner_until_the_manifest_counts():
    seconds = [scale_model.save_seconds(MACHINES[1], MODELS[2], nodes) for nodes in (1, 2, 4)]
    assert seconds == sorted(seconds, reverse=True)


def test_in_place_512_nodes_lose_little_until_one_fails_every_few_minutes():
    *usual, beyond = scale_model.SPOTS
    for machine, model in ((MACHINES[3], MODELS[1]), (MACHINES[1], MODELS[2])):
        found = [scale_model.in_place(machine, model, 512, spot) for spot in usual]
        assert all(0.97 < part <= 1 - scale_model.SNAPSHOT_SHARE for part in found)
        copied = scale_model.in_memory(machine, model, 512, beyond).goodput
        assert copied < scale_model.in_place(machine, model, 512, beyond) < min(found)


@pytest.mark.parametrize(("cost", "mean"), [(1.0, 1e4), (10.0, 3600.0), (60.0, 3600.0)])
def test_the_best_interval_is_the_best(cost, mean):
    best = scale_model.daly(cost, mean)
    found = [scale_model.goodput(best * factor, cost, 30.0, mean) for factor in (0.7, 0.9, 1.0, 1.1, 1.4)]
    assert max(found) == found[2]
    assert found[2] == pytest.approx(1 - math.sqrt(2 * cost / mean), abs=0.03)
    assert best == pytest.approx(scale_model.young(cost, mean), rel=0.2)


def test_without_failures_only_the_save_costs():
    assert scale_model.goodput(90.0, 10.0, 30.0, 1e9) == pytest.approx(0.9, rel=1e-6)
