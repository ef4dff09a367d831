"""The driver's display of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from raytf.config.terminal_text import visible
from raytf.runs.status import Status, clock_text, describe, learned, left, saved, where

#: Seconds between plain lines, where there is no terminal.
PLAIN_SECONDS = 5.0
#: Seconds between two drawings of what turns.
_TICK_SECONDS = 0.2
#: Most and least characters of the bar.
_BAR, _LEAST_BAR = 40, 5


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
            self._console.show_cursor(True)  # which would stay hidden if this process were killed
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
    """Shows what goes on before a run trains, its statuses, and messages.

    Args:
        console: where to; tests give their own.
        clock: injected by tests.
        shows_progress: whether stages and statuses are shown; messages always are.
        shows_saves: whether statuses tell of checkpoints also where there is no trouble.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        shows_progress: bool = True,
        shows_saves: bool = False,
    ):
        super().__init__(console)
        self._clock, self._shows_progress, self._shows_saves = clock, shows_progress, shows_saves
        self._last_line = float("-inf")
        self._last_text = ""
        self._stage = ""
        self._ticker: Ticker | None = None

    def __enter__(self) -> Self:
        return super().__enter__() if self._shows_progress else self

    def __exit__(self, *exc: Any) -> None:
        self._end_stage()
        super().__exit__(*exc)

    def stage(self, text: str) -> None:
        """Show what goes on while nothing is trained, and for how long; until the next stage or status."""
        if not self._shows_progress or text == self._stage:
            return
        self._end_stage()
        self._stage = text
        if self._live is None:
            self.say(text)
            return
        self._live.update(StageLine(visible(text), self._clock), refresh=True)
        self._ticker = Ticker(self._live.refresh)

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        if not self._shows_progress:
            return
        if status.phase == "starting":
            self.stage("computing the first step")
            return
        self._end_stage()
        if self._live is not None:
            self._live.update(Group(*_bar(status, self._console.width, self._shows_saves)), refresh=True)
            return
        text = describe(status, self._shows_saves)
        if text != self._last_text and self._clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_text = self._clock(), text
            self.say(text)

    def _end_stage(self) -> None:
        self._stage = ""
        if self._ticker is not None:
            self._ticker.end()
            self._ticker = None


class StageLine:
    """A line with something that turns, and the seconds since it was made."""

    def __init__(self, text: str, clock: Callable[[], float]):
        self._text, self._clock, self._began = text, clock, clock()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Text:
        now = self._clock()
        turning = self._spinner.render(now)
        assert isinstance(turning, Text)  # it has no text of its own
        return Text.assemble(turning, f" {self._text}", (f" {clock_text(now - self._began)}", "dim"), no_wrap=True)


class Ticker:
    """Draws again a few times a second, in a thread."""

    def __init__(self, draw: Callable[[], None]):
        self._draw, self._over = draw, threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True, name="raytf-stage")
        self._thread.start()

    def end(self) -> None:
        """Draw no more."""
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with contextlib.suppress(OSError, SystemExit):  # nobody reads it any more
                self._draw()


def _bar(status: Status, width: int, shows_saves: bool) -> list[Text]:
    """How far a run is, in two lines that fit a terminal, and a third one where saves are told of."""
    share = status.step / status.total if status.total else 1.0
    after = "  ".join(part for part in (f"{share:4.0%}", *where(status), left(status)) if part)
    size = max(_LEAST_BAR, min(_BAR, width - len(after) - 3))
    done = round(share * size)
    bar = Text.assemble(("━" * done, "green"), ("━" * (size - done), "bright_black"), f" {after}")
    lines = [bar, Text(visible("  ".join(learned(status))))]
    saves = ", ".join(saved(status, shows_saves))
    if saves:
        lines.append(Text(visible(saves), "yellow" if status.trouble is not None else ""))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines
