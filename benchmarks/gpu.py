"""Everything that only a machine with a GPU can show, in one command and some eight minutes.

    python -m benchmarks.gpu --json gpu.json
    python -m benchmarks.gpu --tiny          # the same on CPUs, to see that it runs

Step times of dense models of 25 M and 335 M weights: raytf in fixed, float and exact mode and with one and four logical
shards, beside Keras's `fit` and a loop by hand, a process each (`gpu_way.py`); what the traced step would keep in host
memory; how long training waits for a copy of the state; two workers on one GPU, and kill -9 of one of them. What has no
time left is left out, and said. Nothing is asserted: a table is what comes out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

if not __package__:  # `python benchmarks/gpu.py`, from where `benchmarks` cannot be imported
    os.execve(
        sys.executable,
        [sys.executable, "-m", "benchmarks.gpu", *sys.argv[1:]],
        os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )

from benchmarks import harness
from benchmarks.gpu_way import SIZES
from benchmarks.harness import ROOT, Comparison, Grid, Reading, Report
from raytf.testing import Job, environment
from raytf.testing.processes import WORKER

#: (way, logical shards) of raytf.
OURS = (("float", 1), ("fixed", 1), ("fixed", 4), ("compressed", 1), ("exact", 1))
PEERS = ("keras", "loop")
#: Of raytf's steps/s, in times of Keras's.
GOAL = 0.9
#: For one process: imports, tracing, blocks.
WAY_SECONDS = 90.0
#: For a run of two workers on one GPU, and the fault.
SHARED_SECONDS = 150.0


@dataclass(frozen=True)
class Arguments:
    """Measure raytf on this machine's GPU."""

    minutes: float = 8.0
    """What has not begun by then is left out."""
    batch: int = 256
    steps: int = 30
    """Steps of a block."""
    blocks: int = 5
    """Blocks of each way."""
    tiny: bool = False
    """Models of a few thousand weights, on CPUs as well."""
    json: Path | None = None
    """Write the report here."""


@dataclass
class Bench:
    """The report, and how much time is left for it."""

    arguments: Arguments
    report: Report
    ends_at: float

    def way(self, way: str, model: str, shards: int = 1) -> dict[str, Any] | None:
        """Return the results of gpu_way.py; None if it failed or there is no time left, which the report says."""
        title = f"{model}, {way}, {shards} shard{'s' * (shards > 1)}"
        if time.monotonic() > self.ends_at:
            self.report.notes.append(f"{title}: left out, the time was over")
            return None
        flags = {"way": way, "model": model, "shards": shards}
        flags |= {name: getattr(self.arguments, name) for name in ("batch", "steps", "blocks")}
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_way.py")]
        command += [f"--{name}={value}" for name, value in flags.items()]
        env = harness.importable() | {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAY_SECONDS, check=True)
            return dict(json.loads(done.stdout.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            self.report.notes.append(f"{title}: not done after {WAY_SECONDS:.0f} s")
        except subprocess.CalledProcessError as error:
            self.report.notes.append(f"{title}: failed: {' | '.join(error.stderr.splitlines()[-3:])[-600:]}")
        return None

    def steps(self, model: str) -> None:
        """Step times of one model, each of raytf's ways beside each peer."""
        width, hidden = SIZES[model]
        title = f"{hidden * width * width / 1e6:.3g} M weights"
        rates = {peer: self._rates(found) for peer in PEERS if (found := self.way(peer, model)) is not None}
        for way, shards in OURS:
            found = self.way(way, model, shards)
            if found is None:
                continue
            configuration = f"{title}, {way}, {shards} shard{'s' * (shards > 1)}"
            for peer, theirs in rates.items():
                goal = GOAL if (way, shards, peer) == ("float", 1, "keras") else None
                row = Comparison(configuration, peer, "steps/s", self._rates(found), theirs, goal=goal)
                self.report.comparisons.append(row)
            kept = [[configuration, line] for line in found["in_host_memory"]] if found["on_gpu"] else []
            if kept:
                self.report.grids.append(Grid(f"In host memory: {configuration}", ["way", "what"], kept))

    def copies(self, model: str) -> None:
        """Measure how long training waits for a copy of the state into the node's memory."""
        found = self.way("copy", model)
        if found is None:
            return
        title = f"state of {found['state_bytes'] / 1e9:.2g} GB"
        waits = found["held_after"] if found["is_held"] else found["seconds"]
        for quantity, values in (("training waits for a copy", waits), ("copy is whole", found["seconds"])):
            self.report.readings.append(Reading(title, quantity, "ms", [1000 * seconds for seconds in values]))

    def shared(self, folder: Path) -> None:
        """Two workers on one GPU; one of them is killed."""
        if time.monotonic() > self.ends_at:
            self.report.notes.append("two workers on one GPU: left out, the time was over")
            return
        status = folder / "status.json"
        flags = ["--workers=2", "--steps=4000", f"--storage={folder}", "--run=shared", f"--status-file={status}"]
        flags += [] if self.arguments.tiny else ["--use-gpu", "--gpus-per-worker=0.5"]
        command = [sys.executable, str(ROOT / "jobs" / "mnist.py"), *flags]
        with Job(command, folder / "log", environment(), status_file=status) as job:
            try:
                job.until(lambda: (job.step or 0) >= 100, SHARED_SECONDS)
                reached, began = job.step or 0, time.monotonic()
                job.processes(WORKER)[-1].kill()
                job.until(lambda: (job.step or 0) > reached, SHARED_SECONDS)
            except AssertionError as error:
                self.report.notes.append(f"two workers on one GPU: {str(error)[-600:]}")
                return
            took = time.monotonic() - began
            said = [line for line in job.output.splitlines() if line.startswith("gradients")]
        self.report.notes += said[:1]
        self.report.readings.append(Reading("two workers, one killed", "next new step", "s", [took], at_most=10.0))

    def _rates(self, found: dict[str, Any]) -> list[float]:
        return [self.arguments.steps / seconds for seconds in found["seconds"]]


def main(arguments: Arguments) -> int:
    if not arguments.tiny and not harness.gpus():
        print("error: nvidia-smi finds no GPU on this machine; --tiny runs on CPUs.", file=sys.stderr)
        return 2
    report = Report("gpu", "Steps on a GPU")
    bench = Bench(arguments, report, time.monotonic() + 60 * arguments.minutes)
    with tempfile.TemporaryDirectory(prefix="raytf-gpu-") as folder:
        models = ("tiny",) if arguments.tiny else ("small", "large")
        bench.steps(models[0])
        bench.copies(models[0])
        bench.shared(Path(folder))
        for model in models[1:]:
            bench.steps(model)
            bench.copies(model)
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
