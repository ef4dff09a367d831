"""Measures how much of its time a run spends on new steps under faults: raytf and Ray Train's TensorflowTrainer.

    python -m benchmarks.recovery.goodput                    # 20 minutes of faults, 3 of spot instances, for each
    python -m benchmarks.recovery.goodput --quick

Both train the CNN of jobs/mnist.py on the same data with 1 to 3 workers, on an elastic cluster of this machine: a node
of one CPU for each worker, and a head. The same things happen at the same moments to both, whatever they make of it:

- *faults*: drawn from a seed, one every 60 to 120 s: SIGKILL of a worker, of a node, or a notice for a node which goes
  15 s later. A node is replaced: another one is started 5 to 20 s after its end. Two nodes.
- *spot*: what happened to one user's spot instances on AWS, in scaled time (traces/README.md): one to three nodes,
  which have their two minutes of notice, scaled as well.

Both look for other numbers of workers every 10 s, since a minute, the default of both, is long for faults a minute
apart and for scaled time. raytf has its defaults beside that. Ray's trainer saves as often as is best for so many
drawn faults (the spot trace's are another number), by Young's and Daly's formula, from the cost of a checkpoint that it
measures itself, and once more where Ray tells it of a notice, as Ray's guide has it.

Goodput is the share of the wall time that the new steps would take undisturbed: each counts as long as the median step
with the same number of workers. The clock of a part begins while all its workers train. raytf's ledger says which share
of the time went into new steps; the same share is taken from the steps' own times, so that the two can be compared.
"""

from __future__ import annotations

import dataclasses
import itertools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tyro

from benchmarks import harness
from benchmarks.recovery import fault_trace
from benchmarks.recovery.disturbed import Group, Notes, Program, write_data
from benchmarks.recovery.fault_play import Account, Played, Player, account, steady
from benchmarks.recovery.fault_trace import Trace
from raytf.runs import ledger, timeline
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Job
from raytf.testing.processes import environment

PEER = "stock Ray, interval checkpoints"
#: The least goodput of raytf under drawn faults.
GOAL = 0.92
#: Seconds of training with all workers before the clock of a part begins, and how long to wait for that.
SETTLE_SECONDS, PATIENCE_SECONDS = 5.0, 300.0
#: A run that has not come to have all workers by then is measured as it is; the second is of a quick run.
FULL_SECONDS, FULL_QUICK_SECONDS = 90.0, 8.0
#: Seconds in which the ledger is on storage.
LEDGER_SECONDS = 4.0


@dataclass(frozen=True)
class Arguments:
    """Measure goodput under faults."""

    quick: bool = False
    """45 s of faults every 12 to 18 s, no spot instances."""
    pairs: int = 5
    """Equal parts into which the time under faults is cut; each gives a pair."""
    minutes: float = 20.0
    """Length of the faults."""
    replay_minutes: float = 3.0
    """Length of the spot instances' trace."""
    gap: tuple[float, float] = (60.0, 120.0)
    """Least and most seconds between two faults."""
    delay: tuple[float, float] = (5.0, 20.0)
    """Least and most seconds until a node is replaced."""
    notice: float = 15.0
    """Seconds from a drawn notice to the end of its node."""
    resize_every_seconds: float = 10.0
    """Least time between two planned changes of the number of workers."""
    seed: int = 0
    """Of the faults."""
    price: float = 0.526
    """Dollars for a node and hour: by default those of a g4dn.xlarge on demand in us-east-1."""
    only: tuple[str, ...] = ()
    """Programs to run: raytf, stock. By default both."""
    json: Path | None = None
    """Write the report here too."""


@dataclass(frozen=True)
class Part:
    """The result of a program under one trace; `ledger` is the share in raytf's own ledger, None for its peer."""

    name: str
    trace: Trace
    played: Played
    whole: Account
    pieces: list[Account]
    ledger: float | None
    groups: int


def programs(arguments: Arguments) -> dict[str, Program]:
    both = ("--workers", "1:3", "--resize-every-seconds", str(arguments.resize_every_seconds))
    mean = str(statistics.mean(arguments.gap))
    stock = ("--fault-seconds", mean, "--ask-every-steps", "20")
    found = {
        "raytf": Program("raytf", "recovery/disturbed_job.py", both),
        "stock": Program(PEER, "peers/stock_ray.py", both + stock),
    }
    return {key: program for key, program in found.items() if not arguments.only or key in arguments.only}


def traces(arguments: Arguments) -> dict[str, Trace]:
    """Return the traces to play, by name."""
    counts = fault_trace.read(fault_trace.SPOT_TRACE)
    minutes, replay = arguments.minutes * 60, arguments.replay_minutes * 60
    found = {
        f"faults every {arguments.gap[0]:g}-{arguments.gap[1]:g} s": fault_trace.drawn(
            arguments.seed, minutes, arguments.gap, arguments.delay, arguments.notice
        ),
        "spot trace": fault_trace.replayed(counts, replay, arguments.seed) if replay else None,
    }
    return {name: trace for name, trace in found.items() if trace is not None and trace.seconds}


def run(key: str, program: Program, arguments: Arguments, folder: Path, data: Path) -> tuple[list[Part], Notes]:
    """Play all traces to a program, one after the other."""
    notes, played = Notes(folder / f"{key}.notes"), []
    with ElasticCluster() as cluster:
        player = Player(cluster)
        player.resize(next(iter(traces(arguments).values())).nodes)
        command = program.command(key, data, folder)
        settings = environment(**cluster.env)
        with Job(command, folder / f"{key}.log", settings, folder=harness.ROOT) as job:
            for name, trace in traces(arguments).items():
                player.resize(trace.nodes)
                _get_ready(job, notes, trace.nodes, FULL_QUICK_SECONDS if arguments.quick else FULL_SECONDS)
                print(f"{program.name}, {name}:", flush=True)
                played.append((name, trace, player.play(trace, lambda: _check(job))))
                print(*played[-1][2].log, sep="\n", flush=True)
            time.sleep(LEDGER_SECONDS)
    groups = notes.groups()
    step_seconds = steady(groups)
    print("seconds of a step: " + ", ".join(f"{w} workers {s:.4f}" for w, s in sorted(step_seconds.items())))
    print("marks: " + ", ".join(what for what, _ in notes.all_marks if "=" in what))
    shares = _ledger_shares(folder / key) if key == "raytf" else lambda begin, end: None
    return [
        _part(name, trace, done, groups, step_seconds, shares, arguments.pairs if name.startswith("faults") else 1)
        for name, trace, done in played
    ], notes


def _part(
    name: str,
    trace: Trace,
    played: Played,
    groups: list[Group],
    step_seconds: dict[int, float],
    shares: Callable[[float, float], float | None],
    pieces: int,
) -> Part:
    begin, end = played.began, played.began + played.seconds
    edges = [begin + (end - begin) * i / pieces for i in range(pieces + 1)]
    return Part(
        name,
        trace,
        played,
        account(groups, begin, end, step_seconds),
        [account(groups, a, b, step_seconds) for a, b in itertools.pairwise(edges)],
        shares(begin, end),
        sum(begin <= group.began < end for group in groups),
    )


def _check(job: Job) -> None:
    if not job.is_running:
        raise RuntimeError(f"the job ended:\n{job.output[-5000:]}")


def _get_ready(job: Job, notes: Notes, workers: int, patience: float) -> None:
    """Wait until a group of this many workers has trained for a while."""
    job.until(lambda: notes.groups() and notes.groups()[-1].calls, PATIENCE_SECONDS)
    end = time.monotonic() + patience

    def is_full() -> bool:
        group = notes.groups()[-1]
        settled = bool(group.calls) and time.monotonic() - group.calls[0][1] > SETTLE_SECONDS
        return (settled and group.workers == workers) or time.monotonic() > end

    job.until(is_full, PATIENCE_SECONDS)


def _ledger_shares(run: Path) -> Callable[[float, float], float]:
    """Return a function that finds the share of new steps in raytf's ledger between two moments of the monotonic
    clock."""
    spans, offset = timeline.timeline(ledger.read(Storage(str(run)))), time.time() - time.monotonic()

    def share(begin: float, end: float) -> float:
        begin, end = begin + offset, end + offset
        inside = [s for s in spans if s.end > begin and s.begin < end]
        cut = [dataclasses.replace(s, begin=max(s.begin, begin), end=min(s.end, end)) for s in inside]
        return timeline.goodput(timeline.account(cut))

    return share


def fill(report: harness.Report, ours: list[Part], theirs: list[Part], price: float) -> None:
    """Add the results to the report as rows."""
    for our, their in zip(ours, theirs, strict=bool(ours and theirs)):
        pieces = list(zip(our.pieces, their.pieces, strict=True))

        def compare(what: str, unit: str, values: list[tuple[float, float]], more: bool = True, name: str = our.name):
            # A part in which nothing was done has no ratio; the whole has.
            known = [(a, b) for a, b in values if a > 0 and b > 0]
            if len(known) < len(values):
                left = f"{len(values) - len(known)} of {len(values)} pairs are left out: one side made nothing new"
                report.notes.append(f"{name}: {what}: {left}")
            if known:
                a, b = [a for a, _ in known], [b for _, b in known]
                report.comparisons.append(harness.Comparison(f"{name}: {what}", PEER, unit, a, b, more))

        if len(pieces) > 1:
            compare("goodput, by parts", "share", [(a.goodput, b.goodput) for a, b in pieces])
        compare("goodput", "share", [(our.whole.goodput, their.whole.goodput)])
        compare("new samples", "1/s", [(our.whole.samples_per_second, their.whole.samples_per_second)])
        costs = [part.whole.cost(part.played.node_seconds, price) if part.whole.new else 0.0 for part in (our, their)]
        compare("cost of 1 M new samples", "$", [(costs[0], costs[1])], more=False)
    for name, parts in (("raytf", ours), (PEER, theirs)):
        for part in parts:
            values = {
                ("goodput", "share"): part.whole.goodput,
                ("time in new steps, outside", "share"): part.whole.training,
                ("time in new steps, ledger", "share"): part.ledger,
                ("new", "steps"): part.whole.new,
                ("done again", "steps"): part.whole.redone,
                ("faults that hit", ""): part.played.faults,
                ("groups started", ""): part.groups,
                ("paid", "node-seconds"): part.played.node_seconds,
            }
            for (quantity, unit), value in values.items():
                if value is not None:
                    has_goal = quantity == "goodput" and name == "raytf" and part.name.startswith("faults")
                    goal = GOAL if has_goal else None
                    reading = harness.Reading(f"{name}, {part.name}", quantity, unit, [float(value)], at_least=goal)
                    report.readings.append(reading)


def main(arguments: Arguments) -> int:
    """Run all."""
    if arguments.quick:
        arguments = dataclasses.replace(
            arguments, minutes=0.75, replay_minutes=0.0, gap=(12.0, 18.0), delay=(2.0, 4.0), notice=6.0, pairs=1
        )
    report = harness.Report("goodput", "Goodput under faults, 1 to 3 workers, CNN")
    found: dict[str, list[Part]] = {}
    with tempfile.TemporaryDirectory(prefix="raytf-goodput-") as name:
        data = write_data(Path(name))
        for key, program in programs(arguments).items():
            found[key], notes = run(key, program, arguments, Path(name), data)
            chosen = [what for what, _ in notes.all_marks if what.startswith("every=")]
            if chosen:
                every, cost = (part.partition("=")[2] for part in chosen[0].split(","))
                report.notes.append(f"{program.name}: each {every} steps, since a checkpoint takes {cost} s")
    fill(report, found.get("raytf", []), found.get("stock", []), arguments.price)
    report.notes.append("one program after the other, each with the same things at the same moments; not in turns")
    report.notes.append(f"cost: ${arguments.price:g} for a node and hour, from the order of a node to its end")
    return report.finish(arguments.json)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the clusters go with this process
    sys.exit(main(tyro.cli(Arguments)))
