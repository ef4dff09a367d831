"""`raytf report RUN --html FILE`: write a run as an HTML page."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from raytf.commands._places import run_uri
from raytf.config.terminal_text import say
from raytf.errors import ConfigError
from raytf.runs import history
from raytf.runs.report.page import draw


@dataclass(frozen=True)
class Report:
    """Write a run as one HTML page that works offline: timeline, restarts by phases, ledger, events."""

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    html: str = "report.html"
    """The local file for the page; an existing file is replaced."""


def main(flags: Report) -> None:
    """Run the command."""
    run, steps = history.load_with_steps(run_uri(flags.run))
    page = draw(run, steps)
    try:
        Path(flags.html).expanduser().write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(
            f"--html {flags.html} cannot be written: {error.strerror or error}. Choose a file in a folder that exists."
        ) from error
    for problem in run.problems:
        say(f"damaged: {problem}", file=sys.stderr)
    say(f"{flags.html}: {len(page) / 1024:,.0f} KiB, {len(run.happenings)} events")
