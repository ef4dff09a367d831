"""Tables that commands print: formatted on a terminal, plain columns for `grep` and `awk` elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from raytf.config.terminal_text import visible

#: In characters: the width above which a terminal may fold cells, and the space between two columns.
_FOLDED, _BETWEEN = 24, 2


def show(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    console: Console | None = None,
    dispensable: Sequence[str] = (),
) -> None:
    """Print a table.

    Args:
        rows: the cells of each row, one for each column.
        console: where to print the table; standard output by default.
        dispensable: columns that are dropped on a narrow terminal, the least important one first.
    """
    console = console or Console(highlight=False)
    columns, rows = [visible(c) for c in columns], [[visible(cell) for cell in row] for row in rows]
    if console.is_terminal:
        shown = fitting(columns, rows, console.width, dispensable)
        one_line = [bool(dispensable) and _width(columns, rows, i) <= _FOLDED for i in shown]
        heads = (Column(Text(columns[i]), no_wrap=w, overflow="fold") for i, w in zip(shown, one_line, strict=True))
        table = Table(*heads, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        for row in rows:
            table.add_row(*(Text(row[i]) for i in shown))
        console.print(table)
        left_out = [name for i, name in enumerate(columns) if i not in shown]
        if left_out:
            console.print(f"columns left out because the terminal is too narrow: {', '.join(left_out)}")
        return
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    for line in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.file.write("  ".join(cells).rstrip() + "\n")


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, dispensable: Sequence[str]) -> list[int]:
    """Return the indexes of the columns to show. Dispensable columns are dropped one by one until the others, with long
    cells folded, fit the width."""
    shown = list(range(len(columns)))
    for name in dispensable:
        if sum(min(_FOLDED, _width(columns, rows, i)) for i in shown) + _BETWEEN * (len(shown) - 1) <= width:
            break
        shown.remove(columns.index(name))
    return shown


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]], number: int) -> int:
    return max(len(line[number]) for line in (columns, *rows))


def size_text(count: int) -> str:
    """Format a number of bytes for people, in powers of 1024."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"


def age_text(seconds: float) -> str:
    """Format an age for people, in the largest unit that fits."""
    for name, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {name}"
    return f"{max(0.0, seconds):.0f} s"
