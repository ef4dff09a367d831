"""Scaled learning rates, warm-up and histograms in runs: the law holds with them, and TensorBoard has what it shall."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

import raytf
from tests.ray.conftest import MNIST_JOB, result_of


def events(folder: Path) -> tuple[dict[str, list[int]], int]:
    """Steps of each histogram, by name, and how many graphs there are."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    steps: dict[str, list[int]] = defaultdict(list)
    graphs = 0
    for file in sorted(folder.glob("events*")):
        for event in EventFileLoader(str(file)).Load():
            graphs += event.HasField("graph_def")
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "histograms" or value.tag.startswith("gradients/"):
                    steps[value.tag].append(event.step)
    return steps, graphs


@pytest.mark.slow  # tests/tf: test_optimizing.py has the rates, test_gradients_kept.py the bits beside histograms
def test_rates_and_histograms_change_nothing_that_the_law_promises(start_there, tmp_path: Path):
    common = ["--data", "digits", "--storage", tmp_path, "--no-warm-workers", "--global-batch-size", 256]
    common += ["--scale-learning-rate", "linear", "--base-batch-size", 64, "--warmup-epochs", 1.5]
    start_there(MNIST_JOB, *common, "--run", "plain", "--workers", 1, "--steps", 14).wait()
    shown = [*common, "--run", "shown", "--workers", 2, "--histograms-every", 4]
    start_there(MNIST_JOB, *shown, "--steps", 7).wait()
    start_there(MNIST_JOB, *shown, "--steps", 14).wait()

    one, two = (result_of(tmp_path / name) for name in ("plain", "shown"))
    assert one["weights_sha256"] == two["weights_sha256"]
    rates = [raytf.read_steps(str(tmp_path / name))["learning_rate"] for name in ("plain", "shown")]
    assert rates[0].tolist() == rates[1].tolist()
    # 6 steps an epoch, so 9 of warm-up, from the model's own rate to 4 times it.
    expected = [1e-3 * 4 * (0.25 + 0.75 * min(1, (s + 1) / 9)) for s in range(14)]
    np.testing.assert_allclose(rates[0], expected, rtol=1e-6)

    steps, graphs = events(tmp_path / "shown" / "tensorboard")
    weights = {name.removeprefix("weights/") for name in steps if name.startswith("weights/")}
    assert len(weights) == 8
    assert weights == {name.removeprefix("gradients/") for name in steps if name.startswith("gradients/")}
    assert {tuple(s) for s in steps.values()} == {(4, 8, 12)}
    assert graphs == 2, "one for each start of the run"
    assert events(tmp_path / "plain" / "tensorboard") == ({}, 0)

    refused = start_there(MNIST_JOB, *common[:-6], "--run", "shown", "--workers", 2, "--steps", 20)
    assert refused.ended() == 2
    assert "--scale-learning-rate: linear from --base-batch-size 64 in storage, nothing now" in refused.output
