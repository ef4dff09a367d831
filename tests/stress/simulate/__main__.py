"""Simulates groups of workers under faults, with the code that decides in production.

    python -m tests.stress.simulate [--seeds 100000] [--first 0] [--page FILE.md]
    python -m tests.stress.simulate --seed 4711          # tells the story of one schedule
    python -m tests.stress.simulate --mutants            # how many schedules it takes to find mistakes made on purpose
    python -m tests.stress.simulate --large 1000         # what a death of one of 1,000 workers costs the driver

The clock, the network and the processes are made up, in one thread, and drawn from the schedule's seed, so that a
failure happens again with the same seed. What it finds is told in as few faults as it needs.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

from tests.stress.simulate import page, processes
from tests.stress.simulate.mutants import MUTANTS

#: Schedules that a process runs before it tells of them.
_AT_ONCE = 100


@dataclass(frozen=True)
class Arguments:
    """Simulate groups of workers under faults."""

    seeds: int = 1000
    """Schedules to run."""
    first: int = 0
    """Seed of the first one."""
    seed: int | None = None
    """Tell the story of this schedule."""
    mutants: bool = False
    """Look for mistakes that are made on purpose."""
    large: int | None = None
    """Tell what a death in a group of so many workers costs the driver."""
    processes: int = os.cpu_count() or 1
    """Processes that simulate."""
    page: Path | None = None
    """Write a page about all of it, mutants included."""


def main(arguments: Arguments) -> int:
    """Run schedules, and tell what was found; returns how many violations and missed mutants there are."""
    if arguments.seed is not None:
        return _tell(arguments.seed)
    if arguments.large is not None:
        print(_large(arguments.large))
        return 0
    found = {} if not (arguments.mutants or arguments.page) else _mutants(arguments.processes)
    missed = sum(seed is None for seed in found.values())
    if arguments.mutants:
        return missed
    totals = _schedules(arguments)
    print("\n".join(totals.lines()), flush=True)
    for seed in totals.violations[:3]:
        _tell(seed)
    if arguments.page is not None:
        arguments.page.write_text(page.page(totals, found, _large(1000), _orders()))
    return len(totals.violations) + missed


def _schedules(arguments: Arguments) -> page.Totals:
    totals, began = page.Totals(), time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    parts = [seeds[n : n + _AT_ONCE] for n in range(0, len(seeds), _AT_ONCE)]
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for part in pool.imap_unordered(processes.run, parts):
            totals.add(part)
    totals.wall_seconds, totals.processes = time.monotonic() - began, arguments.processes
    return totals


def _tell(seed: int) -> int:
    from tests.stress.simulate.schedule import minimized, simulate

    outcome = simulate(seed)
    faults = minimized(seed, outcome.violation) if outcome.violation else None
    for seconds, text in simulate(seed, faults, tells=True).story:
        print(f"t={seconds:.2f} {text}")
    return bool(outcome.violation)


def _large(count: int) -> str:
    from tests.stress.simulate import large  # mutants must be loaded before what it imports

    return large.tell(count)


def _orders() -> str:
    from tests.stress.simulate import exhaustive

    return exhaustive.tell(exhaustive.Arguments())


def _mutants(count: int) -> dict[str, int | None]:
    """Return the seed of the first schedule that finds each mistake; None for one that is not found."""
    found = dict(_found(count))
    for name in MUTANTS:
        print(f"{'not found' if found[name] is None else found[name]!s:>9}  {name}", flush=True)
    return {name: found[name] for name in MUTANTS}


def _found(count: int) -> Iterator[tuple[str, int | None]]:
    with multiprocessing.get_context("spawn").Pool(count, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(processes.find, MUTANTS, chunksize=1)


if __name__ == "__main__":
    sys.exit(min(1, main(tyro.cli(Arguments))))
