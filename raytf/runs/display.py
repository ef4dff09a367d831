"""The driver's display of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from raytf.config.terminal_text import visible
from raytf.runs.status import Status, clock_text, describe, learned, left, saved, where

#: Seconds between plain lines, where there is no terminal.
PLAIN_SECONDS = 5.0
#: Seconds between two drawings of what turns.
_TICK_SECONDS = 0.2
#: Seconds without a change after which it is shown how many there have been.
_STILL_SECONDS = 2.0
#: Most and least characters of the bar, and those of what turns behind it.
_BAR, _LEAST_BAR, _TURNING = 40, 5, 8


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
        self._below: StageLine | Bar | None = None
        self._ticker: Ticker | None = None

    def __enter__(self) -> Self:
        return super().__enter__() if self._shows_progress else self

    def __exit__(self, *exc: Any) -> None:
        if self._ticker is not None:
            self._ticker.end()
            self._ticker = None
        super().__exit__(*exc)

    def stage(self, text: str) -> None:
        """Show what goes on while nothing is trained, and for how long; until the next stage or status. Where there is
        no terminal, only before the run trains for the first time."""
        if not self._shows_progress or (isinstance(self._below, StageLine) and self._below.text == text):
            return
        self._put(StageLine(text, self._clock))
        if self._live is None and not self._last_text:
            self.say(text)

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        if not self._shows_progress:
            return
        if status.phase == "starting":
            self.stage("computing the first step")
            return
        before = self._below if isinstance(self._below, Bar) else None
        self._put(Bar(status, self._shows_saves, self._clock, before))
        text = describe(status, self._shows_saves)
        if self._live is None and text != self._last_text and self._clock() - self._last_line >= PLAIN_SECONDS:
            self._last_line, self._last_text = self._clock(), text
            self.say(text)

    def _put(self, below: StageLine | Bar) -> None:
        self._below = below
        if self._live is not None:
            self._live.update(below, refresh=True)
            self._ticker = self._ticker or Ticker(self._tick)

    def _tick(self) -> None:
        if self._live is not None and self._below is not None and self._below.moves:
            self._live.refresh()


class StageLine:
    """What goes on, with something that turns, and the seconds since it was made."""

    moves = True

    def __init__(self, text: str, clock: Callable[[], float]):
        self.text, self._clock, self._began = text, clock, clock()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Text:
        now = self._clock()
        return _line(_turning(self._spinner, now, self._began), f" {visible(self.text)}")


class Bar:
    """How far a run is, in two lines that fit a terminal, and a third one where saves are told of.

    Where nothing has changed for some seconds, or something else goes on than training, seconds are counted.

    Args:
        status: of the run.
        shows_saves: whether saves are told of where there is no trouble.
        clock: seconds, of any clock that only goes forward.
        before: what was drawn for the status before.
    """

    def __init__(self, status: Status, shows_saves: bool, clock: Callable[[], float], before: Bar | None):
        self._status, self._shows_saves, self._clock = status, shows_saves, clock
        self._at = (status.step, status.phase)
        is_still = before is not None and before._at == self._at
        self._began: float = before._began if before is not None and is_still else clock()
        self._spinner: Spinner = before._spinner if before is not None and is_still else Spinner("dots")

    @property
    def moves(self) -> bool:
        """Whether it looks otherwise from one moment to the next."""
        return self._clock() - self._began >= _STILL_SECONDS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        status = self._status
        share = status.step / status.total if status.total else 1.0
        after = "  ".join(part for part in (f"{share:4.0%}", *where(status), left(status)) if part)
        turning = Text("  ") + _turning(self._spinner, self._clock(), self._began) if self.moves else Text()
        size = max(_LEAST_BAR, min(_BAR, options.max_width - len(after) - 2 - _TURNING))
        done = round(share * size)
        yield _line(("━" * done, "green"), ("━" * (size - done), "bright_black"), f" {visible(after)}", turning)
        yield _line(visible("  ".join(learned(status))))
        saves = ", ".join(saved(status, self._shows_saves))
        if saves:
            yield _line((visible(saves), "yellow" if status.trouble is not None else ""))


class Ticker:
    """Calls a function a few times a second, in a thread."""

    def __init__(self, call: Callable[[], None]):
        self._call, self._over = call, threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True, name="raytf-ticker")
        self._thread.start()

    def end(self) -> None:
        """Call it no more."""
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with contextlib.suppress(OSError, SystemExit):  # nobody reads it any more
                self._call()


def _turning(spinner: Spinner, now: float, began: float) -> Text:
    """Something that turns, and for how long it has done so."""
    drawn = spinner.render(now)
    assert isinstance(drawn, Text)  # it has no text of its own
    return Text.assemble(drawn, (f" {clock_text(now - began)}", "dim"))


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
