"""A job of which one rank gets stuck, in its data or in a callback; the next attempt finds the mark and does not."""

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import raytf
from raytf.data.sources import ArraySource


@dataclass(frozen=True)
class Job:
    """Get stuck once."""

    stuck: str = "nowhere"
    """nowhere, data (of the last rank) or callback."""
    mark: Path = Path("mark")
    """File that is made when it gets stuck."""
    pause: float = 0.05
    """Seconds of each step."""
    pause_while: Path | None = None
    """Take them only as long as this file is there; by default until the end."""
    slow_callback: float = 0.0
    """Seconds of a callback at the end of an epoch."""
    slow_epochs: int = 0
    """Epochs at whose end it runs."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


class StuckSource(ArraySource):
    """Arrays, until the last rank has read more than 1,000 records; it has 320 an epoch."""

    def __init__(self, x, y, mark: Path):
        super().__init__(x, y)
        self._mark, self._taken = mark, 0

    def take(self, ids):
        config = json.loads(os.environ.get("TF_CONFIG", "{}"))
        self._taken += len(ids)
        if config and config["task"]["index"] + 1 == len(config["cluster"]["worker"]) and self._taken > 1000:
            get_stuck(self._mark)
        return super().take(ids)


def get_stuck(mark: Path) -> None:
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return
    threading.Event().wait()


def main(job: Job) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(640, 8)).astype("float32"), rng.integers(0, 3, 640)
    mark = job.mark.absolute()

    def build():
        import keras

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    def callbacks(files: str):
        import keras

        class Slow(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                if job.pause_while is None or job.pause_while.exists():
                    time.sleep(job.pause)

            def on_epoch_end(self, epoch, logs=None):
                time.sleep(job.slow_callback * (epoch < job.slow_epochs))
                if job.stuck == "callback" and epoch == 3:
                    get_stuck(mark)

        return [Slow()]

    source = StuckSource(x, y, mark) if job.stuck == "data" else (x, y)
    raytf.fit(build, source, validation=(x, y), config=job.train, callbacks=callbacks)


if __name__ == "__main__":
    raytf.cli(main)
