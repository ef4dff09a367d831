"""The driver's display of a run: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from raytf.config.terminal_text import visible
from raytf.runs.status import Status, clock_text, describe, learned, left, saved, where

#: Seconds between status lines without a terminal.
PLAIN_SECONDS = 5.0
#: Seconds without a line, without a terminal, before one shows the current stage; below 10 even on a busy machine.
QUIET_SECONDS = 8.0
#: The first stage, before anything else is known.
_PREPARING = "preparing the run"
#: Seconds between two frames of the spinner.
_TICK_SECONDS = 0.2
#: Seconds without a change after which the duration is shown.
_STILL_SECONDS = 2.0
#: Maximum and minimum width of the bar, and the width of the spinner after it.
_BAR, _LEAST_BAR, _TURNING = 40, 5, 8
#: The number of latest messages that `say_early` does not repeat.
_RECENT = 100
#: The stream for raytf's own lines if standard output belongs to a Keras program; otherwise None.
_own_stream: TextIO | None = None


@contextlib.contextmanager
def lines_on_stderr() -> Iterator[None]:
    """Write raytf's own lines to the current standard error instead of standard output.

    They are visible even while raytf silences libraries that write to standard error.
    """
    global _own_stream
    before = _own_stream
    with contextlib.ExitStack() as stack:
        _own_stream = sys.stderr
        own = sys.__stderr__
        if own is not None and sys.stderr is own:  # otherwise it belongs to a notebook or a test
            with contextlib.suppress(OSError, ValueError):
                number = os.dup(own.fileno())
                _own_stream = stack.enter_context(open(number, "w", 1, encoding="utf-8", errors="backslashreplace"))
        try:
            yield
        finally:
            _own_stream = before


def stream_of(verbose: int) -> TextIO:
    """Return the stream for raytf's own lines about a `fit` with this `verbose`."""
    if _own_stream is not None:
        return _own_stream
    return sys.stdout if verbose else sys.stderr


class Screen:
    """Permanent lines and, on a terminal, a live part below them; a context manager.

    Args:
        console: where to print; by default the stream of raytf's own lines.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Console(file=stream_of(1), highlight=False)
        self._live: Live | None = None

    @property
    def _draws(self) -> bool:
        """Whether the live part is drawn. A terminal that cannot move its cursor shows only lines, like a file."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def __enter__(self) -> Self:
        if self._draws:
            # rich prints the program's output above the bar, on the bar's terminal. Output to a file must not change.
            self._live = Live(
                console=self._console,
                transient=True,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
            self._console.show_cursor(True)  # otherwise it would stay hidden if this process were killed
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def say(self, message: str) -> None:
        """Print one or several permanent lines."""
        self._print(message)

    def _print(self, message: str) -> None:
        """Print permanent lines with escape sequences made visible. A closed output (`| head`, a closed terminal) does
        not stop the run."""
        # If the output is closed, rich redirects standard output to nowhere and exits the program.
        with contextlib.suppress(OSError, SystemExit):
            self._console.print(visible(message, lines=True), markup=False, soft_wrap=True)


class Display(Screen):
    """Shows the stages before a run trains, its statuses, and messages.

    Args:
        shows_progress: whether to show stages and statuses; messages are always shown.
        shows_saves: whether statuses name checkpoints even without trouble.
        most_quiet: without a terminal, the seconds without a line before one shows the current stage; None for no such
            line.
    """

    def __init__(
        self,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        shows_progress: bool = True,
        shows_saves: bool = False,
        most_quiet: float | None = None,
    ):
        super().__init__(console)
        self._clock, self._shows_progress, self._shows_saves = clock, shows_progress, shows_saves
        self._most_quiet, self._made_at = most_quiet, clock()
        self._said_at = self._made_at
        self._last_line = float("-inf")
        self._last_text = ""
        self._early: set[str] = set()
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._below: StageLine | Bar | None = None
        self._ticker: Ticker | None = None

    def __enter__(self) -> Self:
        if self._shows_progress:
            super().__enter__()
        if self._live is not None:
            self._put(StageLine(_PREPARING, self._clock))
        if not self._draws and self._most_quiet is not None:
            self._ticker = Ticker(self.break_silence)
        return self

    def say(self, message: str) -> None:
        """Print one or several permanent lines, unless `say_early` has already printed them."""
        if message in self._early:
            self._early.remove(message)
            return
        self._said_at = self._clock()
        self._recent.append(message)
        self._print(message)

    def say_early(self, message: str) -> None:
        """Print a line that workers also send, unless their copy was already printed. A later copy is dropped."""
        if message not in self._recent:
            self.say(message)
            self._early.add(message)

    def break_silence(self) -> None:
        """Print the current stage and its duration if no line was printed for `most_quiet` seconds."""
        if self._most_quiet is None or self._clock() - self._said_at < self._most_quiet:
            return
        words, began = (_PREPARING, self._made_at) if self._below is None else (self._below.words, self._below.began)
        self.say(f"{words}, for {clock_text(self._clock() - began)}")

    def __exit__(self, *exc: Any) -> None:
        if self._ticker is not None:
            self._ticker.end()
            self._ticker = None
        super().__exit__(*exc)

    def stage(self, text: str) -> None:
        """Show a stage without training, and its duration, until the next stage or status. Without a terminal, stages
        are shown only before the run trains for the first time."""
        if isinstance(self._below, StageLine) and self._below.words == text:
            return
        self._put(StageLine(text, self._clock))
        if self._shows_progress and self._live is None and not self._last_text:
            self.say(text)

    def show(self, status: Status) -> None:
        """Update the bar, or print a line every few seconds."""
        if status.phase == "starting":
            self.stage("computing the first step")
            return
        before = self._below if isinstance(self._below, Bar) else None
        self._put(Bar(status, self._shows_saves, self._clock, before))
        text = describe(status, self._shows_saves)
        if not self._shows_progress:
            return
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
    """A line with a spinner, the name of a stage, and the seconds since it began.

    Attributes:
        words: the name of the stage.
        began: the time when the stage began, by the clock.
    """

    moves = True

    def __init__(self, text: str, clock: Callable[[], float]):
        self.words, self._clock, self.began = text, clock, clock()
        self._spinner = Spinner("dots")

    def __rich__(self) -> Text:
        now = self._clock()
        return _line(_turning(self._spinner, now, self.began), f" {visible(self.words)}")


class Bar:
    """The progress of a run in two lines that fit a terminal, and a third one about saves.

    A spinner counts the seconds if the step and the phase have not changed for a while.

    Args:
        shows_saves: whether to name saves even without trouble.
        clock: a monotonic clock, in seconds.
        before: the bar of the previous status.

    Attributes:
        began: the time when the step or the phase last changed, by the clock.
    """

    def __init__(self, status: Status, shows_saves: bool, clock: Callable[[], float], before: Bar | None):
        self._status, self._shows_saves, self._clock = status, shows_saves, clock
        self._at = (status.step, status.phase)
        is_still = before is not None and before._at == self._at
        self.began: float = before.began if before is not None and is_still else clock()
        self._spinner: Spinner = before._spinner if before is not None and is_still else Spinner("dots")

    @property
    def words(self) -> str:
        return describe(self._status, self._shows_saves)

    @property
    def moves(self) -> bool:
        """Whether the bar changes without a new status, because its spinner is shown."""
        return self._clock() - self.began >= _STILL_SECONDS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        status = self._status
        share = status.step / status.total if status.total else 1.0
        after = "  ".join(part for part in (f"{share:4.0%}", *where(status), left(status)) if part)
        turning = Text("  ") + _turning(self._spinner, self._clock(), self.began) if self.moves else Text()
        size = max(_LEAST_BAR, min(_BAR, options.max_width - len(after) - 2 - _TURNING))
        done = round(share * size)
        # The characters differ, too, for terminals without colors.
        yield _line(("━" * done, "green"), ("·" * (size - done), "bright_black"), f" {visible(after)}", turning)
        yield _line(visible("  ".join(learned(status))))
        saves = ", ".join(saved(status, self._shows_saves))
        if saves:
            yield _line((visible(saves), "yellow" if status.trouble is not None else ""))


class Ticker:
    """A thread that calls a function a few times a second."""

    def __init__(self, call: Callable[[], None]):
        self._call, self._over = call, threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True, name="raytf-ticker")
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(_TICK_SECONDS):
            with contextlib.suppress(OSError, SystemExit):  # the output is closed
                self._call()


def _turning(spinner: Spinner, now: float, began: float) -> Text:
    drawn = spinner.render(now)
    assert isinstance(drawn, Text)  # because the spinner has no text
    return Text.assemble(drawn, (f" {clock_text(now - began)}", "dim"))


def _line(*parts: str | Text | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
