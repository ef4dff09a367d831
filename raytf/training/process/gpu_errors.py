"""Converts a TensorFlow error in a worker to an error that says whose fault it is: node, job or refusal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from raytf.distributed.gpu import health, visibility
from raytf.distributed.gpu.faults import FaultFacts, FaultOwner, StepLoad, advise, sort
from raytf.errors import GpuError, JobError, RaytfError, UnsupportedError, WorkerLostError, one_line

#: Characters of TensorFlow's text in a message for the user.
_TEXT = 400


def explain(
    error: BaseException, trace: str, load: Callable[[], StepLoad], read_facts: Callable[[], FaultFacts] | None = None
) -> RaytfError | None:
    """Choose what to raise instead of a TensorFlow error that is about a GPU.

    Args:
        error: the error that TensorFlow raised.
        trace: its traceback, as text.
        load: returns what a step puts on a GPU; called only if needed.
        read_facts: returns what is known about this process's GPU; called only if needed. By default `facts`.

    Returns:
        None for an error that is not about a GPU.
    """
    text = str(error)
    if sort(text, FaultFacts()) is None:  # not about a GPU
        return None
    known = (read_facts or facts)()
    whose = sort(text, known)
    address, node = visibility.here()
    if known.is_told:  # the coordinator learns of an error on some worker's GPU, but not on which
        address, node = "of a worker", ""
    message = f"{type(error).__name__}: {one_line(text, _TEXT)}"
    match whose:
        case FaultOwner.REFUSED:
            return UnsupportedError(f"TensorFlow refuses what this run asks of its devices: {message}")
        case FaultOwner.MEMORY:
            return JobError(advise(text, load()), trace)
        case FaultOwner.CODE:
            return JobError(f"kernels of this job fail on every GPU: {message}", trace)
        case FaultOwner.PEER:
            return WorkerLostError(one_line(text, 500))
        case FaultOwner.TAKEN:
            return GpuError(f"node {address}: another process is on the GPU of this worker: {message}", node)
        case FaultOwner.NETWORK:
            return GpuError(f"node {address}: NCCL fails between GPUs: {message}", node, is_doubtful=True)
        case FaultOwner.LAUNCH:
            return GpuError(f"node {address}: a kernel failed on the GPU: {message}", node, is_launch=True)
        case _:
            return GpuError(f"node {address}: its GPU, the driver or a CUDA library fails: {message}", node)


def facts() -> FaultFacts:
    """Return what NVML and Ray know about this worker's GPU, once it has started to compute."""
    if visibility.assigned_gpus() == []:
        return FaultFacts(is_told=True)
    others = None
    with contextlib.suppress(GpuError):
        counts = [reading.processes for reading in health.read_mine(computes=True)]
        others = max((count for count in counts if count is not None), default=None)
    return FaultFacts(others, is_divided=visibility.share() < 1)


def load_of(batch: int, shards: int, is_mixed: bool) -> StepLoad:
    """Return the load that a step puts on a GPU of this process."""
    gpu = None
    with contextlib.suppress(GpuError):
        mine = [reading.gpu for reading in health.read_mine()]
        gpu = (mine[0].name, mine[0].memory_bytes) if mine else None
    return StepLoad(batch, shards, gpu, is_mixed, visibility.share())
