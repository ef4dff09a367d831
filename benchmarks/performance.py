"""The tables of docs/evidence/performance.md and the pages in docs/evidence/performance/, from the benchmarks' results.

    python -m benchmarks.performance --results benchmarks/results

The pages are edited by hand, but between a mark and `<!-- end -->` this program writes the table that the mark names:

    <!-- table goals -->                              one of `OF_ALL`
    <!-- table startup readings -->                   one of `OF_ONE`, for one result
    <!-- table distributed comparisons batch 64, -->  the same, with the rows that match a regular expression
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.harness import ROOT, Comparison, Reading, Report, number

PAGE = ROOT / "docs" / "evidence" / "performance.md"
PAGES = (
    PAGE,
    *sorted(PAGE.with_suffix("").glob("*.md")),
    ROOT / "docs" / "getting-started" / "not-worth-it.md",
)
#: In place of a table without rows: the benchmark has changed since its result was kept.
_NOTHING = "Not measured yet."
_MARK = re.compile(r"(<!-- table ([^\n]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Goal:
    """A goal of a benchmark.

    Attributes:
        text: for people.
        benchmarks: whose rows tell.
        pattern: of those rows' names, in any case of letters.
    """

    text: str
    benchmarks: tuple[str, ...]
    pattern: str = ""


#: Of rows that more than one describes, the first has it.
GOALS = (
    Goal("1 worker: at least 1.0 times Keras `fit` on every model", ("step_overhead",), "keras"),
    Goal("Sums over hosts: at least 1.5 times TensorFlow's gRPC ring", ("hosts",)),
    Goal(
        "Exact mode: at most 1.15 times the float step, a ratio of 0.87",
        ("exact_cost", "distributed"),
        "exact, (raytf, )?float",
    ),
    Goal("Digests of steps: at most 2 % of a step", ("digest_cost",), "with digests"),
    Goal("Audits: at most 1 % of a step", ("digest_cost",), "with audits"),
    Goal("2 and 4 workers: at least 0.9 times PyTorch DDP", ("distributed",), "torch|ddp"),
    Goal("2 and 4 workers: at least 1.5 times stock Ray, MNIST CNN", ("distributed",), r"\bray\b|trainer"),
    Goal("2 and 4 workers: at least 1.5 times a script by hand, MNIST CNN", ("distributed",), "hand|mwms|script"),
    Goal("1 GB durable at 80 % of the raw rate or more", ("checkpoint_cost",), "durable"),
    Goal("Copies in memory every 10 steps: a stall of 1 % or less", ("snapshot_cost",)),
    Goal("A checkpoint's stall: at most a copy of the rank's share in memory", ("checkpoint_cost",), "stall|copy"),
    Goal("Recovery: P50 of 10 s or less", ("recovery",), "P50|median"),
    Goal("Recovery: P95 of 20 s or less", ("recovery",), "P95"),
    Goal("Recovery: at least 3 times faster than stock Ray", ("recovery",), "stock|ray"),
    Goal("A worker joins: the others stand still for at most 0.3 s with 100 MB of state", ("join",), "one joins"),
    Goal("From the command to the 20th step: at least twice as fast as stock Ray", ("startup",), "20th step, ray"),
    Goal("From the command to the 20th step: at most 2.5 times as long as Keras", ("startup",), "20th step, keras"),
    Goal("From the call to the 20th step of a second run: at most 4 s", ("startup",), "second run.*to the 20th step"),
    Goal("README's job with two workers: at most 28 s", ("startup",), "whole"),
    Goal("On a GPU, float: at least 0.9 times Keras `fit`, which compiles with XLA", ("gpu",), "keras"),
    Goal("Two workers on one GPU, one killed: a new step within 10 s", ("gpu",), "killed"),
    Goal("Faults every 60 to 120 s: a goodput of at least 0.92", ("goodput",)),
    Goal(
        "Embedding tables: a step with 10,000,000 rows takes at most 1.1 times as long as one with 10,000", ("tables",)
    ),
    Goal("Input: at least 100,000 samples/s a worker from arrays", ("input",), "array"),
    Goal("Input: at least 50,000 samples/s a worker from Parquet", ("input",), "parquet"),
    Goal(
        "Memory of a worker: plain Keras, the state and 300 MB at most",
        ("step_overhead", "checkpoint_cost", "startup", "distributed"),
        "memory|rss",
    ),
)


@dataclass(frozen=True)
class Found:
    """A row that has a goal."""

    benchmark: str
    name: str
    found: str
    reached: bool


@dataclass(frozen=True)
class Arguments:
    """Write the tables of the pages again."""

    results: Path
    """Folder with NAME.json of each benchmark."""


def load(folder: Path) -> dict[str, Report]:
    """Return the results in a folder by the names of their benchmarks."""
    return {path.stem: Report.read(path) for path in sorted(folder.glob("*.json"))}


def goals(reports: Iterable[Report]) -> dict[str, list[Found]]:
    """Return the rows of each goal by the goal's text; a goal that is not in the list has the name of its row."""
    out: dict[str, list[Found]] = {goal.text: [] for goal in GOALS}
    for report in reports:
        for row in [*report.comparisons, *report.readings]:
            if row.reached is not None:
                found = Found(report.name, _name(row), _number_of(row), row.reached)
                out.setdefault(_goal_of(report.name, found.name), []).append(found)
    return out


def _name(row: Comparison | Reading) -> str:
    return f"{row.configuration}, {row.peer if isinstance(row, Comparison) else row.quantity}"


def _full_name(row: Comparison | Reading) -> str:
    return f"{_name(row)}, {row.unit}"


def _goal_of(benchmark: str, name: str) -> str:
    for goal in GOALS:
        if benchmark in goal.benchmarks and re.search(goal.pattern, name, re.IGNORECASE):
            return goal.text
    return f"{benchmark}: {name}"


def _number_of(row: Comparison | Reading) -> str:
    if isinstance(row, Comparison):
        return f"{statistics.median(row.ratios):.3f}"
    return f"{number(statistics.median(row.values))} {row.unit}".strip()


# -- Markdown ----------------------------------------------------------------------------------------------------------


def filled(page: str, table_of: Callable[[str], str]) -> str:
    """Return the page with new tables between its marks.

    Args:
        page: text.
        table_of: returns the table that a mark names.
    """
    return _MARK.sub(lambda found: f"{found[1]}\n{table_of(found[2])}\n\n{found[3]}", page)


def table_of(mark: str, reports: Mapping[str, Report]) -> str:
    """Return the table that a mark names.

    Raises:
        KeyError: there is no such table or result.
    """
    name, _, rest = mark.partition(" ")
    if name in OF_ALL:
        return OF_ALL[name](reports)
    kind, _, pattern = rest.partition(" ")
    return OF_ONE[kind](reports[name], re.compile(pattern))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _pivot(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """Return a table of cells by row and column."""
    rows, columns = (list(dict.fromkeys(key[part] for key in cells)) for part in (0, 1))
    return table([corner, *columns], ([row, *(cells.get((row, column), "") for column in columns)] for row in rows))


def _spread(values: Sequence[float], text: Callable[[float], str], reached: bool | None = None) -> str:
    """Return the median with the least and the greatest; in bold if it misses its goal."""
    middle, least, most = (text(value) for value in (statistics.median(values), min(values), max(values)))
    out = middle if least == most else f"{middle} ({least}-{most})"
    return f"**{out}**" if reached is False else out


def _ratio(row: Comparison) -> str:
    return _spread(row.ratios, lambda value: f"{value:.2f}", row.reached)


def _comparisons(report: Report, pattern: re.Pattern[str]) -> str:
    """Return a row for each configuration, with a column for each peer."""
    chosen = [row for row in report.comparisons if pattern.search(_full_name(row))]
    if not chosen:
        return _NOTHING
    units = {row.unit for row in chosen}
    cells = {}
    for row in chosen:
        line = row.configuration if len(units) == 1 else f"{row.configuration}, {row.unit}"
        cells[line, "raytf"] = number(statistics.median(row.ours))
        cells[line, f"{row.peer}; ratio"] = f"{number(statistics.median(row.theirs))}; {_ratio(row)}"
    return _pivot(units.pop() if len(units) == 1 else "configuration", cells)


def _variants(report: Report, pattern: re.Pattern[str]) -> str:
    """Return a row for each configuration before its colon, with a column for the peer and for each variant after
    it."""
    cells = {}
    for row in report.comparisons:
        if pattern.search(_full_name(row)):
            line, _, variant = row.configuration.partition(": ")
            cells[line, row.peer] = number(statistics.median(row.theirs))
            cells[line, f"{variant}; ratio"] = f"{number(statistics.median(row.ours))}; {_ratio(row)}"
    return _pivot(report.comparisons[0].unit, cells)


def _readings(report: Report, pattern: re.Pattern[str]) -> str:
    """Return configurations and quantities, the fewer of them as columns; variants after a colon if there is one
    quantity."""
    chosen = [row for row in report.readings if pattern.search(_full_name(row))]
    if not chosen:
        return _NOTHING
    names = [(row.configuration, f"{row.quantity}, {row.unit}".rstrip(", ")) for row in chosen]
    lines, columns = ({name[part] for name in names} for part in (0, 1))
    corner = "configuration"
    if len(columns) == 1 and all(": " in line for line in lines):
        corner = columns.pop()
        names = [tuple(line.split(": ", 1)) for line, _ in names]
    elif len(lines) < len(columns):
        corner = "quantity"
        names = [(column, line) for line, column in names]
    values = [_spread(row.values, number, row.reached) for row in chosen]
    return _pivot(corner, dict(zip(names, values, strict=True)))


def _grids(report: Report, pattern: re.Pattern[str]) -> str:
    return "\n\n".join(table(grid.head, [row for row in grid.rows if pattern.search(row[0])]) for grid in report.grids)


def _goals(reports: Mapping[str, Report]) -> str:
    rows = []
    for text, found in goals(reports.values()).items():
        missed = [f"{row.name}: {row.found}" for row in found if not row.reached]
        verdict = f"{len(found) - len(missed)} of {len(found)}" if found else "not measured"
        rows.append([text, f"**{verdict}**" if missed else verdict, "<br>".join(missed)])
    return table(["goal", "rows that reach it", "rows that miss it"], rows)


def _provenance(reports: Mapping[str, Report]) -> str:
    rows = []
    for name, report in reports.items():
        found = report.machine
        chips = [found["cpu"], *re.findall(r": ([^(]+) \(", " ".join(found["gpus"]))]
        ran = f"`{command(found['command'])}`"
        rows.append([f"`{name}.json`", ran, found["date"], found["commit"], ", ".join(chips)])
    return table(["results", "command", "date", "commit", "machine"], rows)


def command(line: str) -> str:
    """Return a command without the file of its result, which says nothing to others."""
    return re.sub(r" --json[ =]\S+", "", line)


#: Tables of all results.
OF_ALL = {"goals": _goals, "provenance": _provenance}
#: Tables of one result, whose rows match a pattern.
OF_ONE = {"comparisons": _comparisons, "variants": _variants, "readings": _readings, "grids": _grids}


def main(arguments: Arguments) -> None:
    """Write the tables."""
    reports = load(arguments.results)
    for page in PAGES:
        page.write_text(filled(page.read_text(), lambda mark: table_of(mark, reports)))
        print(f"wrote {os.path.relpath(page)}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
