"""Decides, by NVML's readings before a group starts, whether its GPUs are fit.

Thresholds follow those of NVIDIA's DCGM, whose health checks fail a GPU for any uncorrectable ECC error since its
driver was loaded, for rows of memory that wait for a reset to be replaced or could not be replaced, and for hardware
that slows it down. The decisions are tested with made-up readings; the readings were tested on an H200.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.distributed.gpu.nvidia_driver import Gpu, handles, identity, nvml
from raytf.errors import GpuError

#: The fraction of a worker's share of GPU memory that must be free.
FREE = 0.9
#: Seconds to wait until a previous process has freed its memory as it exits, or a hot GPU has cooled down.
WAIT_SECONDS = 20.0
#: Seconds between two readings during that wait.
LOOK_SECONDS = 0.5
#: Reasons for low clocks that indicate a problem, by NVML's bits (nvml.h, nvmlClocksEventReasons).
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
        gpu: the identity of the GPU.
        free_bytes: how much of its memory is free.
        display_bytes: memory that graphics programs hold permanently.
        processes: how many other processes compute on it.
        uncorrected: ECC errors since the driver was loaded that could not be corrected.
        is_remapping: rows of memory wait for a reset to be replaced.
        is_worn: rows of memory could not be replaced.
        slow: NVML's bits for the reasons why its clocks are low.
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
    """A problem of a GPU, as text that follows the GPU's name, and whether it may pass within seconds."""

    text: str
    passes: bool = False


def judge(reading: GpuReading, share: float = 1.0) -> list[GpuComplaint]:
    """Return all problems of a GPU, lasting ones first, for a worker that has a share of it, at most 1.
    Other workers may be using the rest."""
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
        held = "another process holds the rest" if reading.processes else "it is not known which process holds the rest"
        text = f"{_gib(reading.free_bytes)} of its {_gib(all_bytes)} are free, but {_gib(wanted)} are needed: {held}"
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
    """Wait until all of this process's GPUs are fit, for some seconds if their problems may pass.

    Args:
        read: returns the current readings of all of these GPUs.
        node: the node's name for messages, and its id in Ray.
        share: the share of each GPU that is assigned to this worker.
        clock: a monotonic clock, in seconds.
        sleep: waits for a number of seconds.

    Raises:
        GpuError: a GPU is not fit. The message names the node, the GPU and the reading.
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
    """Return readings of the GPUs that this process may use; empty without a driver. See `others` for `computes`.
    Raise GpuError if NVML fails, as it does for a GPU that has fallen off the bus."""
    with nvml() as library:
        return [] if library is None else [_read(library, handle, computes) for handle in handles(library)]


def _read(library: Any, handle: Any, computes: bool) -> GpuReading:
    # A driver also returns some of these errors if a query does not apply to a part of a GPU (MIG).
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
        pids: process ids that NVML reports; in a container, they may be the host's.
        own: the id that this process sees for itself.
        computes: this process computes on the GPU, so one of `pids` is this process even if none equals `own`.
    """
    rest = [pid for pid in pids if pid != own]
    return rest[1:] if computes and len(rest) == len(pids) else rest
