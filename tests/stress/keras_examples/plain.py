"""Runs a Keras program as it is and writes down the loss of each step of each `fit`, and whether `fit` got batches.

python -m tests.stress.keras_examples.plain PROGRAM OUT.json
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np


class Losses(keras.callbacks.Callback):
    """The loss of each step by itself: what metrics have added up before is forgotten."""

    def __init__(self, found: list[float]):
        super().__init__()
        self.found = found

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Of a data set that does not know its end, Keras asks for one batch more than there is. That call fails, but
        # what does not wait for data has run by then: the optimizer's count of steps is one too high.
        optimizer = self.model.optimizer
        if optimizer is not None and int(optimizer.iterations):
            optimizer.iterations.assign(min(int(optimizer.iterations), self.before + len(self.found)))

    def on_train_begin(self, logs: Any = None) -> None:
        self.before = int(self.model.optimizer.iterations) if self.model.optimizer is not None else 0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.model.reset_metrics()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        logs = logs or {}
        self.found.append(float(logs["loss"] if "loss" in logs else logs[min(logs)]))


def main(program: str, out: str) -> None:
    own, fits = keras.Model.fit, []

    def fit(model: Any, *args: Any, **options: Any) -> Any:
        x = args[0] if args else options.get("x")
        has_batches = not isinstance(x, (np.ndarray, list, tuple, dict)) and not keras.ops.is_tensor(x)
        fits.append({"losses": [], "has_batches": has_batches})
        callbacks = options.pop("callbacks", None) or []
        return own(model, *args, callbacks=[*callbacks, Losses(fits[-1]["losses"])], **options)

    keras.Model.fit = fit
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")
    Path(out).write_text(json.dumps(fits))


if __name__ == "__main__":
    main(*sys.argv[1:])
