"""`raytf runs STORAGE`: list the runs of a storage."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import tyro

from raytf.commands._places import USUAL, answering
from raytf.commands._table import age_text, show, size_text
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.runs import inventory
from raytf.runs.run_state import Run
from raytf.runs.status import number_text
from raytf.storage import strict_json
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Runs:
    """List runs with their state, steps, metric, checkpoints, size and age; a search is one row."""

    storage: tyro.conf.Positional[str] = USUAL
    """Where runs are kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""
    json: bool = False
    """Print JSON instead of a table."""


def main(flags: Runs) -> None:
    """Print the runs."""
    storage = Storage(flags.storage)
    if storage.is_local and not os.path.isdir(storage.root) and storage.root != Storage(USUAL).root:
        raise ConfigError(f"there is no folder {storage.locate('')}. Expected a folder in which runs are kept.")
    storage = answering(flags.storage)
    runs = inventory.survey(storage, lambda message: say(message, file=sys.stderr))
    if flags.json:
        print(document(runs))
    elif runs:
        listing(runs, time.time())
    else:
        say(f"no runs in {storage.locate('')}")


def document(runs: Sequence[Run]) -> str:
    """Return runs as JSON."""
    return strict_json.dumps([row(run) for run in runs], indent=1)


def row(run: Run) -> dict[str, Any]:
    """Return a run as a JSON object."""
    return {name: value for name, value in asdict(run).items() if name not in ("epochs", "settings", "saves")}


def listing(runs: Sequence[Run], now: float) -> None:
    """Print runs as a table, with a column of problems if a run has any. A narrow terminal shows fewer columns.

    Args:
        now: the current time, in seconds since the epoch.
    """
    columns = ("run", "state", "step", "metric", "best", "last", "checkpoints", "size", "changed")
    damaged = ("problems",) if any(run.problems for run in runs) else ()
    rows = [(*_row(run, now), *("; ".join(run.problems) for _ in damaged)) for run in runs]
    show((*columns, *damaged), rows, dispensable=("checkpoints", "last", "size", "metric", "best"))


def _step(run: Run) -> str:
    if run.trials is not None:
        return f"{run.trials} trial{'' if run.trials == 1 else 's'}"
    if run.step is None:
        return "-"
    return f"{run.step}" if run.total in (None, run.step) else f"{run.step} of {run.total}"


def _best(run: Run) -> str:
    if run.best is None:
        return "-"
    return number_text(run.best) + ("" if run.epoch is None else f" (epoch {run.epoch + 1})")


def _row(run: Run, now: float) -> tuple[str, ...]:
    return (
        run.name,
        run.state,
        _step(run),
        run.metric or "-",
        _best(run),
        number_text(run.last),
        str(run.checkpoints),
        size_text(run.bytes),
        f"{age_text(now - run.modified)} ago",
    )
