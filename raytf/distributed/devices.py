"""The devices of one process: which computes which shards, where their sums are made and where the weights are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import tensorflow as tf

from raytf.data.plan import assign
from raytf.distributed import memory_needs
from raytf.distributed.gpu import nvml, visibility
from raytf.errors import GpuError


class Devices(Protocol):
    """What a training step needs to know of its process's devices.

    Attributes:
        names: of those that compute, as TensorFlow names them; one at least.
        is_home_apart: weights are on a device of another kind, which makes the updates.
    """

    names: Sequence[str]
    is_home_apart: bool

    def spread(self, shards: int) -> list[range]:
        """Which of a worker's shards each device computes; devices that would have none are left out."""
        ...

    def on(self, device: int) -> AbstractContextManager[object]:
        """Operations inside of the `with` statement run on the device of that number."""
        ...

    def at_home(self) -> AbstractContextManager[object]:
        """Variables that are made, and operations that run, inside of the `with` statement are where weights belong."""
        ...

    def add(self, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """The sum, at home, of the tensors of each device."""
        ...


class OneDevice:
    """The device that TensorFlow takes where nobody says which: the first GPU, else the CPU."""

    names: Sequence[str] = ("",)
    is_home_apart = False

    def spread(self, shards: int) -> list[range]:
        return [range(shards)]

    def on(self, device: int) -> AbstractContextManager[object]:
        return nullcontext()

    def at_home(self) -> AbstractContextManager[object]:
        return nullcontext()

    def add(self, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        return parts[0]


class LocalDevices:
    """Named devices.

    Args:
        names: of those that compute.
        home: where weights belong, and sums are made.
        add: sums of a list of tensors for each device, at home.
    """

    def __init__(self, names: Sequence[str], home: str, add: Callable[[list[list[tf.Tensor]], str], list[tf.Tensor]]):
        self.names: Sequence[str] = list(names)
        self._home, self._add = home, add
        self.is_home_apart = _kind(home) != _kind(self.names[0])

    def spread(self, shards: int) -> list[range]:
        return assign(shards, min(shards, len(self.names)))

    def on(self, device: int) -> AbstractContextManager[object]:
        return tf.device(self.names[device])

    def at_home(self) -> AbstractContextManager[object]:
        return tf.device(self._home)

    def add(self, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        # Evaluation has rows and no tensors.
        return parts[0] if len(parts) == 1 or not parts[0] else self._add(parts, self._home)


def computes_on_gpu(devices: Devices) -> bool:
    """Whether shards are computed on GPUs; where that is left to TensorFlow, whether this process has one."""
    named = [_kind(name) for name in devices.names if name]
    return "GPU" in named if named else bool(tf.config.list_logical_devices("GPU"))


class DeviceRoom:
    """Whether the device of this process has memory for the values of a state beside those of its variables.

    It is looked at once, at the first copy: later numbers would count what is held.

    Args:
        size: bytes that may be held at a time.
        free: bytes of the device that nobody has taken; None where that is not known.
        say: told what was decided, where that is to wait.
    """

    def __init__(self, size: int, free: Callable[[], int | None], say: Callable[[str], None]):
        self._size, self._free, self._say = size, free, say
        self._may: bool | None = None

    def __call__(self, size: int) -> bool:
        """For any part of the state, of which several may be held at once."""
        if self._may is None:
            free = self._free()
            self._may = memory_needs.may_hold(free, self._size)
            if not self._may:
                found = "nobody knows how much is free" if free is None else f"{free / 1e9:,.1f} GB are free"
                self._say(
                    f"the device has no memory for copies of the state ({self._size / 1e9:,.1f} GB, and {found}): "
                    "training waits while it is copied"
                )
        return self._may


def free_bytes() -> int | None:
    """Of this process's first GPU, by its driver.

    Returns:
        None where the driver does not say, or others are on that GPU.
    """
    if visibility.share() < 1:  # TensorFlow was given a part, of which the driver does not know how much is free
        return None
    with suppress(GpuError), nvml.nvml() as library:
        own = [] if library is None else nvml.handles(library)
        return int(library.nvmlDeviceGetMemoryInfo(own[0]).free) if own else None
    return None


def set_memory(share: float, config: Any = tf.config, mine: Callable[[], list[nvml.Gpu]] = nvml.mine) -> None:
    """GPU memory of this process, where TensorFlow has not begun yet: as it is needed, and at most a share of one that
    it has with others, of which TensorFlow would otherwise leave them nothing.

    Args:
        share: part of its GPU, up to 1.
        config: TensorFlow's.
        mine: finds out who the GPUs are.
    """
    devices = config.list_physical_devices("GPU")
    found = mine() if devices and share < 1 else []
    try:
        for i, device in enumerate(devices):
            if i < len(found):
                parts = [config.LogicalDeviceConfiguration(memory_limit=nvml.part_mib(found[i].memory_bytes, share))]
                config.set_logical_device_configuration(device, parts)
            else:
                config.experimental.set_memory_growth(device, True)
    except RuntimeError:
        pass  # it has


def _kind(device: str) -> str:
    """CPU of /job:localhost/replica:0/task:0/device:CPU:0."""
    return device.split(":")[-2]
