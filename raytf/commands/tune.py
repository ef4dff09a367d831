"""`raytf tune JOB`: try values of a job's flags, each in a separate run, and keep the best."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro
from annotated_types import Ge

from raytf.config.objective import MetricObjective
from raytf.config.setting import Rest
from raytf.config.terminal_text import say
from raytf.errors import ConfigError, RaytfError
from raytf.runs.status import number_text


@dataclass(frozen=True)
class Tune:
    """Try values of a job's flags, each in a separate run, and keep the best:
    raytf tune jobs/mnist.py --search 'learning_rate=loguniform(1e-4,1e-1)' --trials 8 -- --validation-share 0.1

    The same command continues where it stopped. Flags after `--` are flags of the job for all trials.
    """  # noqa: D415

    job: tyro.conf.Positional[tuple[str, ...]] = ()
    """The job's file, such as jobs/mnist.py."""
    search: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """FLAG=KIND(VALUES), once for each flag: uniform(LOW,HIGH), loguniform(LOW,HIGH), quniform(LOW,HIGH,STEP),
    randint(LOW,HIGH) without HIGH itself, choice(A,B,...), or grid(A,B,...), whose points are tried one after another.
    FLAG is any flag of the job or of raytf."""
    trials: Annotated[int | None, Ge(1)] = None
    """Number of trials; by default all points of a grid, otherwise 8. A later command can ask for more."""
    metric: str = "val_loss"
    """A metric at the end of an epoch; use max:METRIC or min:METRIC if its name does not imply which is better."""
    scheduler: Literal["none", "asha"] = "none"
    """asha (asynchronous successive halving) stops a trial early if others were better after as many epochs."""
    grace_epochs: Annotated[int, Ge(1)] = 1
    """Epochs before asha may stop a trial."""
    reduction_factor: Annotated[int, Ge(2)] = 3
    """asha keeps one in this many trials at each comparison; the next comes after this many times as many epochs."""
    parallel: Annotated[int | None, Ge(1)] = None
    """Number of concurrent trials; by default as many as fit into the cluster with all their workers."""
    name: str = "tune"
    """Name of the search: the folder of its runs in the storage."""
    storage: str = "~/raytf-runs"
    """Where the search is kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""
    tune_seed: Annotated[int, Ge(0)] = 0
    """Seed for the choice of values; the seed of the trials is the job's --seed."""
    try_default: bool = False
    """Use the job's own values in the first trial, for comparison."""
    retry_failed: bool = False
    """Start failed trials again."""
    flags: Annotated[str, tyro.conf.arg(metavar="TEXT"), Rest("[-- FLAGS OF THE JOB]")] = ""
    """Flags of the job for all trials, as one text for a shell; passing them after `--` is easier."""


def main(flags: Tune) -> None:
    """Run the command."""
    from raytf.commands._table import show
    from raytf.config.train_config import TrainConfig
    from raytf.tune import tuner

    if len(flags.job) != 1:
        what = "No job given" if not flags.job else f"{' '.join(flags.job[1:])!r}: only one job is allowed"
        raise ConfigError(f"{what}. Expected: raytf tune jobs/mnist.py --search 'learning_rate=loguniform(1e-4,1e-1)'")
    TrainConfig.of(run=flags.name, storage=flags.storage).check()
    try:
        goal = MetricObjective.of(flags.metric)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--keep-best", "--metric")) from None
    search = tuner.Search(
        job=flags.job[0],
        texts=flags.search,
        name=flags.name,
        storage=flags.storage,
        goal=goal,
        trials=flags.trials,
        fixed=_fixed(flags.flags),
        scheduler=flags.scheduler,
        grace_epochs=flags.grace_epochs,
        reduction_factor=flags.reduction_factor,
        parallel=flags.parallel,
        seed=flags.tune_seed,
        try_default=flags.try_default,
        retry_failed=flags.retry_failed,
    )
    board, best, copy = tuner.run(search, lambda message: say(message))
    show(board.columns(), board.cells())
    if best is None:
        raise RaytfError(f"no trial has finished. {_first_reason(board)}Repeat the command with --retry-failed.")
    if goal.metric.startswith("test_"):
        say(f"note: {goal.metric} selected the trial, so it does not measure how the model does on new data")
    say(f"best: trial-{best.number:03d}, {goal.metric} {number_text(best.value)}")
    say("flags: " + shlex.join(tuner.flags(board.rows[best.number].parameters)))
    say(f"its run: {copy.locate('')}")


def _fixed(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        what = str(error)
        raise ConfigError(
            f"--flags {text!r}: {what[0].lower()}{what[1:]}. Expected flags of the job in shell syntax, with every "
            "quote closed, or pass them after `--`."
        ) from None


def _first_reason(board: object) -> str:
    whys = [row.why for row in board.rows if row.why]  # type: ignore[attr-defined]
    return f"The first reason: {whys[0]} " if whys else ""
