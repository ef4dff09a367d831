"""Measures what the two tiers of checkpoints cost while nothing fails: steps/s with and without them, in turns, in one
run.

    python -m benchmarks.checkpoint.snapshots --pairs 5
    python -m benchmarks.checkpoint.snapshots --quick

The network of jobs/mnist.py and pictures of MNIST's size on two workers. For a block of seconds the state is copied
into memory every 10 steps and saved to storage once; for the next block neither happens; then again, in the order A B,
B A, A B, ... So what else the machine does meets both alike, and a ratio is that of two neighboring blocks. To take
turns within one run, this program stands in front of the two decisions of rank 0 (`MemoryTier.wish`, `Cadence.is_due`);
all else is the code of a run.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro

import raytf
from benchmarks import harness
from benchmarks.step.exact import BATCH, SHARDS, images

#: Seconds at the start that do not count: exponents, calls and caches find their sizes.
WARM_SECONDS = 10.0


@dataclass(frozen=True)
class Arguments:
    """Measure what checkpoints cost while nothing fails."""

    quick: bool = False
    """Two pairs of blocks of eight seconds."""
    pairs: int = harness.PAIRS
    """Blocks of each kind."""
    block_seconds: float = 15.0
    """Length of a block; one save to storage falls into each that saves."""
    every_steps: int = 10
    """Steps between two copies in memory."""
    workers: int = 2
    json: Path | None = None
    """Write the report here."""


@dataclass
class Turns:
    """Rank 0's clock: which block it is, and how many steps each took. Stands in front of the two decisions."""

    pairs: int
    seconds: float
    path: str
    began: float = field(default_factory=time.monotonic)
    marks: list[tuple[float, int, float, float]] = field(default_factory=list)
    #: Seconds for the hashes of the weights so far.
    hashing: float = 0.0
    saved_in: int = -1

    @property
    def block(self) -> int:
        passed = time.monotonic() - self.began - WARM_SECONDS
        return -1 if passed < 0 else int(passed / self.seconds)

    @property
    def is_on(self) -> bool:
        # A B, B A, A B, ...
        return self.block >= 0 and self.block % 4 in (0, 3)

    def call(self, stop: int, copy_seconds: float) -> None:
        """Record the start of a call of steps that ends at step `stop`."""
        block = self.block
        while len(self.marks) <= block:
            self.marks.append((time.monotonic(), stop, copy_seconds, self.hashing))
            if len(self.marks) > 2 * self.pairs:
                Path(self.path).write_text(json.dumps(self.marks))

    def take_over(self) -> None:
        """From now on decide in this process."""
        from raytf.checkpoint.memory import MemoryTier
        from raytf.training.saving.checkpoint_policy import Cadence

        wish, costs_also = MemoryTier.wish, MemoryTier.costs_also

        def wish_in_turn(snapshots: MemoryTier, stop: int, step_seconds: float) -> float:
            self.call(stop, snapshots.seconds)
            return wish(snapshots, stop, step_seconds) if self.is_on else 0.0

        def is_due_in_turn(*_: Any) -> bool:
            # In the middle of a block, so that the upload ends in it.
            middle = (time.monotonic() - self.began - WARM_SECONDS) % self.seconds > self.seconds / 4
            if not self.is_on or self.saved_in == self.block or not middle:
                return False
            self.saved_in = self.block
            return True

        def count(snapshots: MemoryTier, seconds: float) -> None:
            self.hashing += seconds
            costs_also(snapshots, seconds)

        MemoryTier.costs_also = count  # type: ignore[assignment,method-assign]
        MemoryTier.wish = wish_in_turn  # type: ignore[method-assign]
        Cadence.is_due = is_due_in_turn  # type: ignore[method-assign]


def main(arguments: Arguments) -> int:
    """Train the model, and print the table."""
    if arguments.quick:
        arguments = replace(arguments, pairs=2, block_seconds=8.0)
    report = harness.Report("snapshot_cost", "4b. Checkpoints while nothing fails, MNIST CNN")
    with tempfile.TemporaryDirectory(prefix="raytf-cost-") as folder:
        path, mnist = f"{folder}/marks.json", str(harness.ROOT / "jobs" / "mnist.py")
        os.environ.update(harness.importable())  # Ray's workers have it from here

        def build() -> Any:
            from benchmarks.checkpoint.snapshots import Turns

            Turns(arguments.pairs, arguments.block_seconds, path).take_over()
            return runpy.run_path(mnist)["build"]((28, 28, 1), 10)

        def stop_in_time(_: str) -> list[Any]:
            import keras

            class Stop(keras.callbacks.Callback):
                def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                    self.model.stop_training = Path(path).exists()

            return [Stop()]

        config = raytf.TrainConfig.of(
            storage=folder,
            workers=str(arguments.workers),
            epochs=1_000_000,
            global_batch_size=BATCH,
            logical_shards=SHARDS,
            snapshot_every_steps=arguments.every_steps,
            steps_per_call=arguments.every_steps,  # copies are made where calls end
            warm_workers=False,  # they get ready once after a start, in whichever block that is
        )
        raytf.fit(build, images(BATCH * 100), config=config, callbacks=stop_in_time)
        marks = json.loads(Path(path).read_text())
    rates, copies, hashes = [], [], []
    for (t0, s0, c0, h0), (t1, s1, c1, h1) in itertools.pairwise(marks):
        rates.append((s1 - s0) / (t1 - t0))
        copies.append(100 * (c1 - c0) / (t1 - t0))
        hashes.append(100 * (h1 - h0) / (t1 - t0))
    on = [2 * pair if pair % 2 == 0 else 2 * pair + 1 for pair in range(arguments.pairs)]
    off = [2 * pair + 1 if pair % 2 == 0 else 2 * pair for pair in range(arguments.pairs)]
    what = f"{arguments.workers} workers, to memory every {arguments.every_steps} steps, to storage once a block"
    with_them, without = [rates[b] for b in on], [rates[b] for b in off]
    report.comparisons.append(harness.Comparison(what, "the same without", "steps/s", with_them, without, goal=0.99))
    share = [copies[b] for b in on]
    report.readings.append(harness.Reading(what, "training stands still to copy", "% of the time", share, at_most=1.0))
    report.readings.append(
        harness.Reading(what, "of that, to hash the weights", "% of the time", [hashes[b] for b in on])
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
