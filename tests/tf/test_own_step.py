"""A `train_step` of the model's own does what it does in plain Keras, for every number of shards and ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf._keras.own_steps import optimizers_within
from raytf.checkpoint.variables import weights_sha256
from raytf.data.sources.recording import recorded
from raytf.data.streams import from_tf_dataset
from raytf.storage.storage import Storage
from raytf.training import model as models
from tests.tf import own_steps
from tests.tf.ranks import train

RNG = np.random.default_rng(0)
RECORDS, BATCH, EPOCHS, STEPS = 44, 16, 2, 6  # the last step of an epoch is a part of a batch
X = RNG.normal(size=(RECORDS, own_steps.WIDTH)).astype(np.float32)
Y = RNG.normal(size=(RECORDS, 1)).astype(np.float32)


def dataset(has_labels: bool) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y) if has_labels else X).batch(BATCH)


def alone(name: str) -> tuple[keras.Model, list[float], dict[str, float]]:
    """Plain Keras: the model, the number that stands for each step, and what History shows of the last epoch."""
    factory, has_labels = own_steps.PROGRAMS[name]
    keras.utils.set_random_seed(0)
    model, losses = factory(), []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"] if "loss" in logs else logs[min(logs)])

    shown = model.fit(dataset(has_labels), epochs=EPOCHS, verbose=0, callbacks=[Losses()])
    return model, losses, {key: values[-1] for key, values in shown.history.items()}


def run(name: str, shards: int, ranks: int, **options: Any) -> list[tuple[Any, np.ndarray]]:
    factory, has_labels = own_steps.PROGRAMS[name]
    source = recorded(from_tf_dataset(dataset(has_labels), "train", None, 0), Storage(tempfile.mkdtemp()), print)
    return train(factory, source, BATCH, shards, STEPS, ranks, **options)


def values(model: keras.Model) -> list[np.ndarray]:
    """Weights, states, and what the optimizers that were used keep."""
    used = [each for each in optimizers_within(model) if int(each.iterations)]
    return [np.asarray(v) for v in [*model.weights, *(v for each in used for v in each.variables)]]


#: What shows the mean over the epoch so far for a step, as Keras's metrics do, and not the step's own number.
RUNNING = {"autoencoder", "GAN", "WGAN-GP", "averaged weights", "contrastive with a probe", "as Keras"}
#: Without BatchNorm, which sees its own shard alone.
ALIKE = {"autoencoder", "contrastive with a probe", "by hand", "as Keras"}


@pytest.mark.parametrize("name", own_steps.PROGRAMS)
def test_a_step_of_the_model_s_own_is_what_it_is_in_keras(name: str):
    reference, losses, shown = alone(name)
    ends = set()
    for shards, ranks in ((1, 1), (4, 1), (4, 3)):
        for model, own in run(name, shards, ranks):
            if shards == 4:
                ends.add((weights_sha256(model), own.tobytes(), str(models.logs(model))))
            if shards == 4 and name not in ALIKE:
                continue
            for mine, theirs in zip(values(model), values(reference), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=2e-4, atol=2e-5)
            if name in RUNNING:
                own = [own[e : e + k + 1].mean() for e in (0, 3) for k in range(3)]
            if shards == 1 or name not in RUNNING:
                np.testing.assert_allclose(own, losses, rtol=1e-5, atol=1e-6)
                assert models.logs(model) == pytest.approx(shown, rel=1e-5)
    assert len(ends) == 1, "the bits depend on the number of ranks"
