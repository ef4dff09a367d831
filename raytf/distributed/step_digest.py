"""The bytes that are stored of each step's digests, and a hash chain over all steps. Does not load TensorFlow.

A step has 8 bytes for the whole step, 4 for each logical shard and 1 for each tensor. A process that computes the step
again compares these bytes to know at once whether the step is the same and, if not, which shards and tensors differ. A
tensor's byte matches by chance once in 256 times; the bytes of a step or a shard practically never do.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

STEP_BYTES, SHARD_BYTES, TENSOR_BYTES = 8, 4, 1
#: Name of the values that a shard adds in addition to gradients and states.
LOSS = "loss and metrics"
#: The chain before the first step.
GENESIS = bytes(32)


class DigestKind(StrEnum):
    """A way to compute digests; see `raytf.distributed.encoding.digests`. Different kinds cannot be compared."""

    FOLDED = "folded"
    DEVICE = "device"
    #: For runs that started with a version of raytf that did not fold, and that keep this kind.
    WHOLE = "whole"


@dataclass(frozen=True)
class DigestLayout:
    """The meaning of the bytes of a step's digests.

    Attributes:
        shards: number of logical shards (V).
        tensors: names of the tensors; the last one of each phase of a step is the shard's loss and metrics.
        kind: how the digests were computed.
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
        shards: indices of the logical shards that differ.
        tensors: names of the tensors that differ; empty if by chance no byte differs.
        of: total number of shards.
    """

    shards: tuple[int, ...]
    tensors: tuple[str, ...]
    of: int = 0

    @property
    def is_everywhere(self) -> bool:
        return len(self.shards) == self.of > 0


def number(digest: bytes) -> int:
    """Return the 64-bit digest of the whole step from its stored bytes; 0 if there are none."""
    return int.from_bytes(digest[:STEP_BYTES], "little")


def difference(layout: DigestLayout, one: bytes, other: bytes) -> Difference | None:
    """Return how two digests of the same step and layout differ, or None if they are equal."""
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

    The chain after a step is the SHA-256 of the chain before it and of the step's number, loss, rate and digests.

    Args:
        chain: chain before the steps, 32 bytes.
        step: number of the first step, from 1.
        losses_and_rates: loss and learning rate of each step, float32.
        digests: digests of each step; empty if the steps have none.
    """
    for place, numbers in enumerate(losses_and_rates):
        digest = digests[place] if len(digests) else b""
        chain = hashlib.sha256(chain + struct.pack("<qff", step + place, *numbers) + digest).digest()
    return chain


def _part(raw: bytes, size: int) -> list[bytes]:
    return [raw[i : i + size] for i in range(0, len(raw), size)]
