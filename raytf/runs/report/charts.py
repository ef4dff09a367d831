"""Draws the panels of the timeline: inline SVG that stretches with the page, beside labels that do not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from html import escape

from raytf.runs.report.series import Curve, TimeShare, clock_ticks, ticks
from raytf.runs.status import clock_text

#: Width and height of every drawing, in units that stretch with the page.
_WIDE, _HIGH = 1000.0, 100.0
#: A curve gets a logarithmic scale if its largest value is at least this many times the smallest.
_LOGARITHMIC = 40.0
#: Categories that the band shows even if they are short, and the minimum width of their bars.
_SEEN, _LEAST = ("restart", "resize", "waiting", "hang", "down"), 0.8
#: In a run with many restarts, gaps without workers are drawn only if they exceed this share of the run.
_SHORT = 0.005
#: A curve with fewer points is drawn without a line.
_FEW = 5
#: More marks of a kind than this are drawn thin.
_BROAD = 60


class Frame:
    """Maps times to x coordinates of a drawing.

    Args:
        begin, end: Unix times in seconds.
    """

    def __init__(self, begin: float, end: float):
        self.begin, self.seconds = begin, max(end - begin, 1e-3)

    def x(self, time: float) -> float:
        return round(min(1.0, max(0.0, (time - self.begin) / self.seconds)) * _WIDE, 2)


class Scale:
    """Maps values to heights in a drawing.

    Args:
        low, high: the values at the bottom and at the top.
        is_log: whether the scale is logarithmic, for values above 0.
    """

    def __init__(self, low: float, high: float, is_log: bool = False):
        self._is_log = is_log
        self._low, self._high = self._of(low), self._of(high)
        if self._high <= self._low:
            self._high = self._low + 1.0

    def _of(self, value: float) -> float:
        return math.log10(value) if self._is_log else value

    def share(self, value: float) -> float:
        """Return the height of a value, from 0 to 1."""
        return (self._of(value) - self._low) / (self._high - self._low)

    def y(self, value: float) -> float:
        return round((1 - self.share(value)) * _HIGH, 2)

    def ticks(self, most: int) -> list[float]:
        if not self._is_log:
            return ticks(self._low, self._high, most)
        decades = range(math.ceil(self._low - 1e-9), math.floor(self._high + 1e-9) + 1)
        powers = [10.0**d for d in list(decades)[:: max(1, -(-len(decades) // most))]]
        return powers if len(powers) > 1 else [10.0**self._low, 10.0**self._high]


def panel(
    caption: str, about: str, height: int, drawing: str, labels: Sequence[tuple[float, str]], extra: str = ""
) -> str:
    """Draw a figure.

    Args:
        caption: its title.
        about: a description of the drawing, for screen readers.
        drawing: SVG elements.
        labels: (height from 0 to 1, text) beside the drawing.
        extra: HTML after the title.
    """
    name = f"f-{caption.lower().replace(' ', '-')}"
    beside = "".join(f'<span style="bottom:{share * 100:.2f}%">{escape(text)}</span>' for share, text in labels)
    return (
        f'<figure><figcaption>{escape(caption)}{extra}</figcaption><div class="plot" style="height:{height}px">'
        f'<div class="ys" aria-hidden="true">{beside}</div><div class="area">'
        f'<svg role="img" aria-labelledby="{name} {name}-d" viewBox="0 0 {_WIDE:g} {_HIGH:g}" '
        'preserveAspectRatio="none">'
        f'<title id="{name}">{escape(caption)}</title><desc id="{name}-d">{escape(about)}</desc>{drawing}</svg>'
        "</div></div></figure>"
    )


def axis(frame: Frame) -> str:
    """Draw the labels of the time axis, which all panels share."""
    spans = []
    for i, at in enumerate(clock_ticks(frame.seconds, 8)):
        share = at / frame.seconds
        if share <= 0.97:  # a label at the very end would stick out
            odd = ' class="odd"' if i % 2 else ""
            spans.append(f'<span{odd} style="left:{share * 100:.2f}%">+{clock_text(at)}</span>')
    return f'<div class="plot"><div></div><div class="xs" aria-hidden="true">{"".join(spans)}</div></div>'


def grid(frame: Frame, scale: Scale | None = None, values: Iterable[float] = ()) -> str:
    """Draw thin lines at the ticks of the time axis and at `values`."""
    path = "".join(f"M{frame.x(frame.begin + at)} 0V{_HIGH:g}" for at in clock_ticks(frame.seconds, 8))
    path += "".join(f"M0 {scale.y(value)}H{_WIDE:g}" for value in values) if scale else ""
    return f'<path class="grid" d="{path}"/>'


def lanes(frame: Frame, rows: Sequence[tuple[str, str, Sequence[float]]]) -> str:
    """Draw the events, with one row for each kind, given as (name, color, times)."""
    drawing, labels, high = [grid(frame)], [], _HIGH / len(rows)
    for i, (name, color, times) in enumerate(rows):
        top = i * high
        many = " many" if len(times) > _BROAD else ""
        path = "".join(f"M{x} {top + high * 0.16:.2f}v{high * 0.68:.2f}" for x in sorted({frame.x(t) for t in times}))
        drawing.append(f'<path class="mark{many}" stroke="var(--{color})" d="{path}"/>')
        labels.append((1 - (i + 0.5) / len(rows), name))
    about = "; ".join(f"{len(times)} {name}" for name, _, times in rows) + ". The table of events lists them."
    return panel("Events", about, 26 * len(rows), "".join(drawing), labels)


def band(frame: Frame, pieces: Sequence[TimeShare]) -> str:
    """Draw the categories of the run's time as a band."""
    rects = []
    for piece in pieces:
        x, high = frame.x(piece.begin), _HIGH * sum(piece.shares.values())
        # Each bar reaches the bottom and is covered by the next one, so that rounding leaves no gaps.
        for category, share in reversed(piece.shares.items()):
            width = max(_LEAST if category in _SEEN else 0.0, frame.x(piece.end) - x)
            at = f'x="{x}" y="{_HIGH - high:.1f}" width="{width:.2f}" height="{high:.1f}"'
            rects.append(f'<rect {at} fill="var(--{category})"/>')
            high -= share * _HIGH
    about = f"{len(pieces)} pieces of time, colored by category. The table below has their sums."
    high = 30 if all(len(piece.shares) == 1 for piece in pieces) else 60
    return panel("Time by category", about, high, f'<g shape-rendering="crispEdges">{"".join(rects)}</g>', [])


def world(frame: Frame, changes: Sequence[tuple[float, int]]) -> str:
    """Draw the world size over time."""
    most = max([1, *(workers for _, workers in changes)])
    scale = Scale(0, most * 1.08)
    values = [v for v in ticks(0, most, 4) if v == int(v)]
    if len(changes) > 2 * _BROAD:
        changes = _bridged(changes, _SHORT * frame.seconds)
    path = f"M{frame.x(changes[0][0])} {scale.y(changes[0][1])}" if changes else ""
    path += "".join(f"H{frame.x(at)}V{scale.y(workers)}" for at, workers in changes[1:])
    shape = f"{path}V{_HIGH:g}H{frame.x(changes[0][0])}Z" if changes else ""
    many = " many" if len(changes) > 2 * _BROAD else ""
    drawing = (
        f'{grid(frame, scale, values)}<path class="fill" fill="var(--training)" d="{shape}"/>'
        f'<path class="line{many}" stroke="var(--training)" d="{path}"/>'
    )
    worlds = sorted({workers for _, workers in changes if workers})
    about = f"Training workers over time: between {worlds[0]} and {worlds[-1]}." if worlds else "No worker trained."
    return panel("World size", about, 84, drawing, [(scale.share(v), f"{v:.0f}") for v in values])


def _bridged(changes: Sequence[tuple[float, int]], seconds: float) -> list[tuple[float, int]]:
    """Drop the short gaps in which no worker trained, because many of them would hide the other changes."""
    kept: list[tuple[float, int]] = []
    for (at, workers), after in zip(changes, [*changes[1:], None], strict=True):
        is_short = workers == 0 and after is not None and after[0] - at < seconds
        if not (is_short and kept):
            kept.append((at, workers))
    return kept


def loss(frame: Frame, curve: Curve, breaks: Sequence[float], marks: Sequence[float] = ()) -> str:
    """Draw the loss curve, shaded from the smallest to the largest loss of the steps that a point stands for.

    Args:
        breaks: times at which a curve is interrupted.
        marks: times of steps that stand out.
    """
    low, high = float(curve.low.min()), float(curve.high.max())
    is_log = low > 0 and high / low >= _LOGARITHMIC
    room = 0.0 if is_log else 0.06 * (high - low)
    scale = Scale(max(0.0, low - room) if low >= 0 else low - room, high + room, is_log)
    values = scale.ticks(4)
    drawing = [grid(frame, scale, values)]
    points = [(frame.x(t), scale.y(v)) for t, v in zip(curve.times, curve.values, strict=True)]
    edges = [(scale.y(a), scale.y(b)) for a, b in zip(curve.low, curve.high, strict=True)]
    for part in _parts(curve.times.tolist(), breaks):
        xs = points[part]
        if any(a != b for a, b in edges[part]):
            above = [f"{x} {top}" for (x, _), (_, top) in zip(xs, edges[part], strict=True)]
            below = [f"{x} {bottom}" for (x, _), (bottom, _) in zip(xs, edges[part], strict=True)]
            shade = "M" + "L".join([*above, *reversed(below)]) + "Z"
            drawing.append(f'<path class="fill" fill="var(--loss)" d="{shade}"/>')
        if len(curve) < _FEW:
            dots = "".join(_line([point]) for point in xs)
            drawing.append(f'<path class="line dots" stroke="var(--loss)" d="{dots}"/>')
        else:
            drawing.append(f'<path class="line" stroke="var(--loss)" d="{_line(xs)}"/>')
    if marks:
        path = "".join(f"M{x} 0v{_HIGH * 0.07:g}" for x in sorted({frame.x(t) for t in marks}))
        drawing.append(f'<path class="mark" stroke="var(--fault)" d="{path}"/>')
    about = f"Training loss from {curve.values[0]:.4g} to {curve.values[-1]:.4g}, lowest {low:.4g}, highest {high:.4g}."
    about += f" {len(marks)} mark{'s' if len(marks) > 1 else ''} where steps stand out." if marks else ""
    extra = '<span class="note"> (logarithmic)</span>' if is_log else ""
    if marks:
        extra += f'<ul class="legend inline"><li>{_swatch("upright", "fault")}steps that stand out</li></ul>'
    return panel("Loss", about, 170, "".join(drawing), [(scale.share(v), f"{v:.3g}") for v in values], extra)


def ages(frame: Frame, ages_by_name: dict[str, list[tuple[float, float]]], breaks: Sequence[float]) -> str:
    """Draw the ages of the newest copies, {name: [(time, seconds)]}: the first name solid, the second dashed."""
    most = max([1.0, *(age for rows in ages_by_name.values() for _, age in rows)])
    scale = Scale(0, most * 1.05)
    values = ticks(0, most, 4) if most < 60 else clock_ticks(most, 4)
    drawing, legend, about = [grid(frame, scale, values)], [], []
    for i, (name, rows) in enumerate(ages_by_name.items()):
        many = " many" if len(rows) > 10 * _BROAD else ""
        color, dashed = ("checkpoint", "") if i == 0 else ("redone", " dashed")
        for part in _parts([t for t, _ in rows], breaks):
            path = _line([(frame.x(t), scale.y(age)) for t, age in rows[part]])
            drawing.append(f'<path class="line{many}{dashed}" stroke="var(--{color})" d="{path}"/>')
        swatch = "dash" if dashed else "rule"
        legend.append(f"<li>{_swatch(swatch, color)}{escape(name)}</li>")
        if rows:
            about.append(f"{name}: up to {max(age for _, age in rows):.0f} s")
    text = "Seconds since the run was at the step of its newest copy. " + "; ".join(about)
    extra = f'<ul class="legend inline">{"".join(legend)}</ul>'
    return panel("Checkpoint age", text, 110, "".join(drawing), [(scale.share(v), _seconds(v)) for v in values], extra)


def _swatch(kind: str, color: str) -> str:
    return f'<i class="swatch {kind}" style="color:var(--{color})"></i>'


def _seconds(value: float) -> str:
    return f"{value:g} s" if value < 60 else clock_text(value)


def _line(points: Sequence[tuple[float, float]]) -> str:
    # SVG draws nothing for a single point, so make it a very short line.
    return "M" + "L".join(f"{x} {y}" for x, y in points) + ("h0.01" if len(points) == 1 else "")


def _parts(times: Sequence[float], breaks: Sequence[float]) -> list[slice]:
    """Split the times at the breaks, and return the slices."""
    if not times:
        return []
    cuts, at = [0], 0
    for i, (before, after) in enumerate(itertools.pairwise(times), 1):
        while at < len(breaks) and breaks[at] < before:
            at += 1
        if at < len(breaks) and breaks[at] <= after:
            cuts.append(i)
    return [slice(a, b) for a, b in itertools.pairwise([*cuts, len(times)])]
