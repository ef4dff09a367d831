"""Notices gradients after which 16 bits hold little of the next ones. Pure decisions.

A tensor's exponent rises at once with its largest value, and falls by one with each step: values that are much smaller
are rounded to few bits until it has fallen. To let it fall faster would change the bits of runs whose gradients are
zero now and then, as those of embeddings are.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

#: Norms whose median is the usual one, and how many it takes at least.
_NORMS, _LEAST_NORMS = 50, 10
#: Bits of a tensor's largest value below which the error of random values is about a tenth of them, as measured.
_BITS = 5.7


def imprecise_steps(ratio: float, shards: int) -> int:
    """Return after how many steps compressed gradients of some shards are precise to a tenth again, if those of one
    step were `ratio` times as large as usual."""
    bits = 15 - math.ceil(math.log2(max(2, shards)))
    return max(0, round(math.log2(max(1.0, ratio)) - bits + _BITS))


class SpikeWatch:
    """Watches the norms of the gradients of a run that compresses them, for so many logical shards."""

    def __init__(self, shards: int):
        self._shards = shards
        self._norms: deque[float] = deque(maxlen=_NORMS)
        #: The last step whose gradients are known to be imprecise.
        self._imprecise = 0

    def inspect(self, first: int, norms: np.ndarray) -> list[str]:
        """Return a line for the user for each of consecutive steps whose gradients are so large that those after it are
        imprecise, by their global norms [K], NaN where one is not known; the first step is counted from 1."""
        lines = []
        for step, norm in enumerate(norms.tolist(), first):
            if not math.isfinite(norm):
                continue
            usual = float(np.median(self._norms)) if len(self._norms) >= _LEAST_NORMS else 0.0
            count = imprecise_steps(norm / usual, self._shards) if usual else 0
            if count and step > self._imprecise:
                lines.append(
                    f"the gradients of step {step} are {norm / usual:,.0f} times as large as usual: with "
                    f"--compress-gradients, those of about {count} steps after it are off by 10 % or more"
                )
            self._imprecise = max(self._imprecise, step + count if count else 0)
            self._norms.append(norm)
        return lines
