"""A job whose input forks a child in each worker once it trains, as data loaders do; the child outlives the worker."""

import multiprocessing
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Train with data that fork."""

    children: Path = Path("children")
    """Folder with a file "fork" once they are to fork, and then one for each child, named by it and its parent."""
    pause: Path = Path("pause")
    """While this file is there, reading takes a while."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


class Forking:
    """Is called for each batch in each worker, and forks once it is told to, when the ranks have met.

    Args:
        job: of this file.
    """

    def __init__(self, job: Job):
        self._children, self._pause, self._has_forked = job.children.absolute(), job.pause.absolute(), False

    def __call__(self, x: np.ndarray) -> np.ndarray:
        if not self._has_forked and (self._children / "fork").exists():
            self._has_forked = True
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
            child.start()
            (self._children / f"{child.pid}-{os.getpid()}").touch()
        if self._pause.exists():
            time.sleep(0.05)
        return x


def build():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(job: Job) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2048, 8)).astype("float32"), rng.integers(0, 3, 2048)
    forking = Forking(job)

    def augment(batch, seed):
        import tensorflow as tf

        x, y, weight = batch
        return tf.ensure_shape(tf.numpy_function(forking, [x], x.dtype), x.shape), y, weight

    raytf.fit(build, (x, y), config=job.train, augment=augment)


if __name__ == "__main__":
    raytf.cli(main)
