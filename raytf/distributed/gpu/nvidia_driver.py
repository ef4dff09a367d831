"""Asks NVIDIA's driver for the GPUs of this process (NVML), and for the reason why CUDA does not work.

NVML creates no CUDA context and allocates no GPU memory. It ignores CUDA_VISIBLE_DEVICES, which `visible` therefore
reads as CUDA does. The tests use a simulated NVML.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytf._process import in_thread
from raytf.errors import GpuError

#: Environment variables: which GPUs a process may use, and the order in which CUDA counts them.
VISIBLE, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"

#: Approximate MiB of a GPU's memory that CUDA and its libraries allocate for each process.
CONTEXT_MIB = 600
#: Minimum MiB for tensors.
_LEAST_MIB = 256
#: The name of the driver's library, which every program uses.
DRIVER = "libcuda.so.1"
#: Libraries that TensorFlow 2.21 opens before it registers a GPU (tsl/platform/default/dso_loader.cc and the wheel's
#: strings).
LIBRARIES = (
    "libcudart.so.12",
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcudnn.so.9",
)
#: Seconds within which a working driver answers. A hung driver never answers.
_ANSWER_SECONDS = 5.0
#: Additional seconds for each GPU of the machine: if no process uses the driver, it initializes all GPUs first
#: (NVIDIA, Driver Persistence: 1 to 3 s each).
_GPU_SECONDS = 3.0


@dataclass(frozen=True)
class Gpu:
    """The identity of a GPU.

    Attributes:
        uuid: a globally unique id, such as GPU-5c1b9a0e-...; for a part of a GPU it begins with MIG-.
        name: its kind, such as NVIDIA L4.
        memory_bytes: all of its memory.
    """

    uuid: str
    name: str
    memory_bytes: int


def mine() -> list[Gpu]:
    """Return the GPUs that this process may use, in TensorFlow's order; empty if all are hidden or there is no driver.

    Numbers in CUDA_VISIBLE_DEVICES are NVML's, because a worker's setup makes CUDA count by PCI bus as NVML does.

    Raises:
        GpuError: there is a driver, but it failed to describe the GPUs.
    """
    if os.environ.get(VISIBLE) is not None and not visible(os.environ[VISIBLE]):
        return []  # does not start the driver
    with nvml() as library:
        return [] if library is None else [identity(library, handle) for handle in handles(library)]


def part_mib(memory_bytes: int, share: float) -> int:
    """Return the MiB for the tensors of a process that has a share of a GPU. CUDA needs the rest of the share."""
    return max(_LEAST_MIB, int(memory_bytes * share) // (1 << 20) - CONTEXT_MIB)


def visible(setting: str) -> list[str]:
    """Return the numbers and UUIDs that CUDA reads from CUDA_VISIBLE_DEVICES, up to an invalid or repeated one."""
    names: list[str] = []
    for part in (part.strip() for part in setting.split(",")):
        if not (part.isdigit() or part.startswith(("GPU-", "MIG-"))) or part in names:
            break
        names.append(part)
    return names


@contextmanager
def nvml() -> Iterator[Any]:
    """Yield `pynvml` with its library opened.

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
        raise GpuError(f"the GPU driver (NVML) reported: {error}") from None
    finally:
        if is_open:
            pynvml.nvmlShutdown()


def handles(library: Any) -> Sequence[Any]:
    """Return NVML's handles of the GPUs that this process may use, from an open `pynvml`."""
    setting = os.environ.get(VISIBLE)
    names = [str(i) for i in range(library.nvmlDeviceGetCount())] if setting is None else visible(setting)
    return [
        library.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else library.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def identity(library: Any, handle: Any) -> Gpu:
    """Return the identity of the GPU with this NVML handle."""
    uuid, name = library.nvmlDeviceGetUUID(handle), library.nvmlDeviceGetName(handle)
    return Gpu(_text(uuid), _text(name), int(library.nvmlDeviceGetMemoryInfo(handle).total))


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# The tests compile a driver library that fails as real ones do.


def trouble(ask: Callable[[], str] | None = None, seconds: float | None = None) -> str:
    """Return what is wrong with this machine's driver, for the user; empty if it has a GPU for this process.

    Args:
        ask: queries the driver and returns its problem; by default with `cuInit` and the number of GPUs.
        seconds: how long to wait for the answer; by default it depends on the number of GPUs. If the driver never
            answers, the waiting thread stays behind.
    """
    if seconds is None:
        seconds = _ANSWER_SECONDS + _GPU_SECONDS * len(list(Path("/dev").glob("nvidia[0-9]*")))
    answer = in_thread(ask or _ask, "raytf-cuda")
    wait([answer], seconds)
    if not answer.done():
        return f"the driver has not answered for {seconds:.0f} s"
    error = answer.exception()
    return answer.result() if error is None else f"the driver cannot be queried ({type(error).__name__}: {error})"


def _ask() -> str:
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError as error:
        return f"there is no NVIDIA driver ({error})"
    code = driver.cuInit(0)
    if code:
        return f"cuInit: {_explain(driver, code)}"
    count = ctypes.c_int(0)
    code = driver.cuDeviceGetCount(ctypes.byref(count))
    if code:
        return f"cuDeviceGetCount: {_explain(driver, code)}"
    return "" if count.value else "the driver finds no GPU"


def _explain(driver: ctypes.CDLL, code: int) -> str:
    """Return an error's name and text, such as CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected."""
    texts = []
    for ask in (driver.cuGetErrorName, driver.cuGetErrorString):
        text = ctypes.c_char_p()
        if not ask(code, ctypes.byref(text)) and text.value:
            texts.append(text.value.decode(errors="replace"))
    return ": ".join(texts) or f"CUDA error {code}"


def missing_libraries(names: Iterable[str] = LIBRARIES, opens: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """Return the CUDA libraries that TensorFlow can find neither in the system nor in NVIDIA's packages.
    `opens` raises OSError for a library that cannot be loaded."""
    return [name for name in names if not any(_is_there(place, opens) for place in _places(name))]


def _places(name: str) -> list[str]:
    packages = [Path(folder) / "nvidia" for folder in sys.path if folder]
    return [name, *(str(path) for package in packages for path in sorted(package.glob(f"*/lib/{name}")))]


def _is_there(place: str, opens: Callable[[str], object]) -> bool:
    try:
        opens(place)
    except OSError:
        return False
    return True
