"""Moving averages of the weights: test and export take them, training and checkpoints do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import raytf
from raytf.checkpoint import durable, manifest
from raytf.storage import Storage
from tests.ray.conftest import MNIST_JOB, result_of


def last_checkpoint(folder: Path) -> dict[str, np.ndarray]:
    run = Storage(str(folder))
    return durable.load(run, manifest.list_complete(run)[0]).tensors


def test_averages_are_tested_and_exported_and_training_goes_on_from_the_weights(start_there, tmp_path: Path):
    import keras

    flags = ("--data", "digits", "--model", "softmax", "--ema", 0.9, "--l2", 1e-3, "--storage", tmp_path)
    start_there(MNIST_JOB, *flags, "--run", "halves", "--steps", 12).wait()
    folder = tmp_path / "halves"
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

    output = start_there(MNIST_JOB, *flags, "--run", "halves", "--steps", 24).wait()
    assert "restored step 12 " in output
    start_there(MNIST_JOB, *flags, "--run", "whole", "--steps", 24).wait()
    assert result_of(folder)["weights_sha256"] == result_of(tmp_path / "whole")["weights_sha256"]
