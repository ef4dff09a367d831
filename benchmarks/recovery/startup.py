"""From the command to the first step: raytf's jobs/mnist.py, Ray's TensorflowTrainer, and Keras's fit.

    python -m benchmarks.recovery.startup --pairs 5 --json startup.json

Three commands on the same images, with the same network and one worker each. Cold: nothing is there, raytf and
TensorflowTrainer start a Ray of their own. Warm: a Ray is there, on which each has run once before. A run has the
seconds from the start of its process to the end of its first step, the one that compiles. Keras's fit needs no Ray; it
shows what TensorFlow and the model take by themselves. Second: two runs in one process, of which the second one is
measured, from its call on. The first one has 320 steps of raytf, and 40 of the peer, which keeps no processes.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro

from benchmarks import models
from benchmarks.harness import PAIRS, ROOT, Comparison, Reading, Report, rounds
from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Job, environment

PEERS = ROOT / "benchmarks" / "peers"
STOCK, KERAS = "Ray TensorflowTrainer", "Keras fit"
#: The most seconds of raytf's starts, and the least ratio to those of stock Ray.
GOALS, RATIO = {"cold": 10.0, "warm": 5.0, "second": 3.0}, 2.0
BEGAN = "last run began: "
#: For a command, on a loaded machine.
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Arguments:
    """Seconds from the command to the first step."""

    quick: bool = False
    """One cold start and one second run of each."""
    pairs: int = PAIRS
    """Starts of each, cold and warm."""
    json: Path | None = None
    """Write the report here."""


@dataclass
class Starts:
    """Starts the commands and reads when their first step was done.

    Args:
        folder: for what they write.
        ray: environment in which a Ray is found; empty where each starts its own.
    """

    folder: Path
    ray: dict[str, str] = field(default_factory=dict)
    #: raytf's parts of a start -> seconds of each start.
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def raytf(self) -> float:
        storage, run = self.folder / "runs", f"start-{next(self._numbers)}"
        flags = ["--workers=1", "--steps=40", f"--storage={storage}", f"--run={run}", f"--data={self.data}"]
        began = self._run(run, [str(ROOT / "jobs" / "mnist.py"), *flags])
        events = ledger.read(Storage(str(storage / run)))
        group, attempt = (next(e for e in events if e["kind"] == kind) for kind in ("group", "attempt"))
        self.phases["command and Ray"].append(group["time"] - began)
        for name, seconds in attempt["phases"].items():
            self.phases[name].append(float(seconds))
        return float(attempt["time"]) - began

    def stock(self) -> float:
        return self._peer("startup_stock.py")

    def raytf_again(self) -> float:
        storage, name = self.folder / f"twice-{next(self._numbers)}", "raytf-again"
        script = str(ROOT / "benchmarks" / "recovery" / "startup_twice.py")
        began = self._last_began(name, [script, f"--data={self.data}", f"--storage={storage}"])
        events = ledger.read(Storage(str(storage / "second")))
        attempt = next(e for e in events if e["kind"] == "attempt")
        for phase, seconds in attempt["phases"].items():
            self.phases[phase].append(float(seconds))
        return float(attempt["time"]) - began

    def stock_again(self) -> float:
        note = self.folder / f"again-{next(self._numbers)}.note"
        command = [str(PEERS / "startup_stock.py"), f"--data={self.data}", f"--note={note}", "--runs=2"]
        began = self._last_began("stock-again", command)
        return float(note.read_text()) - began

    def keras(self) -> float:
        return self._peer("startup_keras.py")

    @property
    def data(self) -> Path:
        return self.folder.parent / "images.npz"

    def _peer(self, script: str) -> float:
        name = f"{script}-{next(self._numbers)}"
        note = self.folder / f"{name}.note"
        began = self._run(name, [str(PEERS / script), f"--data={self.data}", f"--note={note}"])
        return float(note.read_text()) - began

    def _last_began(self, name: str, command: list[str]) -> float:
        """When the last run of a program began, as it says."""
        self._run(name, command)
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return float(next(line.removeprefix(BEGAN) for line in lines if line.startswith(BEGAN)))

    def _run(self, name: str, command: list[str]) -> float:
        """When it began; returns when it has ended."""
        around = environment(PYTHONPATH=str(ROOT), **self.ray)
        began = time.time()
        with Job([sys.executable, *command], self.folder / f"{name}.log", around) as job:
            if job.process.wait(PATIENCE_SECONDS):
                raise RuntimeError(f"{name} failed:\n{job.output[-3000:]}")
        return began


def measure(kind: str, starts: Starts, pairs: int, report: Report) -> None:
    """The rows of cold or warm starts, or of second runs."""
    runs = {"raytf": starts.raytf, STOCK: starts.stock, KERAS: starts.keras}
    if kind == "second":
        runs = {"raytf": starts.raytf_again, STOCK: starts.stock_again}
    if importlib.util.find_spec("tf_keras") is None:
        del runs[STOCK]
    if kind == "warm":
        for run in runs.values():
            run()
        starts.phases.clear()
    found = rounds(pairs, runs)
    what = f"{kind} start, one worker" if kind != "second" else "second run of a process, one worker"
    for peer in (STOCK, KERAS):
        if peer in found:
            goal = RATIO if peer == STOCK else None
            report.comparisons.append(
                Comparison(what, peer, "s", found["raytf"], found[peer], more_is_better=False, goal=goal)
            )
    report.readings.append(Reading(what, "to the first step", "s", found["raytf"], at_most=GOALS[kind]))
    for name, seconds in starts.phases.items():
        report.readings.append(Reading(f"{kind} start of raytf", name, "s", seconds))


def main(arguments: Arguments) -> int:
    pairs = 1 if arguments.quick else arguments.pairs
    report = Report("startup", "From the command to the first step")
    if importlib.util.find_spec("tf_keras") is None:
        report.notes.append(f"{STOCK}: skipped, tf_keras is not installed (pip install 'raytf-train[peers]').")
    with tempfile.TemporaryDirectory(prefix="raytf-start-") as name:
        folder = Path(name)
        for kind in GOALS:
            (folder / kind).mkdir()
        x, y = models.images(60_000)
        np.savez(folder / "images.npz", x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])
        measure("cold", Starts(folder / "cold"), pairs, report)
        measure("second", Starts(folder / "second"), pairs, report)
        if not arguments.quick:
            os.environ["PYTHONPATH"] = str(ROOT)  # workers of the cluster unpickle the peer's function
            with ElasticCluster(head_cpus=max(2, os.cpu_count() or 1), dashboard=True) as cluster:
                measure("warm", Starts(folder / "warm", cluster.env), pairs, report)
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
