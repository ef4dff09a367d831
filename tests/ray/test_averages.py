"""Moving averages of the weights: test and export take them, training and checkpoints do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import raytf
from raytf.checkpoint import durable, manifest
from raytf.storage.storage import Storage
from tests.ray.conftest import MNIST_JOB, result_of


def last_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    run = Storage(str(folder))
    return durable.load(run, manifest.list_complete(run)[0]).tensors


#: Of a run whose averages and weights are far apart.
FLAGS = ("--data", "digits", "--model", "softmax", "--ema", 0.9, "--l2", 1e-3, "--workers", 1)


def test_test_and_export_are_of_the_averages_and_checkpoints_keep_both(start_there, tmp_path: Path):
    import keras

    start_there(MNIST_JOB, *FLAGS, "--storage", tmp_path, "--run", "a", "--steps", 12).wait()
    folder = tmp_path / "a"
    saved = last_checkpoint(folder)
    weights = [saved[name] for name in sorted(saved) if name.startswith("model/")]
    averages = [saved[name] for name in sorted(saved) if name.startswith("optimizer/") and "average" in name]
    model = keras.models.load_model(folder / "model.keras")
    exported = [keras.ops.convert_to_numpy(w) for w in model.weights]
    assert len(exported) == len(weights) == len(averages) == 2
    for mine, average, weight in zip(exported, averages, weights, strict=True):
        np.testing.assert_array_equal(mine, average)
        assert np.abs(mine - weight).max() > 1e-4

    x, y = (images := raytf.load_images("digits").test).take(np.arange(images.records))
    loss, accuracy = model.evaluate(x, y, verbose=0)
    metrics = result_of(folder)["metrics"]
    np.testing.assert_allclose([metrics["test_loss"], metrics["test_accuracy"]], [loss, accuracy], rtol=1e-5)
    model.set_weights(weights)
    assert abs(model.evaluate(x, y, verbose=0)[0] - loss) > 1e-4, "the two could not be told apart"


@pytest.mark.slow
def test_a_run_that_goes_on_after_its_end_goes_on_from_the_weights(start_there, tmp_path: Path):
    def train(run: str, steps: int) -> str:
        return start_there(MNIST_JOB, *FLAGS, "--storage", tmp_path, "--run", run, "--steps", steps).wait()

    train("halves", 12)
    assert "restored step 12 " in train("halves", 24)
    train("whole", 24)
    assert result_of(tmp_path / "halves")["weights_sha256"] == result_of(tmp_path / "whole")["weights_sha256"]
