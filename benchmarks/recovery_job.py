"""The job that `benchmarks/recovery.py` disturbs: the MNIST network, and a line for each call of steps."""

from __future__ import annotations

import os
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import raytf

#: By its path, since workers of a cluster cannot import it.
MNIST_JOB = str(Path(__file__).parents[1] / "jobs" / "mnist.py")


@dataclass(frozen=True)
class Job:
    """Train the network of jobs/mnist.py, and note when each step was made."""

    notes: str
    """File that gets `begin SECONDS` for each start of a group, and `STEP SECONDS` for each call of steps."""
    data: str = "auto"
    """auto (MNIST where it can be had, else digits), mnist, digits, or a path or URI of IDX, .npz or Parquet files."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def noting(notes: str):
    """A callback that notes each call of steps, on the clock that all processes of a machine share."""
    import time

    import keras

    class Noting(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self._note("begin")

        def on_epoch_begin(self, epoch, logs=None):
            self._first = epoch * self.params["steps"]

        def on_train_batch_end(self, batch, logs=None):
            self._note(str(self._first + batch + 1))

        def _note(self, what: str) -> None:
            # One write a line: what was written is there after the process was killed.
            descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(descriptor, f"{what} {time.monotonic()}\n".encode())
            finally:
                os.close(descriptor)

    return [Noting()]


def main(job: Job) -> None:
    images = raytf.load_images(job.data)
    build = runpy.run_path(MNIST_JOB)["build"]
    raytf.fit(
        lambda: build(images.image_shape, images.classes),
        images.train,
        config=job.train,
        callbacks=lambda files: noting(job.notes),
    )


if __name__ == "__main__":
    raytf.cli(main)
