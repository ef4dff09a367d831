"""Numbers of a run over time, thinned out to what a page can show."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from raytf.ledger import Event, Span

#: Points of a curve, and pieces of a band, at most.
MOST_POINTS, MOST_PIECES = 2000, 1200
_TRAINING = ("training", "redone")


@dataclass(frozen=True)
class Curve:
    """Values over time, each with the least and most that it stands for.

    Attributes:
        times: seconds of the epoch, [n], that do not go down.
        values, low, high: [n].
        steps: global step of each, [n].
    """

    times: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    steps: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


def merged(spans: Iterable[Span]) -> list[tuple[float, float, str]]:
    """(begin, end, category) of spans; those of one category that touch are one."""
    pieces: list[tuple[float, float, str]] = []
    for span in spans:
        if pieces and pieces[-1][2] == span.category and span.begin <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], span.end, span.category)
        else:
            pieces.append((span.begin, span.end, span.category))
    return pieces


def bands(spans: Sequence[Span], most: int = MOST_PIECES) -> list[tuple[float, float, str]]:
    """As `merged`; where there are too many, time is cut evenly and each piece has the category that it has most of."""
    pieces = merged(spans)
    if len(pieces) <= most:
        return pieces
    begin, end = pieces[0][0], pieces[-1][1]
    width = (end - begin) / most
    seconds: list[dict[str, float]] = [{} for _ in range(most)]
    for first, last, category in pieces:
        for i in range(int((first - begin) / width), min(most - 1, int((last - begin) / width)) + 1):
            part = min(last, begin + (i + 1) * width) - max(first, begin + i * width)
            seconds[i][category] = seconds[i].get(category, 0.0) + part
    named = (
        (begin + i * width, begin + (i + 1) * width, max(found, key=lambda name: found[name]))
        for i, found in enumerate(seconds)
        if found
    )
    return merged(Span(first, last, category, 0, 0, 0) for first, last, category in named)


def world(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """(time, workers) where the number of workers that train changes; 0 where none do."""
    changes: list[tuple[float, int]] = []
    for before, span in itertools.pairwise([None, *spans]):
        assert span is not None
        if before is not None and span.begin > before.end:
            changes.append((before.end, 0))
        if not changes or changes[-1][1] != span.workers:
            changes.append((span.begin, span.workers))
    return [*changes, (spans[-1].end, changes[-1][1])] if changes else []


def times_of_steps(spans: Sequence[Span], last: int) -> np.ndarray:
    """When each step was made, the last time that it was, [last + 1]; NaN where nobody knows."""
    times = np.full(last + 1, np.nan)
    for span in spans:
        first, end = span.first_step, min(span.last_step, last)
        if span.category in _TRAINING and end > first:
            share = np.arange(1, end - first + 1) / (span.last_step - first)
            times[first + 1 : end + 1] = span.begin + share * span.seconds
    return times


def loss_of_steps(spans: Sequence[Span], steps: np.ndarray, losses: np.ndarray, most: int = MOST_POINTS) -> Curve:
    """The loss of the committed steps at the times at which they were made.

    Args:
        steps, losses: global steps (from 1) and their losses, [n].
        most: points of the curve.
    """
    times = times_of_steps(spans, int(steps[-1]) if len(steps) else 0)[steps]
    known = np.isfinite(times) & np.isfinite(losses)
    return _thin(times[known], losses[known], steps[known], most)


def loss_of_events(events: Sequence[Event], most: int = MOST_POINTS) -> Curve:
    """The running loss that the signs of life carried, for a run that has not written that of its steps."""
    found = [(e["time"], e["loss"], e.get("step") or 0) for e in events if isinstance(e.get("loss"), (int, float))]
    times, losses, steps = (
        (np.array(column, np.float64) for column in zip(*found, strict=True)) if found else [np.empty(0)] * 3
    )
    known = np.isfinite(losses)
    return _thin(times[known], losses[known], steps[known], most)


def _thin(times: np.ndarray, values: np.ndarray, steps: np.ndarray, most: int) -> Curve:
    order = np.argsort(times, kind="stable")
    times, values, steps = times[order], values[order], steps[order]
    if len(times) <= most:
        return Curve(times, values, values, values, steps)
    # Even in time, which is what the eye sees: a part of the run that was fast has more steps a point.
    edges = np.linspace(times[0], times[-1], most + 1)[:-1]
    starts = np.unique(np.searchsorted(times, edges, side="left"))
    counts = np.diff([*starts, len(times)])
    means = np.add.reduceat(values, starts) / counts
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Curve(times[starts], means, low, high, steps[starts])


def ages(
    spans: Sequence[Span], events: Sequence[Event], field: str, most: int = MOST_POINTS
) -> list[tuple[float, float]]:
    """(time, seconds) since the run was last at the step of its newest copy: what a failure would cost.

    Args:
        field: of the events, with that step: `checkpoint` on storage, `snapshot` in memory.
    """
    training = iter([span for span in spans if span.category in _TRAINING and span.last_step > span.first_step])
    span = next(training, None)
    # The latest history of the run up to here: spans by their first steps, which go up.
    known: list[Span] = []
    found: list[tuple[float, float]] = []
    for event in events:
        while span is not None and span.begin <= event["time"]:
            while known and known[-1].first_step >= span.first_step:
                known.pop()
            known.append(span)
            span = next(training, None)
        if event["kind"] in ("progress", "phase") and field in event and event.get("phase") != "starting" and known:
            step = int(event.get(field) or 0)
            found.append((event["time"], max(0.0, event["time"] - _made(known, step))))
    return found[:: -(-len(found) // most)] if len(found) > most else found


def _made(known: Sequence[Span], step: int) -> float:
    span = known[max(0, bisect.bisect_right(known, step, key=lambda span: span.first_step) - 1)]
    share = (step - span.first_step) / (span.last_step - span.first_step)
    return span.begin + min(1.0, max(0.0, share)) * span.seconds


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most so many."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most)
    size = 10.0 ** np.floor(np.log10(raw))
    unit = next(size * k for k in (1, 2, 5, 10) if size * k >= raw * 0.999)
    first = np.ceil(low / unit - 1e-9) * unit
    return [float(x) + 0.0 for x in np.arange(first, high + unit * 1e-6, unit)]  # + 0.0: not -0


_CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def clock_ticks(seconds: float, most: int) -> list[float]:
    """Times of a clock from 0 to `seconds`, at most about so many."""
    unit = next((u for u in _CLOCK if seconds / u <= most), None)
    if unit is None:
        unit = 86400 * int(np.ceil(seconds / most / 86400))
    return [float(x) for x in np.arange(0, seconds + 1e-9, unit)]
