"""The display of a run in a notebook cell: a bar, curves, the status and messages, redrawn in place."""

from __future__ import annotations

import html
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console

from raytf.config import program
from raytf.config.terminal_text import visible
from raytf.errors import one_line
from raytf.runs.display import QUIET_SECONDS, Display, stream_of
from raytf.runs.status import Status, describe

#: Seconds between two redraws, points of a curve, and number of messages to keep.
_SECONDS, _POINTS, _LINES = 0.5, 200, 200
_WIDTH, _HEIGHT = 300, 70
_COLORS = ("#1f77b4", "#d62728")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, without importing anything."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def display(verbose: int = 1, shows_saves: bool = False) -> Display:
    """Return a display for this process: a widget in a notebook, otherwise a bar or lines.

    Args:
        verbose: as in Keras's `fit`: 1 shows the progress of a run; 0 and 2 do not.
    """
    if verbose == 1 and in_notebook():
        return NotebookDisplay(shows_saves=shows_saves)
    stream = stream_of(verbose)
    # With verbose=2, a run's output that is redirected to a file has one line per epoch, and nothing else.
    quiet = None if verbose == 2 and stream is sys.stdout else QUIET_SECONDS
    console = Console(file=stream, highlight=False)
    return Display(console, shows_progress=verbose == 1, shows_saves=shows_saves, most_quiet=quiet)


class NotebookDisplay(Display):
    """Shows statuses and messages in a notebook cell.

    Args:
        draw: replaces the HTML that the cell shows; by default through IPython.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[str], None] | None = None,
        shows_saves: bool = False,
    ):
        super().__init__(clock=clock, shows_saves=shows_saves)
        self._draw = draw or _in_cell()
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._status: Status | None = None
        self._stage = self._outcome = ""
        #: (step, loss) of earlier statuses.
        self._loss: list[tuple[float, float]] = []
        self._drawn = float("-inf")
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None = None, error: BaseException | None = None, *_: Any) -> None:
        self._stage = ""
        self._outcome = outcome(error, self._lines)
        if isinstance(error, KeyboardInterrupt):  # IPython would show raytf's own frames
            error._render_traceback_ = lambda: ["KeyboardInterrupt"]  # type: ignore[attr-defined]
        self._redraw(is_due=True)

    def _print(self, message: str) -> None:
        self._lines.extend(visible(message, lines=True).splitlines())
        self._redraw(is_due=True)

    def stage(self, text: str) -> None:
        """Show a stage until the next stage or status. Its duration is not shown, to redraw the cell rarely."""
        if text != self._stage:
            self._stage = text
            self._redraw(is_due=True)

    def show(self, status: Status) -> None:
        """Draw a status, unless the last redraw was less than half a second ago."""
        loss = status.metrics.get("loss")
        if loss is not None and (not self._loss or status.step > self._loss[-1][0]):
            self._loss.append((status.step, loss))
            if len(self._loss) > 2 * _POINTS:
                self._loss = self._loss[::2]
        self._status, self._stage = status, ""
        self._redraw(is_due=False)

    def _redraw(self, is_due: bool) -> None:
        with self._lock:
            now = self._clock()
            if is_due or now - self._drawn >= _SECONDS:
                self._drawn = now
                words = self._stage or ("" if self._status is None else describe(self._status, self._shows_saves))
                self._draw(page(self._status, self._loss, list(self._lines), words, self._outcome))


def outcome(error: BaseException | None, lines: Sequence[str]) -> str:
    """Return one line that describes the end of a run.

    Args:
        error: the error that ended the run, if any.
        lines: the messages so far; the last one describes the end of a run without an error.
    """
    if error is None:
        return lines[-1] if lines else ""
    if isinstance(error, KeyboardInterrupt):
        return f"stopped: interrupted; run the cell again{program.change()} to continue from the last checkpoint"
    return f"failed: {type(error).__name__}: {one_line(error, 600)}"


def page(
    status: Status | None, loss: Sequence[tuple[float, float]], lines: Sequence[str], now: str = "", ending: str = ""
) -> str:
    """Return the widget as HTML without scripts.

    Args:
        status: the latest status; None before training.
        loss: (step, loss) so far.
        lines: the messages, the oldest first.
        now: the current stage, or the status in words.
        ending: a description of the end of the run, shown last.
    """
    parts = []
    above = lines[:-1] if lines and ending == lines[-1] else lines
    if status is None and now:
        parts.append(f"<div>{html.escape(visible(now))}</div>")
    if status is not None:
        share = status.step / status.total if status.total else 1.0
        parts.append(
            f'<div style="background:#ddd;border-radius:4px;width:{_WIDTH * 2 + 20}px;height:10px">'
            f'<div style="background:#2a7;border-radius:4px;width:{100 * share:.1f}%;height:10px"></div></div>'
            f"<div>{html.escape(visible(now))}</div>"
        )
        curves = [_curve("loss", [loss], ["loss"])] if len(loss) > 1 else []
        parts.append(f'<div style="display:flex;gap:20px">{"".join(curves + _of_epochs(status.history))}</div>')
    shown = "".join(f"<div>{html.escape(line)}</div>" for line in above[-6:])
    parts.append(f'<div style="font-size:85%;color:#555">{shown}</div>')
    if len(lines) > 6:
        every = html.escape("\n".join(lines))
        parts.append(f'<details><summary style="font-size:85%">all messages</summary><pre>{every}</pre></details>')
    if ending:
        parts.append(f'<div style="font-weight:600;margin-top:4px">{html.escape(visible(ending))}</div>')
    return f'<div style="font-family:sans-serif;font-size:13px">{"".join(parts)}</div>'


def _of_epochs(history: Sequence[dict[str, Any]]) -> list[str]:
    """Return a curve of one metric over the finished epochs, with its validation metric if there is one."""
    if len(history) < 2:
        return []
    names = [name for name in history[-1] if name not in ("epoch", "step", "loss", "learning_rate")]
    own = [name for name in names if not name.startswith("val_")][:1] or ["loss"]
    wanted = [*own, f"val_{own[0]}"]
    points = {
        name: [(entry["epoch"], entry[name]) for entry in history if isinstance(entry.get(name), float)]
        for name in wanted
    }
    known = [name for name in wanted if len(points[name]) > 1]
    return [_curve(own[0], [points[name] for name in known], known)] if known else []


def _curve(title: str, series: Sequence[Sequence[tuple[float, float]]], names: Sequence[str]) -> str:
    values = [value for points in series for _, value in points if value == value and abs(value) != float("inf")]
    if not values:
        return ""
    low, high = min(values), max(values)
    lines = []
    for points, color in zip(series, _COLORS, strict=False):
        first, last = points[0][0], points[-1][0]
        across, up = _WIDTH / max(last - first, 1e-9), _HEIGHT / max(high - low, 1e-12)
        placed = " ".join(
            f"{(x - first) * across:.1f},{_HEIGHT - (y - low) * up:.1f}" for x, y in points if low <= y <= high
        )
        lines.append(f'<polyline fill="none" stroke="{color}" stroke-width="1.5" points="{placed}"/>')
    legend = ", ".join(
        f'<span style="color:{color}">{html.escape(name)}</span>' for name, color in zip(names, _COLORS, strict=False)
    )
    return (
        f'<div><svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 -2 {_WIDTH} {_HEIGHT + 4}" role="img" '
        f'aria-label="{html.escape(title)}">{"".join(lines)}</svg>'
        f'<div style="font-size:85%">{legend}: {values[-1]:.4g}, from {low:.4g} to {high:.4g}</div></div>'
    )


def _in_cell() -> Callable[[str], None]:
    from IPython.display import HTML
    from IPython.display import display as show

    handle = show(HTML(""), display_id=True)

    def draw(text: str) -> None:
        handle.update(HTML(text))

    return draw
