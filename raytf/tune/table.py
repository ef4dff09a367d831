"""The table of a search: live on a terminal, elsewhere one line for each change. Does not need Ray."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from raytf.config.objective import MetricObjective
from raytf.config.terminal_text import visible
from raytf.runs.display import Screen
from raytf.runs.status import number_text
from raytf.tune.search_record import TrialOutcome, TrialRecord, run_name
from raytf.tune.space import short

_STYLES = {"running": "cyan", "finished": "green", "stopped": "yellow", "failed": "red", "waiting": "dim"}


@dataclass
class TrialRow:
    """A trial, whose state is waiting, running, or the text of a `TrialOutcome`."""

    parameters: dict[str, Any]
    state: str = "waiting"
    epoch: int = 0
    step: int = 0
    value: float | None = None
    why: str = ""


@dataclass
class TrialTable:
    """All trials of a search, in order, and the names of the searched flags."""

    names: list[str]
    goal: MetricObjective
    rows: list[TrialRow] = field(default_factory=list)

    def settle(self, record: TrialRecord) -> None:
        row = self.rows[record.number]
        row.state, row.value, row.epoch, row.why = record.outcome.value, record.value, record.epochs, record.why

    def columns(self) -> list[str]:
        return ["", "trial", "state", *self.names, "epoch", self.goal.metric, "why"]

    def cells(self) -> list[list[str]]:
        """Return the cells of each trial; the best one has a star."""
        finished = {f"{i:06d}": r.value for i, r in enumerate(self.rows) if r.state == TrialOutcome.FINISHED.value}
        best = self.goal.best(finished)
        return [
            [
                "*" if best is not None and i == int(best) else "",
                run_name(i),
                row.state,
                *(short(row.parameters.get(name, "-")) for name in self.names),
                str(row.epoch) if row.epoch else "-",
                number_text(row.value),
                row.why or "-",
            ]
            for i, row in enumerate(self.rows)
        ]


class LiveTable(Screen):
    """Shows the table while it changes."""

    def __init__(self, board: TrialTable, console: Console | None = None):
        super().__init__(console)
        self._board = board
        self._shown: list[list[str]] = []

    def say(self, message: str) -> None:
        """Print a line that stays above the table."""
        with contextlib.suppress(OSError):
            super().say(message)

    def show(self) -> None:
        cells = self._board.cells()
        if cells == self._shown:
            return
        self._shown = cells
        if self._live is not None:
            self._live.update(table(self._board), refresh=True)


def table(board: TrialTable) -> Table:
    """Return the table for a terminal."""
    drawn = Table(*(Column(Text(visible(c))) for c in board.columns()))
    for cells, row in zip(board.cells(), board.rows, strict=True):
        style = "bold" if cells[0] else ""
        drawn.add_row(
            *(Text(visible(c), style=_STYLES.get(row.state, "") if c == row.state else "") for c in cells), style=style
        )
    return drawn


def epochs_text(count: int) -> str:
    """Return a number of epochs as text, such as `2 epochs`."""
    return f"{count} epoch{'' if count == 1 else 's'}"


def change_text(number: int, row: TrialRow, goal: MetricObjective) -> str:
    """Return a trial's change of state as a line."""
    name = run_name(number)
    match row.state:
        case "running":
            values = ", ".join(f"{k}={short(v)}" for k, v in row.parameters.items())
            return f"{name} starts: {values or 'the defaults'}"
        case "finished":
            return f"{name} finished: {goal.metric} {number_text(row.value)} after {epochs_text(row.epoch)}"
        case "stopped":
            return f"{name} stopped: {row.why}"
        case "failed":
            return f"{name} failed: {row.why}"
    return f"{name} {row.state}"
