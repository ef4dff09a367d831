"""Parts that all benchmarks share: pairs that take turns, ratios, goals, a table on the terminal, JSON for
performance.py.

A ratio tells how many times as good raytf is as its peer, above 1 where raytf leads, whether more or less is better. It
is taken pair by pair, of two measurements beside each other in time, so that what else the machine does meets both.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
#: Where the programs are.
HERE = ROOT / "benchmarks"
#: Pairs of a comparison, unless somebody wants more.
PAIRS = 5


@dataclass(frozen=True)
class Comparison:
    """raytf beside a peer.

    Attributes:
        configuration: what was run, such as "MNIST CNN, 2 workers".
        peer: its name.
        unit: of both, such as "steps/s".
        ours, theirs: one measurement of each pair.
        more_is_better: whether the larger number is the better one.
        goal: least ratio that is wanted.
    """

    configuration: str
    peer: str
    unit: str
    ours: list[float]
    theirs: list[float]
    more_is_better: bool = True
    goal: float | None = None

    @property
    def ratios(self) -> list[float]:
        pairs = zip(self.ours, self.theirs, strict=True)
        return [our / their if self.more_is_better else their / our for our, their in pairs]

    @property
    def reached(self) -> bool | None:
        return None if self.goal is None else statistics.median(self.ratios) >= self.goal


@dataclass(frozen=True)
class Reading:
    """A number without a peer.

    Attributes:
        configuration: what was run.
        quantity: what was measured.
        unit: of the values.
        values: all that were measured.
        at_least, at_most: what is wanted of the median.
    """

    configuration: str
    quantity: str
    unit: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reached(self) -> bool | None:
        if self.at_least is None and self.at_most is None:
            return None
        middle = statistics.median(self.values)
        return (self.at_least is None or middle >= self.at_least) and (self.at_most is None or middle <= self.at_most)


@dataclass(frozen=True)
class Grid:
    """A table of another shape, as text.

    Attributes:
        title: above it.
        head, rows: its cells.
    """

    title: str
    head: list[str]
    rows: list[list[str]]


@dataclass
class Report:
    """The results of a benchmark.

    Attributes:
        name: of the module in benchmarks/.
        title: one line.
        comparisons, readings, grids: in the order in which they are shown.
        notes: lines of text, for example which peer was skipped and why.
        machine: where and when it ran; filled in when it is finished.
    """

    name: str
    title: str
    comparisons: list[Comparison] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    load_before: float = field(default_factory=lambda: psutil.getloadavg()[0])

    @classmethod
    def read(cls, path: Path) -> Report:
        document = json.loads(path.read_text())
        document["comparisons"] = [Comparison(**row) for row in document["comparisons"]]
        document["readings"] = [Reading(**row) for row in document["readings"]]
        document["grids"] = [Grid(**table) for table in document["grids"]]
        return cls(**document)

    def finish(self, path: Path | None) -> int:
        """Print the tables and write them where wanted; the exit code, which is 0: a missed goal is a finding."""
        self.machine = machine() | {
            "command": " ".join(["python -m", module(sys.argv[0]), *sys.argv[1:]]),
            "seconds": round(time.time() - self.began),
            "load before": round(self.load_before, 1),
            "load after": round(psutil.getloadavg()[0], 1),
        }
        show(self)
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return 0


def module(path: str) -> str:
    """Return the name under which `python -m` runs a file of this repository."""
    return ".".join(Path(os.path.relpath(path, ROOT)).with_suffix("").parts)


def importable() -> dict[str, str]:
    """Return an environment in which a program in a file, and Ray's workers, can import `benchmarks`."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def turns(pairs: int, ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Measure both in turns, A B, B A, A B, ...: one number of each for every pair."""
    found: tuple[list[float], list[float]] = [], []
    for pair in range(pairs):
        order = [(found[0], ours), (found[1], theirs)]
        for values, run in order if pair % 2 == 0 else reversed(order):
            values.append(run())
    return found


def rounds(count: int, runs: dict[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Measure several ways like `turns`: each round measures all of them, every second round in reverse order."""
    found: dict[str, list[T]] = {name: [] for name in runs}
    for number in range(count):
        for name in list(runs)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(runs[name]())
    return found


def machine() -> dict[str, Any]:
    """Return what a reader must know to judge the numbers."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    versions = {}
    for package in ("ray", "tensorflow", "keras", "tf_keras", "torch", "pyarrow", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "cpu": _cpu_name(),
        "cores": psutil.cpu_count(),
        "memory GiB": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
        "python": platform.python_version(),
        "versions": versions,
    }


def gpus() -> int:
    """Return the number of this machine's GPUs."""
    return len(_gpus())


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpus() -> list[str]:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return found.strip().splitlines()


# -- what people read --------------------------------------------------------------------------------------------------

COMPARED = ["configuration", "unit", "raytf", "peer", "", "ratio", "min", "max", "pairs", "goal"]
READ = ["configuration", "quantity", "median", "min", "max", "goal"]


def compared(report: Report) -> list[list[str]]:
    """Return the cells of the comparisons, as `COMPARED` names them."""
    return [
        [
            row.configuration,
            row.unit,
            number(statistics.median(row.ours)),
            row.peer,
            number(statistics.median(row.theirs)),
            f"{statistics.median(row.ratios):.2f}",
            f"{min(row.ratios):.2f}",
            f"{max(row.ratios):.2f}",
            str(len(row.ratios)),
            _goal(row.reached, [f"≥ {row.goal:g}" if row.goal is not None else ""]),
        ]
        for row in report.comparisons
    ]


def read(report: Report) -> list[list[str]]:
    """Return the cells of the readings, as `READ` names them."""
    return [
        [
            row.configuration,
            f"{row.quantity}, {row.unit}",
            number(statistics.median(row.values)),
            number(min(row.values)),
            number(max(row.values)),
            _goal(
                row.reached,
                [
                    f"≥ {number(row.at_least)}" if row.at_least is not None else "",
                    f"≤ {number(row.at_most)}" if row.at_most is not None else "",
                ],
            ),
        ]
        for row in report.readings
    ]


def number(value: float) -> str:
    """Three or four digits that matter."""
    if abs(value) < 10:
        return f"{value:.3g}"
    return f"{value:,.1f}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.3g}"


def _goal(reached: bool | None, wanted: Iterable[str]) -> str:
    text = ", ".join(part for part in wanted if part)
    return "" if reached is None else f"{text} {'reached' if reached else 'missed'}"


def show(report: Report) -> None:
    """Print the report on the terminal."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 150)
    for head, rows in ((COMPARED, compared(report)), (READ, read(report))):
        if rows:
            table = Table(*head, title=report.title, title_justify="left", title_style="bold")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    for grid in report.grids:
        table = Table(*grid.head, title=grid.title, title_justify="left", title_style="bold")
        for row in grid.rows:
            table.add_row(*row)
        console.print(table)
    for note in report.notes:
        console.print(note, markup=False, soft_wrap=True)
    seconds, load = report.machine["seconds"], (report.machine["load before"], report.machine["load after"])
    console.print(f"{report.name}: {seconds} s; load {load[0]} before, {load[1]} after", markup=False)
