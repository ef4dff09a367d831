"""The peer of recovery/startup.py without Ray: Keras's `model.fit` on arrays. It notes when its first and its 20th step
ended.

As in Keras's guide "Training & evaluation with the built-in methods"; every step is noted by itself, so none waits for
others.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import models


@dataclass(frozen=True)
class Program:
    """Train the MNIST CNN for some steps."""

    data: Path
    """An .npz with x_train and y_train."""
    note: Path
    """File that gets a line for the first and for the 20th step: its number, and when it ended."""
    steps: int = 40
    """Then it ends."""


def noting(keras: Any, note: Path) -> Any:
    """Return a callback that records when the first and the 20th step were done."""

    class Noting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch in (0, 19):
                with note.open("a") as lines:
                    lines.write(f"{batch + 1} {time.time()}\n")

    return Noting()


def main(program: Program) -> None:
    import keras

    arrays = np.load(program.data)
    records = program.steps * models.BATCH
    x, y = arrays["x_train"][:records], arrays["y_train"][:records]
    # XLA would compile for seconds before the first step; only long runs have that back.
    model = models.compiled(keras, "cnn", jit_compile=False)
    model.fit(x, y, batch_size=models.BATCH, epochs=1, verbose=0, callbacks=[noting(keras, program.note)])


if __name__ == "__main__":
    main(tyro.cli(Program))
