"""Measures how long one sum over processes of several hosts takes: raytf's own, and TensorFlow's collectives over gRPC.

    python -m benchmarks.step.hosts

Hosts are network namespaces of this machine, so a network costs no more than the kernel's work for it, and all hosts
share its cores. Processes of one host share its memory. All ways are in the same processes and take turns.
"""

from __future__ import annotations

import contextlib
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.peers import common
from benchmarks.step.namespaces import namespaces, reason_not_possible
from benchmarks.turns import Conductor

RING, OWN = "gRPC ring", "raytf"
#: Of raytf beside the ring.
GOAL = 1.5


@dataclass(frozen=True)
class Arguments:
    """Compare ways to add a vector over hosts."""

    layouts: list[str] = field(default_factory=lambda: ["1+1", "2+2", "1+1+1"])
    """Processes of each host."""
    megabytes: list[float] = field(default_factory=lambda: [2.8, 28.0])
    """Of a vector of float32."""
    pairs: int = harness.PAIRS
    """Turns of each way."""
    seconds: float = 1.0
    """Length of a turn."""
    quick: bool = False
    """Two hosts and one size, in three short turns."""
    json: Path | None = None
    """Write what was found here."""


@contextlib.contextmanager
def ranks(counts: Sequence[int]) -> Iterator[Conductor]:
    """Start the processes, so many on each host."""
    with (
        namespaces(len(counts)) as (hosts, here),
        tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        places = [host for host, count in zip(hosts, counts, strict=True) for _ in range(count)]
        command = [sys.executable, str(Path(__file__).with_name("collective_ranks.py")), "--address", "{address}"]
        command += ["--workers", str(len(places)), "--threads", "1", "--model", "tensorflow"]
        command += ["--places", ",".join(f"{place.name}@{place.address}" for place in places)]
        log, around = Path(folder) / "log", common.environment()
        yield Conductor.started(stack, "ranks", command, len(places), log, around, 5.0, here)


def measure(layout: str, arguments: Arguments, report: harness.Report) -> None:
    counts = [int(count) for count in layout.split("+")]
    with ranks(counts) as conductor:
        for megabytes in arguments.megabytes:
            count, steps = round(megabytes * 1e6 / 4), {}
            for way in (RING, OWN):
                conductor.run(2, way=way, count=count)
                seconds = conductor.run(8, way=way, count=count)["seconds"] / 8
                steps[way] = max(4, math.ceil(arguments.seconds / seconds))

            def block(way: str, count: int = count, steps: Any = steps) -> float:
                return 1000 * conductor.run(steps[way], way=way, count=count)["seconds"] / steps[way]

            own, ring = harness.turns(arguments.pairs, lambda block=block: block(OWN), lambda block=block: block(RING))
            what = f"{megabytes:g} MB, {layout} processes of {len(counts)} hosts"
            report.comparisons.append(harness.Comparison(what, RING, "ms", own, ring, False, GOAL))


def main(arguments: Arguments) -> int:
    reason = reason_not_possible()
    if reason:
        print(f"error: {reason}.", file=sys.stderr)
        return 2
    settings: dict[str, Any] = vars(arguments)
    if arguments.quick:
        settings = settings | {"layouts": ["1+1"], "megabytes": [2.8], "pairs": 3, "seconds": 0.4}
    arguments = Arguments(**settings)
    report = harness.Report("hosts", "One sum over the processes of several hosts")
    for layout in arguments.layouts:
        measure(layout, arguments, report)
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
