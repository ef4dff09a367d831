"""The tables of a run's page, and the sections that hold them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from raytf.runs import timeline
from raytf.runs.history import History, HistoryEvent, RestartRecord
from raytf.runs.spikes import QUANTITIES, Spike
from raytf.runs.status import clock_text

#: Sorts of events -> the name of its row in the timeline, and its color.
LANES = {
    "fault": ("faults", "fault"),
    "notice": ("notices", "notice"),
    "resize": ("resizes", "resize"),
    "start": ("starts", "training"),
    "save": ("saves", "save"),
}
_SORT_COLORS = {**{sort: color for sort, (_, color) in LANES.items()}, "driver": "startup", "note": "down"}
_PHASE_COLORS = 10
#: Characters of a setting's value that are shown.
_SETTING = 400
#: Rows of a table that are shown all at once.
_LONG = 40


def section(title: str, inner: str) -> str:
    """Return a section of the page that can be folded; on a phone a script folds all but the first.

    Its id, by which the page remembers whether it is folded, is made from the title.

    Args:
        title: its heading.
        inner: HTML.
    """
    name = title.lower().replace(" ", "-")
    return f'<section id="{name}"><details open><summary><h2>{escape(title)}</h2></summary>{inner}</details></section>'


def account(run: History) -> str:
    """Return where the time of the run went."""
    if not run.seconds:
        return section("Where the time went", "<p>This run has no ledger.</p>")
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
    return section(
        "Where the time went",
        f'<div class="whole" aria-hidden="true">{bar}</div>'
        '<table class="accounts"><thead><tr><th>category</th><th class="n">seconds</th><th class="n">share</th>'
        f'<th class="what">what</th></tr></thead><tbody>{rows}</tbody><tfoot><tr><td>sum</td>'
        f'<td class="n">{booked:,.1f}</td><td class="n">{share}</td>'
        f'<td class="what">of {clock:,.1f} s of wall clock</td></tr></tfoot></table>',
    )


def _what(category: str, state: str) -> str:
    """Return what a category of time is, for a run in this state."""
    is_end = category == "finish" and state == "failed"
    return "from the failure to the end of the run" if is_end else timeline.CATEGORIES[category]


def restarts(run: History) -> str:
    """Return the starts of the run, with their phases."""
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
    return section(
        "Starts and restarts",
        f"<p>{text}</p>{legend(list(colors.items()))}"
        f"{_box('Starts and restarts', len(run.restarts))}"
        f'<table class="stack"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>',
    )


def _spread(seconds: Sequence[float]) -> str:
    """Say how long restarts took: with percentiles only where they are enough for a percentile to be one of them."""
    if len(seconds) < 20:
        return f"Restarts took {min(seconds):.1f} to {max(seconds):.1f} s."
    p50, p95 = np.percentile(seconds, [50, 95], method="inverted_cdf")
    return f"Half of the restarts took {p50:.1f} s or less, 95 % took {p95:.1f} s or less."


def _restart(r: RestartRecord, begin: float, colors: dict[str, str], longest: float) -> str:
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in r.phases.items())
    parts = "".join(
        f'<i style="flex:{seconds:.3f};background:{colors[name]}"></i>'
        for name, seconds in r.phases.items()
        if seconds > 0
    )
    phases = escape(phases)
    width = f"{r.seconds / longest:.1%}"
    bar = f'<div class="bar" role="img" aria-label="{phases}" title="{phases}" style="width:{width}">'
    return (
        f'<tr><td class="n">+{clock_text(r.time - begin)}</td><td class="why">{escape(r.cause)}</td>'
        f'<td class="n" data-label="workers">{escape(str(r.workers))}</td><td>{escape(r.tier)}</td>'
        f'<td class="n" data-label="step">{r.from_step:,}</td><td class="n" data-label="redone">{r.redone:,}</td>'
        f'<td class="n" data-label="seconds">{r.seconds:.1f}</td><td class="phases">{bar}{parts}</div></td></tr>'
    )


def events(run: History) -> str:
    """Return all events of the run."""
    if not run.happenings:
        return ""
    rows = "".join(_event(h, run.begin) for h in run.happenings)
    return section(
        "Events",
        f"<p>All {len(run.happenings):,} of them.</p>"
        f'{_box("Events", len(run.happenings))}<table class="stack"><thead><tr>'
        '<th class="n">at</th><th class="n">step</th><th>kind</th><th>what</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>",
    )


def _event(h: HistoryEvent, begin: float) -> str:
    step = "" if h.step is None else f"{h.step:,}"
    label = ' data-label="step"' if step else ""
    return (
        f'<tr><td class="n">+{clock_text(h.time - begin)}</td><td class="n"{label}>{step}</td><td class="kind">'
        f'<i class="swatch" style="background:var(--{_SORT_COLORS[h.sort]})"></i>{escape(h.kind)}</td>'
        f'<td class="why">{escape(h.text)}</td></tr>'
    )


def spikes(run: History, outliers: Sequence[Spike]) -> str:
    """Return the steps that stand out, with the commands that show why."""
    if not outliers:
        return ""
    rows = "".join(
        f'<tr><td class="n">{spike.first:,}</td><td class="n" data-label="steps">{spike.last - spike.first + 1:,}</td>'
        + "".join(f'<td data-label="{_spoken(name)}">{escape(spike.describe(name))}</td>' for name in QUANTITIES)
        + f'<td class="why"><code>{escape(spike.replayed(run.place))}</code></td></tr>'
        for spike in outliers
    )
    columns = "".join(f"<th>{_spoken(name)}</th>" for name in QUANTITIES)
    return section(
        "Steps that stand out",
        "<p>Their loss or the norm of their gradient is far above that of the "
        "fifty steps before. The command computes the first of them again and shows its records.</p>"
        f"{_box('Steps that stand out', len(outliers))}"
        f'<table class="stack"><thead><tr><th class="n">step</th><th class="n">steps</th>{columns}'
        f"<th>to look at it</th></tr></thead><tbody>{rows}</tbody></table></div>",
    )


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def settings(run: History) -> str:
    """Return what the run is made of, and the commands that can be used with it."""
    place = shlex.quote(run.place)
    commands = [("the command that started it", shlex.join(run.command))] if run.command else []
    if run.saves:
        commands.append(("what it learned, as a model", f"raytf export {place}"))
    commands.append(("this page as a file", f"raytf report {place}"))
    if run.saves:
        commands.append(("every byte of its checkpoints, checked", f"raytf verify {place}"))
    commands += [
        (f"step {s:,}, computed again", f"raytf replay {place} --step {s} -- COMMAND") for s in list(run.saves)[-3:]
    ]
    rows = "".join(
        f'<tr><td>{escape(what)}</td><td class="why"><code>{escape(text)}</code></td></tr>' for what, text in commands
    )
    saves = ", ".join(f"{step:,}" for step in run.saves)
    sentence = (
        f"Checkpoints are of step {saves}." if saves else "It has no checkpoint that could be exported or resumed."
    )
    return section("To use it", f'<p>{sentence}</p><table class="stack"><tbody>{rows}</tbody></table>') + section(
        "Settings",
        f"<p>What is not at its default.</p>{_named(run.changed, 'Nothing is, or it was not noted.')}"
        f"<p>What must be the same when the run goes on.</p>{_named(run.settings, 'Nothing is noted of it yet.')}"
        f"<p>What the run was made with.</p>{_named(run.made_with, 'Nothing is noted of it yet.')}",
    )


def _named(values: Mapping[str, str], nothing: str) -> str:
    """Return a table of names and values; where it is empty, a line that says so."""
    if not values:
        return f"<p>{escape(nothing)}</p>"
    cut = {name: value[:_SETTING] + ("…" if value[_SETTING:] else "") for name, value in values.items()}
    rows = "".join(f'<tr><td>{escape(n)}</td><td class="why">{escape(value)}</td></tr>' for n, value in cut.items())
    return f'<table class="stack"><tbody>{rows}</tbody></table>'


def _box(name: str, rows: int) -> str:
    """Return the beginning of what holds a table; a long one scrolls by itself."""
    tall = " tall" if rows > _LONG else ""
    return f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{name}">'


def legend(entries: Sequence[tuple[str, str]], swatch: str = "") -> str:
    """Return names with their colors, (name, CSS color); nothing for none.

    Args:
        entries: of the legend.
        swatch: CSS class of what shows a color.
    """
    if not entries:
        return ""
    items = "".join(
        f'<li><i class="swatch {swatch}" style="background:{c};color:{c}"></i>{escape(name)}</li>'
        for name, c in entries
    )
    return f'<ul class="legend">{items}</ul>'
