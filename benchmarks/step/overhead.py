"""Measures what raytf costs if there is nothing to add over workers: steps/s and memory of one worker against Keras's
fit.

    python -m benchmarks.step.overhead --pairs 5 --json step_overhead.json
    python -m benchmarks.step.overhead --quick
    python -m benchmarks.step.overhead --threads 2 --models cnn

raytf is the real `raytf.fit` on Ray, the peer the real `model.fit` (peers/keras_fit.py), with as many of TensorFlow's
threads. Both can be set up in several ways, of which each is a process of its own; all are there at once and take
turns. In a first round each way does a block, and the fastest goes on into the pairs, so that neither side is held back
by a setting; raytf has XLA only where it is the faster way for Keras. On a machine with a GPU both use it.

raytf cuts each batch into logical shards, four by default, so that one worker learns what four would. Keras does not:
`1 shard` is the same computation as Keras's, `4 shards` is the default. Gradients are added as floats; what raytf's
default of adding them in fixed point costs beside that is in exact_cost.py.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks.harness import HERE, PAIRS, Comparison, Reading, Report, importable, turns
from benchmarks.models import MODELS
from benchmarks.peers.keras_fit import CALL_STEPS
from benchmarks.turns import Conductor

#: The setting in which raytf computes what Keras does.
SAME = "1 shard"
#: Setting -> flags.
OURS = {"4 shards": ["--shards=4"], SAME: ["--shards=1"]}
#: Of steps/s, in times of Keras's.
GOAL = 1.0
WAYS = {"plain": [], "XLA": ["--jit"]}
#: Of memory beyond plain Keras and the size of the state.
MEMORY_GOAL_MB = 300.0
#: Calls before the clock runs; a quick run has one.
WARM_CALLS = 2


@dataclass(frozen=True)
class Arguments:
    """Steps/s of one raytf worker against Keras's fit."""

    quick: bool = False
    """Two pairs of short blocks without the ResNet, both sides without XLA, raytf with one shard."""
    pairs: int = PAIRS
    """Blocks of each side."""
    seconds: float = 3.0
    """Length of a block."""
    models: str = ",".join(MODELS)
    """Which models."""
    threads: int = 1
    """TensorFlow's threads of each side."""
    json: Path | None = None
    """Write the report here."""


def measure(name: str, arguments: Arguments, folder: Path, report: Report) -> None:
    """All rows of one model."""
    pairs, seconds = (2, 1.0) if arguments.quick else (arguments.pairs, arguments.seconds)
    warm = CALL_STEPS * (1 if arguments.quick else WARM_CALLS)
    title, flags = MODELS[name].title, ["--address={address}", f"--model={name}", f"--threads={arguments.threads}"]
    environment = importable() | {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
    steps: dict[str, int] = {}
    with contextlib.ExitStack() as stack:

        def start(what: str, script: str, words: list[str]) -> Conductor:
            command = [sys.executable, str(HERE / script), *flags, *words]
            log = folder / f"{name} {what}.log"
            one = stack.enter_context(Conductor(f"{name} {what}", command, 1, log, dict(environment)))
            one.run(warm)  # one after another: a start wants all cores
            steps[one.name] = max(1, round(seconds * one.rate(warm) / CALL_STEPS)) * CALL_STEPS
            return one

        def rate(one: Conductor) -> float:
            return one.rate(steps[one.name])

        def fastest(ways: dict[str, Conductor]) -> str:
            return max(ways, key=lambda way: rate(ways[way])) if len(ways) > 1 else next(iter(ways))

        # A quick run has no time for XLA's compiler.
        tried = {"plain": WAYS["plain"]} if arguments.quick else WAYS
        theirs = {way: start(f"Keras {way}", "peers/keras_fit.py", words) for way, words in tried.items()}
        peer = fastest(theirs)
        for setting, words in OURS.items():
            if arguments.quick and setting != SAME:
                continue
            own = {way: WAYS[way] for way in ("plain", peer)}  # nobody needs XLA where it is slower
            ours = {
                w: start(
                    f"{setting} {w}",
                    "step/overhead_job.py",
                    [*words, *more, f"--storage={folder}/{name} {setting} {w}"],
                )
                for w, more in own.items()
            }
            way = fastest(ours)
            found = turns(pairs, lambda: rate(ours[way]), lambda: rate(theirs[peer]))  # noqa: B023
            report.comparisons.append(
                Comparison(f"{title}, {setting} ({way})", f"Keras fit ({peer})", "steps/s", *found, goal=GOAL)
            )
            if setting == SAME:
                add_memory(report, title, *(one["plain"].run(warm, memory=True) for one in (ours, theirs)))


def add_memory(report: Report, title: str, ours: dict[str, float], theirs: dict[str, float]) -> None:
    """Memory of raytf's worker beside Keras's process, both without XLA; PSS, where shared pages are cut."""
    keras, most = theirs["memory_mb"], theirs["memory_mb"] + ours["state_mb"] + MEMORY_GOAL_MB
    report.readings.append(Reading(title, "memory of plain Keras", "MB", [keras]))
    report.readings.append(Reading(title, "memory of raytf's worker", "MB", [ours["memory_mb"]], at_most=most))


def main(arguments: Arguments) -> int:
    report = Report("step_overhead", "One worker against Keras's fit")
    with tempfile.TemporaryDirectory(prefix="raytf-steps-") as folder:
        for name in arguments.models.split(","):
            if arguments.quick and name == "resnet":
                continue  # its steps are long
            measure(name, arguments, Path(folder), report)
    report.notes.append(
        f"Batch 128; threads within an operation on each side: {arguments.threads}. Each side in its fastest way, "
        "which is named in brackets. Memory is PSS: what processes share is cut among them."
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
