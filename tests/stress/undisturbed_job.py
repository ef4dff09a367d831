"""The job that `tests/stress/undisturbed.py` leaves alone: training, validation, checkpoints, and a slow callback."""

from __future__ import annotations

import runpy
import time
from dataclasses import dataclass, field
from pathlib import Path

import raytf

#: By its path, since workers of a cluster cannot import it.
MNIST_JOB = str(Path(__file__).parents[2] / "jobs" / "mnist.py")


@dataclass(frozen=True)
class Job:
    """Train on digits, validate after each epoch, and take long for a callback now and then."""

    slow_every: int = 100
    """Epochs between two slow callbacks."""
    slow_seconds: float = 45.0
    """How long they take."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def main(job: Job) -> None:
    images = raytf.load_images("digits")

    def callbacks(files: str):
        import keras

        def wait(epoch, logs):
            time.sleep(job.slow_seconds * (epoch % job.slow_every == job.slow_every - 1))

        return [keras.callbacks.LambdaCallback(on_epoch_end=wait)]

    raytf.fit(
        lambda: runpy.run_path(MNIST_JOB)["build"](images.image_shape, images.classes),
        images.train,
        validation=images.test,
        config=job.train,
        callbacks=callbacks,
    )


if __name__ == "__main__":
    raytf.cli(main)
