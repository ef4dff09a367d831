"""Workers are killed again and again: how long the others pause, and whether anything changes in what is learned.

    python -m tests.stress.repair --kills 200 [--forked]

Each run trains the MNIST CNN of `tests/stress/law/job.py` in exact mode with two to four workers, of which random ones
are killed with SIGKILL at random moments: in the forward pass, in the sum, between two steps, while a replacement
starts or joins, two at once. The pause is the longest time between two steps around a kill, as rank 0's callback
notes them, less the usual one; it moves with rank 0. A run without kills tells which weights all must end with. With
`--forked` each worker has forked a child that outlives it and holds its sockets open.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro

from raytf.testing import Job, environment
from raytf.testing.processes import WORKER
from tests.stress.law.schedules import redone

JOB = Path(__file__).with_name("law") / "job.py"
#: Seconds for a run to come to its first step, and for its end.
PATIENCE_SECONDS = 300.0
#: A pause for which somebody will want to see the log.
_STRANGE_SECONDS = 3.0
#: Seconds between two kills, at least and at most: some come before what was lost is replaced.
_BETWEEN = (2.0, 9.0)
#: Steps after a kill from which on the status is one of those that are left: some come with each status.
_FRESH_STEPS = 20
#: Of the runs, in turns.
_WORKERS = (2, 4, 3)


@dataclass(frozen=True)
class Arguments:
    """Kill workers of runs that repair themselves."""

    kills: int = 200
    """How many, in all runs together."""
    each: int = 40
    """In each run."""
    seed: int = 0
    """Of the draw."""
    data: str = "auto"
    """As in jobs/mnist.py."""
    epochs: int = 70
    """Of each run; long enough for all its kills."""
    pause: float = 0.02
    """Seconds of sleep in each step."""
    forked: bool = False
    """Each worker has a child that holds its sockets."""
    json: Path | None = None
    """Write all results here too."""


@dataclass(frozen=True)
class Outcome:
    """What one run has come to.

    Attributes:
        workers: that it has.
        kills: seconds of the epoch at which workers were killed.
        pauses: seconds that the others stood still after each.
        redone, missing, twice: steps that were computed again; records that were not learned from, and again.
        sha256: of the weights.
        with_child: killed workers whose child lived on.
    """

    workers: int
    kills: list[float]
    pauses: list[float]
    redone: int
    missing: int
    twice: int
    sha256: str
    with_child: int


def run(arguments: Arguments, folder: Path, workers: int, kills: int, draw: random.Random) -> Outcome:
    """Train once, with so many kills.

    Raises:
        AssertionError: the run fails.
    """
    status = folder / "status.json"
    command = [
        sys.executable,
        str(JOB),
        "--data",
        arguments.data,
        "--epochs",
        str(arguments.epochs),
        "--global-batch-size",
        "96",
    ]
    command += ["--logical-shards", "12", "--workers", str(workers), "--exact", "--steps-per-call", "1"]
    command += ["--checkpoint-every-steps", "100", "--max-failures", "1000", "--pause", str(arguments.pause)]
    command += ["--storage", str(folder), "--run", "r", "--status-file", str(status)]
    killed: list[float] = []
    children, with_child = folder / "children", 0
    children.mkdir()
    if arguments.forked:
        command += ["--children", str(children)]
    holders = Holders(children)
    with Job(command, folder / "log", environment(), status_file=status) as job:
        job.until(lambda: (job.step or 0) > 20, PATIENCE_SECONDS)
        while len(killed) < kills and job.is_running:
            time.sleep(draw.uniform(*_BETWEEN))
            victims = holders.chosen(job, draw)
            for victim in victims:
                with suppress(psutil.NoSuchProcess):
                    forked = victim.children()
                    victim.kill()
                    killed.append(time.time())
                    with_child += any(child.is_running() for child in forked)
        job.wait(PATIENCE_SECONDS * 4)
    shutil.rmtree(children)  # they end
    result = json.loads((folder / "r" / "result.json").read_text())
    noted = [line.split() for line in (folder / "r" / "files" / "executed.txt").read_text().splitlines()]
    times = [float(at) for at, _ in noted]
    history = result["history"]
    return Outcome(
        workers,
        killed,
        pauses(times, killed),
        redone(folder / "r"),
        round(sum(epoch["seen"][0] for epoch in history)),
        round(sum(epoch["seen"][1] for epoch in history)),
        result["weights_sha256"],
        with_child,
    )


def workers_of(job: Job) -> list[psutil.Process]:
    """Those that live, the oldest first, which is rank 0 until it is killed."""
    return sorted(job.processes(WORKER), key=lambda process: process.create_time())


class Holders:
    """Which workers surely have the state: all that lived when as many trained, some steps after the latest kill.

    Just after a kill the status is still that of before, and says of a process that has only begun that it trains.

    Args:
        children: folder with a file for each child of a worker, which looks like one.
    """

    def __init__(self, children: Path) -> None:
        self._children = children
        self._sure: set[psutil.Process] = set()
        self._killed_at = 0

    def chosen(self, job: Job, draw: random.Random) -> list[psutil.Process]:
        """One worker or two to kill, of which at least one is left that has the state; none where that is not sure."""
        children = {path.name for path in self._children.iterdir()}
        living = [process for process in workers_of(job) if str(process.pid) not in children]
        status = job.status or {}
        step = status.get("step") or 0
        if status.get("workers") == len(living) and step >= self._killed_at + _FRESH_STEPS:
            self._sure = set(living)
        self._sure &= set(living)
        victims = draw.sample(living, min(len(living), 2 if draw.random() < 0.1 else 1))
        while victims and self._sure <= set(victims):
            victims.pop()
        if victims:
            self._killed_at = step
        return victims


def pauses(times: list[float], kills: list[float]) -> list[float]:
    """For each kill, the longest gap between steps around it or up to two seconds later, less the usual one."""
    gaps = [(begin, end) for begin, end in itertools.pairwise(times)]
    usual = statistics.median(end - begin for begin, end in gaps)
    found = []
    for kill in kills:
        near = [end - begin for begin, end in gaps if end >= kill and begin <= kill + 2]
        found.append(max(0.0, max(near, default=0.0) - usual))
    return found


def main(arguments: Arguments) -> int:
    draw, outcomes = random.Random(f"repair {arguments.seed}"), []
    left = arguments.kills
    while left > 0 or not outcomes:
        kills = min(arguments.each, left) if outcomes else 0  # the first one is undisturbed
        folder = Path(tempfile.mkdtemp(prefix="raytf-repair-"))
        try:
            found = run(arguments, folder, _WORKERS[len(outcomes) % len(_WORKERS)], kills, draw)
        except AssertionError:
            print(f"failed; its files are in {folder}")
            raise
        if found.redone or max(found.pauses, default=0.0) > _STRANGE_SECONDS:
            print(f"kept, to be looked at: {folder}")
        else:
            shutil.rmtree(folder)
        outcomes.append(found)
        left -= len(found.kills)
        worst = f", pauses to {max(found.pauses):.2f} s" if found.pauses else ""
        print(
            f"{found.workers} workers, {len(found.kills)} killed ({found.with_child} had a child){worst}: "
            f"{found.redone} redone, "
            f"{found.missing} missing, {found.twice} twice, {found.sha256[:8]}",
            flush=True,
        )
    every = sorted(pause for found in outcomes for pause in found.pauses)
    if every:
        p99 = every[min(len(every) - 1, int(len(every) * 0.99))]
        print(f"{len(every)} kills: P50 {statistics.median(every):.2f} s, P99 {p99:.2f} s, most {every[-1]:.2f} s")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(found) for found in outcomes], indent=1))
    is_good = len({found.sha256 for found in outcomes}) == 1
    return 0 if is_good and not any(found.redone or found.missing or found.twice for found in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
