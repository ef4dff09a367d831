"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere. No Ray and no TensorFlow here."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

#: Seconds between plain lines, where there is no terminal.
PLAIN_SECONDS = 5.0


@dataclass(frozen=True)
class Status:
    """Where a run is, as rank 0 last said.

    Attributes:
        step, total: global steps done and wanted.
        epoch, epochs: from 1; epochs counts those that `total` reaches.
        metrics: running loss and metrics of the epoch.
        samples_per_second: over the last report.
        workers: world size.
        checkpoint: step of the last complete checkpoint, or None.
        phase: what goes on, where it is not training.
    """

    step: int
    total: int
    epoch: int
    epochs: int
    workers: int
    metrics: dict[str, float] = field(default_factory=dict)
    samples_per_second: float = 0.0
    seconds_left: float | None = None
    checkpoint: int | None = None
    phase: str = "training"


def describe(status: Status) -> str:
    """A status as one line."""
    parts = [f"epoch {status.epoch}/{status.epochs}", f"step {status.step}/{status.total}"]
    parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
    if status.samples_per_second:
        parts.append(f"{status.samples_per_second:,.0f} samples/s")
    parts.append(f"{status.workers} worker{'s' if status.workers != 1 else ''}")
    parts.append(f"saved {'nothing yet' if status.checkpoint is None else f'step {status.checkpoint}'}")
    if status.phase != "training":
        parts.append(status.phase)
    elif status.seconds_left is not None:
        parts.append(f"ETA {clock_text(status.seconds_left)}")
    return ", ".join(parts)


def clock_text(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    """Shows statuses and messages; a context manager.

    Args:
        console: where to; tests give their own.
        clock: injected by tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._clock = clock
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = float("-inf")
        self._last_text = ""

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, message: str) -> None:
        """Print a line that stays."""
        self._console.print(message, markup=False)

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        text = describe(status)
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=status.total)
            self._bar.update(self._task, description=text, completed=status.step, total=status.total)
        elif text != self._last_text and self._clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_text = self._clock(), text
            self.say(text)
