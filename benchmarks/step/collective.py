"""Measures how long one sum over the processes of a host takes, in several ways to add gradients.

    python -m benchmarks.step.collective

Vectors of float32 as they are, in several buckets, as bfloat16, as 16-bit integers of which two travel in a word, and
raytf's own way (`raytf.distributed.allreduce.control_plane`), each against one flat vector through TensorFlow's
collectives over gRPC as MultiWorkerMirroredStrategy chooses them; and gloo's `all_reduce` of torch, where torch is
installed. Conversions count. All ways of TensorFlow are in the same processes and take turns.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.peers import common
from benchmarks.step.collective_ranks import BUCKETS
from benchmarks.turns import Conductor

PLAIN, OWN, GLOO = "gRPC", "raytf", "gloo"
WAYS = [PLAIN, "gRPC ring", f"gRPC, {BUCKETS} buckets", "gRPC, bfloat16", "gRPC, int16", OWN]


@dataclass(frozen=True)
class Arguments:
    """Compare ways to add a vector over processes."""

    workers: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of processes."""
    megabytes: list[float] = field(default_factory=lambda: [2.8, 0.1, 28.0])
    """Of a vector of float32."""
    threads: int = 1
    """Of each process, within an operation."""
    pairs: int = harness.PAIRS
    """Turns of each way."""
    seconds: float = 1.0
    """Length of a turn."""
    quick: bool = False
    """One size, in three short turns."""
    json: Path | None = None
    """Write what was found here."""


@contextlib.contextmanager
def processes(workers: int, threads: int, report: harness.Report) -> Iterator[dict[str, Conductor]]:
    """Way -> who does it."""
    around = common.environment()
    with (
        tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        made: dict[str, Conductor] = {}
        for framework, ways in (("tensorflow", WAYS), ("torch", [GLOO])):
            if importlib.util.find_spec(framework) is None:
                report.notes.append(f"{GLOO}: skipped, torch is not installed (pip install 'raytf-train[peers]').")
                continue
            command = [sys.executable, str(Path(__file__).with_name("collective_ranks.py")), "--address", "{address}"]
            command += ["--workers", str(workers), "--threads", str(threads), "--model", framework]
            conductor = Conductor.started(stack, framework, command, workers, Path(folder) / framework, around, 5.0)
            made |= dict.fromkeys(ways, conductor)
        yield made


def measure(workers: int, arguments: Arguments, report: harness.Report) -> None:
    with processes(workers, arguments.threads, report) as made:
        for megabytes in arguments.megabytes:
            count = round(megabytes * 1e6 / 4)
            steps = {}
            cpu: dict[str, list[float]] = {way: [] for way in made}
            for way, conductor in made.items():
                conductor.run(2, way=way, count=count)
                seconds = conductor.run(8, way=way, count=count)["seconds"] / 8
                steps[way] = max(4, math.ceil(arguments.seconds / seconds))

            def block(way: str, count: int = count, steps: Any = steps, cpu: Any = cpu) -> float:
                answer = made[way].run(steps[way], way=way, count=count)
                cpu[way].append(1000 * answer["cpu"] / steps[way])
                return 1000 * answer["seconds"] / steps[way]

            found = harness.rounds(arguments.pairs, {way: lambda way=way: block(way) for way in made})
            add(report, f"{megabytes:g} MB, {workers} processes", found, cpu)


def add(report: harness.Report, what: str, found: dict[str, list[float]], cpu: dict[str, list[float]]) -> None:
    """Add the rows of one size."""
    for way, values in found.items():
        if way != PLAIN:
            name = "raytf" if way == OWN else way.removeprefix("gRPC, ")
            report.comparisons.append(
                harness.Comparison(f"{what}: {name}", "gRPC, one flat vector", "ms", values, found[PLAIN], False)
            )
    if GLOO in found:
        report.comparisons.append(harness.Comparison(f"{what}: raytf", "gloo", "ms", found[OWN], found[GLOO], False))
    for way, values in cpu.items():
        report.readings.append(harness.Reading(f"{what}: {way}", "CPU time of rank 0", "ms", values))


def main(arguments: Arguments) -> int:
    settings: dict[str, Any] = vars(arguments)
    if arguments.quick:
        settings = settings | {"megabytes": [2.8], "pairs": 3, "seconds": 0.4}
    arguments = Arguments(**settings)
    report = harness.Report("collective", "One sum over the processes of a host")
    for workers in arguments.workers:
        measure(workers, arguments, report)
    report.notes = list(dict.fromkeys(report.notes))
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
