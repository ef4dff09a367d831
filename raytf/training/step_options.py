"""How a step is computed."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.distributed import wire
from raytf.distributed.buckets import Overlap
from raytf.distributed.devices import Devices


@dataclass(frozen=True)
class StepOptions:
    """How a step is computed.

    Attributes:
        flags: number of flags that are summed over workers with each step.
        jit: compile gradients with XLA.
        fixed_point: add gradients in fixed point, so that the sum is the same for every number of workers.
        compress: send gradients as 16 bits.
        devices: this process's devices; by default one.
        keeps_gradients: return the gradients of a call's last step.
        words: how devices represent integers, the same on all workers; by default what suits these devices best.
        overlap: all-reduce gradients in buckets, while other gradients are still computed; by default all at once.
        digests: return digests of each step, where its sums are in fixed point.
        has_old_digests: make them as the run's are, which has begun with a raytf that did not fold; see `DigestKind`.
        audits: have a graph in which another worker can compute a shard, too, where that is possible.
    """

    flags: int = 1
    jit: bool = False
    fixed_point: bool = True
    compress: bool = False
    devices: Devices | None = None
    keeps_gradients: bool = False
    words: wire.WireWords | None = None
    overlap: Overlap | None = None
    digests: bool = True
    has_old_digests: bool = False
    audits: bool = False
