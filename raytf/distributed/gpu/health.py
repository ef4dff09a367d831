"""Decides whether GPUs are fit for a group, by NVML's readings before the group starts and by a matrix product.

Thresholds follow those of NVIDIA's DCGM, whose health checks fail a GPU for any uncorrectable ECC error since its
driver was loaded, for rows of memory that wait for a reset to be replaced or could not be replaced, and for hardware
that slows it down. The decisions are tested with made-up readings; the reading has run on an H200.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.distributed.gpu.nvidia_driver import Gpu, handles, identity, nvml
from raytf.errors import GpuError

#: Part of a GPU's memory that must be free, relative to what a worker was given of it.
FREE = 0.9
#: Seconds in which a previous process that is ending gives its memory back, and a hot GPU cools down.
WAIT_SECONDS = 20.0
#: Seconds between two readings meanwhile.
LOOK_SECONDS = 0.5
#: Reasons for low clocks that indicate trouble, by NVML's bits (nvml.h, nvmlClocksEventReasons).
SLOW = {
    0x08: "the hardware slows it down (power or heat)",
    0x20: "it is too hot, and the driver slows it down",
    0x40: "it is too hot, and the hardware slows it down",
    0x80: "its power supply slows it down",
}


@dataclass(frozen=True)
class GpuReading:
    """NVML's readings of a GPU; None for values that this kind of GPU does not report.

    Attributes:
        gpu: which GPU it is.
        free_bytes: of its memory.
        display_bytes: of its memory, held by graphics programs, which keep it.
        processes: other than this one, that compute on it.
        uncorrected: ECC errors since the driver was loaded that could not be corrected.
        is_remapping: rows of memory wait for a reset to be replaced.
        is_worn: rows could not be replaced.
        slow: NVML's bits that say why its clocks are low.
    """

    gpu: Gpu
    free_bytes: int
    display_bytes: int = 0
    processes: int | None = None
    uncorrected: int | None = None
    is_remapping: bool | None = None
    is_worn: bool | None = None
    slow: int | None = None


@dataclass(frozen=True)
class GpuComplaint:
    """A problem of a GPU, in words that follow the GPU's name, and whether it may pass within seconds."""

    text: str
    passes: bool = False


def judge(reading: GpuReading, share: float = 1.0) -> list[GpuComplaint]:
    """Return everything that is wrong with a GPU, lasting problems first, for a worker that was given a share of it, at
    most 1. Others have the rest, and may be using it."""
    complaints = []
    if reading.uncorrected:
        complaints.append(GpuComplaint(f"{reading.uncorrected} uncorrectable ECC errors since its driver was loaded"))
    if reading.is_worn:
        complaints.append(GpuComplaint("rows of its memory are broken and could not be replaced"))
    if reading.is_remapping:
        complaints.append(GpuComplaint("rows of its memory wait for a reset (nvidia-smi -r) to be replaced"))
    reasons = [text for bit, text in SLOW.items() if reading.slow and reading.slow & bit]
    if reasons:
        complaints.append(GpuComplaint(" and ".join(reasons), passes=True))
    all_bytes = reading.gpu.memory_bytes - reading.display_bytes
    wanted = int(FREE * min(share, 1.0) * all_bytes)
    if reading.free_bytes < wanted:
        held = "another process holds the rest" if reading.processes else "it is not known what holds the rest"
        text = f"{_gib(reading.free_bytes)} of its {_gib(all_bytes)} are free, and {_gib(wanted)} should be: {held}"
        complaints.append(GpuComplaint(text, passes=True))
    return complaints


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"


def await_fit(
    read: Callable[[], Sequence[GpuReading]],
    node: tuple[str, str],
    share: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Return once all of this process's GPUs are fit; wait some seconds for problems that may pass.

    Args:
        read: reads all of these GPUs now.
        node: its name for messages, and Ray's id.
        share: of each GPU that this worker was given.
        clock: a monotonic clock, in seconds.
        sleep: waits for a number of seconds.

    Raises:
        GpuError: a GPU is not fit; names node, GPU and reading.
    """
    deadline = clock() + WAIT_SECONDS
    while True:
        try:
            readings = read()
        except GpuError as error:
            raise GpuError(f"node {node[0]}: {error}", node[1]) from None
        wrong = [(reading.gpu, complaint) for reading in readings for complaint in judge(reading, share)]
        if not wrong:
            return
        lasting = [(gpu, complaint) for gpu, complaint in wrong if not complaint.passes]
        if lasting or clock() >= deadline:
            gpu, complaint = (lasting or wrong)[0]
            waited = "" if lasting else f", after {WAIT_SECONDS:.0f} s"
            raise GpuError(f"node {node[0]}: {gpu.name} ({gpu.uuid}) is not fit: {complaint.text}{waited}", node[1])
        sleep(LOOK_SECONDS)


def read_mine(computes: bool = False) -> list[GpuReading]:
    """Return readings of the GPUs that this process may use, and has started to use or not; empty without a driver. A
    GpuError says that NVML fails, as for a GPU that has fallen off the bus."""
    with nvml() as library:
        return [] if library is None else [_read(library, handle, computes) for handle in handles(library)]


def _read(library: Any, handle: Any, computes: bool) -> GpuReading:
    # A driver also answers with some of these if a question makes no sense for a part of a GPU (MIG).
    names = ("NotSupported", "NoPermission", "FunctionNotFound", "InvalidArgument")
    unknown = tuple(getattr(library, f"NVMLError_{name}") for name in names)

    def ask(question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(handle, *args)
        except unknown:
            return None

    rows = ask(library.nvmlDeviceGetRemappedRows)
    computing = ask(library.nvmlDeviceGetComputeRunningProcesses)
    drawing = ask(library.nvmlDeviceGetGraphicsRunningProcesses) or ()
    uncorrected, volatile = library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, library.NVML_VOLATILE_ECC
    return GpuReading(
        identity(library, handle),
        int(library.nvmlDeviceGetMemoryInfo(handle).free),
        display_bytes=sum(process.usedGpuMemory or 0 for process in drawing),
        processes=None if computing is None else len(others([p.pid for p in computing], os.getpid(), computes)),
        uncorrected=ask(library.nvmlDeviceGetTotalEccErrors, uncorrected, volatile),
        is_remapping=None if rows is None else bool(rows[2]),
        is_worn=None if rows is None else bool(rows[3]),
        slow=ask(library.nvmlDeviceGetCurrentClocksEventReasons),
    )


def others(pids: Sequence[int], own: int, computes: bool) -> list[int]:
    """Return the processes on a GPU that are not this one.

    Args:
        pids: as NVML reports them; if this process is in a container, they may be the host's.
        own: this process's number, as it knows it.
        computes: this process computes on the GPU, so one of them is this process, whatever its number.
    """
    rest = [pid for pid in pids if pid != own]
    return rest[1:] if computes and len(rest) == len(pids) else rest
