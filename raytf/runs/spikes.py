"""Finds spikes: steps whose loss or gradient norm is far above that of the steps before. Uses no storage."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

#: Number of steps from which a band is computed, and of steps for which it is then used.
WINDOW, SERVES = 50, 5
#: The upper limit of a band is this many deviations above the median.
DEVIATIONS = 6.0
#: Ratio of the standard deviation to the median absolute deviation in a normal distribution.
_SIGMAS = 1.4826
#: The smallest deviation: of logarithms, so that only values above 1.8 times the median are outside; and relative to
#: the median, for values that may be negative.
_LEAST_LOG, _LEAST_SHARE = 0.1, 1e-3
#: Replaces 0, which has no logarithm.
_TINY = 1e-12
#: The columns of `raytf.read_steps` that are searched for spikes.
QUANTITIES = ("loss", "gradient_norm")


@dataclass(frozen=True)
class Spike:
    """A series of steps that stand out.

    Attributes:
        first, last: the first and the last of these steps, counted from 1.
        outside: the quantities that left their bands.
        values: the known values of the first step, by quantity.
        usual: the medians of the steps before, by quantity.
    """

    first: int
    last: int
    outside: tuple[str, ...]
    values: Mapping[str, float]
    usual: Mapping[str, float]

    @property
    def height(self) -> float:
        """Return the first step's largest ratio of a value to its usual value."""
        return max((self.values[name] / self.usual[name] for name in self.values if self.usual[name] > 0), default=0.0)

    def describe(self, quantity: str) -> str:
        """Return the first step's value and the usual one, as text; empty if the value is unknown."""
        if quantity not in self.values:
            return ""
        return f"{self.values[quantity]:.4g} (usually {self.usual[quantity]:.4g})"

    def replayed(self, run: str) -> str:
        """Return the command that computes the first step again and dumps its records."""
        return f"raytf replay {shlex.quote(run)} --step {self.first} --dump step-{self.first} -- COMMAND"


def find(steps: Mapping[str, np.ndarray]) -> list[Spike]:
    """Find the spikes of a run.

    A value is outside its band if it is more than six robust deviations (1.4826 times the median absolute deviation)
    above the median of the fifty steps before. If no value of a quantity is negative, logarithms are compared, because
    losses and norms follow a log-normal distribution: a late loss of 0.001 may well be ten times as large in the next
    batch. The first fifty steps have no band.

    Args:
        steps: the columns step, loss and gradient_norm, as `raytf.read_steps` returns them.
    """
    numbers = steps["step"]
    medians, outside = {}, {}
    for name in QUANTITIES:
        values = steps[name]
        # Each step has a loss, so NaN is a real value here: it counts as infinite.
        medians[name], outside[name] = band(np.where(np.isnan(values), np.inf, values) if name == "loss" else values)
    marked = np.flatnonzero(np.any([*outside.values()], 0))
    if not len(marked):
        return []
    parts = np.split(marked, np.flatnonzero(np.diff(marked) > SERVES) + 1)
    return [_spike(numbers, steps, medians, outside, part) for part in parts]


def _spike(
    numbers: np.ndarray,
    steps: Mapping[str, np.ndarray],
    medians: Mapping[str, np.ndarray],
    outside: Mapping[str, np.ndarray],
    part: np.ndarray,
) -> Spike:
    first = part[0]
    known = [name for name in QUANTITIES if not np.isnan(medians[name][first])]
    return Spike(
        int(numbers[first]),
        int(numbers[part[-1]]),
        tuple(name for name in QUANTITIES if outside[name][part].any()),
        {name: float(steps[name][first]) for name in known},
        {name: float(medians[name][first]) for name in known},
    )


def band(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the median of the steps before each value, and whether the value is above its band.

    Args:
        values: [n], in the order of the steps; NaN for unknown values.

    Returns:
        The medians, [n] float64, with NaN if there is no band; and the flags, [n] bool.
    """
    medians, outside = np.full(len(values), np.nan), np.zeros(len(values), bool)
    known = np.flatnonzero(~np.isnan(values))
    if len(known) <= WINDOW:
        return medians, outside
    numbers = values[known].astype(np.float64)
    is_log = bool((numbers >= 0).all())
    scaled = np.log(np.maximum(numbers, _TINY)) if is_log else numbers
    windows = np.lib.stride_tricks.sliding_window_view(scaled, WINDOW)[: len(scaled) - WINDOW : SERVES]
    middle = np.median(windows, 1)
    with np.errstate(invalid="ignore"):  # the difference of two infinite values
        away = [np.median(np.abs(part - at[:, None]), 1) for part, at in _parts(windows, middle)]
    spread = _SIGMAS * np.concatenate(away)
    least = np.full(len(middle), _LEAST_LOG) if is_log else _LEAST_SHARE * np.abs(middle)
    limits = middle + DEVIATIONS * np.maximum(spread, least)
    late = known[WINDOW:]
    medians[late] = np.repeat(np.exp(middle) if is_log else middle, SERVES)[: len(late)]
    outside[late] = scaled[WINDOW:] > np.repeat(limits, SERVES)[: len(late)]
    return medians, outside


def _parts(windows: np.ndarray, middle: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split windows and medians into pieces, because the caller copies each piece."""
    cuts = range(4096, len(windows), 4096)
    return list(zip(np.split(windows, cuts), np.split(middle, cuts), strict=True))
