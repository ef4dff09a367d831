"""A job in which a bit of one rank's weights flips once, at any time, as by a fault of its memory."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Train, and flip a bit."""

    mark: Path | None = None
    """File that is made when the bit was flipped; none flips where it is not given."""
    after: int = 150
    """Steps before that."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def main(job: Job) -> None:
    mark, after = None if job.mark is None else job.mark.absolute(), job.after
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(512, 8)).astype("float32"), rng.integers(0, 3, 512)

    def build():
        import keras

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

        def flip():
            while int(model.optimizer.iterations.numpy()) < after:
                time.sleep(0.001)
            weight = model.weights[0]
            values = np.array(weight.value)
            values.reshape(-1).view(np.uint32)[3] ^= np.uint32(1 << 20)
            weight.assign(values)
            mark.touch()

        if mark is not None and raytf.rank() == 1 and not mark.exists():
            threading.Thread(target=flip, daemon=True).start()
        return model

    raytf.fit(build, (x, y), config=job.train)


if __name__ == "__main__":
    raytf.cli(main)
