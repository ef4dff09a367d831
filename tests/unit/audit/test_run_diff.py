"""Where two runs part, and why, from what their folders tell."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raytf.audit import run_diff
from raytf.checkpoint import manifest
from raytf.checkpoint.naming import name_of
from raytf.commands.bisect import result_lines
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.distributed.step_digest import DigestLayout
from raytf.runs import run_log
from raytf.storage.storage import Storage

LAYOUT = DigestLayout(4, ("kernel", "bias", "loss and metrics"))
STEPS = 100
ADAM = {"beta_1": 0.9, "learning_rate": 0.001}
IDENTITY = {
    "--seed": "0",
    "contents of the training data": "9 records, CRC-32 00000000",
    "model optimizer": f"Adam {json.dumps(ADAM)}",
    "model structure": "aaaa",
    "validation data": "none",
}
DENSE = {"class_name": "Dense", "config": {"name": "dense", "units": 64}}


class Made:
    """A run's folder, of which one thing may be another than usual."""

    def __init__(self, folder: str):
        self.run = Storage(folder)
        self.digests = np.random.default_rng(0).integers(0, 256, (STEPS, LAYOUT.bytes), np.uint8)
        self.losses, self.rates = np.linspace(1, 0, STEPS), np.full(STEPS, 0.001)
        self.identity, self.layers = dict(IDENTITY), [DENSE]

    def differ(self, step: int, shards: range, tensors: tuple[int, ...] = (0,)) -> None:
        """Steps from one on differ, all but the first in everything."""
        self.digests[step:] ^= 255
        row, begin = self.digests[step - 1], 8 + 4 * LAYOUT.shards
        row[:8] ^= 255
        for shard in shards:
            row[8 + 4 * shard] ^= 255
        for tensor in tensors:
            row[begin + tensor] ^= 255

    def write(self, steps: int = STEPS) -> run_diff.RunTrace:
        log = run_log.StepLog(self.run, "20260101T000000.000-aaaaaa", LAYOUT)
        log.add(1, 0, self.losses[:steps], self.rates[:steps], self.digests[:steps])
        log.write(log.take())
        manifest.write(self.run, name_of(9, "a"), 9, [], {"identity": self.identity})
        architecture = {"version": 1, "config": {"class_name": "Sequential", "config": {"layers": self.layers}}}
        self.run.put("architecture.json", json.dumps(architecture).encode())
        return run_diff.load(self.run)


@pytest.fixture
def made(tmp_path):
    return Made(str(tmp_path / "a")), Made(str(tmp_path / "b"))


def test_equal_runs_do_not_part(made):
    one, other = made
    found = run_diff.part(one.write(), other.write(60))
    assert (found.same, found.step, found.settings, run_diff.why(found)) == (60, None, (), [])
    assert result_lines(found, [], [STEPS, 60]) == ["the 60 steps that both have are the same"]


def test_a_flipped_bit_in_a_gradient_is_named(made):
    one, other = made
    other.differ(70, range(2, 3))
    found = run_diff.part(one.write(), other.write())
    assert (found.same, found.step) == (69, 70)
    assert run_diff.why(found) == [
        "shard 2 of the batch differs in kernel; the weights before the step are the same",
        "settings, data and model are the same: a machine computed wrongly, or the data changed",
    ]
    assert result_lines(found, [], [STEPS, STEPS]) == ["69 steps are the same; the runs part at step 70"]


def test_records_of_the_shards_that_differ_are_named(made):
    one, other = made
    sizes = {"training records": "9", "--global-batch-size": "4", "--logical-shards": "4"}
    one.identity |= sizes
    other.identity |= sizes
    other.differ(70, range(1, 3))
    found = run_diff.part(one.write(), other.write())
    plan = StepPlan(9, 4, 4)
    epoch, inside = plan.locate(69)
    pipeline = Pipeline(ArraySource(np.zeros(9), np.zeros(9)), plan, range(1, 3), 0)
    expected = pipeline.numbers(69)
    assert expected is not None
    assert plan.is_full(inside), epoch
    assert found.records == (expected.tolist(), expected.tolist())
    listed = ", ".join(map(str, expected))
    assert f"both runs had records {listed} of the data there" in run_diff.why(found)


@pytest.mark.parametrize(
    "change",
    [
        {"contents of the training data": "9 records, sample CRC-32 00000000, x float32[3]"},
        {"training records": "many"},
        {"--logical-shards": "0"},
        {"--global-batch-size": "0"},
        {"--seed": ""},
    ],
)
def test_records_are_not_named_where_their_order_is_not_known(change):
    known = IDENTITY | {"training records": "9", "--global-batch-size": "4", "--logical-shards": "4"}
    assert len(run_diff.record_numbers(known, 70, [1, 2]) or ()) == 2
    assert run_diff.record_numbers(known | change, 70, [1, 2]) is None
    assert run_diff.record_numbers({}, 70, [1, 2]) is None


def test_a_machine_wrong_in_all_shards_of_a_step_does_not_change_weights(made):
    one, other = made
    other.differ(70, range(4))
    first, _ = run_diff.why(run_diff.part(one.write(), other.write()))
    assert first == "all shards differ in kernel; the weights before the step are the same"


def test_a_flipped_bit_in_the_weights_is_named(made):
    one, other = made
    other.differ(71, range(4), (0, 1, 2))
    (line,) = run_diff.why(run_diff.part(one.write(), other.write()))
    assert line.startswith("all shards differ, so the weights after step 70 do")


def test_another_learning_rate_is_named(made):
    one, other = made
    other.differ(2, range(4), (0, 1, 2))
    other.rates[:] = 0.002
    other.identity["model optimizer"] = f"Adam {json.dumps({**ADAM, 'learning_rate': 0.002})}"
    found = run_diff.part(one.write(), other.write())
    assert found.step == 2
    assert run_diff.why(found)[0] == "model optimizer, learning_rate: 0.001 and 0.002"
    # A callback that changes it is in no setting.
    other.identity["model optimizer"] = IDENTITY["model optimizer"]
    assert run_diff.why(run_diff.part(one.write(), other.write()))[0] == "learning rate of step 1: 0.001 and 0.002"


def test_another_seed_label_and_layer_are_named(made):
    one, other = made
    other.differ(1, range(4), (0, 1, 2))
    other.identity["--seed"] = "1"
    other.identity["contents of the training data"] = "9 records, CRC-32 00000001"
    other.identity["model structure"] = "bbbb"
    other.identity["validation data"] = "some"
    other.layers = [{**DENSE, "config": {"name": "dense", "units": 32}}]
    lines = run_diff.why(run_diff.part(one.write(), other.write()))
    assert lines == [
        "--seed: 0 and 1",
        "contents of the training data: 9 records, CRC-32 00000000 and 9 records, CRC-32 00000001",
        "model, config.layers[dense].config.units: 64 and 32",
        "all shards differ: the initial weights differ, or the computation with them does",
    ]


def test_a_layer_more_is_named(made):
    one, other = made
    other.differ(1, range(4), (0, 1, 2))
    other.identity["model structure"] = "bbbb"
    other.layers = [DENSE, {**DENSE, "config": {"name": "more", "units": 3}}]
    assert run_diff.why(run_diff.part(one.write(), other.write()))[0] == "model, config.layers: dense and dense, more"


def test_runs_without_digests_are_told_apart_by_their_losses(made):
    one, other = made
    other.losses[41] = np.nextafter(other.losses[41], 2)
    one.digests[:] = other.digests[:] = 0
    found = run_diff.part(one.write(), other.write())
    assert (found.step, found.difference) == (42, None)
    assert run_diff.why(found) == ["loss of step 42: the digests of these runs cannot be compared"]
