"""`raytf predict MODEL INPUT OUTPUT`: predict for each record of a data set, on Ray Data."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from annotated_types import Ge, Gt

from raytf.commands._places import model_uri
from raytf.config.terminal_text import say
from raytf.inference.serving.served_versions import bounds


@dataclass(frozen=True)
class Predict:
    """Predict for every record of a data set and write the predictions beside its columns, in the order of the records.

    The output appears only when it is complete. Processes that die are replaced, and their work is repeated.
    """

    model: tyro.conf.Positional[str]
    """A run with an export (STORAGE/NAME, or its name in ~/raytf-runs), a folder of versions such as
    s3://bucket/models/mnist, or a version in such a folder."""
    input: tyro.conf.Positional[str]
    """A file or folder, local, s3://, gs:// or az://: Parquet, CSV, JSONL, TFRecords, images, one .npz, MNIST's IDX
    files; or digits or mnist for their test images."""
    output: tyro.conf.Positional[str]
    """The file to write: .parquet, .csv or .jsonl; local, s3://, gs:// or az://."""
    version: int | None = None
    """Version of the model; by default the newest one."""
    x: tuple[str, ...] = ()
    """The column for the model's input. Several columns of numbers become a vector; use INPUT=COLUMN for a model with
    several inputs. By default columns are matched by name."""
    keep: str = "scalars"
    """Columns of the input to write beside the predictions: scalars (all without arrays), all, none, or A,B."""
    classes: bool = False
    """Write the class with the largest output, and that output as its score, instead of all outputs."""
    fit: Literal["crop", "stretch"] = "crop"
    """How to fit an image to the model's input shape: crop or stretch (distort) it, as in training."""
    batch_size: Annotated[int, Ge(1)] = 256
    """Records in one call of the model."""
    workers: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "1"
    """Number of processes that hold the model, or the fewest and the most."""
    cpus_per_worker: Annotated[float, Gt(0)] = 1.0
    """CPUs and TensorFlow threads of each of these processes."""
    gpus_per_worker: Annotated[float, Ge(0)] = 0.0
    """GPUs of each of these processes."""
    overwrite: bool = False
    """Replace an existing output."""
    verbose: bool = False
    """Also show the messages of TensorFlow and Ray."""


def main(flags: Predict) -> None:
    """Run the command."""
    workers = bounds("--workers", flags.workers)
    from raytf.inference.batch import predict  # Ray is not needed for --help
    from raytf.inference.batch.columns import Options

    plan = predict.PredictionPlan(
        model_uri(flags.model),
        flags.input,
        flags.output,
        flags.version,
        Options(flags.x, flags.keep, flags.classes),
        flags.batch_size,
        workers,
        flags.cpus_per_worker,
        flags.gpus_per_worker,
        flags.overwrite,
        flags.verbose,
        flags.fit,
    )
    began = time.monotonic()
    with _Bar() as bar:
        records = predict.run(plan, bar.show, lambda text: say(text))
    say(f"{flags.output.partition('?')[0]}: {records:,} predictions in {time.monotonic() - began:.1f} s")


class _Bar:
    """The progress of a prediction: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __enter__(self) -> _Bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = Console(file=sys.stdout, highlight=False)
        self._bar = Progress("records", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console)
        self._task = self._bar.add_task("records", total=None)
        self._is_terminal = console.is_terminal
        if self._is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._is_terminal:
            self._bar.stop()

    def show(self, done: int, total: int | None) -> None:
        if self._is_terminal:
            self._bar.update(self._task, completed=done, total=total)
        elif time.monotonic() - self._last >= 5:
            self._last = time.monotonic()
            say(f"{done:,}{'' if total is None else f' of {total:,}'} records")
