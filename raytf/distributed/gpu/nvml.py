"""The GPUs of this process: which ones it may see, and their identities, from the driver's management library (NVML).

NVML makes no CUDA context and takes no memory of a GPU, and it ignores CUDA_VISIBLE_DEVICES: `visible` reads that as
CUDA does. Its tests prove the decisions, with a simulated NVML.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from raytf.errors import GpuError

#: Environment variables: which GPUs a process may use, and the order in which CUDA counts them.
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

#: MiB of a GPU's memory that CUDA and its libraries take for each process, approximately.
CONTEXT_MIB = 600
#: MiB that are left for tensors at least.
_LEAST_MIB = 256


@dataclass(frozen=True)
class Gpu:
    """The identity of a GPU.

    Attributes:
        uuid: unique in the world, such as GPU-5c1b9a0e-...; that of a part of a GPU begins with MIG-.
        name: its kind, such as NVIDIA L4.
        memory_bytes: all of its memory.
    """

    uuid: str
    name: str
    memory_bytes: int


def mine() -> list[Gpu]:
    """The GPUs that this process may use, in TensorFlow's order; empty if all are hidden or there is no driver.

    Numbers in CUDA_VISIBLE_DEVICES are NVML's, because a worker's set-up makes CUDA count by PCI bus as NVML does.

    Raises:
        GpuError: there is a driver, but it does not describe the GPUs.
    """
    if os.environ.get(VISIBLE) is not None and not visible(os.environ[VISIBLE]):
        return []  # without asking the driver
    with nvml() as library:
        return [] if library is None else [identity(library, handle) for handle in handles(library)]


def part_mib(memory_bytes: int, share: float) -> int:
    """MiB for the tensors of a process that has a share of a GPU; the rest of its share is CUDA's own."""
    return max(_LEAST_MIB, int(memory_bytes * share) // (1 << 20) - CONTEXT_MIB)


def visible(setting: str) -> list[str]:
    """The numbers and UUIDs that CUDA takes from CUDA_VISIBLE_DEVICES: those before the first invalid or repeated."""
    found: list[str] = []
    for part in (part.strip() for part in setting.split(",")):
        if not (part.isdigit() or part.startswith(("GPU-", "MIG-"))) or part in found:
            break
        found.append(part)
    return found


@contextmanager
def nvml() -> Iterator[Any]:
    """`pynvml` with its library opened.

    Yields:
        `pynvml`; None if the machine has no such library.

    Raises:
        GpuError: a call inside the `with` statement failed, with NVML's message.
    """
    import pynvml

    is_open = False
    try:
        with suppress(pynvml.NVMLError_LibraryNotFound):
            pynvml.nvmlInit()
            is_open = True
        yield pynvml if is_open else None
    except pynvml.NVMLError as error:
        raise GpuError(f"the GPU driver (NVML) says: {error}") from None
    finally:
        if is_open:
            pynvml.nvmlShutdown()


def handles(library: Any) -> Sequence[Any]:
    """NVML's handles of the GPUs that this process may use.

    Args:
        library: `pynvml`, open.
    """
    setting = os.environ.get(VISIBLE)
    names = [str(i) for i in range(library.nvmlDeviceGetCount())] if setting is None else visible(setting)
    return [
        library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else library.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def identity(library: Any, handle: Any) -> Gpu:
    """The identity of the GPU with this NVML handle."""
    uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    return Gpu(_text(uuid), _text(name), int(library.nvmlDeviceGetMemoryInfo(handle).total))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
