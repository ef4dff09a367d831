"""A state that is a function of the step alone, so that each byte of a restored one can be checked; and what a rank and
the torturer tell each other about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

#: Where a rank can be killed; what each one spans is in docs/evidence/torture.md.
MOMENTS = ("restore", "snapshot", "write", "upload", "manifest", "retention")
_TENSORS = 7
_DTYPES = (np.float32, np.float64, np.uint8, np.int64, np.float32)


@dataclass(frozen=True)
class Plan:
    """One attempt and how it ends.

    Attributes:
        seed: of the random waits in its ranks.
        attempt: its name.
        ranks: how many.
        nodes: which the ranks are dealt to, in turn; each holds the whole state in memory.
        keep: checkpoints that retention leaves.
        moment, rank, skip: the kill follows when this rank enters this moment, after this many times before.
        delay: seconds from there to SIGKILL.
        alone: seconds for which the others survive that rank.
        dawdle: most seconds of a random wait around and within each moment.
        plant: a defect to find; see torture.py.
    """

    seed: str
    attempt: str
    ranks: int
    nodes: int
    keep: int
    moment: str
    rank: int
    skip: int
    delay: float
    alone: float
    dawdle: float
    plant: str = ""

    def mates(self, rank: int) -> list[int]:
        """The ranks of a rank's node, in order."""
        return [r for r in range(self.ranks) if r % self.nodes == rank % self.nodes]


class State:
    """Tensors of about this many bytes, all of whose values change with each step."""

    def __init__(self, size: int):
        count = size // (_TENSORS * 5)
        self._bases = [
            np.arange(count // (1 + i % 3) + i, dtype=np.uint32) * np.uint32(2654435761) for i in range(_TENSORS)
        ]
        self.tensors = {
            f"model/{i:05d}": np.empty(len(base), _DTYPES[i % len(_DTYPES)]) for i, base in enumerate(self._bases)
        } | {"optimizer/iterations": np.zeros((), np.int64)}
        self.fill(0)

    def fill(self, step: int) -> None:
        """Set all tensors, in place, to what they are after a step."""
        for i, (base, tensor) in enumerate(zip(self._bases, self.tensors.values(), strict=False)):
            values = base + np.uint32((step * 2246822519 + i * 3266489917) % 2**32)
            tensor[...] = values >> np.uint32(8)  # what fits into float32
        self.tensors["optimizer/iterations"][...] = step

    def differs(self, step: int, tensors: dict[str, np.ndarray]) -> str:
        """What is wrong with tensors that are said to be those of a step; empty where every bit is right."""
        if sorted(tensors) != sorted(self.tensors):
            return f"{len(tensors)} of {len(self.tensors)} tensors"
        self.fill(step)
        for name, right in self.tensors.items():
            found = tensors[name]
            if (found.dtype, found.shape) != (right.dtype, right.shape) or found.tobytes() != right.tobytes():
                return f"{name} is not that of step {step}"
        return ""


class Slowly(dict[str, np.ndarray]):
    """Tensors that take their time, one after the other, so that a kill finds whoever reads them in the middle."""

    wait = staticmethod(lambda: None)

    def items(self) -> Iterator[tuple[str, np.ndarray]]:  # type: ignore[override]
        for item in super().items():
            yield item
            self.wait()
