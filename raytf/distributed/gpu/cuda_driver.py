"""What the CUDA driver says about itself: TensorFlow only logs it, and not if its messages are silenced.

Its tests compile a driver that fails in the ways of a real one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

#: The driver's library, by the name that every program uses.
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
#: Seconds in which a working driver answers; one that hangs never does.
_ANSWER_SECONDS = 5.0
#: Additional seconds for each GPU of the machine: if no process holds the driver, it initializes all of them first
#: (NVIDIA, Driver Persistence: 1 to 3 s each).
_GPU_SECONDS = 3.0


def answer_seconds(devices: Path = Path("/dev")) -> float:
    """How many seconds to wait for the driver's answer on this machine."""
    return _ANSWER_SECONDS + _GPU_SECONDS * len(list(devices.glob("nvidia[0-9]*")))


def trouble(ask: Callable[[], str] | None = None, seconds: float | None = None) -> str:
    """What is wrong with this machine's driver, for the user; empty if it has a GPU for this process.

    Args:
        ask: asks the driver; by default `cuInit` and a count of GPUs.
        seconds: to wait for the answer; by default those of this machine. If the answer never comes, the thread that
            waits for it is left behind.
    """
    answers: list[str] = []
    seconds = answer_seconds() if seconds is None else seconds
    thread = threading.Thread(target=lambda: answers.append((ask or _ask)()), daemon=True, name="raytf-cuda")
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else f"the driver has not answered for {seconds:.0f} s"


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
    """An error in words, such as CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected."""
    said = []
    for ask in (driver.cuGetErrorName, driver.cuGetErrorString):
        text = ctypes.c_char_p()
        if not ask(code, ctypes.byref(text)) and text.value:
            said.append(text.value.decode(errors="replace"))
    return ": ".join(said) or f"CUDA error {code}"


def missing_libraries(names: Iterable[str] = LIBRARIES, opens: Callable[[str], object] = ctypes.CDLL) -> list[str]:
    """CUDA libraries that TensorFlow would not find, neither in the system nor in NVIDIA's packages.

    Args:
        names: file names.
        opens: raises OSError for a library that cannot be loaded.
    """
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
