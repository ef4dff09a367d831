"""Rows of the step log: what a run records of each step, kept in memory until they are in storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

#: The columns of `StepRows.numbers`.
COLUMNS = ("step", "epoch", "loss", "learning_rate", "gradient_norm")


@dataclass(frozen=True)
class StepRows:
    """Consecutive steps, in order.

    Attributes:
        numbers: [n, 5] float64, see `COLUMNS`; steps count from 1; an unknown norm is NaN.
        digests: [n, B] uint8, see `raytf.distributed.step_digest`; all 0 for a step without a digest.
        weights: step -> hash of the weights after it, for some of the steps.
    """

    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS))))
    digests: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    weights: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def joined(cls, chunks: Sequence[StepRows]) -> StepRows:
        """Return the chunks joined in order, with the shorter digests of another version padded with zeros."""
        if not chunks:
            return cls()
        width = max(chunk.digests.shape[1] for chunk in chunks)
        digests = [np.pad(chunk.digests, ((0, 0), (0, width - chunk.digests.shape[1]))) for chunk in chunks]
        weights = {step: value for chunk in chunks for step, value in chunk.weights.items()}
        return cls(np.concatenate([chunk.numbers for chunk in chunks]), np.concatenate(digests), weights)

    def after(self, step: int) -> StepRows:
        late = self.numbers[:, 0] > step
        weights = {at: value for at, value in self.weights.items() if at > step}
        return StepRows(self.numbers[late], self.digests[late], weights)

    def part(self, begin: int) -> StepRows:
        if not begin:
            return self
        return self.after(int(self.numbers[begin - 1, 0]))

    def weighed(self, step: int, value: int) -> StepRows:
        """Return these rows with the hash of the weights after `step` added."""
        return replace(self, weights={**self.weights, step: value})

    def arrays(self) -> dict[str, np.ndarray]:
        weights = np.array([*self.weights.items()], np.uint64).reshape(-1, 2)
        return {"numbers": self.numbers, "digests": self.digests, "weights": weights}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> StepRows:
        """Return the rows from the result of `arrays`, of this version or an earlier one."""
        known = arrays["numbers"]
        numbers = np.pad(known, ((0, 0), (0, len(COLUMNS) - known.shape[1])), constant_values=np.nan)
        digests = arrays.get("digests", np.empty((len(numbers), 0), np.uint8))
        pairs = arrays.get("weights", np.empty((0, 2), np.uint64)).reshape(-1, 2)
        return cls(numbers, digests, {int(step): int(value) for step, value in pairs.tolist()})
