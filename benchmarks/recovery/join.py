"""Measures how long the others stand still while a worker joins them, which costs a copy of the state.

    python -m benchmarks.recovery.join

Two workers train the CNN of jobs/mnist.py with Adam and a hidden layer so wide that weights and Adam's averages are
100 MB. One is killed, and its replacement starts, builds, traces and runs its graph beside the other one, gets the
state from it and joins at a step's end. From the times that a callback notes for each step: the gap between the last
one before the join and the first one after it, less the usual step of two. No peer has this: theirs start all again.
"""

from __future__ import annotations

import itertools
import random
import signal
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from benchmarks import harness
from benchmarks.recovery.disturbed import Group, Notes, Program, write_data
from benchmarks.recovery.recovery import PATIENCE_SECONDS, WORKERS, started, until_full
from raytf.testing import Job

#: Seconds that the others may stand still.
GOAL_SECONDS = 0.3
#: Weights that a unit of the hidden layer has, and bytes of each: itself and Adam's two averages.
UNIT_WEIGHTS, WEIGHT_BYTES = 3146, 12
#: Steps that are made before a worker is killed.
SETTLE_STEPS = 30


@dataclass(frozen=True)
class Arguments:
    """Measure how long others stand still while a worker joins."""

    quick: bool = False
    """Two joins."""
    joins: int = 10
    """How many."""
    megabytes: int = 100
    """Of the state."""
    seed: int = 0
    """Of the draw of who is killed."""
    json: Path | None = None
    """Write the report here."""


def stood(old: Group, new: Group) -> float:
    """Return the seconds between the last step of a group and the first one of the next, less the usual step of the
    larger one."""
    larger = max(old, new, key=lambda group: group.workers)
    usual = statistics.median(b - a for (_, a), (_, b) in itertools.pairwise(larger.calls))
    return new.calls[0][1] - old.calls[-1][1] - usual


def measure(arguments: Arguments, folder: Path) -> tuple[list[float], list[float]]:
    """Measure the seconds of each join and of each death.

    Raises:
        AssertionError: the run does not go on.
    """
    units = round(arguments.megabytes * 1e6 / WEIGHT_BYTES / UNIT_WEIGHTS)
    flags = ("--workers", str(WORKERS), "--units", str(units), "--steps-per-call", "1", "--exact")
    program = Program("raytf", "recovery/disturbed_job.py", flags)
    draw, joins, deaths = random.Random(f"join {arguments.seed}"), list[float](), list[float]()
    with started(program, "join", write_data(folder), folder, own_ray=False) as (place, job, notes):
        for _ in range(2 if arguments.quick else arguments.joins):
            _train(job, notes)
            said = len(job.output)
            worker: psutil.Process = draw.choice(place.workers())
            worker.kill()
            until_full(job, said)
            _train(job, notes)
            whole, left, joined = [group for group in notes.groups() if group.calls][-3:]
            deaths.append(stood(whole, left))
            joins.append(stood(left, joined))
            print(f"a death {deaths[-1]:.2f} s, a join {joins[-1]:.2f} s", flush=True)
    return joins, deaths


def _train(job: Job, notes: Notes) -> None:
    """Wait until the present group has made some steps."""
    job.until(lambda: notes.groups() and len(notes.groups()[-1].calls) > SETTLE_STEPS, PATIENCE_SECONDS)


def main(arguments: Arguments) -> int:
    """Run all."""
    report = harness.Report("join", f"A worker joins: {arguments.megabytes} MB of state, two workers, exact mode")
    with tempfile.TemporaryDirectory(prefix="raytf-join-") as folder:
        joins, deaths = measure(arguments, Path(folder))
    name = f"CNN with {arguments.megabytes} MB of state"
    goal = harness.Reading(name, "the other one stands still while one joins", "s", joins, at_most=GOAL_SECONDS)
    report.readings += [goal, harness.Reading(name, "and when one dies", "s", deaths)]
    return report.finish(arguments.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster goes with this process
    sys.exit(main(tyro.cli(Arguments)))
