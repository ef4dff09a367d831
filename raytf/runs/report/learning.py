"""What a page draws of a run's learning and speed: numbers by step, epoch and time, thinned out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raytf.runs.history import History
from raytf.runs.ledger import Event
from raytf.runs.report import series
from raytf.storage.untrusted_json import number

#: Points of a curve, at most.
MOST_POINTS = 1500
_STEP_COLUMNS = ("loss", "learning_rate", "gradient_norm")
#: Of an epoch's log, what is no metric.
_NO_METRIC = ("epoch", "step", "learning_rate")
_FAULTS = ("fault", "resize")


def document(run: History, steps: Mapping[str, np.ndarray] | None) -> dict[str, Any]:
    """All curves as JSON; times in seconds since the run's first event, NaN as null.

    Args:
        run: of which they are.
        steps: of `raytf.read_steps`.
    """
    found = {} if steps is None or not len(steps["step"]) else dict(steps)
    at = series.times_of_steps(run.spans, found["step"]) - run.begin if found else np.zeros(0)
    return {
        "steps": _of_steps(found, at) if found else _of_events(run.events, run.begin),
        "epochs": _epochs(run.epochs, found.get("step", np.zeros(0, int)), at),
        "speed": _speed(run.events, run.begin),
        "faults": [
            [round(h.time - run.begin, 2), h.step, f"{h.kind}: {h.text}", h.sort]
            for h in run.happenings
            if h.sort in _FAULTS
        ],
    }


def metrics_of(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the metrics that epochs have, without those of validation that have another one beside them."""
    names = dict.fromkeys(name for epoch in epochs for name in epoch if name not in _NO_METRIC)
    return [name for name in names if not (name.startswith("val_") and name.removeprefix("val_") in names)]


def _of_steps(steps: Mapping[str, np.ndarray], at: np.ndarray, most: int = MOST_POINTS) -> dict[str, list[Any]]:
    count = len(steps["step"])
    starts = np.unique(np.linspace(0, count, min(count, most) + 1).astype(int)[:-1])
    sizes = np.diff([*starts, count])
    last = np.minimum(starts + sizes, count) - 1
    nothing = np.full(count, np.nan)
    table: dict[str, np.ndarray] = {"step": steps["step"][last], "time": at[last]}
    table["epoch"] = steps.get("epoch", nothing)[last] + 1
    for name in _STEP_COLUMNS:
        values = steps.get(name, nothing)
        known = np.isfinite(values)
        sums = np.add.reduceat(np.where(known, values, 0.0), starts)
        counts = np.add.reduceat(known.astype(int), starts)
        table[name] = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return {name: _plain(values) for name, values in table.items()}


def _of_events(events: Sequence[Event], begin: float) -> dict[str, list[Any]]:
    """The running loss that signs of life carried, where nothing of the steps is on storage yet."""
    found = [(e.get("step") or 0, e["time"] - begin, e["loss"]) for e in events if number(e.get("loss")) is None]
    found = found[:: max(1, -(-len(found) // MOST_POINTS))]
    step, time, loss = (list(column) for column in zip(*found, strict=True)) if found else ([], [], [])
    nothing = [None] * len(found)
    return {
        "step": step,
        "epoch": nothing,
        "time": _plain(np.array(time)),
        "loss": _plain(np.array(loss, float)),
        **dict.fromkeys(("learning_rate", "gradient_norm"), nothing),
    }


def _epochs(epochs: Sequence[Mapping[str, Any]], steps: np.ndarray, at: np.ndarray) -> list[dict[str, Any]]:
    rows = []
    for index, epoch in enumerate(epochs):
        place = np.searchsorted(steps, epoch.get("step", 0))
        time = float(at[place]) if place < len(at) else math.nan
        known = {name: _number(value) for name, value in epoch.items() if isinstance(value, (int, float))}
        rows.append({**known, "epoch": int(epoch.get("epoch", index)) + 1, "time": _number(time)})
    return rows


def _speed(events: Sequence[Event], begin: float) -> dict[str, list[Any]]:
    rows = [
        (round(e["time"] - begin, 2), e.get("step") or 0, _number(float(e["samples_per_second"])), e.get("workers"))
        for e in events
        if e.get("samples_per_second") and e.get("phase") == "training"
    ]
    rows = rows[:: max(1, -(-len(rows) // MOST_POINTS))]
    columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], []]
    return dict(zip(("time", "step", "samples_per_second", "workers"), columns, strict=True))


def _plain(values: np.ndarray) -> list[Any]:
    if values.dtype.kind in "iu":
        return [int(value) for value in values]
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
