"""A job whose training data fork a child in each worker once it trains, as data loaders do; it outlives the worker."""

import multiprocessing
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import raytf
from raytf.data.sources import ArraySource


@dataclass(frozen=True)
class Job:
    """Train with data that fork."""

    children: Path = Path("children")
    """Folder with a file "fork" once they are to fork, and then one for each child, named by it and its parent."""
    pause: Path = Path("pause")
    """While this file is there, reading takes a while."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


class Forking(ArraySource):
    """Forks when it is told to, which is after the ranks have met."""

    def __init__(self, x, y, children: Path, pause: Path):
        super().__init__(x, y)
        self._children, self._pause, self._has_forked = children, pause, False

    def take(self, records):
        if not self._has_forked and (self._children / "fork").exists():
            self._has_forked = True
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(300,))
            child.start()
            (self._children / f"{child.pid}-{os.getpid()}").touch()
        if self._pause.exists():
            time.sleep(0.05)
        return super().take(records)


def build():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def main(job: Job) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2048, 8)).astype("float32"), rng.integers(0, 3, 2048)
    raytf.fit(build, Forking(x, y, job.children.absolute(), job.pause.absolute()), config=job.train)


if __name__ == "__main__":
    raytf.cli(main)
