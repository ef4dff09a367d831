"""The bytes that are kept of a step's digests, and a chain over all steps. This module loads no TensorFlow.

A step has 8 bytes of its own, 4 of each logical shard and 1 of each tensor. With them, whoever computes the step again
knows at once whether it is the same, and if not, which shard of which tensor differs. A tensor's byte may be equal by
chance, once in 256 times; a step's or a shard's is not.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

STEP_BYTES, SHARD_BYTES, TENSOR_BYTES = 8, 4, 1
#: The name of what a shard adds beside gradients and states.
LOSS = "loss and metrics"
#: The chain before the first step.
GENESIS = bytes(32)


class DigestKind(StrEnum):
    """A way to make digests, see `raytf.distributed.encoding.digests`. Different kinds cannot be compared."""

    FOLDED = "folded"
    DEVICE = "device"
    #: For runs that started with a raytf that did not fold; they keep it.
    WHOLE = "whole"


@dataclass(frozen=True)
class DigestLayout:
    """The meaning of the bytes of a step's digests.

    Attributes:
        shards: V.
        tensors: their names; the last one of each phase of a step is the shard's loss and metrics.
        kind: how they were made.
    """

    shards: int
    tensors: tuple[str, ...]
    kind: DigestKind = DigestKind.FOLDED

    @property
    def bytes(self) -> int:
        return STEP_BYTES + SHARD_BYTES * self.shards + TENSOR_BYTES * len(self.tensors)


@dataclass(frozen=True)
class Difference:
    """The difference between two digests of a step.

    Attributes:
        shards: indices of logical shards.
        tensors: names; empty where by chance no byte differs.
        of: how many shards there are.
    """

    shards: tuple[int, ...]
    tensors: tuple[str, ...]
    of: int = 0

    @property
    def is_everywhere(self) -> bool:
        return len(self.shards) == self.of > 0


def number(digest: bytes) -> int:
    """Return a step's own digest, 64 bits, out of all that is kept of it; 0 for nothing."""
    return int.from_bytes(digest[:STEP_BYTES], "little")


def difference(layout: DigestLayout, one: bytes, other: bytes) -> Difference | None:
    """Return how two digests of one step, of one layout, differ; None if they are equal."""
    if one == other:
        return None
    begin = STEP_BYTES + SHARD_BYTES * layout.shards
    shards = [_part(each[STEP_BYTES:begin], SHARD_BYTES) for each in (one, other)]
    tensors = [_part(each[begin:], TENSOR_BYTES) for each in (one, other)]
    return Difference(
        tuple(i for i, (a, b) in enumerate(zip(*shards, strict=True)) if a != b),
        tuple(layout.tensors[i] for i, (a, b) in enumerate(zip(*tensors, strict=True)) if a != b),
        layout.shards,
    )


def chained(
    chain: bytes, step: int, losses_and_rates: Sequence[tuple[float, float]], digests: Sequence[bytes]
) -> bytes:
    """Return the chain after some steps.

    After each it is the SHA-256 of the chain before it, its number, loss, learning rate and digests.

    Args:
        chain: before them, 32 bytes.
        step: the first one, from 1.
        losses_and_rates: loss and learning rate of each, float32.
        digests: of each; empty where steps have none.
    """
    for place, numbers in enumerate(losses_and_rates):
        digest = digests[place] if len(digests) else b""
        chain = hashlib.sha256(chain + struct.pack("<qff", step + place, *numbers) + digest).digest()
    return chain


def _part(raw: bytes, size: int) -> list[bytes]:
    return [raw[i : i + size] for i in range(0, len(raw), size)]
