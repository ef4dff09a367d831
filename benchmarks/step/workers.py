"""Steps per second of 2 and 4 workers of this machine, raytf beside those who do the same.

    python -m benchmarks.step.workers
    python -m benchmarks.step.workers --workers 2 --cases cnn:64 --pairs 9

Real `raytf.fit` against (a) a script written by hand for MultiWorkerMirroredStrategy, (b) Ray's TensorflowTrainer and
(c) PyTorch's DistributedDataParallel through Ray's TorchTrainer, see benchmarks/peers/. One network, one global batch,
data of MNIST's size in memory, equally many threads for each worker. All programs are there all the time and
take turns of equal length. With as many GPUs as workers, each has one.

`raytf` adds gradients as floats with one logical shard for each worker, the same computation as its peers'. `exact`
has raytf's default of four shards, so that the same bits come out for every number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from benchmarks import harness, models
from benchmarks.peers import common
from benchmarks.turns import Conductor

HAND, STOCK, DDP = "MWMS by hand", "Ray TensorflowTrainer", "DDP through Ray"
#: What else a peer needs, its script, and the least ratio that is wanted on the CNN.
PEERS: dict[str, tuple[str | None, str, float]] = {
    HAND: (None, "peers/mwms_tutorial.py", 1.5),
    STOCK: ("tf_keras", "peers/ray_stock.py", 1.5),
    DDP: ("torch", "peers/ddp.py", 0.9),
}
#: Exact against float.
EXACT_GOAL = 1 / 1.15
#: Steps before the clock runs: graphs are made, allocators and caches fill.
WARM = 4 * common.CALL_STEPS


@dataclass(frozen=True)
class Arguments:
    """Compare distributed steps."""

    workers: list[int] = field(default_factory=lambda: [2, 4])
    """Numbers of workers."""
    cases: list[str] = field(default_factory=lambda: ["cnn:64", "cnn:128"])
    """MODEL:BATCH, models of cnn and mlp, with so many examples in a step over all workers."""
    threads: int = 1
    """Of each worker, within an operation."""
    pairs: int = harness.PAIRS
    """Turns of each program."""
    seconds: float = 3.0
    """Length of a turn."""
    without: list[str] = field(default_factory=list)
    """Peers to leave out, by the names in the table."""
    quick: bool = False
    """Two workers, the CNN with a batch of 64, three short turns."""
    json: Path | None = None
    """Write what was found here."""


def programs(
    without: list[str], workers: int, report: harness.Report, peers: dict[str, tuple[str | None, str, float]] = PEERS
) -> dict[str, list[str]]:
    """Name -> script and flags of its own."""
    job = str(Path(__file__).with_name("workers_job.py"))
    found = {
        "raytf": [job, "--mode", "float", "--shards", str(workers)],
        "raytf, exact": [job, "--mode", "exact"],
    }
    for name, (package, script, _) in peers.items():
        if name in without:
            continue
        if package is not None and importlib.util.find_spec(package) is None:
            report.notes.append(f"{name}: skipped, {package} is not installed (pip install 'raytf-train[peers]').")
            continue
        found[name] = [str(harness.HERE / script)]
    return found


def measure(case: str, workers: int, arguments: Arguments, report: harness.Report) -> None:
    name, _, batch = case.partition(":")
    use_gpu = harness.gpus() >= workers
    around = common.environment()
    if not use_gpu:
        around["CUDA_VISIBLE_DEVICES"] = "-1"
    flags = [
        "--address",
        "{address}",
        "--workers",
        workers,
        "--model",
        name,
        "--batch",
        batch,
        "--threads",
        arguments.threads,
    ]
    flags += ["--use-gpu"] if use_gpu else []
    with (
        tempfile.TemporaryDirectory(prefix="rd-", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        started = {}
        for who, command in programs(arguments.without, workers, report).items():
            ranks = 1 if who.startswith("raytf") else workers
            words = [sys.executable, *command, *map(str, flags)]
            log = Path(folder) / f"{len(started)}.log"
            # One after the other: they would only hold up each other.
            started[who] = Conductor.started(stack, who, words, ranks, log, around | {"TMPDIR": folder}, 5.0)
        steps = {}
        for who, conductor in started.items():
            conductor.run(WARM)
            rate = conductor.rate(2 * common.CALL_STEPS)
            steps[who] = common.CALL_STEPS * max(1, math.ceil(rate * arguments.seconds / common.CALL_STEPS))
        cpu: dict[str, list[float]] = {who: [] for who in started}

        def block(who: str) -> float:
            answer = started[who].run(steps[who])
            cpu[who].append(1000 * answer["cpu"] / steps[who])
            return steps[who] / answer["seconds"]

        rates = harness.rounds(arguments.pairs, {who: lambda who=who: block(who) for who in started})
        for conductor in started.values():
            conductor.dismiss()  # they end beside each other
    add(report, f"{models.MODELS[name].title}, batch {batch}, {workers} workers", rates, cpu, name == "cnn")


def add(
    report: harness.Report, what: str, rates: dict[str, list[float]], cpu: dict[str, list[float]], has_goals: bool
) -> None:
    """Add the rows of one configuration."""
    for who, (_, _, goal) in PEERS.items():
        if who in rates:
            row = harness.Comparison(what, who, "steps/s", rates["raytf"], rates[who], goal=goal if has_goals else None)
            report.comparisons.append(row)
    exact = rates["raytf, exact"]
    report.comparisons.append(
        harness.Comparison(f"{what}, exact", "raytf, float", "steps/s", exact, rates["raytf"], goal=EXACT_GOAL)
    )
    if HAND in rates:
        report.comparisons.append(harness.Comparison(f"{what}, exact", HAND, "steps/s", exact, rates[HAND]))
    for who, values in cpu.items():
        report.readings.append(harness.Reading(what, f"CPU time of rank 0, {who}", "ms/step", values))


def main(arguments: Arguments) -> int:
    if arguments.quick:
        arguments = dataclasses.replace(arguments, workers=[2], cases=["cnn:64"], pairs=3, seconds=1.5)
    report = harness.Report("distributed", "Distributed step: raytf beside its peers")
    for workers in arguments.workers:
        for case in arguments.cases:
            try:
                measure(case, workers, arguments, report)
            except RuntimeError as error:  # of hours of others nothing is lost
                report.notes.append(f"{case}, {workers} workers: no result: {str(error).splitlines()[0]}")
    if max(arguments.workers) * arguments.threads > (os.cpu_count() or 1) and not harness.gpus():
        report.notes.append(f"This machine has {os.cpu_count()} cores: more workers than that share them.")
    report.notes = list(dict.fromkeys(report.notes))
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
