"""Measures what a checkpoint costs: the stall of training, the time until it is durable, CPU seconds and bytes.

    python -m benchmarks.checkpoint.durable
    python -m benchmarks.checkpoint.durable --quick

States of 10 MB, 100 MB and 1 GB (dense layers with Adam), one rank. raytf's two tiers are beside Keras's
ModelCheckpoint and ray.train.report (benchmarks/peers/checkpoint_keras.py and checkpoint_ray.py), and beside what the
machine gives: one copy of the same bytes in memory by one thread, and the same bytes written to a file and fsynced.

A stall is the time in which the call that saves does not return, and by how much the next update of all variables
takes longer than one usually does, should it have to wait for the save. Durable is what a resume would find; Keras
and Ray do not fsync, raytf does. Nothing trains while a save is under way.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.turns import Conductor

#: What raytf's durable tier is compared with: program and what it does.
PEERS = {
    "ModelCheckpoint .keras": ("keras", ".keras"),
    "ModelCheckpoint .weights.h5": ("keras", ".weights.h5"),
    "ray.train.report SYNC": ("ray", "SYNC"),
    "ray.train.report ASYNC": ("ray", "ASYNC"),
}
OWN = {
    "memory": ("raytf", "memory"),
    "durable": ("raytf", "durable"),
    "copy": ("raytf", "copy"),
    "disk": ("raytf", "disk"),
}


@dataclass(frozen=True)
class Arguments:
    """Measure what a checkpoint costs."""

    quick: bool = False
    """Two pairs, of 10 and 100 MB."""
    pairs: int = harness.PAIRS
    megabytes: tuple[int, ...] = (10, 100, 1000)
    folder: Path | None = None
    """Where checkpoints are written: a folder on the disk that is to be measured; by default the temporary one."""
    json: Path | None = None
    """Write the report here."""


def main(arguments: Arguments) -> int:
    """Measure and print the tables."""
    report = harness.Report("checkpoint_cost", "4. Checkpoints: stall, time to durable, CPU and bytes")
    peers, python = harness.HERE / "peers", sys.executable
    with (
        tempfile.TemporaryDirectory(prefix="raytf-saves-", dir=arguments.folder) as folder,
        contextlib.ExitStack() as stack,
    ):
        commands = {
            "raytf": [python, str(Path(__file__).with_name("durable_raytf.py")), "{address}"],
            "keras": [python, str(peers / "checkpoint_keras.py"), "{address}"],
            "ray": [python, str(peers / "checkpoint_ray.py"), "{address}", folder],
        }
        running = {
            name: stack.enter_context(Conductor(name, command, 1, Path(folder) / f"{name}.log"))
            for name, command in commands.items()
        }
        for megabytes in (10, 100) if arguments.quick else arguments.megabytes:
            measure(report, running, megabytes, 2 if arguments.quick else arguments.pairs, folder)
    report.notes.append("bytes of ray.train.report are those of the local directory and of its copy on storage")
    return report.finish(arguments.json)


def measure(report: harness.Report, running: dict[str, Conductor], megabytes: int, pairs: int, folder: str) -> None:
    """Add the rows of one size."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in OWN | PEERS}
    for name, (program, what) in (OWN | PEERS).items():
        if name in PEERS:  # their first one imports and opens, raytf's has been
            running[program].run(1, megabytes=megabytes, what=what, folder=folder)
    for number in range(pairs):
        for name in list(found)[:: 1 if number % 2 == 0 else -1]:
            program, what = (OWN | PEERS)[name]
            found[name].append(running[program].run(1, megabytes=megabytes, what=what, folder=folder))
        print(
            f"{megabytes} MB: {number + 1} of {pairs}, {time.time() - report.began:.0f} s", file=sys.stderr, flush=True
        )
    size = "1 GB" if megabytes == 1000 else f"{megabytes} MB"

    def values(name: str, key: str) -> list[float]:
        return [answer[key] for answer in found[name]]

    def compare(
        what: str, ours: str, theirs: str, peer: str, key: str, goal: float | None = None, their_key: str = ""
    ) -> None:
        report.comparisons.append(
            harness.Comparison(
                f"{size}: {what}",
                peer,
                "MB" if key == "written" else "s",
                values(ours, key),
                values(theirs, their_key or key),
                False,
                goal,
            )
        )

    compare("stall, to memory", "memory", "copy", "one copy in memory", "stall", 1.0)
    compare("stall, to storage", "durable", "copy", "one copy in memory", "stall")
    goal, disk = 0.8 if megabytes >= 1000 else None, "the disk: write and fsync"
    compare("time to durable", "durable", "disk", disk, "durable", goal)
    compare("the same less the stall", "durable", "disk", disk, "writing", None, "durable")
    for peer in PEERS:
        compare("stall, to storage", "durable", peer, peer, "stall")
        compare("time to durable", "durable", peer, peer, "durable")
        compare("CPU seconds", "durable", peer, peer, "cpu")
        compare("bytes", "durable", peer, peer, "written")
    report.readings.append(harness.Reading(f"{size}, to memory", "CPU", "s", values("memory", "cpu")))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
