"""raytf's job of recovery/startup.py for the second run of a process: the same model, twice."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import raytf
from benchmarks import models


@dataclass(frozen=True)
class Program:
    """Train the MNIST CNN twice, as two runs."""

    data: Path
    """An .npz with x_train and y_train."""
    storage: Path
    """Where the runs are: `first` and `second`."""
    first_steps: int = 320
    """Of the first run: some seconds, in which the second one's processes get ready."""
    steps: int = 40
    """Of the second run."""
    workers: int = 1
    """Of both."""


def model():  # type: ignore[no-untyped-def]
    """Built in the worker."""
    import keras

    return models.compiled(keras, "cnn", jit_compile=False)


def main(program: Program) -> None:
    arrays = np.load(program.data)
    x, y = arrays["x_train"], arrays["y_train"]
    own = raytf.TrainConfig.of(
        storage=str(program.storage), workers=str(program.workers), global_batch_size=models.BATCH
    )
    for run, steps in (("first", program.first_steps), ("second", program.steps)):
        began = time.time()
        raytf.fit(model, x, y, config=own.replace(run=run, steps=steps))
    print(f"last run began: {began}", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Program))
