"""The state that benchmark 4 saves: dense layers with Adam, of as many bytes as wanted, and what programs answer."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

LAYERS = 8


def build(megabytes: int) -> tuple[keras.Model, Callable[[], float]]:
    """Return a compiled model whose weights and optimizer's state take about this many bytes, and an update of all of
    it, which returns its seconds: it stands for the step that follows a save."""
    # Three numbers of four bytes for each weight: itself and two moments.
    side = max(8, int((megabytes * 1e6 / 12 / LAYERS) ** 0.5))
    model = keras.Sequential([keras.Input((side,)), *(keras.layers.Dense(side) for _ in range(LAYERS))])
    model.compile(keras.optimizers.Adam(), "mse")
    model.optimizer.build(model.trainable_variables)
    variables = [v.value for v in (*model.variables, *model.optimizer.variables) if v.dtype == "float32"]

    @tf.function
    def change() -> None:
        done: list[tf.Operation] = []
        for v in variables:
            with tf.control_dependencies(done):  # one after the other, so that it takes little memory
                done = [v.assign_add(tf.fill(v.shape, 1e-6)).op]

    def update() -> float:
        began = time.perf_counter()
        change()
        return time.perf_counter() - began

    for _ in range(3):
        update()
    return model, update


def folder_bytes(folder: str | Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(p.stat().st_size for p in Path(folder).rglob("*") if p.is_file())


class Watch:
    """Takes the time of one save.

    Args:
        update: of `build`.
    """

    def __init__(self, update: Callable[[], float]):
        self._update = update
        self._usual = statistics.median(update() for _ in range(5))
        self._cpu, self._began = os.times(), time.perf_counter()
        self.answer: dict[str, Any] = {}

    def goes_on(self) -> None:
        """Record the stall: the call has returned. The next update may wait for memory that the save still uses."""
        self._blocked = time.perf_counter() - self._began
        self.answer["stall"] = self._blocked + max(0.0, self._update() - self._usual)

    def is_durable(self, written: int) -> None:
        """Record the times and the CPU seconds until the checkpoint is complete."""
        ended = os.times()
        self.answer["durable"] = time.perf_counter() - self._began
        self.answer["writing"] = self.answer["durable"] - self._blocked
        self.answer["cpu"] = ended.user + ended.system - self._cpu.user - self._cpu.system
        self.answer["written"] = written / 1e6
