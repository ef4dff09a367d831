"""Measures what digests of steps and audits cost an exact run: steps/s with them against those without.

    python -m benchmarks.step.digests --workers 1 2 --models mnist large --json cost.json

Processes and models are those of `benchmarks.step.exact`. One or two per cent are less than by what blocks of steps,
or two processes of one program, differ on a shared machine. So the kinds of steps are all in one process, take turns
after each call of a few steps, and a pair is made of many turns: of each kind the median. Each pair has processes of
its own. Audits are rare, so that what one costs is measured by itself: a call with an audit against those without, as
its share of the steps from one audit to the next.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import tyro

from benchmarks.harness import PAIRS, Report, rounds
from benchmarks.step import exact
from benchmarks.step.exact import AUDIT, AUDITED, CALL, EXACT, PLAIN, Workers

#: Of exact with digests against exact without, and with audits against without.
DIGESTS_GOAL, AUDITS_GOAL = 0.98, 0.99
#: What is measured of a block of steps.
KINDS = ("wall", "cpu")


@dataclass(frozen=True)
class Arguments:
    """Digests and audits against neither."""

    quick: bool = False
    """The model of jobs/mnist.py, one worker and two, two pairs of few turns."""
    workers: list[int] = field(default_factory=lambda: [1, 2])
    """Numbers of workers."""
    models: list[str] = field(default_factory=lambda: list(exact.MODELS))
    """Of mnist and large."""
    pairs: int = PAIRS
    """Pairs of numbers."""
    turns: int = 40
    """Of each kind of steps for one number, of a call each."""
    verbose: bool = False
    """Show what the workers print."""
    json: Path | None = None
    """Write the report here."""


def pair(workers: Workers, modes: Sequence[str], turns: int) -> dict[str, dict[str, float]]:
    """Return the seconds of a step of each mode, and of a step of a call with an audit if any has them: medians of the
    turns."""
    runs = {mode: partial(workers.run, mode, 1) for mode in modes}
    if AUDITED in modes:
        runs[AUDIT] = partial(workers.run, AUDITED, 1, AUDIT)
    found = rounds(turns, runs)
    return {mode: {kind: statistics.median(t[kind] for t in found[mode]) for kind in KINDS} for mode in found}


def with_audits(plain: dict[str, float], audited: dict[str, float], every: int) -> dict[str, float]:
    """Return the seconds of a step if one of so many has an audit.

    Args:
        plain: of a step without.
        audited: of a step of a call that has one.
        every: steps.
    """
    return {kind: plain[kind] + (audited[kind] - plain[kind]) * CALL / every for kind in KINDS}


def measure(name: str, count: int, arguments: Arguments, report: Report) -> None:
    """Measure the rows of a model and a number of workers."""
    from raytf.training.auditing import EVERY

    modes = [PLAIN, EXACT, *([AUDITED] if count > 1 else [])]
    pairs, weights = [], 0
    for _ in range(arguments.pairs):
        workers = Workers(count, name, modes, arguments.verbose)
        try:
            weights = workers.answer()["weights"]
            pairs.append(pair(workers, modes, arguments.turns))
        finally:
            workers.end()
    what = exact.described(name, weights, count)
    digested, plain = ([each[mode] for each in pairs] for mode in (EXACT, PLAIN))
    report.comparisons += exact.compared(f"{what}, with digests", PLAIN, digested, plain, DIGESTS_GOAL)
    if count > 1:
        audited = [with_audits(each[AUDITED], each[AUDIT], EVERY) for each in pairs]
        report.comparisons += exact.compared(f"{what}, with audits", EXACT, audited, digested, AUDITS_GOAL)


def main(arguments: Arguments) -> int:
    if arguments.quick:
        arguments = dataclasses.replace(arguments, workers=[1, 2], models=["mnist"], pairs=2, turns=4)
    report = Report("digest_cost", "Digests and audits against neither")
    for count in arguments.workers:
        for name in arguments.models:
            measure(name, count, arguments, report)
    report.notes.append(
        f"Batch {exact.BATCH}, {exact.SHARDS} logical shards, one thread within operations, calls of {CALL} steps; "
        f"each number is a median of {arguments.turns} calls. One worker has no audits."
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main(tyro.cli(Arguments)))
