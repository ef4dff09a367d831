"""Trains on random vectors of two classes, of which one record is far from all others."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import raytf

#: The record, and how far off it is.
RECORD, FACTOR = 77, 50.0


@dataclass(frozen=True)
class Job:
    """Train on a poisoned record."""

    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build():
    import keras

    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-3), loss)
    return model


def main(job: Job) -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 320)
    x = (rng.normal(size=(320, 8)) + y[:, None]).astype(np.float32)
    x[RECORD] *= -FACTOR
    raytf.fit(build, (x, y), config=job.train)
    print("the program went on")


if __name__ == "__main__":
    raytf.cli(main)
