"""Replicas of the weights: equal in all modes of training, and fixed, or gone back from, where a bit of one flips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from raytf.checkpoint.replicas import Digest
from raytf.data.sources import ArraySource
from raytf.testing.processes import free_port
from tests.tf.ranks import train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

ROOT = Path(__file__).parents[2]


def play(folder: Path, count: int, runs: list[tuple[int | None, bool]]) -> list[list[dict[str, Any]]]:
    """Of each run, what each of some processes tells at its end."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    orders = {"addresses": addresses, "folder": str(folder), "runs": runs}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.tf.replica_worker", json.dumps(orders | {"rank": rank})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=env,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        told = [json.loads(worker.stdout.readline()) for worker in workers]  # type: ignore[union-attr]
        return [list(run) for run in zip(*told, strict=True)]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


@pytest.fixture(scope="module")
def of_three(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    """Three ranks: nothing happens; a bit of rank 1 flips; a bit of rank 0 flips where last bits are promised."""
    return play(tmp_path_factory.mktemp("runs"), 3, [(None, False), (1, False), (0, True)])


def test_replicas_that_are_equal_are_left_alone(of_three):
    undisturbed = of_three[0]
    assert len({each["hash"] for each in undisturbed}) == 1
    assert not any(each["events"] or each["said"] or each["error"] for each in undisturbed)
    assert undisturbed[0]["complete"] == [2, 6, 12]


def test_of_three_the_one_that_differs_gets_the_state_of_the_others(of_three):
    found, first = of_three[1], of_three[1][0]
    assert len({each["hash"] for each in found}) == 1
    assert found[0]["everything"] == found[1]["everything"] == found[2]["everything"]
    [event] = first["events"]
    assert event["text"].startswith("the weights of rank 1 (host 1, CPU:0) differ at step 6 from those of the other 2")
    booked = {name: event[name] for name in ("kind", "of_step", "from_step", "ranks", "fixed")}
    assert booked == {"kind": "replicas", "of_step": 6, "from_step": 5, "ranks": [1], "fixed": True}
    assert any("They were replaced by the majority's at step 7" in line for line in first["said"])
    assert 6 not in first["complete"], "a part of that checkpoint was of the weights that differed"
    assert all(each["saved"] == [12, True] for each in found)
    assert first["copied"][first["copied"].index("distrust") - 1 :][:3] == [6, "distrust", 7]


def test_a_run_that_promises_its_last_bits_goes_back_and_names_who_differs(of_three):
    undisturbed, found = of_three[0], of_three[2]
    for each in found:
        assert (each["error"]["ranks"], each["error"]["at"], each["error"]["from"]) == ([0], 7, 2)
        assert "rank 0 (host 0, CPU:0)" in each["error"]["text"]
        assert each["hash"] == undisturbed[0]["hash"], "updates from weights that were wrong are not in it"


def test_of_two_nobody_can_say_who_is_right_and_the_run_goes_back(tmp_path: Path, of_three):
    [found] = play(tmp_path, 2, [(0, False)])
    for each in found:
        assert each["error"]["text"] == (
            "the weights of rank 0 (host 0, CPU:0) and rank 1 (host 1, CPU:0) differ at step 6, and no majority shows "
            "which are right; the run goes back to the last agreed step"
        )
        assert (each["error"]["ranks"], each["error"]["at"], each["error"]["from"]) == ([], 7, 2)
        assert each["error"]["complete"] == [2]
        assert each["hash"] == of_three[0][0]["hash"]
        assert each["everything"] == of_three[0][0]["everything"]
    assert found[0]["events"][0]["fixed"] is False


def build() -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0, use_ema=True), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    ("exact", "compress"), [(True, False), (True, True), (False, False)], ids=["fixed", "compressed", "float"]
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_are_equal_in_every_mode(exact: bool, compress: bool, world_size: int):
    rng = np.random.default_rng(0)
    source = ArraySource(rng.standard_normal((50, 6)).astype(np.float32), rng.integers(0, 3, 50))
    found = train(build, source, 12, 4, 9, world_size=world_size, exact=exact, compress=compress)
    hashes = {Digest([v.value for v in model.variables]).value() for model, _ in found}
    slots = {Digest([v.value for v in model.optimizer.variables]).value() for model, _ in found}
    assert (len(hashes), len(slots)) == (1, 1)
