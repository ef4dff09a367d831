"""Rows of the log of steps: what a run notes of each, and what memory keeps of it until storage has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

#: Of the numbers.
COLUMNS = ("step", "epoch", "loss", "learning_rate", "gradient_norm")


@dataclass(frozen=True)
class StepRows:
    """Consecutive steps, in order.

    Attributes:
        numbers: [n, 5] float64, see `COLUMNS`; steps count from 1; NaN for a norm that is not known.
        digests: [n, B] uint8, see `raytf.distributed.step_digest`; all 0 where a step has none.
        weights: the hash of the weights after some of the steps.
    """

    numbers: np.ndarray = field(default_factory=lambda: np.empty((0, len(COLUMNS))))
    digests: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint8))
    weights: Mapping[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def joined(cls, chunks: Sequence[StepRows]) -> StepRows:
        """Return chunks joined in their order; digests of another version are padded with zeros."""
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
        """Return the same rows, with the hash of the weights after a step."""
        return replace(self, weights={**self.weights, step: value})

    def arrays(self) -> dict[str, np.ndarray]:
        weights = np.array([*self.weights.items()], np.uint64).reshape(-1, 2)
        return {"numbers": self.numbers, "digests": self.digests, "weights": weights}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray]) -> StepRows:
        """Return the rows that `arrays` has written, perhaps in an earlier version."""
        known = arrays["numbers"]
        numbers = np.pad(known, ((0, 0), (0, len(COLUMNS) - known.shape[1])), constant_values=np.nan)
        digests = arrays.get("digests", np.empty((len(numbers), 0), np.uint8))
        pairs = arrays.get("weights", np.empty((0, 2), np.uint64)).reshape(-1, 2)
        return cls(numbers, digests, {int(step): int(value) for step, value in pairs.tolist()})
