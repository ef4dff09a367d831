"""raytf's job in `recovery.py`, `join.py` and `goodput.py` of benchmarks/recovery: the CNN; notes each call."""

from __future__ import annotations

import os
import runpy
from dataclasses import dataclass, field
from pathlib import Path

import raytf

#: By its path, since workers of a cluster cannot import it.
MODELS = str(Path(__file__).parents[1] / "models.py")


@dataclass(frozen=True)
class Job:
    """Train the CNN, and note when each step was made."""

    notes: str
    """File that gets `begin SECONDS WORKERS` for each start and change of a group, and `STEP SECONDS` for each call."""
    data: str
    """.npz with x_train, y_train, x_test and y_test."""
    units: int = 128
    """Of the hidden layer; each has 3146 weights."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(units: int):
    import keras

    model = runpy.run_path(MODELS)["cnn"](keras, units)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    return model


def noting(notes: str):
    """Return a callback that records each call of steps, by the clock that all processes of a machine share."""
    import time

    import keras

    class Noting(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self._begin()

        def _begin(self):
            self._workers = raytf.size()
            self._note("begin", f" {self._workers}")

        def on_epoch_begin(self, epoch, logs=None):
            self._first = epoch * self.params["steps"]

        def on_train_batch_end(self, batch, logs=None):
            if raytf.size() != self._workers:  # others have come, or some are gone, while this one trained
                self._begin()
            self._note(str(self._first + batch + 1))

        def _note(self, what: str, more: str = "") -> None:
            # One write a line: what was written is there after the process was killed.
            descriptor = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(descriptor, f"{what} {time.monotonic()}{more}\n".encode())
            finally:
                os.close(descriptor)

    return [Noting()]


def main(job: Job) -> None:
    images = raytf.load_images(job.data)
    raytf.fit(lambda: build(job.units), images.train, config=job.train, callbacks=lambda files: noting(job.notes))


if __name__ == "__main__":
    raytf.cli(main)
