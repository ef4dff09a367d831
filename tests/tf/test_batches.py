"""Training on batches that a program makes: each step has Keras's batch, for every number of shards and ranks."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from raytf.checkpoint.variables import weights_sha256
from raytf.data import tree
from raytf.data.sources import Source
from raytf.data.sources.batches import LiveBatches, recorded
from raytf.data.streams import Stream, from_tf_dataset
from raytf.storage.storage import Storage
from tests.tf.ranks import train

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(53, 6)).astype(np.float32), RNG.integers(0, 3, 53)
LENGTHS = RNG.integers(2, 9, 53)
WORDS = [RNG.integers(1, 20, n) for n in LENGTHS]
EPOCHS = 3


def dense() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def words() -> keras.Model:
    layers = [keras.layers.Embedding(20, 4, mask_zero=True), keras.layers.GRU(5), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((None,), dtype="int64"), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


def padded() -> tf.data.Dataset:
    """Batches whose records are as long as the longest of each."""
    spec = tf.TensorSpec([None], tf.int64), tf.TensorSpec([], tf.int64)
    made = tf.data.Dataset.from_generator(lambda: zip(WORDS, Y, strict=True), output_signature=spec)
    return made.padded_batch(8)


def of_sizes(*sizes: int) -> tf.data.Dataset:
    ends = np.cumsum([0, *sizes])
    parts = [tf.data.Dataset.from_tensor_slices((X[a:b], Y[a:b])).batch(b - a) for a, b in itertools.pairwise(ends)]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concatenate(part)
    return whole


def stored(stream: Stream) -> Source:
    return recorded(stream, Storage(tempfile.mkdtemp()), print)  # where it writes nothing


def live(stream: Stream) -> Source:
    """As the driver feeds workers, without the way between them."""
    first = [leaf for _, leaf in tree.flatten(stream.peek())]
    steps = stream.steps or stream.count()
    batches = [stream.read(0, i) for i in range(steps)]

    def fetch(step: int, shards: range) -> tuple[list[np.ndarray], int]:
        leaves = [leaf for _, leaf in tree.flatten(batches[step % steps])]
        rows, of = len(leaves[0]), fetch.shards
        return [leaf[shards.start * rows // of : shards.stop * rows // of] for leaf in leaves], rows

    fetch.shards = SHARDS
    return LiveBatches("train", first, stream.spec(), steps, fetch=fetch)


SHARDS = 4
CASES: dict[str, tuple[Callable[[], Any], Callable[[], tf.data.Dataset], Callable[[Stream], Source]]] = {
    "recorded": (dense, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), stored),
    "recorded, of different sizes": (dense, lambda: of_sizes(8, 5, 16, 16, 2, 6), stored),
    "live": (dense, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(8), live),
    "live, of different sizes": (dense, lambda: of_sizes(8, 5, 16, 16, 2, 6), live),
    "live, of different lengths": (words, padded, live),
}


#: Of different lengths are of different sizes, too.
TWINS = {"live, of different sizes"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in TWINS)) for name in CASES])
def test_each_step_has_the_batch_that_it_has_in_keras(name: str, monkeypatch: pytest.MonkeyPatch):
    factory, dataset, source = CASES[name]
    keras.utils.set_random_seed(0)
    reference = factory()
    losses: list[float] = []

    class Losses(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            reference.reset_metrics()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(logs["loss"])

    reference.fit(dataset(), epochs=EPOCHS, shuffle=False, verbose=0, callbacks=[Losses()])
    ends = {}
    for shards, ranks in ((1, 1), (4, 1), (4, 3)):
        monkeypatch.setattr(f"{__name__}.SHARDS", shards)
        made = source(from_tf_dataset(dataset(), "train", None, 0))
        batch = 16 if "recorded, of" in name else 8
        found = train(factory, made, batch, shards, len(losses), ranks, call_steps=4)
        for model, own in found:
            np.testing.assert_allclose(own, losses, rtol=1e-5, atol=1e-6)
            ends.setdefault(shards, set()).add(f"{weights_sha256(model)} {own.tobytes().hex()}")
    assert [len(bits) for bits in ends.values()] == [1, 1], "the bits depend on the number of ranks"
