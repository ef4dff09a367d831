"""Steps with real TensorFlow servers: they learn what a plain step learns, and lose no update."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytf.testing.processes import environment

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What `servers.main` has seen, with two parameter servers and three workers."""
    env = environment(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")
    command = [sys.executable, "-m", "tests.tf.servers"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("parts", [3, 2], ids=["no backups", "one backup worker"])
def test_synchronous_aggregation_equals_a_plain_step_on_the_same_batches(told: dict[str, Any], parts: int):
    found = told[f"sync {parts}"]
    assert found["applied"] == told["steps"]
    assert found["finite"]
    assert found["loss difference"] < 1e-4
    assert found["difference"] < 5e-4  # of weights and of Adam's moments, which divide by small numbers


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_layers_add_to_the_loss_counts_as_in_keras(told: dict[str, Any], kind: str):
    assert told["added"][kind]["loss"] < 2e-6
    assert told["added"][kind]["weights"] < 2e-6


def test_what_differs_after_many_steps_is_rounding_alone(told: dict[str, Any]):
    assert told["difference in 64 bits"] < 1e-9


def test_large_variables_are_cut_and_all_are_spread_over_the_servers(told: dict[str, Any]):
    places = told["places"]
    kernel = [device for path, device, size in places if size == 512 * 512 * 4 // 2]
    assert len(set(kernel)) == 2
    loads: dict[str, int] = {}
    for _, device, size in places:
        loads[device] = loads.get(device, 0) + size
    assert max(loads.values()) <= 1.1 * min(loads.values())


def test_no_asynchronous_update_is_lost(told: dict[str, Any]):
    found = told["async"]
    # Keras's own counter would have lost some; each of the weights has seen all.
    assert found == {"applied": 210, "weights": [210.0] * 4, "iterations": 210}


def test_a_rate_that_is_set_between_two_batches_holds_for_the_next_one(told: dict[str, Any]):
    assert told["rate set"] == {"moved": 0.25, "rate": 0.25}


def test_a_scaled_schedule_with_a_warm_up_is_that_of_a_plain_step(told: dict[str, Any]):
    assert told["scaled"]["loss difference"] < 1e-4
    assert told["scaled"]["difference"] < 5e-4


def test_a_constant_rate_is_scaled_once_and_warmed_up_even_after_a_resume(told: dict[str, Any]):
    np.testing.assert_allclose(told["moved"], np.cumsum(told["law"]), rtol=1e-6)


def test_aggregated_gradients_are_told_for_histograms(told: dict[str, Any]):
    assert told["scaled"]["gradients"] == told["scaled"]["weights"]


def test_what_comes_back_from_the_servers_is_what_was_sent(told: dict[str, Any]):
    assert told["same"]
