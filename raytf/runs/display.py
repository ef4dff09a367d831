"""The driver's display of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from raytf.config.terminal_text import visible
from raytf.runs.status import Status, describe

#: Seconds between plain lines, where there is no terminal.
PLAIN_SECONDS = 5.0


class Screen:
    """Lines that stay and, on a terminal, a part below them that is drawn again; a context manager.

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
        shows_progress: whether statuses are shown; messages always are.
    """

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic, shows_progress: bool = True
    ):
        super().__init__(console)
        self._clock, self._shows_progress = clock, shows_progress
        self._last_line = float("-inf")
        self._last_text = ""

    def __enter__(self) -> Self:
        return super().__enter__() if self._shows_progress else self

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        if not self._shows_progress:
            return
        text = visible(describe(status))
        if self._live is not None:
            share = status.step / status.total if status.total else 1.0
            bar = Table.grid(padding=(0, 1))
            bar.add_row(ProgressBar(total=max(1, status.total), completed=status.step, width=40), Text(f"{share:4.0%}"))
            self._live.update(Group(bar, Text(text)), refresh=True)
        elif text != self._last_text and self._clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_text = self._clock(), text
            self.say(text)
