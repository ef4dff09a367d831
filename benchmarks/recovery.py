"""How long a run stands still after a fault: raytf and Ray Train's TensorflowTrainer side by side.

    python benchmarks/recovery.py --kills 20 --raylets 5 --frozen 5

Both train the network of jobs/mnist.py with two workers on an elastic cluster of this machine: two nodes of one CPU,
one spare node, and a head. At random moments a worker is killed (SIGKILL), or a node's raylet is, or all of a node is
frozen (SIGSTOP). A lost node is replaced by a new one once the run has recovered. The peer has Ray's default settings
and saves at the end of each epoch, as in Ray's tutorial; raytf has its own defaults. Warm processes that raytf keeps
are not waited for: a fault may come before they are ready.

What is measured is the time from the fault to the next *new* step, one above every step that was made before it. So it
holds what was lost: steps since the last checkpoint are done again first.
"""

from __future__ import annotations

import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro

from raytf.testing import ElasticCluster, Job, Node
from raytf.testing.processes import environment

JOBS = {name: Path(__file__).with_name(f"recovery_{file}.py") for name, file in (("raytf", "job"), ("stock", "stock"))}
FAULTS = ("worker", "raylet", "frozen")
WORKERS = 2
#: P50 of the seconds to a new step, how many times the peer's that is, and the median of steps redone.
GOAL_SECONDS, GOAL_RATIO, GOAL_REDONE = 10.0, 3.0, 10
#: A run that has made no new step after so many seconds has not recovered.
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Arguments:
    """Measure how long a run stands still after a fault."""

    kills: int = 20
    """SIGKILLs to one of two workers."""
    raylets: int = 5
    """SIGKILLs to the raylet of a node with a worker."""
    frozen: int = 5
    """SIGSTOPs to all processes of a node with a worker."""
    stock: int | None = None
    """At most so many of each for TensorflowTrainer; 0 leaves it out. By default as many as for raytf."""
    rounds: int = 1
    """Parts in which the faults come, raytf and its peer by turns, so that both see the same machine."""
    gap: tuple[float, float] = (15.0, 45.0)
    """Seconds of training between two faults: at least, and at most."""
    seed: int = 0
    """Of the order and the moments of the faults."""
    data: str = "auto"
    """As in jobs/mnist.py: auto, mnist, digits, or a path of IDX files."""
    flags: str = ""
    """More flags for raytf's job, parted by spaces, such as --no-warm-workers."""
    json: Path | None = None
    """Write all results here too."""


@dataclass(frozen=True)
class Recovery:
    """What became of one fault; seconds count from it.

    Attributes:
        peer: raytf or stock.
        fault: of `FAULTS`.
        step: the latest that was made before the group stopped.
        group_seconds: until the new group was ready to restore.
        first_seconds: until it had made its first step or steps.
        new_seconds: until it had made a new one.
        redone: steps that were made a second time.
        source: where the state came from: memory, checkpoint, or nothing.
        reused: processes of the new group that had been there before the fault.
        phases: seconds of each part of the restart, as raytf says them, counted from the last sign of life.
    """

    peer: str
    fault: str
    step: int
    group_seconds: float
    first_seconds: float
    new_seconds: float
    redone: int
    source: str
    reused: int
    phases: dict[str, float]


class Notes:
    """The file in which a job notes its steps: parts of (step, seconds), one for each group that began."""

    def __init__(self, path: Path):
        self._path = path
        path.touch()

    def groups(self) -> list[tuple[float, list[tuple[int, float]]]]:
        """For each group when it began, and its calls: the step that each ended at, and when."""
        found: list[tuple[float, list[tuple[int, float]]]] = []
        for line in self._path.read_text().splitlines():
            what, _, when = line.partition(" ")
            if what == "begin":
                found.append((float(when), []))
            else:
                found[-1][1].append((int(what), float(when)))
        return found

    def reached(self) -> int:
        """The highest step of all groups; 0 before the first."""
        return max((step for _, calls in self.groups() for step, _ in calls), default=0)


def inject(fault: str, cluster: ElasticCluster, draw: random.Random) -> tuple[Node | None, float]:
    """Do it to a random worker, or to the node of one; that node where it has to be replaced, and when it was done."""
    if fault == "worker":
        worker = draw.choice(cluster.workers())
        now = time.monotonic()
        worker.kill()
        return None, now
    node = draw.choice([node for node in cluster.nodes if node.workers()])
    if fault == "raylet":
        raylet = node.raylet()
        assert raylet is not None
        now = time.monotonic()
        raylet.kill()
        return node, now
    frozen = node.processes()
    now = time.monotonic()
    for process in frozen:
        process.suspend()
    return node, now


def recover(peer: str, fault: str, cluster: ElasticCluster, job: Job, notes: Notes, draw: random.Random) -> Recovery:
    """Inject a fault, wait for a new step and put the cluster right again.

    Raises:
        AssertionError: there is none within the patience; with the job's output.
    """
    groups, said = len(notes.groups()), len(job.output)
    there = {process.pid for node in cluster.nodes for process in node.processes()}
    node, at = inject(fault, cluster, draw)
    job.until(lambda: len(notes.groups()) > groups, PATIENCE_SECONDS)
    highest = max(step for _, calls in notes.groups()[:groups] for step, _ in calls)
    job.until(lambda: notes.reached() > highest, PATIENCE_SECONDS)
    workers = [process.pid for one in cluster.nodes if one is not node for process in one.workers()]
    if node is not None:
        node.kill()
        cluster.add_node()
    began, calls = notes.groups()[groups]
    later = [call for _, calls in notes.groups()[groups:] for call in calls]
    phases: dict[str, float] = {}
    if peer == "raytf":
        job.until(lambda: "restarted in" in job.output[said:], PATIENCE_SECONDS)
        words = re.findall(r"restarted in [\d.]+ s: (.*)", job.output[said:])[-1].split(", ")
        phases = {name: float(seconds) for name, _, seconds in (word.rpartition(" ") for word in words)}
    restored = re.search(r"restored step (\d+) from (\w+)", job.output[said:])
    # Without a word about it, the first call of one step tells from where the group went on.
    start = int(restored[1]) if restored else calls[0][0] - 1
    return Recovery(
        peer,
        fault,
        highest,
        began - at,
        calls[0][1] - at,
        next(when for step, when in later if step > highest) - at,
        max(0, highest - start),
        restored[2] if restored else "checkpoint" if start else "nothing",
        sum(pid in there for pid in workers),
        phases,
    )


def measure(peer: str, run: str, faults: list[str], arguments: Arguments, folder: Path) -> list[Recovery]:
    """One run with all its faults."""
    draw = random.Random(f"recovery {arguments.seed} {run}")
    found: list[Recovery] = []
    notes = Notes(folder / f"{run}.notes")
    # The peer's workers read the data themselves, in another folder.
    data = str(Path(arguments.data).resolve()) if Path(arguments.data).exists() else arguments.data
    command = [sys.executable, str(JOBS[peer]), "--notes", str(folder / f"{run}.notes"), "--data", data]
    command += ["--storage", str(folder), "--run", run, "--workers", str(WORKERS), "--steps", "10000000"]
    command += arguments.flags.split() if peer == "raytf" else []
    with (
        ElasticCluster(nodes=WORKERS + 1) as cluster,
        Job(command, folder / f"{run}.log", environment(**cluster.env), folder=Path.cwd()) as job,
    ):
        for fault in faults:
            job.until(lambda: notes.groups() and notes.groups()[-1][1], PATIENCE_SECONDS)
            pause = time.monotonic() + draw.uniform(*arguments.gap)
            job.until(lambda until=pause: time.monotonic() >= until, PATIENCE_SECONDS)
            found.append(recover(peer, fault, cluster, job, notes, draw))
            print(describe(found[-1]), flush=True)
    return found


def describe(recovery: Recovery) -> str:
    """One fault as a line."""
    return (
        f"{recovery.peer:>6} {recovery.fault:7} at step {recovery.step:6}: new group {recovery.group_seconds:5.1f} s, "
        f"first step {recovery.first_seconds:5.1f} s, new step {recovery.new_seconds:5.1f} s, {recovery.redone:4} "
        f"steps redone, from {recovery.source}, {recovery.reused} processes were there before"
    )


def table(found: list[Recovery]) -> str:
    """Seconds to a new step for each fault, and of what they consist."""

    def values(peer: str, fault: str, value: Callable[[Recovery], float]) -> list[float]:
        return [value(r) for r in found if (r.peer, r.fault) == (peer, fault)]

    def percentiles(numbers: list[float]) -> str:
        return " / ".join(f"{np.percentile(numbers, p):.1f}" for p in (50, 95)) if numbers else "-"

    parts: dict[str, Callable[[Recovery], float]] = {
        "to a new group": lambda r: r.group_seconds,
        "to its first step": lambda r: r.first_seconds - r.group_seconds,
        "steps done again": lambda r: r.new_seconds - r.first_seconds,
    }
    lines = ["| fault | n | raytf P50 / P95 s | stock P50 / P95 s | ratio of P50 | raytf redone | stock redone |"]
    lines += ["| --- | --- | --- | --- | --- | --- | --- |"]
    for fault in FAULTS:
        ours, theirs = (values(peer, fault, lambda r: r.new_seconds) for peer in JOBS)
        again = [values(peer, fault, lambda r: r.redone) for peer in JOBS]
        if ours or theirs:
            lines.append(
                f"| {fault} | {len(ours)}, {len(theirs)} | {percentiles(ours)} | {percentiles(theirs)} | "
                + (f"{np.median(theirs) / np.median(ours):.1f}" if ours and theirs else "-")
                + " | "
                + " | ".join(f"{np.median(steps):.0f}" if steps else "-" for steps in again)
                + " |"
            )
    lines += ["", "| P50 seconds | " + " | ".join(parts) + " |", "| --- |" + " --- |" * len(parts)]
    for peer in JOBS:
        for fault in FAULTS:
            rows = [values(peer, fault, part) for part in parts.values()]
            if rows[0]:
                lines.append(f"| {peer}, {fault} | " + " | ".join(f"{np.median(row):.1f}" for row in rows) + " |")
    names = list(dict.fromkeys(name for r in found for name in r.phases))
    lines += ["", "| phases of raytf, P50 s | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for fault in FAULTS:
        if any(r.phases for r in found if r.fault == fault):
            medians = [np.median(values("raytf", fault, lambda r, n=name: r.phases.get(n, 0.0))) for name in names]
            lines.append(f"| {fault} | " + " | ".join(f"{median:.1f}" for median in medians) + " |")
    sources = Counter(r.source for r in found if r.peer == "raytf")
    lines += ["", "raytf went on from: " + ", ".join(f"{source} {count} times" for source, count in sources.items())]
    return "\n".join(lines)


def missed(found: list[Recovery]) -> list[str]:
    """Which goals raytf does not reach: a new step, few redone, nothing read from storage, sooner than its peer."""
    problems = []
    for fault in FAULTS:
        ours, theirs = ([r for r in found if (r.peer, r.fault) == (peer, fault)] for peer in JOBS)
        if not ours:
            continue
        seconds = float(np.median([r.new_seconds for r in ours]))
        if seconds > GOAL_SECONDS:
            problems.append(f"{fault}: {seconds:.1f} s to a new step, and not {GOAL_SECONDS:g}")
        if theirs and (ratio := float(np.median([r.new_seconds for r in theirs])) / seconds) < GOAL_RATIO:
            problems.append(f"{fault}: {ratio:.1f} times as fast as its peer, and not {GOAL_RATIO:g}")
        if np.median([r.redone for r in ours]) > GOAL_REDONE:
            problems.append(f"{fault}: more than {GOAL_REDONE} steps redone")
        if any(r.source != "memory" for r in ours):
            problems.append(f"{fault}: not all restores are from memory")
    return problems


def main(arguments: Arguments) -> int:
    """Run all; the exit code, 1 where a goal is missed."""
    began = time.monotonic()
    print(" ".join(["python", *sys.argv]), flush=True)
    print(f"load before: {psutil.getloadavg()[0]:.1f} on {psutil.cpu_count()} CPUs", flush=True)
    wanted = dict(zip(FAULTS, (arguments.kills, arguments.raylets, arguments.frozen), strict=True))
    found: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="raytf-recovery-") as name:
        for number in range(arguments.rounds):
            for peer in JOBS:
                limit = arguments.stock if peer == "stock" and arguments.stock is not None else max(wanted.values())
                faults = [fault for fault, count in wanted.items() for _ in range(min(count, limit))]
                random.Random(f"order {arguments.seed}").shuffle(faults)
                if faults[number :: arguments.rounds]:
                    run = f"{peer}-{number}"
                    found += measure(peer, run, faults[number :: arguments.rounds], arguments, Path(name))
    print(f"load after: {psutil.getloadavg()[0]:.1f}; {time.monotonic() - began:.0f} s\n\n{table(found)}")
    if arguments.json is not None:
        document: dict[str, Any] = {"arguments": sys.argv[1:], "recoveries": [asdict(r) for r in found]}
        arguments.json.write_text(json.dumps(document, indent=1))
    problems = missed(found)
    print("", *([f"missed: {problem}" for problem in problems] or ["all goals are reached"]), sep="\n")
    return int(bool(problems))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster goes with this process
    sys.exit(main(tyro.cli(Arguments)))
