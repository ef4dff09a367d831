"""Series of a run's numbers by time, step and epoch, thinned out to what a page can show."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.runs.history import History
from raytf.runs.ledger import Event
from raytf.runs.timeline import CATEGORIES, COPY_TIERS, RecoveryPointAges, Span
from raytf.storage.untrusted_json import number

#: The most points of a curve and pieces of a band. A band with more pieces is divided into `_EVEN` equal ones.
MOST_POINTS, MOST_PIECES, _EVEN = 2000, 400, 200
_TRAINING = ("training", "redone")
#: Losses above this are left out like infinite ones: their sums would overflow.
_MOST_LOSS = 1e100
#: The most points of a curve that a script draws.
MOST_CURVE_POINTS = 1500
_STEP_COLUMNS = ("loss", "learning_rate", "gradient_norm")
#: Keys of an epoch's log that are not metrics.
_NO_METRIC = ("epoch", "step", "learning_rate")
_FAULTS = ("fault", "resize")


@dataclass(frozen=True)
class Curve:
    """Values over time. Each stands for one or more steps.

    Attributes:
        times: Unix times in seconds, [n], in ascending order.
        values, low, high: mean, smallest and largest value of the steps of each point, [n].
        steps: the first global step of each point, [n].
    """

    times: np.ndarray
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    steps: np.ndarray

    def __len__(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class TimeShare:
    """A part of the run's time, with the share of each category. If the shares add up to less than 1, the run had
    finished for the rest of that time."""

    begin: float
    end: float
    shares: dict[str, float]


def merged(spans: Iterable[Span]) -> list[tuple[float, float, str]]:
    """Return (begin, end, category) of spans, with adjoining spans of the same category merged."""
    pieces: list[tuple[float, float, str]] = []
    for span in spans:
        if pieces and pieces[-1][2] == span.category and span.begin <= pieces[-1][1]:
            pieces[-1] = (pieces[-1][0], span.end, span.category)
        else:
            pieces.append((span.begin, span.end, span.category))
    return pieces


def bands(spans: Sequence[Span]) -> list[TimeShare]:
    """Divide the run's time into pieces of one category each; if these are too many, into equal pieces with the shares
    of all categories."""
    pieces = merged(spans)
    if len(pieces) > MOST_PIECES:
        # Each heartbeat of a group that saves adds a short piece of checkpoint time.
        shortest = (pieces[-1][1] - pieces[0][0]) / 1000
        pieces = merged(
            Span(a, b, "training" if c == "checkpoint" and b - a < shortest else c, 0, 0, 0) for a, b, c in pieces
        )
    if len(pieces) <= MOST_PIECES:
        return [TimeShare(begin, end, {category: 1.0}) for begin, end, category in pieces]
    begin, end = pieces[0][0], pieces[-1][1]
    width = (end - begin) / _EVEN
    seconds: list[dict[str, float]] = [{} for _ in range(_EVEN)]
    for first, last, category in pieces:
        for i in range(int((first - begin) / width), min(_EVEN - 1, int((last - begin) / width)) + 1):
            part = min(last, begin + (i + 1) * width) - max(first, begin + i * width)
            seconds[i][category] = seconds[i].get(category, 0.0) + max(0.0, part)
    return [
        TimeShare(begin + i * width, begin + (i + 1) * width, {c: split[c] / width for c in CATEGORIES if split.get(c)})
        for i, split in enumerate(seconds)
    ]


def world(spans: Sequence[Span]) -> list[tuple[float, int]]:
    """Return (time, workers) for each change of the number of training workers, and for the run's end."""
    changes: list[tuple[float, int]] = []
    for before, span in itertools.pairwise([None, *spans]):
        assert span is not None
        if before is not None and span.begin > before.end:
            changes.append((before.end, 0))
        if not changes or changes[-1][1] != span.workers:
            changes.append((span.begin, span.workers))
    return [*changes, (spans[-1].end, changes[-1][1])] if changes else []


def times_of_steps(spans: Sequence[Span], steps: np.ndarray) -> np.ndarray:
    """Return the time at which each step was last made; NaN if unknown.

    Args:
        steps: ascending, [n]. The required memory depends only on their number.
    """
    times = np.full(len(steps), np.nan)
    for span in spans:
        if span.category in _TRAINING and span.last_step > span.first_step:
            begin, end = np.searchsorted(steps, (span.first_step, span.last_step), side="right")
            share = (steps[begin:end] - span.first_step) / (span.last_step - span.first_step)
            times[begin:end] = span.begin + share * span.seconds
    return times


def step_columns(run: History, steps: Mapping[str, np.ndarray] | None) -> dict[str, np.ndarray]:
    """Return columns by step, with `time` as Unix time in seconds, or NaN if unknown.

    Args:
        steps: columns of `raytf.read_steps`; without them, the running losses of the heartbeats are returned.
    """
    if steps is not None and len(steps["step"]):
        return {**steps, "time": times_of_steps(run.spans, steps["step"])}
    points = [(e.get("step") or 0, e["time"], e["loss"]) for e in run.events if number(e.get("loss")) is None]
    step, time, loss = np.array(points, np.float64).reshape(-1, 3).T
    return {"step": step.astype(int), "time": time, "loss": loss}


def loss_curve(columns: Mapping[str, np.ndarray], most: int = MOST_POINTS) -> Curve:
    """Return the loss over time.

    Args:
        columns: the result of `step_columns`.
        most: the most points of the curve.
    """
    known = np.isfinite(columns["time"]) & (np.abs(columns["loss"]) < _MOST_LOSS)  # drops NaN, too
    return _thin(columns["time"][known], columns["loss"][known], columns["step"][known], most)


def _thin(times: np.ndarray, values: np.ndarray, steps: np.ndarray, most: int) -> Curve:
    order = np.argsort(times, kind="stable")
    times, values, steps = times[order], values[order], steps[order]
    if len(times) <= most:
        return Curve(times, values, values, values, steps)
    # Points are evenly spaced in time, as the chart's axis is, so points of fast parts stand for more steps.
    edges = np.linspace(times[0], times[-1], most + 1)[:-1]
    starts = np.unique(np.searchsorted(times, edges, side="left"))
    counts = np.diff([*starts, len(times)])
    means = np.add.reduceat(values, starts) / counts
    low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
    return Curve(times[starts], means, low, high, steps[starts])


def ages(events: Sequence[Event]) -> dict[str, list[tuple[float, float]]]:
    """Return (time, age in seconds) of each tier's newest copy, at the heartbeats of training."""
    rows_by_tier: dict[str, list[tuple[float, float]]] = {tier: [] for tier in COPY_TIERS}
    line = RecoveryPointAges()
    for event in events:
        line.see(event)
        if event["kind"] in ("progress", "phase") and event.get("phase") == "training":
            for tier, seconds in line.seconds(event["time"]).items():
                rows_by_tier[tier].append((event["time"], seconds))
    return {tier: rows[:: max(1, -(-len(rows) // MOST_POINTS))] for tier, rows in rows_by_tier.items()}


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers from `low` to `high`, about `most` of them at most."""
    if high <= low:
        return [low]
    raw = (high - low) / max(1, most)
    if raw < max(abs(low), abs(high)) * 1e-12 or raw < 1e-290:  # too few floats lie between them
        return [low]
    size = 10.0 ** np.floor(np.log10(raw))
    unit = next(size * k for k in (1, 2, 5, 10) if size * k >= raw * 0.999)
    first = np.ceil(low / unit - 1e-9) * unit
    return [float(x) + 0.0 for x in np.arange(first, high + unit * 1e-6, unit)]  # + 0.0 turns -0.0 into 0.0


_CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def clock_ticks(seconds: float, most: int) -> list[float]:
    """Return times from 0 to `seconds` in multiples of a unit of clocks, about `most` of them at most."""
    unit = next((u for u in _CLOCK if seconds / u <= most), None)
    if unit is None:
        unit = 86400 * int(np.ceil(seconds / most / 86400))
    return [float(x) for x in np.arange(0, seconds + 1e-9, unit)]


def learning_curves(run: History, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Return all curves as JSON, with times in seconds since the run's first event, and NaN as null.

    Args:
        columns: the result of `step_columns`.
    """
    return {
        "steps": _steps(columns, run.begin),
        "epochs": _epochs(run),
        "speed": _speed(run.events, run.begin),
        "faults": [
            [round(h.time - run.begin, 2), h.step, f"{h.kind}: {h.text}", h.sort]
            for h in run.happenings
            if h.sort in _FAULTS
        ],
    }


def metrics_of(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the metrics of epochs. A validation metric is listed only if the training metric of the same
    name is missing."""
    names = dict.fromkeys(name for epoch in epochs for name in epoch if name not in _NO_METRIC)
    return [name for name in names if not (name.startswith("val_") and name.removeprefix("val_") in names)]


def _steps(columns: Mapping[str, np.ndarray], begin: float) -> dict[str, list[Any]]:
    count = len(columns["step"])
    starts = np.unique(np.linspace(0, count, min(count, MOST_CURVE_POINTS) + 1).astype(int)[:-1])
    last = np.array([*starts[1:], count], int)[: len(starts)] - 1
    nothing = np.full(count, np.nan)
    table: dict[str, np.ndarray] = {"step": columns["step"][last], "time": columns["time"][last] - begin}
    table["epoch"] = columns.get("epoch", nothing)[last] + 1
    for name in _STEP_COLUMNS:
        values = columns.get(name, nothing)
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        counts = np.add.reduceat(known.astype(int), starts)
        table[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return {name: _plain(values) for name, values in table.items()}


def _epochs(run: History) -> list[dict[str, Any]]:
    times = times_of_steps(run.spans, np.array([epoch.get("step", 0) for epoch in run.epochs], float)) - run.begin
    rows = []
    for index, (epoch, time) in enumerate(zip(run.epochs, times.tolist(), strict=True)):
        known = {name: _number(value) for name, value in epoch.items() if isinstance(value, (int, float))}
        rows.append({**known, "epoch": int(epoch.get("epoch", index)) + 1, "time": _number(time)})
    return rows


def _speed(events: Sequence[Event], begin: float) -> dict[str, list[Any]]:
    rows = [
        (round(e["time"] - begin, 2), e.get("step") or 0, _number(float(e["samples_per_second"])), e.get("workers"))
        for e in events
        if e.get("samples_per_second") and e.get("phase") == "training"
    ]
    rows = rows[:: max(1, -(-len(rows) // MOST_CURVE_POINTS))]
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]
    return dict(zip(("time", "step", "samples_per_second", "workers"), columns, strict=True))


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind in "iu":
        return [int(value) for value in values]
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
