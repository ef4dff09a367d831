"""Draws a run as one self-contained HTML page."""

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
from raytf.runs.report import charts, series
from raytf.runs.spikes import QUANTITIES, Spike
from raytf.runs.status import clock_text

#: Sort of events -> name and color of its row in the timeline.
LANES = {
    "fault": ("faults", "fault"),
    "notice": ("notices", "notice"),
    "resize": ("resizes", "resize"),
    "start": ("starts", "training"),
    "save": ("saves", "save"),
}
_SORT_COLORS = {**{sort: color for sort, (_, color) in LANES.items()}, "driver": "startup", "note": "down"}
_PHASE_COLORS = 10
#: The most characters of a setting's value that are shown.
_SETTING = 400
#: Tables with more rows than this scroll in a box.
_LONG = 40
#: A pause in training interrupts a curve if it takes more than this share of the page's width.
_BREAK_SHARE = 0.004


def draw(run: History, steps: dict[str, np.ndarray] | None = None) -> str:
    """Return the page of a run.

    Args:
        steps: columns of `raytf.read_steps`; without them, the running loss of the ledger is drawn.
    """
    main, data = parts(run, steps)
    return document(f"{run.name}: {run.state}", main, data)


def document(title: str, main: str, data: Any, scripts: Sequence[str] = ()) -> str:
    """Return a self-contained HTML page.

    Args:
        title: title of the window.
        main: contents of the page, as HTML.
        data: data for the scripts, which must be serializable as JSON.
        scripts: JavaScript code to run after the scripts that draw a run.
    """
    file = resources.files("raytf.runs.report").joinpath
    css = "\n".join(file(name).read_text() for name in ("vendor/uplot.css", "page.css"))
    # A self-contained page includes the license of uPlot in place of a link to it.
    licence, plots = file("vendor/LICENSE").read_text(), file("vendor/uplot.js").read_text()
    plots = f"/*! uPlot 1.6.32. {licence}*/{plots.partition('*/')[2]}"
    js = "\n".join([plots, *(file(name).read_text() for name in ("charts.js", "page.js")), *scripts])
    # HTML escapes have no effect in a script element, so use JSON's for `<`, which could end it.
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title>\n<style>\n{css}</style></head>\n<body><main>\n{main}\n"
        f'</main>\n<script type="application/json" id="data">{embedded}</script>\n'
        f"<script>\n{js}</script></body></html>\n"
    )


def parts(run: History, steps: dict[str, np.ndarray] | None = None) -> tuple[str, dict[str, Any]]:
    """Return the contents of a run's page as HTML, and the data that its scripts draw. See `draw`."""
    outliers = [] if steps is None else spikes.find(steps)
    columns = series.step_columns(run, steps)
    drawn, data = _timeline(run, columns, outliers)
    data["curves"] = series.learning_curves(run, columns)
    data["metrics"] = series.metrics_of(run.epochs)
    sections = [head(run), _problems(run), _learning(data["curves"]), drawn, _spikes(run, outliers), _account(run)]
    sections += [_restarts(run), _events(run), _settings(run)]
    sections.append(
        f"<footer>Drawn by raytf {escape(_when(time.time()))}. Times count from the run's first event.</footer>"
    )
    return "\n".join(part for part in sections if part), data


def head(run: History) -> str:
    """Return the top of a run's page: its name, state and main figures."""
    return f'<div id="head">{_header(run)}{_tiles(run)}</div>'


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Format seconds for people: 8.2 s, 4 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, name, part, below in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            return f"{whole // unit} {name} {whole % unit // part} {below}"
    raise AssertionError(seconds)


def _header(run: History) -> str:
    began = f" · began {_when(run.begin)}" if run.events else ""
    error = " error" if run.state == "failed" else ""
    why = f'<p class="ended{error}"{" role=alert" if error else ""}>{escape(run.why)}</p>' if run.why else ""
    return (
        f'<header><h1>{escape(run.name)}</h1><span class="state {escape(run.state)}">{escape(run.state)}</span>'
        f'<div class="place">{escape(run.place)}{began}</div></header>{why}'
    )


def _learning(curves: dict[str, Any]) -> str:
    """Return the controls and placeholders of the curves of learning and speed, which a script draws."""
    if not (curves["steps"]["step"] or curves["epochs"]):
        return ""
    sorts = {fault[3] for fault in curves["faults"]}
    marks = [(LANES[sort][0], f"var(--{LANES[sort][1]})") for sort in ("fault", "resize") if sort in sorts]
    return _section(
        "Learning",
        '<div class="controls"><label>by <select id="by">'
        "<option>step</option><option>epoch</option><option>time</option></select></label>"
        '<label>smooth <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0.6"></label>'
        '<label><input id="log" type="checkbox"> logarithmic</label></div>'
        f"<p>Drag to zoom all charts. Double-click to reset them.</p>{_legend(marks, 'upright')}"
        '<div id="learning-charts" class="charts"></div>',
    ) + _section("Speed", '<div id="speed-charts" class="charts"></div>')


def _problems(run: History) -> str:
    if not run.problems:
        return ""
    rows = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    return _section("Damaged files", f"<p>The contents of these files are missing from this page.</p><ul>{rows}</ul>")


def _tiles(run: History) -> str:
    restarts = [r for r in run.restarts if not r.is_first]
    held = sum(r.tier == HELD for r in restarts)
    in_place = f"{held:,} in place, " if held else ""
    steps = f"of {run.total:,}" if run.total not in (None, run.step) else ""
    again = f"{run.redone:,} repeated" if run.redone else "none known to be repeated"
    faults = sum(h.sort == "fault" and h.kind in ("fault", "driver") for h in run.happenings)  # a hang has a fault, too
    tiles = [
        ("Goodput", f"{run.goodput:.1%}" if run.seconds else "unknown", "of the time was spent on new steps"),
        ("Wall clock", duration(run.wall_clock), ""),
        ("Steps", f"{run.step:,}", f"{steps}{', ' if steps else ''}{again}"),
        ("Restarts", f"{len(restarts):,}", f"{in_place}{faults:,} fault{'' if faults == 1 else 's'} seen"),
    ]
    if run.samples_per_second:
        tiles.append(("Samples/s", f"{run.samples_per_second:,.0f}", "while it trained"))
    tiles += _metric(run)
    inner = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        + (f"<small>{escape(small)}</small>" if small else "")
        + "</dd></div>"
        for name, value, small in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _metric(run: History) -> list[tuple[str, str, str]]:
    """Return the tile of the metric that judges the run; if there is none, of its last known metric."""
    if run.metric is None:
        return [(name, f"{value:.4g}", "") for name, value in list(run.metrics.items())[-1:]]
    test = run.metrics.get(f"test_{run.metric.removeprefix('val_')}")
    more = [f"{name} {known:.4g}" for name, known in (("best", run.best), ("test", test)) if known is not None]
    return [(run.metric, "unknown" if run.last is None else f"{run.last:.4g}", ", ".join(more))]


def _timeline(run: History, columns: Mapping[str, np.ndarray], outliers: Sequence[Spike]) -> tuple[str, dict]:
    data: dict = {"seconds": 0, "bands": [], "world": [], "loss": [], "marks": []}
    if not run.spans:
        return "", data
    frame = charts.Frame(run.spans[0].begin, run.spans[-1].end)
    pieces, world = series.bands(run.spans), series.world(run.spans)
    curve = series.loss_curve(columns)
    breaks = [
        begin
        for begin, end, category in series.merged(run.spans)
        if category in ("startup", "restart", "resize", "waiting", "hang", "down")
        and end - begin > _BREAK_SHARE * frame.seconds
    ]
    rows = [(name, color, [h.time for h in run.happenings if h.sort == s]) for s, (name, color) in LANES.items()]
    rows = [row for row in rows if row[2] or row[0] == "faults"]
    ages = series.ages(run.events)
    tiers = {"on storage": ages["durable"], "in memory": ages["memory"]}
    panels = [charts.lanes(frame, rows), charts.band(frame, pieces), charts.world(frame, world)]
    if len(curve):
        at = series.times_of_steps(run.spans, np.array([spike.first for spike in outliers], int))
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
    html = _section(
        "Timeline",
        "<p>Point at the timeline to see what happened at a time. A checkpoint's age is the time since the run "
        f"was at its step, which a failure would cost.</p>{legend}"
        f'<div class="timeline">{"".join(panels)}{charts.axis(frame)}</div>',
    )
    return html, data


def _mix(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{category} {share:.0%}" for category, share in shares.items())


# -- sections and tables -----------------------------------------------------------------------------------------------


def _section(title: str, inner: str) -> str:
    """Return a foldable section of the page; on a phone a script folds all sections but the first.

    Its id is made from the title, and identifies the section when the page remembers which ones are folded.
    """
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}"><details open><summary><h2>{escape(title)}</h2></summary>{inner}</details></section>'


def _account(run: History) -> str:
    if not run.seconds:
        return _section("Where the time went", "<p>This run has no ledger.</p>")
    booked, clock = sum(run.seconds.values()), run.wall_clock
    bar = "".join(
        f'<i style="flex:{seconds:.3f};background:var(--{category})" title="{category} {seconds / booked:.1%}"></i>'
        for category, seconds in run.seconds.items()
    )
    rows = "".join(
        f'<tr><td><i class="swatch" style="background:var(--{category})"></i>{category}</td>'
        f'<td class="n">{seconds:,.1f}</td><td class="n">{seconds / booked:.1%}</td>'
        f'<td class="what">{escape(_what(category, run.state))}</td></tr>'
        for category, seconds in run.seconds.items()
    )
    share = f"{booked / clock:.1%}" if clock else ""
    return _section(
        "Where the time went",
        f'<div class="whole" aria-hidden="true">{bar}</div>'
        '<table class="accounts"><thead><tr><th>category</th><th class="n">seconds</th><th class="n">share</th>'
        f'<th class="what">what</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><td>sum</td>'
        f'<td class="n">{booked:,.1f}</td><td class="n">{share}</td>'
        f'<td class="what">of {clock:,.1f} s of wall clock</td></tr></tfoot></table>',
    )


def _what(category: str, state: str) -> str:
    is_end = category == "finish" and state == "failed"
    return "from the failure to the end of the run" if is_end else timeline.CATEGORIES[category]


def _restarts(run: History) -> str:
    if not run.restarts:
        return ""
    names = list(dict.fromkeys(name for r in run.restarts for name in r.phases))
    colors = {name: f"var(--p{i % _PHASE_COLORS})" for i, name in enumerate(names)}
    longest = max(r.seconds for r in run.restarts) or 1.0
    again = sorted(r.seconds for r in run.restarts if not r.is_first)
    text = "From the last heartbeat before a failure or change to the end of the new group's first step, by phase."
    if len(again) > 1:
        text += f" {_spread(again)}"
    columns = {"at": "n", "why": "", "workers": "n", "state": "", "step": "n", "redone": "n"}
    columns |= {"seconds": "n", "phases": ""}
    rows = [_restart(r, run.begin, colors, longest) for r in run.restarts]
    title = "Starts and restarts"
    return _section(title, f"<p>{text}</p>{_legend(list(colors.items()))}{_table(title, columns, rows)}")


def _spread(seconds: Sequence[float]) -> str:
    """Return how long restarts took, in words: as percentiles from 20 restarts on, otherwise as a range."""
    if len(seconds) < 20:
        return f"Restarts took {min(seconds):.1f} to {max(seconds):.1f} s."
    p50, p95 = np.percentile(seconds, [50, 95], method="inverted_cdf")
    return f"Half of the restarts took {p50:.1f} s or less, 95 % took {p95:.1f} s or less."


def _restart(r: RestartRecord, begin: float, colors: dict[str, str], longest: float) -> str:
    phases = escape(", ".join(f"{name} {seconds:.1f} s" for name, seconds in r.phases.items()))
    parts = "".join(
        f'<i style="flex:{seconds:.3f};background:{colors[name]}"></i>'
        for name, seconds in r.phases.items()
        if seconds > 0
    )
    width = f"{r.seconds / longest:.1%}"
    bar = f'<div class="bar" role="img" aria-label="{phases}" title="{phases}" style="width:{width}">{parts}</div>'
    cells = [_cell(f"+{clock_text(r.time - begin)}", "n"), _cell(r.cause, "why"), _cell(r.workers, "n", "workers")]
    cells += [_cell(r.tier), _cell(f"{r.from_step:,}", "n", "step"), _cell(f"{r.redone:,}", "n", "redone")]
    return "".join([*cells, _cell(f"{r.seconds:.1f}", "n", "seconds"), f'<td class="phases">{bar}</td>'])


def _events(run: History) -> str:
    if not run.happenings:
        return ""
    columns = {"at": "n", "step": "n", "kind": "", "what": ""}
    rows = [_event(h, run.begin) for h in run.happenings]
    return _section("Events", f"<p>All {len(rows):,} events.</p>{_table('Events', columns, rows)}")


def _event(h: HistoryEvent, begin: float) -> str:
    step = "" if h.step is None else f"{h.step:,}"
    swatch = f'<i class="swatch" style="background:var(--{_SORT_COLORS[h.sort]})"></i>'
    kind = f'<td class="kind">{swatch}{escape(h.kind)}</td>'
    at = _cell(f"+{clock_text(h.time - begin)}", "n")
    return f"{at}{_cell(step, 'n', 'step' if step else '')}{kind}{_cell(h.text, 'why')}"


def _spikes(run: History, outliers: Sequence[Spike]) -> str:
    """Return the section of the steps that stand out, with the commands that replay them."""
    if not outliers:
        return ""
    spoken = {name: name.replace("_", " ") for name in QUANTITIES}
    rows = [
        f"{_cell(f'{spike.first:,}', 'n')}{_cell(f'{spike.last - spike.first + 1:,}', 'n', 'steps')}"
        + "".join(_cell(spike.describe(name), label=text) for name, text in spoken.items())
        + _code(spike.replayed(run.place))
        for spike in outliers
    ]
    columns = {"step": "n", "steps": "n", **dict.fromkeys(spoken.values(), ""), "to inspect it": ""}
    title = "Steps that stand out"
    return _section(
        title,
        "<p>Their loss or gradient norm is far above that of the fifty steps before. The command computes the first "
        f"of these steps again and dumps its records.</p>{_table(title, columns, rows)}",
    )


def _settings(run: History) -> str:
    """Return the sections with the commands for the run and with its settings."""
    place = shlex.quote(run.place)
    commands = [("the command that started it", shlex.join(run.command))] if run.command else []
    if run.saves:
        commands.append(("export its model", f"raytf export {place}"))
    commands.append(("write this page to a file", f"raytf report {place}"))
    if run.saves:
        commands.append(("check every byte of its checkpoints", f"raytf verify {place}"))
    commands += [
        (f"compute step {s:,} again", f"raytf replay {place} --step {s} -- COMMAND") for s in list(run.saves)[-3:]
    ]
    rows = "".join(f"<tr>{_cell(what)}{_code(text)}</tr>" for what, text in commands)
    saves = ", ".join(f"{step:,}" for step in run.saves)
    sentence = f"It has checkpoints of step {saves}." if saves else "It has no checkpoint to export or resume."
    return _section("To use it", f'<p>{sentence}</p><table class="stack"><tbody>{rows}</tbody></table>') + _section(
        "Settings",
        f"<p>Settings that differ from their defaults.</p>{_named(run.changed, 'None, or not recorded.')}"
        f"<p>Settings that must not change when the run continues.</p>{_named(run.settings, 'Not recorded yet.')}"
        f"<p>Versions and machine of the last start.</p>{_named(run.made_with, 'Not recorded yet.')}",
    )


def _named(values: Mapping[str, str], nothing: str) -> str:
    """Return a table of names and values, or the text `nothing` if there are none."""
    if not values:
        return f"<p>{escape(nothing)}</p>"
    cut = {name: value[:_SETTING] + ("…" if value[_SETTING:] else "") for name, value in values.items()}
    rows = "".join(f"<tr>{_cell(name)}{_cell(value, 'why')}</tr>" for name, value in cut.items())
    return f'<table class="stack"><tbody>{rows}</tbody></table>'


def _cell(text: object, css: str = "", label: str = "") -> str:
    """Return a cell of a table. On a phone, where columns are stacked, the label is shown before the text."""
    attributes = (f' class="{css}"' if css else "") + (f' data-label="{label}"' if label else "")
    return f"<td{attributes}>{escape(str(text))}</td>"


def _code(text: str) -> str:
    return f'<td class="why"><code>{escape(text)}</code></td>'


def _table(name: str, columns: Mapping[str, str], rows: Sequence[str]) -> str:
    """Return a table, from {heading: CSS class} and the cells of each row as HTML. A long table scrolls in its box."""
    tall = " tall" if len(rows) > _LONG else ""
    head = "".join(
        f'<th class="{css}">{column}</th>' if css else f"<th>{column}</th>" for column, css in columns.items()
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{name}"><table class="stack">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _legend(entries: Sequence[tuple[str, str]], swatch: str = "") -> str:
    """Return a legend of (name, CSS color), with swatches of a CSS class; empty if there are no entries."""
    if not entries:
        return ""
    items = "".join(
        f'<li><i class="swatch {swatch}" style="background:{c};color:{c}"></i>{escape(name)}</li>'
        for name, c in entries
    )
    return f'<ul class="legend">{items}</ul>'
