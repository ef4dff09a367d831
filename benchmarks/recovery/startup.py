"""From the command to the first and the 20th step: raytf's jobs/mnist.py, Ray's TensorflowTrainer, and Keras's fit.

    python -m benchmarks.recovery.startup --pairs 5 --json startup.json

Three commands on the same images, with the same network. Cold: nothing is there, raytf and TensorflowTrainer start a
Ray of their own. Warm: a Ray is there, on which each has run once before. A run has the seconds from the start of its
process to the end of its first step, the one that compiles, and to the end of its 20th, before which nothing is hidden.
Keras's fit needs no Ray; it shows what TensorFlow and the model take by themselves. Second: two runs in one process, of
which the second one is measured, from its call on. The first one has 320 steps of raytf, and 40 of the peer, which
keeps no processes. Whole: README's job, three epochs with two workers, from the command to its end.
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
#: What is measured, in order: kind of start, and number of workers.
KINDS = (("cold", 1), ("cold", 2), ("second", 1), ("second", 2), ("warm", 1))
#: The most seconds of raytf's second runs to the 20th step.
SECOND_SECONDS = 4.0
#: The least ratios to the 20th step.
RATIOS = {STOCK: 2.0, KERAS: 1 / 2.5}
#: The most seconds of README's job.
WHOLE_SECONDS = 28.0
STEPS = (1, 20)
BEGAN = "last run began: "
#: For a command, on a loaded machine.
PATIENCE_SECONDS = 300.0


#: Step -> seconds from the command to its end.
Seconds = dict[int, float]


@dataclass(frozen=True)
class Arguments:
    """Seconds from the command to the first and the 20th step."""

    quick: bool = False
    """One cold start and one second run of each."""
    pairs: int = PAIRS
    """Starts of each kind."""
    json: Path | None = None
    """Write the report here."""


@dataclass
class Starts:
    """Starts the commands and reads when their first step was done.

    Args:
        folder: for what they write.
        workers: of raytf and of TensorflowTrainer; Keras's fit is one process.
        ray: environment in which a Ray is found; empty where each starts its own.
    """

    folder: Path
    workers: int
    ray: dict[str, str] = field(default_factory=dict)
    #: raytf's parts of a start -> seconds of each start.
    phases: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    #: Seconds of the newest command.
    _took: float = 0.0

    def raytf(self) -> Seconds:
        storage, run = self.folder / "runs", f"start-{next(self._numbers)}"
        began = self._job(run, f"--steps={STEPS[-1]}", f"--storage={storage}")
        events = ledger.read(Storage(str(storage / run)))
        self.phases["command and Ray"].append(next(e for e in events if e["kind"] == "group")["time"] - began)
        return self._noted(events, began)

    def whole(self) -> float:
        """Measure README's job, from the command to its end."""
        self._job(f"whole-{next(self._numbers)}", "--epochs=3", f"--storage={self.folder / 'runs'}")
        return self._took

    def stock(self) -> Seconds:
        return self._peer("startup_stock.py", f"--workers={self.workers}")

    def raytf_again(self) -> Seconds:
        storage, name = self.folder / f"twice-{next(self._numbers)}", "raytf-again"
        script = str(ROOT / "benchmarks" / "recovery" / "startup_twice.py")
        given = f"--data={self.data}", f"--storage={storage}", f"--steps={STEPS[-1]}", f"--workers={self.workers}"
        began = self._last_began(name, [script, *given])
        return self._noted(ledger.read(Storage(str(storage / "second"))), began)

    def stock_again(self) -> Seconds:
        note = self.folder / f"again-{next(self._numbers)}.note"
        given = f"--data={self.data}", f"--note={note}", "--runs=2", f"--workers={self.workers}"
        began = self._last_began("stock-again", [str(PEERS / "startup_stock.py"), *given])
        return _read(note, began)

    def keras(self) -> Seconds:
        return self._peer("startup_keras.py")

    @property
    def data(self) -> Path:
        return self.folder.parent / "images.npz"

    def _job(self, run: str, *flags: str) -> float:
        own = f"--workers={self.workers}", f"--run={run}", f"--data={self.data}"
        return self._run(run, [str(ROOT / "jobs" / "mnist.py"), *own, *flags])

    def _noted(self, events: list[ledger.Event], began: float) -> Seconds:
        """Return the times of the first and the last step, and of the start, from the ledger of a run of 20 steps."""
        attempt = next(e for e in events if e["kind"] == "attempt")
        for name, seconds in attempt["phases"].items():
            self.phases[name].append(float(seconds))
        last = next(e for e in events if e["kind"] == "phase" and e["step"] == STEPS[-1])
        return {step: float(event["time"]) - began for step, event in zip(STEPS, (attempt, last), strict=True)}

    def _peer(self, script: str, *flags: str) -> Seconds:
        name = f"{script}-{next(self._numbers)}"
        note = self.folder / f"{name}.note"
        began = self._run(name, [str(PEERS / script), f"--data={self.data}", f"--note={note}", *flags])
        return _read(note, began)

    def _last_began(self, name: str, command: list[str]) -> float:
        """Return when the last run of a program started, as its output says."""
        self._run(name, command)
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return float(next(line.removeprefix(BEGAN) for line in lines if line.startswith(BEGAN)))

    def _run(self, name: str, command: list[str]) -> float:
        """Run a program until it ends; return when it started."""
        around = environment(PYTHONPATH=str(ROOT), **self.ray)
        began = time.time()
        with Job([sys.executable, *command], self.folder / f"{name}.log", around) as job:
            if job.process.wait(PATIENCE_SECONDS):
                raise RuntimeError(f"{name} failed:\n{job.output[-3000:]}")
        self._took = time.time() - began
        return began


def _read(note: Path, began: float) -> Seconds:
    """Return a peer's records, a line for each step."""
    lines = (line.split() for line in note.read_text().splitlines())
    return {int(step): float(at) - began for step, at in lines}


def measure(kind: str, starts: Starts, pairs: int, report: Report) -> None:
    """Measure the rows of cold or warm starts, or of second runs."""
    runs = {"raytf": starts.raytf, STOCK: starts.stock, KERAS: starts.keras}
    if kind == "second":
        runs = {"raytf": starts.raytf_again, STOCK: starts.stock_again}
    if importlib.util.find_spec("tf_keras") is None:
        del runs[STOCK]
    if kind == "warm":
        for run in runs.values():
            run()
        starts.phases.clear()
    found, workers = rounds(pairs, runs), "one worker" if starts.workers == 1 else f"{starts.workers} workers"
    start = f"{kind} start, {workers}" if kind != "second" else f"second run of a process, {workers}"
    for step, name in zip(STEPS, ("first", f"{STEPS[-1]}th"), strict=True):
        ours, what = [each[step] for each in found["raytf"]], f"to the {name} step"
        for peer in (each for each in (STOCK, KERAS) if each in found):
            goal = RATIOS[peer] if step == STEPS[-1] else None
            theirs = [each[step] for each in found[peer]]
            compared = Comparison(f"{start}, {what}", peer, "s", ours, theirs, more_is_better=False, goal=goal)
            report.comparisons.append(compared)
        at_most = SECOND_SECONDS if kind == "second" and step == STEPS[-1] else None
        report.readings.append(Reading(start, what, "s", ours, at_most=at_most))
    for name, seconds in starts.phases.items():
        report.readings.append(Reading(f"{kind} start of raytf, {workers}", name, "s", seconds))


def main(arguments: Arguments) -> int:
    pairs = 1 if arguments.quick else arguments.pairs
    report = Report("startup", "From the command to the first and the 20th step")
    if importlib.util.find_spec("tf_keras") is None:
        report.notes.append(f"{STOCK}: skipped, tf_keras is not installed (pip install 'raytf-train[peers]').")
    with tempfile.TemporaryDirectory(prefix="raytf-start-") as name:
        folder = Path(name)
        x, y = models.images(60_000)
        np.savez(folder / "images.npz", x_train=x, y_train=y, x_test=x[:1000], y_test=y[:1000])
        for kind, workers in KINDS:
            own = folder / f"{kind}-{workers}"
            own.mkdir()
            if kind != "warm":
                measure(kind, Starts(own, workers), pairs, report)
            elif not arguments.quick:
                os.environ["PYTHONPATH"] = str(ROOT)  # workers of the cluster unpickle the peer's function
                with ElasticCluster(head_cpus=max(2, os.cpu_count() or 1), dashboard=True) as cluster:
                    measure(kind, Starts(own, workers, cluster.env), pairs, report)
        starts = Starts(folder / "cold-2", 2)  # one for all, as it counts the names of its runs
        whole = [starts.whole() for _ in range(pairs)]
        report.readings.append(Reading("jobs/mnist.py, two workers", "whole", "s", whole, at_most=WHOLE_SECONDS))
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
