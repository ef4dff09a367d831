"""`raytf replay RUN --step S`: compute a step of a run again, from the checkpoint before it, and compare."""

from __future__ import annotations

import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from annotated_types import Ge

from raytf.audit import step_replay
from raytf.audit.step_replay import NotedSteps, ReplayPlan, StepComparison
from raytf.commands._places import run_uri
from raytf.config.setting import Rest
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Replay:
    """Compute a step of a run again on this machine, from the nearest checkpoint before it, and compare every step from
    there with the run's records: raytf replay ~/raytf-runs/mnist --step 1234 -- python train.py

    Pass the command of the program that trained the run after `--`; commands recorded in the run's folder are never
    run. The run is not changed, and may still train. The exit code is 1 if a step differs or nothing can be compared.
    """  # noqa: D415

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    step: Annotated[int, Ge(1)]
    """The step to compute again, counted from 1."""
    workers: Annotated[int, Ge(1)] = 1
    """Number of workers that compute it; the number does not change the result."""
    dump: Path | None = None
    """Write the content of the step to this folder: its records with their losses (images as pictures), norms of
    gradients, and the weights before and after the step."""
    notebook: bool = False
    """Print Python code that loads the files of --dump."""
    program: Annotated[str, tyro.conf.arg(metavar="TEXT"), Rest("-- COMMAND ...")] = ""
    """The command of the program, as one text for a shell; passing it after `--` is easier."""


def main(flags: Replay) -> None:
    """Print the comparison, and exit with 1 if a step differs or nothing can be compared."""
    run, dump = Storage(run_uri(flags.run)), _folder(flags)
    noted = step_replay.read_noted(run)
    _check(run, noted, flags)
    words = step_replay.words_of(run, flags.program, f"raytf replay {shlex.quote(flags.run)} --step {flags.step}")
    with tempfile.TemporaryDirectory(prefix="raytf-replay-") as folder:
        begin = step_replay.seed_before(run, folder, flags.step)
        where = "the first step" if begin == 0 else f"the checkpoint of step {begin}"
        workers = "1 worker" if flags.workers == 1 else f"{flags.workers} workers"
        say(f"computing step {flags.step} of {run.locate('')} again, from {where}, with {workers}")
        again = step_replay.compute(words, ReplayPlan(run.uri, flags.step, flags.workers, folder, dump))
        comparison = step_replay.compare_steps(noted, step_replay.read_noted(again), range(begin + 1, flags.step + 1))
        is_equal = comparison.differs is None and comparison.same
        wrong = step_replay.not_computed(run, again, flags.step) if is_equal else ""
    for line in (*comparison_lines(comparison, begin, flags.step), *([wrong] if wrong else [])):
        say(line)
    for line in loaded(dump, flags.notebook) if dump else ():
        say(line)
    sys.exit(0 if comparison.is_same and not wrong else 1)


def loaded(dump: str, notebook: bool) -> list[str]:
    """Return lines that say where a dump is, or for a notebook the Python code that loads it."""
    if not notebook:
        return [f"the content of the step is in {dump}; records.csv lists the highest loss first"]
    return [
        "import csv, numpy",
        f"records, batch = list(csv.DictReader(open({dump + '/records.csv'!r}))), numpy.load({dump + '/batch.npz'!r})",
        f"before, after = numpy.load({dump + '/before.npz'!r}), numpy.load({dump + '/after.npz'!r})",
    ]


def _folder(flags: Replay) -> str:
    """Return the folder for the dump, or an empty text for none. Refuse a folder with other files."""
    if flags.dump is None:
        if flags.notebook:
            raise ConfigError("--notebook prints the code that loads a dump. Also pass --dump DIR.")
        return ""
    if flags.workers != 1:
        raise ConfigError(f"--dump with --workers {flags.workers}: a dump needs a single worker. Leave out --workers.")
    if flags.dump.exists() and (not flags.dump.is_dir() or any(flags.dump.iterdir())):
        raise ConfigError(f"--dump {flags.dump}: expected a folder that is empty or does not exist.")
    return str(flags.dump.absolute())


def comparison_lines(comparison: StepComparison, begin: int, end: int) -> list[str]:
    """Return the result for people, one line each.

    Args:
        begin: the step of the checkpoint at which the computation started.
        end: the last step that was computed again.
    """
    lines = []
    if comparison.differs is None and comparison.same:
        steps = f"step {end} is" if comparison.same == 1 else f"{comparison.same} steps, up to step {end}, are"
        lines.append(f"{steps} the same, bit for bit")
    elif comparison.differs is not None:
        difference = comparison.difference
        before = f"{comparison.same} steps after step {begin} are the same; " if comparison.same else ""
        assert difference is not None
        shards = ", ".join(map(str, difference.shards[:8])) or "none by its own digest"
        tensors = ", ".join(difference.tensors[:8]) or "not known"
        lines.append(f"{before}step {comparison.differs} differs from the run's records")
        lines.append(f"  shards: {shards}{' ...' * (len(difference.shards) > 8)}")
        lines.append(f"  tensors: {tensors}{' ...' * (len(difference.tensors) > 8)}")
    if comparison.unknown:
        steps = "1 step" if comparison.unknown == 1 else f"{comparison.unknown} steps"
        lines.append(f"{steps} cannot be compared bit by bit: {comparison.why}")
    if comparison.farthest is not None:
        at, run, here = comparison.farthest
        lines.append(f"  their losses differ, most in step {at}: {run:.9g} was recorded, {here:.9g} was computed")
    elif comparison.losses:
        losses = "the loss is" if comparison.losses == 1 else f"{comparison.losses} losses are"
        lines.append(f"  {losses} the same")
    return lines


def _check(run: Storage, noted: NotedSteps, flags: Replay) -> None:
    """Refuse a step that cannot be compared, before anything starts."""
    if not noted.losses:
        raise ConfigError(f"{run.locate('')} has no recorded steps yet. Expected the folder of a run, STORAGE/NAME.")
    last = max(noted.losses)
    if flags.step > last:
        raise ConfigError(
            f"--step {flags.step}: {run.locate('')} has recorded {last} steps. It records them with each save."
        )
    if noted.digests.of(flags.step) is None:
        say(
            f"the run has no digest of step {flags.step}, so losses are compared. Runs with float sums, with "
            "--no-digests or from an old raytf have no digests."
        )
