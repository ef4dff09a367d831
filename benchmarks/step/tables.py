"""Measures what a step costs as the tables of a model grow: an Embedding of 10^4 to 10^7 rows, compared with plain
Keras.

    python -m benchmarks.step.tables
    python -m benchmarks.step.tables --rows 10000 10000000 --optimizers SGD

One process and one worker, whose step and Keras's `train_on_batch` take turns in blocks of steps. All sizes are there
at the same time, each with a table of its own. What remains of a table's size are the caches of the processor.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import harness

BATCH, LOOKUPS, WIDTH = 256, 8, 16
#: Units of the dense layers, as those of a small recommender.
TOWER = (256, 128, 64)
#: Steps of one block, which are one call of raytf's step, and blocks before the clock runs.
CALL, WARM = 16, 2
#: A step with the largest table against one with the smallest.
GOAL = 1.1


@dataclass(frozen=True)
class Arguments:
    """Compare steps with tables of several sizes."""

    rows: list[int] = field(default_factory=lambda: [10**4, 10**5, 10**6, 10**7])
    """Rows of the table."""
    optimizers: list[str] = field(default_factory=lambda: ["SGD", "Adagrad"])
    """Keras's optimizers whose updates are of the rows that occur."""
    pairs: int = harness.PAIRS
    """Turns of each way."""
    blocks: int = 4
    """Blocks of steps in a turn."""
    quick: bool = False
    """Two sizes and one optimizer, in three short turns."""
    json: Path | None = None
    """Write what was found here."""


def model(rows: int, optimizer: str) -> Any:
    import keras
    from keras import layers

    inputs = keras.Input((LOOKUPS,), dtype="int32")
    # Zeros, since drawing 10^7 rows takes longer than all steps.
    found = layers.Embedding(rows, WIDTH, embeddings_initializer="zeros")(inputs)
    hidden = layers.Flatten()(found)
    for units in TOWER:
        hidden = layers.Dense(units, "relu")(hidden)
    made = keras.Model(inputs, layers.Dense(1)(hidden))
    made.compile(getattr(keras.optimizers, optimizer)(0.01), "mse")
    return made


class Way:
    """Steps of one kind with one size of the table."""

    def __init__(self, rows: int, optimizer: str):
        rng = np.random.default_rng(0)
        records = BATCH * CALL
        self._x = rng.integers(0, rows, (records, LOOKUPS)).astype(np.int32)
        self._y = rng.normal(size=(records, 1)).astype(np.float32)
        self.prepare(rows, optimizer)
        for _ in range(WARM):
            self.block()

    def prepare(self, rows: int, optimizer: str) -> None:
        raise NotImplementedError

    def block(self) -> None:
        """Run `CALL` steps."""
        raise NotImplementedError

    def measure(self, blocks: int) -> float:
        """Return the milliseconds of a step."""
        began = time.perf_counter()
        for _ in range(blocks):
            self.block()
        return (time.perf_counter() - began) / (blocks * CALL) * 1e3


class Keras(Way):
    def prepare(self, rows: int, optimizer: str) -> None:
        self._model = model(rows, optimizer)

    def block(self) -> None:
        for step in range(CALL):
            part = slice(step * BATCH, (step + 1) * BATCH)
            self._model.train_on_batch(self._x[part], self._y[part])


class Raytf(Way):
    def prepare(self, rows: int, optimizer: str) -> None:
        from raytf.checkpoint.variables import seed_states
        from raytf.config.flags import ComputeSection
        from raytf.data.pipeline import Pipeline
        from raytf.data.plan import StepPlan
        from raytf.data.sources import ArraySource
        from raytf.training.model.model import build
        from raytf.training.step.step import StepOptions, TrainStep

        source, plan = ArraySource(self._x, self._y), StepPlan(len(self._x), BATCH, 1)
        pipeline = Pipeline(source, plan, range(1), seed=0)
        made = build(lambda: model(rows, optimizer), pipeline.sample(), [source], ComputeSection(), seed=0)
        pipeline.prepare(len(seed_states(made)), None)
        leaves = pipeline.template, pipeline.leaf_specs
        self._step = TrainStep(made, plan, range(1), None, *leaves, StepOptions(fixed_point=True))
        self._call = pipeline.submit(0, CALL).result()
        pipeline.close()

    def block(self) -> None:
        self._step(self._call, np.zeros(1, np.float32))


def main(arguments: Arguments) -> int:
    rows, optimizers, pairs, blocks = arguments.rows, arguments.optimizers, arguments.pairs, arguments.blocks
    if arguments.quick:
        rows, optimizers, pairs, blocks = [min(rows), max(rows)], optimizers[:1], 3, 2
    report = harness.Report("tables", "A step with tables of several sizes")
    for optimizer in optimizers:
        ways = {(kind.__name__, size): kind(size, optimizer) for kind in (Raytf, Keras) for size in rows}
        found: dict[tuple[str, int], list[float]] = {key: [] for key in ways}
        for turn in range(pairs):
            for key in list(ways)[:: 1 if turn % 2 == 0 else -1]:
                found[key].append(ways[key].measure(blocks))
        for size in rows:
            report.comparisons.append(
                harness.Comparison(
                    f"{optimizer}, {size:,} rows of {WIDTH}",
                    "Keras's train_on_batch",
                    "ms",
                    found["Raytf", size],
                    found["Keras", size],
                    more_is_better=False,
                )
            )
        small, large = min(rows), max(rows)
        grown = [b / a for a, b in zip(found["Raytf", small], found["Raytf", large], strict=True)]
        theirs = statistics.median(found["Keras", large]) / statistics.median(found["Keras", small])
        report.readings.append(
            harness.Reading(optimizer, f"a step with {large:,} rows / with {small:,}", "", grown, at_most=GOAL)
        )
        report.notes.append(f"{optimizer}: in plain Keras the same ratio is {theirs:.1f}.")
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
