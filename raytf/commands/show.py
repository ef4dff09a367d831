"""`raytf show RUN`: show the state of a run, and where its time went."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
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
from raytf.errors import ConfigError, StorageError
from raytf.runs import history, restart_phases, run_log, spikes
from raytf.runs.events import HELD
from raytf.runs.history import History, HistoryEvent
from raytf.runs.spikes import QUANTITIES, Spike
from raytf.runs.status import clock_text, number_text
from raytf.runs.timeline import CATEGORIES
from raytf.storage import strict_json

#: Up to this many saves in a row have a line each; more become one line.
_SAVES_IN_A_ROW = 2
_STYLES = {"fault": "red", "notice": "yellow", "resize": "magenta", "start": "green"}
#: Spikes that are shown: the latest ones.
_SPIKES = 10
#: Seconds between two reads of a followed run, its events that are shown, and the states in which it is followed.
_FOLLOW_SECONDS, _FOLLOWED, _LIVING = 2.0, 12, ("running", "waiting")
#: Where the output is not a terminal: wide enough for what is said of an event.
_PLAIN_WIDTH = 160


@dataclass(frozen=True)
class Show:
    """Show the state of a run, where its time went, what happened, and the steps that stand out."""

    run: tyro.conf.Positional[str]
    """The run's folder: STORAGE/NAME, such as s3://bucket/runs/mnist; or the name of a run in ~/raytf-runs."""
    json: bool = False
    """Print one JSON document instead."""
    follow: bool = False
    """Show it again every 2 seconds while it runs, with the latest events."""

    def check(self) -> None:
        """Refuse what cannot be shown.

        Raises:
            ConfigError: two flags do not go together.
        """
        if self.json and self.follow:
            raise ConfigError("--follow shows tables, and --json prints one document. Pass one of them.")


def main(flags: Show) -> None:
    """Run the command."""
    flags.check()
    uri = run_uri(flags.run)
    if flags.follow:
        follow(uri)
    run, outliers = history.load(uri), list[Spike]()
    try:
        outliers = spikes.find(run_log.read_steps(uri))
    except StorageError as error:  # the rest is worth showing
        run = replace(run, problems=(*run.problems, str(error)))
    if flags.json:
        print(strict_json.dumps(document(run, outliers), indent=1))
        return
    console = Console(highlight=False)
    show(run, console if console.is_terminal else Console(highlight=False, width=_PLAIN_WIDTH), outliers)


def follow(uri: str, console: Console | None = None, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show a run until it runs no more.

    Args:
        uri: its folder.
        console: standard output by default. If it is no terminal, events are printed as they happen.
        sleep: injected by tests.
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
                at = clock_text(happened.time - run.begin)
                console.print(_text(f"+{at} {happened.kind}: {happened.text}"), soft_wrap=True)
            shown = len(run.happenings)
            sleep(_FOLLOW_SECONDS)


def document(run: History, outliers: Sequence[Spike] = ()) -> dict[str, Any]:
    """Return a history as JSON, with times in seconds since the run's first event.

    Args:
        outliers: steps that stand out.
    """
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
    """Print a history, and steps that stand out, as tables."""
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
        console.print("this run has no ledger: it was made by a version of raytf that did not write one")


def headline(run: History) -> list[str]:
    """Return the most important facts, in two or three lines."""
    steps = f"{run.step} steps" if run.total in (None, run.step) else f"{run.step} of {run.total} steps"
    first = f"{run.state}{f' ({run.why})' if run.why else ''}: {steps}"
    if run.redone:
        first += f", {run.redone} redone"
    if run.samples_per_second:
        first += f", {run.samples_per_second:,.0f} samples/s"
    again = [r.tier for r in run.restarts if not r.is_first]
    first += f", {restart_phases.counted(len(again), again.count(HELD))}"
    lines = [first]
    if run.metrics:
        lines.append(", ".join(f"{name} {number_text(value)}" for name, value in run.metrics.items()))
    if run.seconds:
        lines.append(f"goodput {run.goodput:.1%} of {run.wall_clock - run.seconds.get('down', 0.0):.1f} s")
    return lines


def _text(value: object, style: str = "") -> Text:
    """Return a cell in which neither brackets nor escape sequences have an effect."""
    return Text(visible(value), style)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")


def _account(run: History) -> Table:
    booked, clock = sum(run.seconds.values()), run.wall_clock
    table = _table("\nwhere the time went")
    table.add_column("category")
    table.add_column("seconds", justify="right")
    table.add_column("%", justify="right")
    table.add_column("what")
    for category, seconds in run.seconds.items():
        table.add_row(category, f"{seconds:.1f}", f"{seconds / booked:.1%}", CATEGORIES[category])
    table.add_section()
    table.add_row("sum", f"{booked:.1f}", f"{booked / clock:.1%}" if clock else "", f"of {clock:.1f} s of wall clock")
    return table


def _restarts(run: History) -> Table:
    table = _table("starts of worker groups")
    for name in ("at", "seconds", "workers", "from step", "redone"):
        table.add_column(name, justify="right")
    table.add_column("state")
    table.add_column("why")
    for r in run.restarts:
        numbers = (f"+{clock_text(r.time - run.begin)}", f"{r.seconds:.1f}", r.workers, r.from_step, r.redone)
        table.add_row(*map(_text, numbers), _text(r.tier), _text(r.cause))
    return table


def _phases(run: History) -> Table:
    """Return a separate table: both together do not fit a terminal of 80 columns."""
    table = _table("where each start spent its time")
    table.add_column("at", justify="right")
    table.add_column("seconds by phase")
    for r in run.restarts:
        parts = restart_phases.describe(r.phases).partition(": ")[2]
        table.add_row(_text(f"+{clock_text(r.time - run.begin)}"), _text(parts))
    return table


def _events(run: History) -> Table:
    table = _table("events")
    table.add_column("at", justify="right")
    table.add_column("step", justify="right")
    table.add_column("kind")
    table.add_column("what")
    for group in _in_groups(run.happenings):
        first, last = group[0], group[-1]
        at = f"+{clock_text(first.time - run.begin)}"
        if len(group) > _SAVES_IN_A_ROW:
            text = f"{len(group)} checkpoints, the last one of step {last.step} at +{clock_text(last.time - run.begin)}"
            table.add_row(at, str(first.step), "save", text)
            continue
        for h in group:
            step = "" if h.step is None else str(h.step)
            at = f"+{clock_text(h.time - run.begin)}"
            table.add_row(at, step, _text(h.kind, _STYLES.get(h.sort, "")), _text(h.text))
    return table


def _print_spikes(run: History, outliers: Sequence[Spike], console: Console) -> None:
    shown = outliers[-_SPIKES:]
    table = _table("steps that stand out")
    for name in ("steps", *QUANTITIES):
        table.add_column(name.replace("_", " "), justify="right")
    for spike in shown:
        steps = str(spike.first) if spike.first == spike.last else f"{spike.first} to {spike.last}"
        table.add_row(steps, *(_text(spike.describe(name)) for name in QUANTITIES))
    console.print(table)
    if len(outliers) > len(shown):
        console.print(f"the latest {len(shown)} of {len(outliers)}; --json has all")
    worst = max(shown, key=lambda spike: spike.height)
    console.print("what was in the highest one:", _text(worst.replayed(run.place)), soft_wrap=True)


def _in_groups(happenings: list[HistoryEvent]) -> Iterator[list[HistoryEvent]]:
    """Yield consecutive saves as one group, and every other event alone."""
    group: list[HistoryEvent] = []
    for h in happenings:
        if group and (h.kind != "save" or group[-1].kind != "save"):
            yield group
            group = []
        group.append(h)
    if group:
        yield group
