"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere. No Ray and no TensorFlow here."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytf.errors import ConfigError
from raytf.terminal import visible

#: Seconds between plain lines, where there is no terminal.
PLAIN_SECONDS = 5.0


@dataclass(frozen=True)
class SaveTrouble:
    """Saves fail.

    Attributes:
        seconds: since the first in a row failed.
        retry_seconds: to the next try.
        why: the last failed, in short.
    """

    seconds: float
    retry_seconds: float
    why: str


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
        snapshot: step of the newest copy of the state in memory, or None.
        snapshot_bytes: that the copies take on each node.
        stall_seconds: for which this group of workers has stood still to save or copy the state.
        phase: what goes on, where it is not training.
        trouble: that checkpoints cannot be saved, or None.
        history: the last epochs that have ended: metrics, and `epoch` (from 0) and `step`.
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
    snapshot: int | None = None
    snapshot_bytes: int = 0
    stall_seconds: float = 0.0
    phase: str = "training"
    trouble: SaveTrouble | None = None
    history: list[dict[str, Any]] = field(default_factory=list)


def describe(status: Status) -> str:
    """A status as one line."""
    parts = [f"epoch {status.epoch}/{status.epochs}", f"step {status.step}/{status.total}"]
    parts += [f"{name} {value:.4g}" for name, value in status.metrics.items()]
    if status.samples_per_second:
        parts.append(f"{status.samples_per_second:,.0f} samples/s")
    parts.append(f"{status.workers} worker{'s' if status.workers != 1 else ''}")
    parts.append(f"saved {'nothing yet' if status.checkpoint is None else f'step {status.checkpoint}'}")
    if status.trouble is not None:
        since, again = clock_text(status.trouble.seconds), clock_text(status.trouble.retry_seconds)
        parts.append(f"saving fails since {since} ({status.trouble.why}), next try in {again}")
    if status.snapshot is not None:
        parts.append(f"in memory step {status.snapshot} ({status.snapshot_bytes / 2**20:,.0f} MiB a node)")
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


class StatusFile:
    """Keeps the latest status as JSON in a local file: the fields of `Status`, and `time` in seconds of the epoch.

    Args:
        path: a file in a folder that exists; None writes nothing.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str | None):
        self._path = path
        self._status: Status | None = None
        if path is not None:
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path)  # what an earlier command left says nothing of this one
                with open(f"{path}.part", "w"):
                    pass
                os.remove(f"{path}.part")
            except OSError as error:
                raise ConfigError(
                    f"--status-file {path} cannot be written: {error.strerror or error}. Give a file in a folder that "
                    "exists."
                ) from error

    def show(self, status: Status) -> None:
        """Replace the file where the status is a new one. A disk that is full is no reason to stop."""
        if self._path is None or status == self._status:
            return
        self._status = status
        with contextlib.suppress(OSError):
            with open(f"{self._path}.part", "w") as stream:
                json.dump({**dataclasses.asdict(status), "time": time.time()}, stream)
            os.replace(f"{self._path}.part", self._path)


class Screen:
    """Lines that stay and, on a terminal, a part below them that is drawn anew; a context manager.

    Args:
        console: where to; standard output by default.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        """Print a line that stays, or several; escape sequences in it are seen and do nothing. That nobody reads it any
        more (`| head`, a closed terminal) ends no run."""
        # rich takes it for the end of the program, having redirected standard output to nowhere.
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(visible(message, lines=True), markup=False, soft_wrap=True)


class Display(Screen):
    """Shows statuses and messages.

    Args:
        console: where to; tests give their own.
        clock: injected by tests.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic):
        super().__init__(console)
        self._clock = clock
        self._last_line = float("-inf")
        self._last_text = ""

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        text = visible(describe(status))
        if self._live is not None:
            share = status.step / status.total if status.total else 1.0
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(total=max(1, status.total), completed=status.step, width=40), Text(f"{share:4.0%}"))
            self._live.update(Group(bar, Text(text)), refresh=True)
        elif text != self._last_text and self._clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_text = self._clock(), text
            self.say(text)
