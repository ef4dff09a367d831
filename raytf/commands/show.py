"""`raytf show RUN`: show the state of a run, and how it spent its time."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import tyro
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from raytf.commands._places import run_uri
from raytf.config.terminal_text import visible
from raytf.errors import ConfigError
from raytf.runs import history, spikes, timeline
from raytf.runs.events import HELD
from raytf.runs.history import History
from raytf.runs.spikes import QUANTITIES, Spike
from raytf.runs.status import clock_text, number_text
from raytf.runs.timeline import CATEGORIES
from raytf.storage import strict_json

#: Up to this many consecutive saves have one line each; more are combined into one line.
_SAVES_IN_A_ROW = 2
_STYLES = {"fault": "red", "notice": "yellow", "resize": "magenta", "start": "green"}
#: Maximum number of spikes to show; the latest are shown.
_SPIKES = 10
#: With --follow: seconds between two reads, the number of events to show, and the states in which it continues.
_FOLLOW_SECONDS, _FOLLOWED, _LIVING = 2.0, 12, ("running", "waiting")
#: The width if the output is not a terminal, wide enough for the text of an event.
_PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Show:
    """Show the state of a run, how it spent its time, its events, and the steps that stand out."""

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    json: bool = False
    """Print one JSON document instead."""
    follow: bool = False
    """Update the state and the latest events every 2 seconds while the run is active."""

    def check(self) -> None:
        """Check that the flags can be combined.

        Raises:
            ConfigError: two flags exclude each other.
        """
        if self.json and self.follow:
            raise ConfigError("--follow shows tables, and --json prints one document. Pass one of them.")


def main(flags: Show) -> None:
    """Run the command."""
    flags.check()
    uri = run_uri(flags.run)
    if flags.follow:
        follow(uri)
    run, steps = history.load_with_steps(uri)
    outliers = [] if steps is None else spikes.find(steps)
    if flags.json:
        print(strict_json.dumps(document(run, outliers), indent=1))
        return
    console = Console(highlight=False)
    show(run, console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH), outliers)


def follow(uri: str, console: Console | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it stops.

    Args:
        console: standard output by default. If it is not a terminal, events are printed as they happen.
    """
    console, shown = console or Console(highlight=False), 0
    is_live = console.is_terminal
    with Live(console=console, auto_refresh=False, transient=True) if is_live else contextlib.nullcontext() as live:
        while (run := history.load(uri)).state in _LIVING:
            if live is not None:
                last = replace(run, happenings=run.happenings[-_FOLLOWED:])
                lines = [_text(line) for line in (f"run {run.name} in {run.place}", *headline(run))]
                live.update(Group(*lines, *([_events(last)] if last.happenings else [])), refresh=True)
            for happened in run.happenings[shown:] if live is None else ():
                console.print(_text(f"{_at(run, happened.time)} {happened.kind}: {happened.text}"), soft_wrap=True)
            shown = len(run.happenings)
            sleep(_FOLLOW_SECONDS)


def document(run: History, outliers: Sequence[Spike] = ()) -> dict[str, Any]:
    """Return a history as JSON, with times in seconds since the run's first event."""
    return {
        "name": run.name,
        "place": run.place,
        "state": run.state,
        "why": run.why,
        "began": run.begin,
        "step": run.step,
        "total": run.total,
        "redone": run.redone,
        "samples_per_second": run.samples_per_second,
        "metrics": run.metrics,
        "goodput": run.goodput,
        "seconds": run.seconds,
        "booked_seconds": sum(run.seconds.values()),
        "wall_clock_seconds": run.wall_clock,
        "restarts": [
            {**asdict(r), "time": r.time - run.begin, "seconds": r.seconds} for r in run.restarts if not r.is_first
        ],
        "problems": list(run.problems),
        "events": [{**asdict(h), "time": h.time - run.begin} for h in run.happenings],
        "spikes": [{**asdict(spike), "command": spike.replayed(run.place)} for spike in outliers],
    }


def show(run: History, console: Console, outliers: Sequence[Spike] = ()) -> None:
    """Print a history, and the steps that stand out, as tables."""
    console.print(_text(f"run {run.name} in {run.place}"), soft_wrap=True)
    for line in headline(run):
        console.print(_text(line), soft_wrap=True)
    if run.seconds:
        console.print(_account(run))
    if run.restarts:
        console.print(_restarts(run))
        console.print(_phases(run))
    if run.happenings:
        console.print(_events(run))
    if outliers:
        _print_spikes(run, outliers, console)
    for problem in run.problems:
        console.print(Text(f"damaged: {problem}"), soft_wrap=True)
    if not run.events and not run.problems:
        console.print("this run has no ledger, because its version of raytf did not write one")


def headline(run: History) -> list[str]:
    """Return the most important facts, in two or three lines."""
    steps = f"{run.step} steps" if run.total in (None, run.step) else f"{run.step} of {run.total} steps"
    first = f"{run.state}{f' ({run.why})' if run.why else ''}: {steps}"
    if run.redone:
        first += f", {run.redone} redone"
    if run.samples_per_second:
        first += f", {run.samples_per_second:,.0f} samples/s"
    again = [r.tier for r in run.restarts if not r.is_first]
    first += f", {timeline.counted(len(again), again.count(HELD))}"
    lines = [first]
    if run.metrics:
        lines.append(", ".join(f"{name} {number_text(value)}" for name, value in run.metrics.items()))
    if run.seconds:
        lines.append(f"goodput {run.goodput:.1%} of {run.wall_clock - run.seconds.get('down', 0.0):.1f} s")
    return lines


def _text(value: object, style: str = "") -> Text:
    """Return a cell in which brackets and escape sequences have no effect."""
    return Text(visible(value), style)


def _table(title: str, *columns: str) -> Table:
    """Return an empty table; a column whose heading begins with `>` is aligned to the right."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name.startswith(">") else "left")
    return table


def _account(run: History) -> Table:
    booked, clock = sum(run.seconds.values()), run.wall_clock
    table = _table("\nwhere the time went", "category", ">seconds", ">%", "what")
    for category, seconds in run.seconds.items():
        table.add_row(category, f"{seconds:.1f}", f"{seconds / booked:.1%}", CATEGORIES[category])
    table.add_section()
    table.add_row("sum", f"{booked:.1f}", f"{booked / clock:.1%}" if clock else "", f"of {clock:.1f} s of wall clock")
    return table


def _restarts(run: History) -> Table:
    table = _table("starts of worker groups", ">at", ">seconds", ">workers", ">from step", ">redone", "state", "why")
    for r in run.restarts:
        numbers = (_at(run, r.time), f"{r.seconds:.1f}", r.workers, r.from_step, r.redone)
        table.add_row(*map(_text, numbers), _text(r.tier), _text(r.cause))
    return table


def _phases(run: History) -> Table:
    """Return the phases of each start, as a separate table so that both fit a terminal of 80 columns."""
    table = _table("where each start spent its time", ">at", "seconds by phase")
    for r in run.restarts:
        table.add_row(_text(_at(run, r.time)), _text(timeline.describe(r.phases).partition(": ")[2]))
    return table


def _events(run: History) -> Table:
    table = _table("events", ">at", ">step", "kind", "what")
    # Consecutive saves are one group, and every other event is a separate group.
    numbered = enumerate(run.happenings)
    for _, group in itertools.groupby(numbered, lambda item: "save" if item[1].kind == "save" else item[0]):
        happenings = [h for _, h in group]
        first, last = happenings[0], happenings[-1]
        if len(happenings) > _SAVES_IN_A_ROW:
            text = f"{len(happenings)} checkpoints, the last one of step {last.step} at {_at(run, last.time)}"
            table.add_row(_at(run, first.time), str(first.step), "save", text)
            continue
        for h in happenings:
            step = "" if h.step is None else str(h.step)
            table.add_row(_at(run, h.time), step, _text(h.kind, _STYLES.get(h.sort, "")), _text(h.text))
    return table


def _at(run: History, time: float) -> str:
    return f"+{clock_text(time - run.begin)}"


def _print_spikes(run: History, outliers: Sequence[Spike], console: Console) -> None:
    shown = outliers[-_SPIKES:]
    table = _table("steps that stand out", ">steps", *(f">{name.replace('_', ' ')}" for name in QUANTITIES))
    for spike in shown:
        steps = str(spike.first) if spike.first == spike.last else f"{spike.first} to {spike.last}"
        table.add_row(steps, *(_text(spike.describe(name)) for name in QUANTITIES))
    console.print(table)
    if len(outliers) > len(shown):
        console.print(f"the latest {len(shown)} of {len(outliers)}; --json shows all")
    worst = max(shown, key=lambda spike: spike.height)
    console.print("to inspect the highest one:", _text(worst.replayed(run.place)), soft_wrap=True)
