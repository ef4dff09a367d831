"""docs/evidence/performance.md: what the benchmarks found, with what people wrote about it in benchmarks/findings.md.

    python -m benchmarks.performance --results kept --write docs/evidence/performance.md

`benchmarks/all.py` writes the page after a run; this writes it again, of the same results, when the text has changed.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.harness import COMPARED, READ, ROOT, Comparison, Reading, Report, compared, number, read

FINDINGS = ROOT / "benchmarks" / "findings.md"
#: Section of the findings that comes first of all.
INTRODUCTION = "introduction"
IMAGES = ROOT / "docs" / "evidence" / "images"
#: What is the same for all results of a machine; the rest is told with each of them.
_MACHINE = ("cpu", "cores", "memory GiB", "gpus", "python")


@dataclass(frozen=True)
class Goal:
    """What is wanted.

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
    Goal("Exact mode: at most 1.15 times the float step", ("exact_cost", "distributed"), "exact, (raytf, )?float"),
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
    Goal(
        "From the command to the first step: at most 10 s cold, 5 s warm, 3 s for a second run",
        ("startup",),
        "to the first",
    ),
    Goal("From the command to the first step: at least twice as fast as stock Ray", ("startup",), "start|run"),
    Goal("On a GPU, float: at least 0.9 times Keras `fit`, which compiles with XLA", ("gpu",), "keras"),
    Goal("Two workers on one GPU, one killed: a new step within 10 s", ("gpu",), "killed"),
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
    """Write the page again."""

    results: Path
    """Folder with NAME.json of each benchmark."""
    write: Path = ROOT / "docs" / "evidence" / "performance.md"


def load(folder: Path, names: Sequence[str]) -> list[Report]:
    """The results that a folder has, in the order of the names; others follow."""
    there = {path.stem: path for path in sorted(folder.glob("*.json"))}
    order = [name for name in names if name in there]
    return [Report.read(there[name]) for name in [*order, *(name for name in there if name not in order)]]


def page(reports: Sequence[Report], findings: str | None = None, failed: Mapping[str, str] | None = None) -> str:
    """The page, as Markdown.

    Args:
        reports: in the order in which they are shown.
        findings: text of benchmarks/findings.md.
        failed: benchmarks without a result of the last run, and why.
    """
    texts = sections(_text(FINDINGS) if findings is None else findings)
    common = {key: reports[0].machine.get(key) for key in _MACHINE} if reports else {}
    parts = ["# Performance", _written_by(), texts.get(INTRODUCTION, "")]
    parts += [_machine(common), _failed(failed or {}), _goals(reports)]
    for report in reports:
        parts += _section(report, texts.get(report.name, ""), common)
    have = {INTRODUCTION, *(report.name for report in reports)}
    parts += [f"## {name}\n\n{text}" for name, text in texts.items() if name not in have]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def sections(text: str) -> dict[str, str]:
    """The parts of the findings by their headings of the second level; what is above the first is for who edits it."""
    found = re.split(r"^## +(\S+)[^\n]*\n", text, flags=re.MULTILINE)
    return {name: body.strip() for name, body in zip(found[1::2], found[2::2], strict=True) if body.strip()}


def goals(reports: Iterable[Report]) -> dict[str, list[Found]]:
    """Rows of each goal, by the goal's text; of goals that are not in the list, by their own name."""
    out: dict[str, list[Found]] = {goal.text: [] for goal in GOALS}
    for report in reports:
        for row in [*report.comparisons, *report.readings]:
            if row.reached is None:
                continue
            name = f"{row.configuration}, {row.peer if isinstance(row, Comparison) else row.quantity}"
            out.setdefault(_goal_of(report.name, name), []).append(
                Found(report.name, name, _number_of(row), row.reached)
            )
    return out


def _goal_of(benchmark: str, name: str) -> str:
    for goal in GOALS:
        if benchmark in goal.benchmarks and re.search(goal.pattern, name, re.IGNORECASE):
            return goal.text
    return f"{benchmark}: {name}"


def _number_of(row: Comparison | Reading) -> str:
    if isinstance(row, Comparison):
        ratios = row.ratios
        return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}], wanted ≥ {row.goal:g}"
    wanted = [
        f"{sign} {number(limit)}" for sign, limit in (("≥", row.at_least), ("≤", row.at_most)) if limit is not None
    ]
    return f"{number(statistics.median(row.values))} {row.unit}, wanted {', '.join(wanted)}"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _written_by() -> str:
    return (
        "<!-- Written by benchmarks/all.py: edit the text in benchmarks/findings.md, not here. -->\n\n"
        "Each number stands beside that of a peer which took turns with raytf on the same machine in the same run. A "
        "ratio tells how many times as good raytf is, above 1 where it leads, whether more or less is better; it is "
        "the median of the pairs, with the least and the greatest. The peers' programs are in `benchmarks/peers/`."
    )


def _machine(common: Mapping[str, Any]) -> str:
    if not common:
        return "No benchmark has left a result."
    gpus = ", ".join(common["gpus"] or []) or "no GPU"
    return (
        f"Machine: {common['cpu']}, {common['cores']} cores, {common['memory GiB']} GiB, {gpus}; Python "
        f"{common['python']}. All of it: `python -m benchmarks.all`; in 20 minutes, with larger spreads: `python "
        "-m benchmarks.all --quick`. The same commands measure GPUs where there are some, `python -m "
        "benchmarks.gpu` what only those can show ([GPUs](../guides/gpu.md))."
    )


def _failed(failed: Mapping[str, str]) -> str:
    return "\n".join(f"- **{name}** has no result of the last run: {why}." for name, why in failed.items())


def _goals(reports: Sequence[Report]) -> str:
    rows, missed = [], []
    for text, found in goals(reports).items():
        reached = sum(row.reached for row in found)
        verdict = "not measured" if not found else "reached" if reached == len(found) else "**missed**"
        names = ", ".join(f"[{name}](#{name})" for name in dict.fromkeys(row.benchmark for row in found))
        rows.append([text, names, f"{reached} of {len(found)}" if found else "", verdict])
        missed += [f"- [{r.benchmark}](#{r.benchmark}): {r.name}: {r.found}" for r in found if not r.reached]
    told = "Missed, with what was tried and what stands in the way in its section:\n\n" + "\n".join(missed)
    return "## Goals\n\n" + table(["goal", "benchmark", "rows", ""], rows) + (f"\n\n{told}" if missed else "")


def _section(report: Report, text: str, common: Mapping[str, Any]) -> list[str]:
    parts = [f"## {report.name}", f"{report.title}."]
    for head, rows in ((COMPARED, compared(report)), (READ, read(report))):
        if rows:
            parts.append(table(head, rows))
    parts += [f"{grid.title}:\n\n{table(grid.head, grid.rows)}" for grid in report.grids]
    parts += [f"- {note}" for note in ["\n- ".join(report.notes)] if note]
    if report.name == "step_profile" and IMAGES.is_dir():
        parts += [f"![{path.stem}](images/{path.name})" for path in sorted(IMAGES.glob("step-*.svg"))]
    return [*parts, text, _provenance(report, common)]


def _provenance(report: Report, common: Mapping[str, Any]) -> str:
    found = report.machine
    other = [f"{key} {found.get(key)}" for key in _MACHINE if found.get(key) != common.get(key)]
    versions = ", ".join(f"{name} {version}" for name, version in found.get("versions", {}).items())
    parts = [
        f"`{command(str(found.get('command', '')))}`",
        f"{found.get('date')}",
        f"commit {found.get('commit')}",
        f"{found.get('seconds')} s",
        f"load {found.get('load before')} before, {found.get('load after')} after",
        *other,
        versions,
    ]
    return f"<sub>{'; '.join(parts)}</sub>"


def command(line: str) -> str:
    """A command without the file of its result, which says nothing to others."""
    return re.sub(r" --json[ =]\S+", "", line)


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def main(arguments: Arguments) -> None:
    """Write the page."""
    from benchmarks.all import ENTRIES

    arguments.write.write_text(page(load(arguments.results, [entry.name for entry in ENTRIES])))
    print(f"wrote {os.path.relpath(arguments.write)}")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
