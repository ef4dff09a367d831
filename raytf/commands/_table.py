"""Tables of commands: drawn on a terminal, plain columns elsewhere, so that `grep` and `awk` have lines to work on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from raytf.config.terminal_text import visible


def show(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None = None) -> None:
    """Print a table.

    Args:
        columns: headings.
        rows: a cell for each column.
        console: where to; standard output by default.
    """
    console = console or Console(highlight=False)
    columns, rows = [visible(c) for c in columns], [[visible(cell) for cell in row] for row in rows]
    if console.is_terminal:
        table = Table(*(Column(Text(c)) for c in columns))
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        return
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    for line in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.file.write("  ".join(cells).rstrip() + "\n")


def size_text(count: int) -> str:
    """Bytes for people, in powers of 1024."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def age_text(seconds: float) -> str:
    """How long ago something was, in the largest unit that fits."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
