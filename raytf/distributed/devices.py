"""The devices of one process: which device computes which shards, adds them up, and holds the weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import tensorflow as tf

from raytf.data.plan import assign
from raytf.distributed import memory_needs
from raytf.distributed.gpu import nvidia_driver, visibility
from raytf.errors import GpuError


class Devices:
    """The devices of a process for a training step. By default, TensorFlow chooses one: a GPU, or else the CPU.

    Attributes:
        names: TensorFlow's names of the devices that compute; at least one.
        is_home_apart: whether the weights are on a device of another kind, which also computes the updates.
    """

    names: Sequence[str] = ("",)
    is_home_apart = False

    def spread(self, shards: int) -> list[range]:
        """Return the range of a worker's shards that each device computes, without devices that have no shard."""
        return [range(shards)]

    def on(self, device: int) -> AbstractContextManager[object]:
        """Return a context in which operations run on the device with this number."""
        return nullcontext()

    def at_home(self) -> AbstractContextManager[object]:
        """Return a context in which variables are created and operations run on the device that holds the weights."""
        return nullcontext()

    def add(self, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return the sum of all devices' tensors, on the device that holds the weights."""
        return parts[0]


class LocalDevices(Devices):
    """Named devices.

    Args:
        names: names of the devices that compute.
        home: device that holds the weights and computes the sums.
        add: returns the sums of all devices' lists of tensors, on `home`.
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
        # Evaluation has rows but no tensors.
        return parts[0] if len(parts) == 1 or not parts[0] else self._add(parts, self._home)


def computes_on_gpu(devices: Devices) -> bool:
    """Return whether shards are computed on GPUs. If TensorFlow chooses the device, it uses any GPU of this process."""
    named = [_kind(name) for name in devices.names if name]
    return "GPU" in named if named else bool(tf.config.list_logical_devices("GPU"))


class DeviceRoom:
    """Decides whether this process's device has memory for copies of the state (`size` bytes) besides its variables.

    The free memory (None if unknown) is read only once, at the first copy, because later readings would count copies.
    """

    def __init__(self, size: int, free: Callable[[], int | None], say: Callable[[str], None]):
        self._size, self._free, self._say = size, free, say
        self._may: bool | None = None

    def __call__(self, size: int) -> bool:
        """Return whether a part of the state may be held; its `size` is ignored, because several parts may be held."""
        if self._may is None:
            free = self._free()
            self._may = memory_needs.may_hold(free, self._size)
            if not self._may:
                needs = f"copies of the state, {self._size / 1e9:,.3g} GB"
                why = (
                    f"it is not known whether the device has memory for {needs}"
                    if free is None
                    else f"the device has no memory for {needs}: {free / 1e9:,.3g} GB are free"
                )
                self._say(f"training waits while its state is copied: {why}")
        return self._may


def free_bytes() -> int | None:
    """Return the free memory of this process's first GPU, or None if it is unknown or other processes share the GPU."""
    if visibility.share() < 1:  # the driver does not know how much of TensorFlow's share is free
        return None
    with suppress(GpuError), nvidia_driver.nvml() as library:
        own = [] if library is None else nvidia_driver.handles(library)
        return int(library.nvmlDeviceGetMemoryInfo(own[0]).free) if own else None
    return None


def set_memory(
    share: float, config: Any = tf.config, mine: Callable[[], list[nvidia_driver.Gpu]] = nvidia_driver.mine
) -> None:
    """Limit this process's GPU memory, before TensorFlow has started: let memory grow as needed, and on a shared GPU
    only up to this process's share. By default, TensorFlow would leave nothing for other processes."""
    devices = config.list_physical_devices("GPU")
    gpus = mine() if devices and share < 1 else []
    try:
        for i, device in enumerate(devices):
            if i < len(gpus):
                parts = [
                    config.LogicalDeviceConfiguration(memory_limit=nvidia_driver.part_mib(gpus[i].memory_bytes, share))
                ]
                config.set_logical_device_configuration(device, parts)
            else:
                config.experimental.set_memory_growth(device, True)
    except RuntimeError:
        pass  # TensorFlow has started already


def _kind(device: str) -> str:
    """Return the kind of a device, such as CPU for /job:localhost/replica:0/task:0/device:CPU:0."""
    return device.split(":")[-2]
