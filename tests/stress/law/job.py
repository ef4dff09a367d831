"""The job that `tests/stress/law/schedules.py` disturbs: it counts how often each record was learned from.

The counts are a Keras metric: they are added with the gradients of each step and saved in each checkpoint, so they tell
of the history that the weights have seen, whatever was done twice on the way. Every record carries its number as a
second column of the labels. At the end of an epoch the metric says how many records were not seen, and how many more
than once.
"""

from __future__ import annotations

import contextlib
import os
import runpy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import raytf

#: By its path, since workers of a cluster cannot import it.
MNIST_JOB = str(Path(__file__).parents[3] / "jobs" / "mnist.py")
#: Records of the data that are used: few enough for a vector of counts in each step, no multiple of any batch size.
RECORDS = 4001
#: Seconds for which a child of a worker lives: longer than anybody waits for a worker that is lost.
CHILD_SECONDS = 60.0


@dataclass(frozen=True)
class Job:
    """Train on MNIST and count how often each record was seen."""

    data: str = "auto"
    """auto (MNIST where it can be had, else digits), mnist, digits, or a path or URI of IDX, .npz or Parquet files."""
    model: Literal["mnist", "batchnorm"] = "mnist"
    """The network of jobs/mnist.py, or one with BatchNorm, Dropout, AdamW, a schedule, clipping and weight averages."""
    pause: float = 0.0
    """Seconds of sleep after each step, so that a short run lasts long enough to be disturbed."""
    pause_while: str = ""
    """Sleep only as long as this file is there; by default until the end."""
    children: Path | None = None
    """Each worker forks children while it trains, as data loaders do. A child has a file here, named by its process
    number, and lives as long as the file."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build(name: str, image_shape: tuple[int, ...], classes: int, records: int, steps: int):
    import keras
    from keras import layers, ops

    class Seen(keras.metrics.Metric):
        """[2] numbers of records seen never and more than once."""

        def __init__(self):
            super().__init__(name="seen")
            self.counts = self.add_variable((records,), "zeros", name="counts")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.counts.assign_add(ops.sum(ops.one_hot(ops.cast(y_true[:, 1], "int32"), records), 0))

        def result(self):
            missing, twice = self.counts == 0, self.counts > 1
            return ops.stack([ops.sum(ops.cast(found, "float32")) for found in (missing, twice)])

    def loss(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true[:, 0], y_pred)

    if name == "mnist":
        model, optimizer = runpy.run_path(MNIST_JOB)["build"](image_shape, classes), keras.optimizers.Adam(1e-3)
    else:
        model = keras.Sequential(
            [
                keras.Input(image_shape),
                layers.Rescaling(1 / 255),
                layers.Conv2D(16, 3, strides=2, use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.Activation("relu"),
                layers.Flatten(),
                layers.Dropout(0.3),
                layers.Dense(64, activation="relu", kernel_regularizer="l2"),
                layers.Dropout(0.3),
                layers.Dense(classes, activation="softmax"),
            ]
        )
        schedule = keras.optimizers.schedules.CosineDecay(2e-3, steps)
        optimizer = keras.optimizers.AdamW(schedule, weight_decay=1e-3, global_clipnorm=1.0, use_ema=True)
    model.compile(optimizer, loss, metrics=[Seen()])
    return model


def executed(files: str, pause: float, pause_while: str = ""):
    """A callback that notes each step that was computed, also those that a failure makes to be done again."""
    import time

    import keras

    class Executed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self._first, self._done = epoch * self.params["steps"], 0

        def on_train_batch_end(self, batch, logs=None):
            self._note(f"{time.time():.4f} {self._first + batch + 1}")
            if not pause_while or os.path.exists(pause_while):
                time.sleep(pause * (batch + 1 - min(self._done, batch)))
            self._done = batch + 1

        def _note(self, line: str) -> None:
            # One write a line: what was written is there after the process was killed.
            descriptor = os.open(os.path.join(files, "executed.txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                os.write(descriptor, f"{line}\n".encode())
            finally:
                os.close(descriptor)

    return [Executed()]


def fork_always(children: Path) -> None:
    """Have this process fork a child whenever it has other sockets than before: after each meeting with the others."""
    import multiprocessing
    import threading
    import time

    def sockets() -> set[str]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(f"/proc/self/fd/{name}"))
        return {target for target in found if target.startswith("socket:")}

    def live() -> None:
        mine, end = children / str(os.getpid()), time.monotonic() + CHILD_SECONDS
        mine.touch()
        while mine.exists() and time.monotonic() < end:
            time.sleep(0.5)

    def watch() -> None:
        held, before = set[str](), set[str]()
        while children.exists():
            time.sleep(0.2)
            now = sockets()
            if now == before != held:
                multiprocessing.get_context("fork").Process(target=live, daemon=True).start()
                held = now
            before = now

    threading.Thread(target=watch, daemon=True).start()


def main(job: Job) -> None:
    import numpy as np

    images = raytf.load_images(job.data)
    numbers = np.arange(min(RECORDS, images.train.records))
    x, label = images.train.take(numbers)
    y = np.stack([label, numbers], 1).astype(np.int32)
    batch, length = job.train.batch.global_batch_size, job.train.length
    steps = length.steps or (length.epochs or 1) * -(-len(numbers) // batch)
    children = job.children and job.children.absolute()

    def built():
        if children is not None and Path("/proc/self/cmdline").read_text().startswith("ray::"):
            fork_always(children)
        return build(job.model, images.image_shape, images.classes, len(numbers), steps)

    raytf.fit(
        built,
        (x, y),
        config=job.train,
        callbacks=lambda files: executed(files, job.pause, job.pause_while),
    )


if __name__ == "__main__":
    raytf.cli(main)
