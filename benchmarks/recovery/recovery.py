"""Measures how long a run stands still after a fault: raytf, Ray Train's trainer, and a script with BackupAndRestore.

    python -m benchmarks.recovery.recovery                              # 20 workers killed, 5 of each peer
    python -m benchmarks.recovery.recovery --raylets 5 --frozen 5       # and raylets killed, nodes frozen
    python -m benchmarks.recovery.recovery --own-ray --load 6 --stopped 5  # one machine, beside 6 programs that compute
    python -m benchmarks.recovery.recovery --quick

All train the CNN of jobs/mnist.py on the same data with two workers. Those on Ray have an elastic cluster of this
machine: two nodes of one CPU, one spare node, and a head; the script has a process for each worker. At random moments
a worker is killed (SIGKILL) or stopped (SIGSTOP), or a node's raylet is killed, or all of a node is frozen. A lost node
is replaced by a new one once the run has recovered. Warm processes that raytf keeps are not waited for; on two busy
cores they were all ready 20 s after a recovery, and `--gap 8 16` shows what faults cost that come before.

What is measured is the time from the fault to the next *new* step, one above every step that was made before it. So it
holds what was lost: steps since the last checkpoint are done again first.

raytf has its defaults. Ray's trainer saves every `--save-every-steps`, as does the script; `epoch` among `--only` is
Ray's trainer with a checkpoint at the end of each epoch, as in Ray's guide, which loses more. An epoch is MNIST's, 468
steps or some 15 s here. Young's and Daly's best interval for a checkpoint of 0.1 s and a fault an hour is 27 s, so
neither is too seldom for real clusters.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import tyro

from benchmarks import harness
from benchmarks.recovery.disturbed import Notes, Program, add_node, write_data
from raytf.testing import ElasticCluster, Job
from raytf.testing.processes import WORKER, environment

FAULTS = ("worker", "raylet", "frozen", "stopped")
WORKERS = 2
#: What raytf says when workers went on where they were, and from which step.
IN_PLACE = re.compile(r"(\d+) workers? (?:go(?:es)? on|continues?) after ([\d.]+) s at step (\d+), no step lost")
#: P50 and P95 of the seconds from a worker's death to a new step, and how many times sooner than Ray's trainer.
GOAL_P50, GOAL_P95, GOAL_RATIO = 10.0, 20.0, 3.0
#: A run that has made no new step after this many seconds has not recovered.
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Arguments:
    """Measure how long a run stands still after a fault."""

    quick: bool = False
    """2 workers killed, 1 of each peer, with gaps of 15 to 20 s."""
    pairs: int = 5
    """Rounds: in each, all programs are started, raytf with its share of the faults and each peer with its own."""
    kills: int = 20
    """SIGKILLs to one of two workers."""
    raylets: int = 0
    """SIGKILLs to the raylet of a node with a worker."""
    frozen: int = 0
    """SIGSTOPs to all processes of a node with a worker."""
    stopped: int = 0
    """SIGSTOPs to one of two workers."""
    load: int = 0
    """Programs that compute all the while beside those that are measured."""
    own_ray: bool = False
    """raytf in a Ray that it starts by itself, as on one machine; no peer, no nodes to lose."""
    peer: int | None = None
    """At most this many of each for each peer; 0 leaves them out. By default as many as there are pairs."""
    only: tuple[str, ...] = ()
    """Programs to run: raytf, epoch, often, script. By default all but `epoch`."""
    save_every_steps: int = 100
    """Steps between two checkpoints of the script, and of Ray's trainer."""
    gap: tuple[float, float] = (20.0, 40.0)
    """Seconds of training between two faults: at least, and at most."""
    seed: int = 0
    """Of the order and the moments of the faults."""
    flags: str = ""
    """More flags for raytf's job, parted by spaces, such as --no-warm-workers."""
    json: Path | None = None
    """Write the report here too."""
    recoveries: Path | None = None
    """Write each recovery here, as JSON."""


@dataclass(frozen=True)
class Recovery:
    """The recovery from one fault; seconds count from the fault.

    Attributes:
        program: key of `programs`.
        round: in which it was.
        fault: of `FAULTS`.
        step: the latest that was made before the group stopped.
        group_seconds: until the new group was ready to train.
        first_seconds: until it had made its first step or steps.
        new_seconds: until it had made a new one.
        redone: steps that were made a second time.
        source: where the state came from: memory, checkpoint, or nothing.
        reused: processes of the new group that had been there before the fault.
        phases: seconds of each part of the restart. raytf's are its own, counted from the last sign of life.
        full_seconds: until as many workers trained as before.
    """

    program: str
    round: int
    fault: str
    step: int
    group_seconds: float
    first_seconds: float
    new_seconds: float
    redone: int
    source: str
    reused: int
    phases: dict[str, float]
    full_seconds: float


def programs(arguments: Arguments) -> dict[str, Program]:
    """Return all programs to measure, raytf first."""
    often = ("--save-every-steps", str(arguments.save_every_steps))
    workers = ("--workers", str(WORKERS))
    found = {
        "raytf": Program("raytf", "recovery/disturbed_job.py", (*workers, *arguments.flags.split())),
        "epoch": Program("stock Ray, checkpoint each epoch", "peers/stock_ray.py", workers),
        "often": Program(f"stock Ray, each {arguments.save_every_steps} steps", "peers/stock_ray.py", workers + often),
        "script": Program("script, BackupAndRestore", "peers/backup_and_restore.py", workers + often, on_ray=False),
    }
    if arguments.own_ray:
        return {"raytf": found["raytf"]}
    wanted = arguments.only or ("raytf", "often", "script")
    return {key: found[key] for key in found if key in wanted}


class Place:
    """The cluster or machine on which a program runs, with the faults that are possible there.

    Args:
        job: the program.
        cluster: None for one without Ray.
    """

    def __init__(self, job: Job, cluster: ElasticCluster | None):
        self._job, self._cluster = job, cluster

    def workers(self) -> list[psutil.Process]:
        own = self._job.processes
        return self._cluster.workers() if self._cluster else own(WORKER) or own("--rank")

    def processes(self) -> list[psutil.Process]:
        nodes = self._cluster.nodes if self._cluster else []
        return [process for node in nodes for process in node.processes()] if self._cluster else self._job.processes()

    def inject(self, fault: str, draw: random.Random) -> tuple[float, Callable[[], None]]:
        """Do it to a random worker, or to the node of one; when it was done, and what puts the cluster right again."""
        if fault in ("worker", "stopped"):
            worker = draw.choice(self.workers())
            now = time.monotonic()
            worker.kill() if fault == "worker" else worker.suspend()
            return now, lambda: None
        cluster = self._cluster
        assert cluster is not None
        node = draw.choice([node for node in cluster.nodes if node.workers()])
        raylet = node.raylet()
        frozen = [raylet] if fault == "raylet" else node.processes()
        now = time.monotonic()
        for process in frozen:
            assert process is not None
            process.kill() if fault == "raylet" else process.suspend()

        def fix() -> None:
            node.kill()
            add_node(cluster)

        return now, fix


@contextmanager
def loaded(count: int) -> Iterator[None]:
    """So many programs compute as long as the `with` statement lasts, and not longer than this process."""
    code = "import os, sys\nparent = int(sys.argv[1])\nwhile os.getppid() == parent:\n    sum(range(1000000))"
    command = [sys.executable, "-c", code, str(os.getpid())]
    # In sessions of their own: Linux shares processors among sessions first, so all of one would count as one.
    running = [subprocess.Popen(command, start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@contextmanager
def started(program: Program, run: str, data: Path, folder: Path, own_ray: bool) -> Iterator[tuple[Place, Job, Notes]]:
    """Run a program, on a cluster that is made for it if it needs one and starts none itself."""
    with ExitStack() as stack:
        cluster = stack.enter_context(ElasticCluster()) if program.on_ray and not own_ray else None
        for _ in range(WORKERS + 1 if cluster else 0):
            add_node(cluster)
        notes = Notes(folder / f"{run}.notes")
        command = program.command(run, data, folder)
        settings = environment(**(cluster.env if cluster else {}))
        job = stack.enter_context(Job(command, folder / f"{run}.log", settings, folder=harness.ROOT))
        yield Place(job, cluster), job, notes


def recover(key: str, round: int, fault: str, place: Place, job: Job, notes: Notes, draw: random.Random) -> Recovery:
    """Inject a fault, wait for a new step and put the cluster right again.

    Raises:
        AssertionError: there is none within the patience; with the job's output.
    """
    groups, said = len(notes.groups()), len(job.output)
    there = {process.pid for process in place.processes()}
    at, fix = place.inject(fault, draw)
    if key == "raytf":
        job.until(lambda: IN_PLACE.search(job.output[said:]) or "restarted in" in job.output[said:], PATIENCE_SECONDS)
        if "restarted in" not in job.output[said:]:
            recovery = _in_place(round, fault, at, place, there, job, notes, said)
            fix()
            until_full(job, said)
            return replace(recovery, full_seconds=time.monotonic() - at)
    job.until(lambda: len(notes.groups()) > groups, PATIENCE_SECONDS)
    highest = max(step for group in notes.groups()[:groups] for step, _ in group.calls)
    job.until(lambda: notes.groups() and notes.reached > highest, PATIENCE_SECONDS)
    workers = [process.pid for process in place.workers()]
    fix()
    group = notes.groups()[groups]
    later = [call for one in notes.groups()[groups:] for call in one.calls]
    phases = _phases(group.marks, at, group.began, later[0][1])
    if key == "raytf":
        job.until(lambda: "restarted in" in job.output[said:], PATIENCE_SECONDS)
        words = re.findall(r"restarted in [\d.]+ s: (.*)", job.output[said:])[-1].split(", ")
        phases = {name: float(seconds) for name, _, seconds in (word.rpartition(" ") for word in words)}
    restored = re.search(r"restored step (\d+) from (\w+)", job.output[said:])
    # Without a word about it, the first call of one step tells from where the group went on.
    start = int(restored[1]) if restored else later[0][0] - 1
    return Recovery(
        key,
        round,
        fault,
        highest,
        group.began - at,
        later[0][1] - at,
        next(when for step, when in later if step > highest) - at,
        max(0, highest - start),
        restored[2] if restored else "checkpoint" if start else "nothing",
        sum(pid in there for pid in workers),
        phases,
        later[0][1] - at,
    )


def until_full(job: Job, said: int) -> None:
    """Wait until raytf says that all workers train, after so many characters of its output."""
    job.until(lambda: str(WORKERS) in (found[1] for found in IN_PLACE.finditer(job.output[said:])), PATIENCE_SECONDS)


def _in_place(
    round: int, fault: str, at: float, place: Place, there: set[int], job: Job, notes: Notes, said: int
) -> Recovery:
    """Return the recovery from a fault after which the others continued in place; the lost worker is not back yet."""
    found = IN_PLACE.search(job.output[said:])
    assert found is not None
    step, pause = int(found[3]), float(found[2])
    job.until(lambda: notes.groups() and notes.reached > step, PATIENCE_SECONDS)
    calls = [call for group in notes.groups() for call in group.calls]
    new = next(when for made, when in calls if made > step)
    redone = max(0, max((made for made, when in calls if when < new), default=step) - step)
    reused = sum(process.pid in there for process in place.workers())
    phases = {"notice": max(0.0, new - at - pause), "meet and go on": pause}
    took = new - at
    return Recovery("raytf", round, fault, step, took, took, took, redone, "their memory", reused, phases, took)


def _phases(marks: list[tuple[str, float]], at: float, began: float, first: float) -> dict[str, float]:
    """Return a peer's records of the parts of its restart; a mark is made at the end of each part."""
    found, last = {}, at
    for name, when in [*marks, ("build", began), ("first step", first)]:
        if when >= last and "=" not in name:
            found[name], last = when - last, when
    return found


def measure(
    key: str,
    program: Program,
    round: int,
    faults: list[str],
    arguments: Arguments,
    folder: Path,
    data: Path,
    found: list[Recovery],
) -> None:
    """Measure one run with all its faults; each recovery is added to the list.

    Raises:
        AssertionError: it did not recover in time.
        RuntimeError: it did not start.
    """
    run = f"{key}-{round}"
    draw = random.Random(f"recovery {arguments.seed} {run}")
    with started(program, run, data, folder, arguments.own_ray) as (place, job, notes):
        for fault in faults:
            job.until(lambda: notes.groups() and notes.groups()[-1].calls, PATIENCE_SECONDS)
            pause = time.monotonic() + draw.uniform(*arguments.gap)
            job.until(lambda until=pause: time.monotonic() >= until, PATIENCE_SECONDS)
            found.append(recover(key, round, fault, place, job, notes, draw))
            print(describe(found[-1]), flush=True)


def describe(recovery: Recovery) -> str:
    """Return one fault as a line."""
    return (
        f"{recovery.program:>6} {recovery.fault:7} at {recovery.step:6}: new group {recovery.group_seconds:5.1f} s, "
        f"first step {recovery.first_seconds:5.1f} s, new step {recovery.new_seconds:5.1f} s, {recovery.redone:4} "
        f"redone, from {recovery.source}, {recovery.reused} processes were there before; "
        + ", ".join(f"{name} {seconds:.1f}" for name, seconds in recovery.phases.items())
    )


def fill(report: harness.Report, found: list[Recovery], named: dict[str, Program]) -> None:
    """Add the results to the report as rows."""
    for fault in FAULTS:
        ours = [r for r in found if (r.program, r.fault) == ("raytf", fault)]
        for key, program in named.items():
            theirs = [r for r in found if (r.program, r.fault) == (key, fault)]
            if key != "raytf" and ours and theirs:
                pairs = paired(ours, theirs)
                report.comparisons.append(
                    harness.Comparison(
                        f"{fault} lost, seconds to a new step" if fault == "worker" else f"{fault}, to a new step",
                        program.name,
                        "s",
                        [our for our, _ in pairs],
                        [their for _, their in pairs],
                        more_is_better=False,
                        goal=GOAL_RATIO if program.on_ray else None,
                    )
                )
    for key, program in named.items():
        for fault in FAULTS:
            rows = [r for r in found if (r.program, r.fault) == (key, fault)]
            if rows:
                _read(report, f"{program.name}, {fault}", rows, key == "raytf" and fault == "worker")
    sources = [r.source for r in found if r.program == "raytf"]
    if sources:
        counts = {source: sources.count(source) for source in dict.fromkeys(sources)}
        report.notes.append("raytf went on from: " + ", ".join(f"{s} {n} times" for s, n in counts.items()))


def _read(report: harness.Report, name: str, rows: list[Recovery], is_goal: bool) -> None:
    seconds = [r.new_seconds for r in rows]
    for percent, goal in ((50, GOAL_P50), (95, GOAL_P95)):
        value = float(np.percentile(seconds, percent))
        quantity = f"P{percent} to a new step, n = {len(rows)}"
        report.readings.append(harness.Reading(name, quantity, "s", [value], at_most=goal if is_goal else None))
    parts: dict[str, Callable[[Recovery], float]] = {
        "to a new group": lambda r: r.group_seconds,
        "from there to its first step": lambda r: r.first_seconds - r.group_seconds,
        "steps done again": lambda r: r.new_seconds - r.first_seconds,
        "to full size": lambda r: r.full_seconds,
    }
    for quantity, part in parts.items():
        report.readings.append(harness.Reading(name, quantity, "s", [part(r) for r in rows]))
    report.readings.append(harness.Reading(name, "redone", "steps", [float(r.redone) for r in rows]))
    for phase in dict.fromkeys(name for r in rows for name in r.phases):
        values = [r.phases.get(phase, 0.0) for r in rows]
        report.readings.append(harness.Reading(name, f"phase: {phase}", "s", values))


def paired(ours: list[Recovery], theirs: list[Recovery]) -> list[tuple[float, float]]:
    """For each of a peer's faults the median of raytf's in the same round that stand beside it."""
    pairs = []
    for round in sorted({r.round for r in theirs}):
        beside = [r.new_seconds for r in ours if r.round == round]
        faults = [r.new_seconds for r in theirs if r.round == round]
        parts = np.array_split(beside, min(len(faults), len(beside))) if beside else []
        pairs += [(float(np.median(part)), their) for part, their in zip(parts, faults, strict=False)]
    return pairs


def main(arguments: Arguments) -> int:
    """Run all."""
    if arguments.quick:
        arguments = replace(arguments, gap=(15.0, 20.0))
    report = harness.Report("recovery", "Recovery: from a fault to the next new step, two workers, CNN")
    rounds = 1 if arguments.quick else arguments.pairs
    kills = 2 if arguments.quick else arguments.kills
    most = (1 if arguments.quick else rounds) if arguments.peer is None else arguments.peer
    wanted = dict(zip(FAULTS, (kills, arguments.raylets, arguments.frozen, arguments.stopped), strict=True))
    found: list[Recovery] = []
    named = programs(arguments)
    report.notes += [program.missing for program in named.values() if program.missing]
    named = {key: program for key, program in named.items() if not program.missing}
    if arguments.load:
        report.notes.append(f"{arguments.load} other programs computed all the while")
    with tempfile.TemporaryDirectory(prefix="raytf-recovery-") as name, loaded(arguments.load):
        data = write_data(Path(name))
        for round in range(rounds):
            for key in list(named)[:: 1 if round % 2 == 0 else -1]:
                limit = max(wanted.values()) if key == "raytf" else most
                known: Sequence[str] = FAULTS if named[key].on_ray else FAULTS[:1]
                if arguments.own_ray:
                    known = ("worker", "stopped")
                faults = [fault for fault in known for _ in range(min(wanted[fault], limit))]
                random.Random(f"order {arguments.seed}").shuffle(faults)
                if faults[round::rounds]:
                    try:
                        measure(key, named[key], round, faults[round::rounds], arguments, Path(name), data, found)
                    except (AssertionError, RuntimeError) as error:  # that, too, is a finding
                        report.notes.append(f"{named[key].name}, round {round + 1}: {str(error).splitlines()[0]}")
    fill(report, found, named)
    if arguments.recoveries is not None:
        arguments.recoveries.write_text(json.dumps([asdict(r) for r in found], indent=1))
    return report.finish(arguments.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster goes with this process
    sys.exit(main(tyro.cli(Arguments)))
