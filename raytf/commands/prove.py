"""`raytf prove RUN`: check that a run's records are consistent, and compute a share of its steps again."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from typing import Annotated

import annotated_types
import tyro

from raytf.audit import chain_check, step_replay
from raytf.audit.chain_check import Interval
from raytf.audit.step_replay import NotedSteps, ReplayPlan, compare_steps, read_noted
from raytf.commands import replay
from raytf.commands._places import run_uri
from raytf.config.setting import Rest
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Prove:
    """Check that a run's step log and its checkpoints are intact and consistent with each other. Then compute a random
    share of its steps again and compare every bit: raytf prove s3://bucket/runs/mnist -- python train.py

    Pass the command of the program that trained the run after `--`; commands recorded in the run's folder are never
    run. `--share 0` computes nothing and needs no program. The run's folder is never changed. The exit code is 1 if a
    check fails or no step can be computed again. `raytf verify` checks only the checkpoints.
    """  # noqa: D415

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    share: Annotated[float, annotated_types.Interval(ge=0, le=1)] = 0.01
    """Share of the steps to compute again, from 0 to 1, rounded up to whole intervals between two checkpoints. 0
    computes nothing."""
    workers: Annotated[int, annotated_types.Ge(1)] = 1
    """Number of workers that compute the steps; it does not change the result."""
    program: Annotated[str, tyro.conf.arg(metavar="TEXT"), Rest("-- COMMAND ...")] = ""
    """The command of the program, as one text for a shell; passing it after `--` is easier."""


def main(flags: Prove) -> None:
    """Print the findings, and exit with 1 if a check fails."""
    run = Storage(run_uri(flags.run))
    if not run.list(run_log.STEPS):
        raise ConfigError(f"{run.locate('')} has no recorded steps. Expected the folder of a run, STORAGE/NAME.")
    words = step_replay.words_of(run, flags.program, f"raytf prove {shlex.quote(flags.run)}") if flags.share else []
    report = chain_check.check(run)
    for line in (*report.problems, *report.notes):
        say(line)
    if report.problems:
        sys.exit(1)
    say(f"the records of {report.steps} steps and {len(report.checkpoints)} checkpoints are consistent")
    if not flags.share:
        return
    every = chain_check.intervals(report.checkpoints)
    if not report.has_digests or not every:
        why = "there is no checkpoint" if report.has_digests else "its last step has no digest"
        say(f"no step can be computed again: {why}")
        sys.exit(1)
    chosen = chain_check.draw(every, flags.share)
    computed = sum(len(interval.steps) for interval in chosen)
    say(f"computing {computed} of {report.steps} steps again, in whole intervals between two checkpoints")
    noted = read_noted(run)
    problems = [line for interval in chosen for line in _computed_again(run, noted, words, interval, flags.workers)]
    for line in problems:
        say(line)
    if problems:
        sys.exit(1)
    say(
        f"{computed} of {report.steps} steps were computed again, and all of their bits are the same. A forged or "
        "skipped step would have been detected with a probability of "
        f"{chain_check.chance(computed, report.steps):.1%}, "
        f"and at least one of ten such steps with {chain_check.chance(computed, report.steps, 10):.1%}"
    )


def _computed_again(run: Storage, noted: NotedSteps, words: list[str], interval: Interval, workers: int) -> list[str]:
    steps = interval.steps
    with tempfile.TemporaryDirectory(prefix="raytf-prove-") as folder:
        if interval.begin is not None and not step_replay.seed(run, folder, interval.begin):
            return [f"checkpoint {interval.begin} was deleted while this command ran"]
        say(f"computing steps {steps[0]} to {steps[-1]} again")
        again = step_replay.compute(words, ReplayPlan(run.uri, steps[-1], workers, folder))
        comparison = compare_steps(noted, read_noted(again), steps)
        if comparison.differs is not None or comparison.same != len(steps):
            return replay.comparison_lines(comparison, steps[0] - 1, steps[-1])
        wrong = step_replay.not_computed(run, again, steps[-1], interval.end)
    return [wrong] if wrong else []
