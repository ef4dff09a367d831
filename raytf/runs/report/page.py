"""A run as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from raytf.runs import spikes, timeline
from raytf.runs.events import HELD
from raytf.runs.history import History, HistoryEvent, RestartRecord
from raytf.runs.report import charts, learning, series
from raytf.runs.spikes import QUANTITIES, Spike
from raytf.runs.status import clock_text

#: What is no training, and interrupts a curve where it takes more than this share of the page's width.
_BREAK_SHARE = 0.004
_PHASE_COLORS = 10
#: Characters of a setting's value that are shown.
_SETTING = 400
#: Rows of a table that are shown all at once.
_LONG = 40
_LANES = {
    "fault": ("faults", "fault"),
    "notice": ("notices", "notice"),
    "resize": ("resizes", "resize"),
    "start": ("starts", "training"),
    "save": ("saves", "save"),
}
_SORT_COLORS = {**{sort: color for sort, (_, color) in _LANES.items()}, "driver": "startup", "note": "down"}


def draw(run: History, steps: dict[str, np.ndarray] | None = None) -> str:
    """The page.

    Args:
        run: of which it tells.
        steps: of `raytf.read_steps`; the running loss of the ledger is drawn where there are none.
    """
    main, data = parts(run, steps)
    return document(f"{run.name}: {run.state}", main, data)


def document(title: str, main: str, data: Any, scripts: Sequence[str] = ()) -> str:
    """A page that needs nothing but itself.

    Args:
        title: of its window.
        main: HTML.
        data: for the scripts.
        scripts: files beside those that draw a run.
    """
    file = resources.files("raytf.runs.report").joinpath
    css = "\n".join(file(name).read_text() for name in ("vendor/uplot.css", "page.css"))
    # With its licence in place of a link, as a page needs nothing but itself.
    licence, plots = file("vendor/LICENSE").read_text(), file("vendor/uplot.js").read_text()
    plots = f"/*! uPlot 1.6.32. {licence}*/{plots.partition('*/')[2]}"
    js = "\n".join([plots, *(file(name).read_text() for name in ("charts.js", "page.js")), *scripts])
    # In a script element nothing is escaped but what would end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style></head>\n<body><main>\n{main}\n"
        f'</main>\n<script type="application/json" id="data">{embedded}</script>\n'
        f"<script>\n{js}</script></body></html>\n"
    )


def parts(run: History, steps: dict[str, np.ndarray] | None = None) -> tuple[str, dict[str, Any]]:
    """What is inside the page of a run, as HTML, and the data that its scripts draw. See `draw`."""
    found = [] if steps is None else spikes.find(steps)
    timeline, data = _timeline(run, steps, found)
    data["curves"] = learning.document(run, steps)
    data["metrics"] = learning.metrics_of(run.epochs)
    told = [head(run), _problems(run), _learning(data["curves"]), timeline, _spikes(run, found)]
    told += [_account(run), _restarts(run), _events(run), _settings(run)]
    told.append(
        f"<footer>Drawn by raytf {escape(_when(time.time()))}. Times count from the run's first event.</footer>"
    )
    return "\n".join(part for part in told if part), data


def head(run: History) -> str:
    """What a page says first: where the run is."""
    return f'<div id="head">{_header(run)}{_tiles(run)}</div>'


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Seconds for people: 8.2 s, 4 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, part, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // part} {below}"
    raise AssertionError(seconds)


def _header(run: History) -> str:
    began = f" · began {_when(run.begin)}" if run.events else ""
    why = f"<div>{escape(run.why)}</div>" if run.why else ""
    return (
        f'<header><h1>{escape(run.name)}</h1><span class="state {escape(run.state)}">{escape(run.state)}</span>{why}'
        f'<div class="place">{escape(run.place)}{began}</div></header>'
    )


def _learning(curves: dict[str, Any]) -> str:
    """Places for the curves of learning and speed, which a script draws, and how they are drawn."""
    if not (curves["steps"]["step"] or curves["epochs"]):
        return ""
    return (
        '<section id="learning"><h2>Learning</h2><div class="controls"><label>by <select id="by">'
        "<option>step</option><option>epoch</option><option>time</option></select></label>"
        '<label>smooth <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0.6"></label>'
        '<label><input id="log" type="checkbox"> logarithmic</label></div>'
        "<p>Thin lines are failures and resizes. Drag to look closer, click twice to see all.</p>"
        '<div id="learning-charts" class="charts"></div></section>'
        '<section id="speed"><h2>Speed</h2><div id="speed-charts" class="charts"></div></section>'
    )


def _settings(run: History) -> str:
    """What the run is made of, and what a person types to use it."""
    place = shlex.quote(run.place)
    commands = [
        ("what it learned, as a model", f"raytf export {place}"),
        ("this page as a file", f"raytf report {place}"),
    ]
    commands += [("every byte of its checkpoints, checked", f"raytf verify {place}")]
    commands += [
        (f"step {s:,}, computed again", f"raytf replay {place} --step {s} -- COMMAND") for s in list(run.saves)[-3:]
    ]
    if run.command:
        commands.insert(0, ("the command that started it", shlex.join(run.command)))
    told = "".join(
        f'<tr><td>{escape(what)}</td><td class="why"><code>{escape(text)}</code></td></tr>' for what, text in commands
    )
    saves = ", ".join(f"{step:,}" for step in run.saves) or "none"
    return (
        f"<section><h2>To use it</h2><p>Checkpoints are of step {saves}.</p>"
        f'<table class="stack"><tbody>{told}</tbody></table></section>'
        "<section><h2>Settings</h2>"
        f"<p>What is not at its default.</p>{_named(run.changed, 'Nothing is, or it was not noted.')}"
        f"<p>What must be the same when the run goes on.</p>{_named(run.settings, 'Nothing is noted of it yet.')}"
        f"<p>What the run was made with.</p>{_named(run.made_with, 'Nothing is noted of it yet.')}</section>"
    )


def _named(values: Mapping[str, str], nothing: str) -> str:
    """A table of names and values; where it is empty, a line that says so."""
    if not values:
        return f"<p>{escape(nothing)}</p>"
    cut = {name: value[:_SETTING] + ("…" if value[_SETTING:] else "") for name, value in values.items()}
    rows = "".join(f'<tr><td>{escape(n)}</td><td class="why">{escape(value)}</td></tr>' for n, value in cut.items())
    return f'<table class="stack"><tbody>{rows}</tbody></table>'


def _problems(run: History) -> str:
    """What of the run could not be read, and is not on the page."""
    if not run.problems:
        return ""
    rows = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    return f"<section><h2>Damaged files</h2><p>What they held is not on this page.</p><ul>{rows}</ul></section>"


def _tiles(run: History) -> str:
    restarts = [r for r in run.restarts if not r.is_first]
    held = sum(r.tier == HELD for r in restarts)
    in_place = f"{held:,} in place, " if held else ""
    steps = f"of {run.total:,}" if run.total not in (None, run.step) else ""
    again = f"{run.redone:,} made once more" if run.redone else "none known to be redone"
    faults = sum(h.sort == "fault" and h.kind in ("fault", "driver") for h in run.happenings)  # a hang is a fault, too
    tiles = [
        ("Goodput", f"{run.goodput:.1%}" if run.seconds else "unknown", "of the time went into new steps"),
        ("Wall clock", duration(run.wall_clock), ""),
        ("Steps", f"{run.step:,}", f"{steps}{', ' if steps else ''}{again}"),
        ("Restarts", f"{len(restarts):,}", f"{in_place}{faults:,} fault{'' if faults == 1 else 's'} seen"),
    ]
    if run.samples_per_second:
        tiles.append(("Samples/s", f"{run.samples_per_second:,.0f}", "while it trained"))
    tiles += [(name, f"{value:.4g}", "") for name, value in list(run.metrics.items())[-1:]]
    inner = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        + (f"<small>{escape(small)}</small>" if small else "")
        + "</dd></div>"
        for name, value, small in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _timeline(run: History, steps: dict[str, np.ndarray] | None, found: Sequence[Spike]) -> tuple[str, dict]:
    data: dict = {"seconds": 0, "bands": [], "world": [], "loss": [], "marks": []}
    if not run.spans:
        return "", data
    frame = charts.Frame(run.spans[0].begin, run.spans[-1].end)
    pieces, world = series.bands(run.spans), series.world(run.spans)
    curve = (
        series.loss_of_steps(run.spans, steps["step"], steps["loss"])
        if steps is not None and len(steps["step"])
        else series.loss_of_events(run.events)
    )
    breaks = [
        begin
        for begin, end, category in series.merged(run.spans)
        if category in ("startup", "restart", "resize", "waiting", "hang", "down")
        and end - begin > _BREAK_SHARE * frame.seconds
    ]
    rows = [(name, color, [h.time for h in run.happenings if h.sort == s]) for s, (name, color) in _LANES.items()]
    rows = [row for row in rows if row[2] or row[0] == "faults"]
    ages = series.ages(run.events)
    tiers = {"on storage": ages["durable"], "in memory": ages["memory"]}
    panels = [charts.lanes(frame, rows), charts.band(frame, pieces), charts.world(frame, world)]
    if len(curve):
        at = series.times_of_steps(run.spans, np.array([spike.first for spike in found], int))
        panels.append(charts.loss(frame, curve, breaks, at[np.isfinite(at)].tolist()))
    if any(tiers.values()):
        panels.append(charts.ages(frame, tiers, breaks))
    begin = frame.begin
    data["seconds"] = frame.seconds
    data["bands"] = [[round(piece.begin - begin, 2), _mix(piece.shares)] for piece in pieces]
    data["world"] = [[round(t - begin, 2), workers] for t, workers in world]
    data["loss"] = [
        [round(t - begin, 2), float(f"{v:.5g}"), int(s)]
        for t, v, s in zip(curve.times.tolist(), curve.values.tolist(), curve.steps.tolist(), strict=True)
    ]
    data["marks"] = [[round(h.time - begin, 2), h.kind, h.text] for h in run.happenings]
    legend = _legend([(c, f"var(--{c})") for c in run.seconds])
    html = (
        "<section><h2>Timeline</h2><p>Point at it for what happened when. A checkpoint's age is the time since the run "
        f"was at its step: what a failure would cost.</p>{legend}"
        f'<div class="timeline">{"".join(panels)}{charts.axis(frame)}</div></section>'
    )
    return html, data


def _spikes(run: History, found: Sequence[Spike]) -> str:
    """Steps that stand out, with the commands that show why."""
    if not found:
        return ""
    rows = "".join(
        f'<tr><td class="n">{spike.first:,}</td><td class="n" data-label="steps">{spike.last - spike.first + 1:,}</td>'
        + "".join(f'<td data-label="{_spoken(name)}">{escape(spike.told(name))}</td>' for name in QUANTITIES)
        + f'<td class="why"><code>{escape(spike.replayed(run.place))}</code></td></tr>'
        for spike in found
    )
    columns = "".join(f"<th>{_spoken(name)}</th>" for name in QUANTITIES)
    return (
        "<section><h2>Steps that stand out</h2><p>Their loss or the norm of their gradient is far above that of the "
        "fifty steps before. The command computes the first of them again and shows its records.</p>"
        f"{_box('Steps that stand out', len(found))}"
        f'<table class="stack"><thead><tr><th class="n">step</th><th class="n">steps</th>{columns}'
        f"<th>to look at it</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _mix(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{category} {share:.0%}" for category, share in shares.items())


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = "".join(f'<li><i class="swatch" style="background:{c}"></i>{escape(name)}</li>' for name, c in entries)
    return f'<ul class="legend">{items}</ul>'


def _account(run: History) -> str:
    if not run.seconds:
        return "<section><h2>Where the time went</h2><p>This run has no ledger.</p></section>"
    booked, clock = sum(run.seconds.values()), run.wall_clock
    bar = "".join(
        f'<i style="flex:{seconds:.3f};background:var(--{category})" title="{category} {seconds / booked:.1%}"></i>'
        for category, seconds in run.seconds.items()
    )
    rows = "".join(
        f'<tr><td><i class="swatch" style="background:var(--{category})"></i>{category}</td>'
        f'<td class="n">{seconds:,.1f}</td><td class="n">{seconds / booked:.1%}</td>'
        f'<td class="what">{escape(timeline.CATEGORIES[category])}</td></tr>'
        for category, seconds in run.seconds.items()
    )
    share = f"{booked / clock:.1%}" if clock else ""
    return (
        f'<section><h2>Where the time went</h2><div class="whole" aria-hidden="true">{bar}</div>'
        '<table class="accounts"><thead><tr><th>category</th><th class="n">seconds</th><th class="n">share</th>'
        f'<th class="what">what</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><td>sum</td>'
        f'<td class="n">{booked:,.1f}</td><td class="n">{share}</td>'
        f'<td class="what">of {clock:,.1f} s of wall clock</td></tr></tfoot></table></section>'
    )


def _restarts(run: History) -> str:
    if not run.restarts:
        return ""
    names = list(dict.fromkeys(name for r in run.restarts for name in r.phases))
    colors = {name: f"var(--p{i % _PHASE_COLORS})" for i, name in enumerate(names)}
    longest = max(r.seconds for r in run.restarts) or 1.0
    again = sorted(r.seconds for r in run.restarts if not r.is_first)
    text = "From the last sign of life before a failure or change to the end of the next first step, by phases."
    if len(again) > 1:
        text += f" {_spread(again)}"
    rows = "".join(_restart(r, run.begin, colors, longest) for r in run.restarts)
    head = "".join(
        f'<th class="{c}">{name}</th>'
        for name, c in [("at", "n"), ("why", ""), ("workers", "n"), ("state", ""), ("step", "n"), ("redone", "n")]
        + [("seconds", "n"), ("phases", "")]
    )
    return (
        f"<section><h2>Starts and restarts</h2><p>{text}</p>{_legend(list(colors.items()))}"
        f"{_box('Starts and restarts', len(run.restarts))}"
        f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _spread(seconds: Sequence[float]) -> str:
    """How long restarts took: percentiles only of so many that a percentile is one of them."""
    if len(seconds) < 20:
        return f"Restarts took {min(seconds):.1f} to {max(seconds):.1f} s."
    p50, p95 = np.percentile(seconds, [50, 95], method="inverted_cdf")
    return f"Half of the restarts took {p50:.1f} s or less, 95 % took {p95:.1f} s or less."


def _box(name: str, rows: int) -> str:
    """The beginning of what holds a table; a long one scrolls by itself."""
    tall = " tall" if rows > _LONG else ""
    return f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{name}">'


def _restart(r: RestartRecord, begin: float, colors: dict[str, str], longest: float) -> str:
    told = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in r.phases.items())
    parts = "".join(
        f'<i style="flex:{seconds:.3f};background:{colors[name]}"></i>'
        for name, seconds in r.phases.items()
        if seconds > 0
    )
    told = escape(told)
    width = f"{r.seconds / longest:.1%}"
    bar = f'<div class="bar" role="img" aria-label="{told}" title="{told}" style="width:{width}">'
    return (
        f'<tr><td class="n">+{clock_text(r.time - begin)}</td><td class="why">{escape(r.cause)}</td>'
        f'<td class="n" data-label="workers">{escape(str(r.workers))}</td><td>{escape(r.tier)}</td>'
        f'<td class="n" data-label="step">{r.from_step:,}</td><td class="n" data-label="redone">{r.redone:,}</td>'
        f'<td class="n" data-label="seconds">{r.seconds:.1f}</td><td class="phases">{bar}{parts}</div></td></tr>'
    )


def _events(run: History) -> str:
    if not run.happenings:
        return ""
    rows = "".join(_event(h, run.begin) for h in run.happenings)
    return (
        f"<section><h2>Events</h2><p>All {len(run.happenings):,} of them.</p>"
        f'{_box("Events", len(run.happenings))}<table class="stack"><thead><tr>'
        '<th class="n">at</th><th class="n">step</th><th>kind</th><th>what</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _event(h: HistoryEvent, begin: float) -> str:
    step = "" if h.step is None else f"{h.step:,}"
    label = ' data-label="step"' if step else ""
    return (
        f'<tr><td class="n">+{clock_text(h.time - begin)}</td><td class="n"{label}>{step}</td><td class="kind">'
        f'<i class="swatch" style="background:var(--{_SORT_COLORS[h.sort]})"></i>{escape(h.kind)}</td>'
        f'<td class="why">{escape(h.text)}</td></tr>'
    )
