"""Measures what a batch hook costs: steps/s with a callback that has an empty one, against steps/s without.

    python -m benchmarks.step.batch_hooks --workers 1 2 --json batch_hooks.json

Both are `raytf.fit` with the network of jobs/mnist.py and the defaults of raytf. With the hook a call into TensorFlow
has one step in place of many, and the ranks agree on what the hook has changed. Each run is timed from the end of its
first epoch to the end of its last one.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import tyro

import raytf
from benchmarks import harness, models
from benchmarks.harness import ROOT, Report

#: Of an epoch, and how many epochs there are.
STEPS, EPOCHS = 200, 4


@dataclass(frozen=True)
class Arguments:
    """Steps/s with a batch hook against without."""

    workers: list[int] = field(default_factory=lambda: [1, 2])
    """Numbers of workers."""
    pairs: int = harness.PAIRS
    """Runs of each kind."""
    json: Path | None = None
    """Write the report here."""


def clock(keras: Any, path: str, has_hook: bool) -> Any:
    """Return a callback that writes the seconds of a step to a file, and has a batch hook if `has_hook` is set."""

    class Clock(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 0:
                self.began = time.perf_counter()
            if epoch == EPOCHS - 1:
                seconds = (time.perf_counter() - self.began) / STEPS / (EPOCHS - 1)
                Path(path).write_text(str(seconds))

        def get_state(self) -> dict[str, Any]:
            return {}

    class Hooked(Clock):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pass

    return Hooked() if has_hook else Clock()


def rate(folder: Path, name: str, workers: int, has_hook: bool) -> float:
    """Return the steps per second of one run."""
    path = str(folder / f"{name}.seconds")

    def build() -> Any:
        import keras

        return models.compiled(keras, "cnn")

    def callbacks(files: str) -> list[Any]:
        import keras

        return [clock(keras, path, has_hook)]

    config = raytf.TrainConfig.of(
        storage=str(folder),
        run=name,
        workers=str(workers),
        epochs=EPOCHS,
        global_batch_size=models.BATCH,
        checkpoint_every_seconds=1e6,
    )
    raytf.fit(build, models.MODELS["cnn"].data(STEPS * models.BATCH), config=config, callbacks=callbacks)
    return 1 / float(Path(path).read_text())


def main(arguments: Arguments) -> int:
    report = Report("batch_hooks", "The hook of every batch against none")
    with tempfile.TemporaryDirectory(prefix="raytf-hooks-") as name:
        ray.init(num_cpus=max(arguments.workers), runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}})
        numbers = iter(range(1_000_000))
        for workers in arguments.workers:

            def run(has_hook: bool, workers: int = workers) -> float:
                return rate(Path(name), f"run-{next(numbers)}", workers, has_hook)

            found = harness.turns(arguments.pairs, lambda: run(True), lambda: run(False))
            what = f"MNIST CNN, batch {models.BATCH}, {workers} worker{'s' * (workers > 1)}, a batch hook"
            report.comparisons.append(harness.Comparison(what, "no batch hook", "steps/s", *found))
        ray.shutdown()
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
