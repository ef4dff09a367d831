"""`raytf runs STORAGE`: lists the runs of a storage."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass

import tyro

from raytf import inventory
from raytf.commands.table import age_text, show, size_text
from raytf.inventory import Run
from raytf.storage import PREFLIGHT_SECONDS, Storage, within
from raytf.terminal import say


@dataclass(frozen=True)
class Runs:
    """List runs with their state, steps, metric, checkpoints, size and age."""

    storage: tyro.conf.Positional[str] = "~/raytf-runs"
    """Where runs are kept: a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""
    json: bool = False
    """Print JSON instead of a table."""


def main(flags: Runs) -> None:
    """Print the runs."""
    storage = Storage(flags.storage)
    within(PREFLIGHT_SECONDS, lambda: _look(storage), storage.locate(""))
    found = inventory.survey(storage, lambda message: say(message, file=sys.stderr))
    now = time.time()
    if flags.json:
        print(json.dumps([asdict(run) | {"state": run.state.value} for run in found], indent=1))
    elif found:
        columns = ("run", "state", "step", "metric", "best", "last", "checkpoints", "size", "changed")
        show(columns, [_row(run, now) for run in found])
    else:
        say(f"no runs in {storage.locate('')}")


def _look(storage: Storage) -> None:
    storage.list()


def _row(run: Run, now: float) -> tuple[str, ...]:
    return (
        run.name,
        run.state.value,
        "-" if run.step is None else str(run.step),
        run.metric or "-",
        "-" if run.best is None or run.epoch is None else f"{run.best:.4g} (epoch {run.epoch + 1})",
        "-" if run.last is None else f"{run.last:.4g}",
        str(run.checkpoints),
        size_text(run.bytes),
        f"{age_text(now - run.modified)} ago",
    )
