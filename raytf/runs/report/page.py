"""A run as one HTML page that needs nothing but itself."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

import numpy as np

from raytf.runs import spikes
from raytf.runs.events import HELD
from raytf.runs.history import History
from raytf.runs.report import charts, series, tables
from raytf.runs.report.tables import LANES, section
from raytf.runs.spikes import Spike

#: A pause in training interrupts a curve where it takes more than this share of the page's width.
_BREAK_SHARE = 0.004


def draw(run: History, steps: dict[str, np.ndarray] | None = None) -> str:
    """Return the page of a run.

    Args:
        run: of which it tells.
        steps: of `raytf.read_steps`; the running loss of the ledger is drawn where there are none.
    """
    main, data = parts(run, steps)
    return document(f"{run.name}: {run.state}", main, data)


def document(title: str, main: str, data: Any, scripts: Sequence[str] = ()) -> str:
    """Return a page that needs nothing but itself.

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
    """Return what is inside the page of a run, as HTML, and the data that its scripts draw. See `draw`."""
    outliers = [] if steps is None else spikes.find(steps)
    timeline, data = _timeline(run, steps, outliers)
    data["curves"] = series.learning_curves(run, steps)
    data["metrics"] = series.metrics_of(run.epochs)
    sections = [head(run), _problems(run), _learning(data["curves"]), timeline, tables.spikes(run, outliers)]
    sections += [tables.account(run), tables.restarts(run), tables.events(run), tables.settings(run)]
    sections.append(
        f"<footer>Drawn by raytf {escape(_when(time.time()))}. Times count from the run's first event.</footer>"
    )
    return "\n".join(part for part in sections if part), data


def head(run: History) -> str:
    """Return what a page says first: where the run is."""
    return f'<div id="head">{_header(run)}{_tiles(run)}</div>'


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def duration(seconds: float) -> str:
    """Return seconds for people: 8.2 s, 4 min 5 s, 3 h 20 min, 2 d 4 h."""
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
    """Return places for the curves of learning and speed, which a script draws, and how they are drawn."""
    if not (curves["steps"]["step"] or curves["epochs"]):
        return ""
    sorts = {fault[3] for fault in curves["faults"]}
    marks = [(LANES[sort][0], f"var(--{LANES[sort][1]})") for sort in ("fault", "resize") if sort in sorts]
    return section(
        "Learning",
        '<div class="controls"><label>by <select id="by">'
        "<option>step</option><option>epoch</option><option>time</option></select></label>"
        '<label>smooth <input id="smooth" type="range" min="0" max="0.99" step="0.01" value="0.6"></label>'
        '<label><input id="log" type="checkbox"> logarithmic</label></div>'
        f"<p>Drag to zoom in all charts, double-click to see everything.</p>{tables.legend(marks, 'upright')}"
        '<div id="learning-charts" class="charts"></div>',
    ) + section("Speed", '<div id="speed-charts" class="charts"></div>')


def _problems(run: History) -> str:
    """Return the section about files that could not be read, and are not on the page."""
    if not run.problems:
        return ""
    rows = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
    return section("Damaged files", f"<p>What they held is not on this page.</p><ul>{rows}</ul>")


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
    tiles += _metric(run)
    inner = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}'
        + (f"<small>{escape(small)}</small>" if small else "")
        + "</dd></div>"
        for name, value, small in tiles
    )
    return f'<dl class="tiles">{inner}</dl>'


def _metric(run: History) -> list[tuple[str, str, str]]:
    """Return the tile of the metric that the list of runs shows, too; of any metric where no epoch has ended."""
    if run.metric is None:
        return [(name, f"{value:.4g}", "") for name, value in list(run.metrics.items())[-1:]]
    test = run.metrics.get(f"test_{run.metric.removeprefix('val_')}")
    more = [f"{name} {known:.4g}" for name, known in (("best", run.best), ("test", test)) if known is not None]
    return [(run.metric, "unknown" if run.last is None else f"{run.last:.4g}", ", ".join(more))]


def _timeline(run: History, steps: dict[str, np.ndarray] | None, outliers: Sequence[Spike]) -> tuple[str, dict]:
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
    legend = tables.legend([(c, f"var(--{c})") for c in run.seconds])
    html = section(
        "Timeline",
        "<p>Point at it for what happened when. A checkpoint's age is the time since the run "
        f"was at its step: what a failure would cost.</p>{legend}"
        f'<div class="timeline">{"".join(panels)}{charts.axis(frame)}</div>',
    )
    return html, data


def _mix(shares: dict[str, float]) -> str:
    if len(shares) == 1:
        return next(iter(shares))
    return ", ".join(f"{category} {share:.0%}" for category, share in shares.items())
