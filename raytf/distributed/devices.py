"""The devices of one process: which device computes which shards, where sums are made, and where the weights are."""

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
    """The devices of a process for a training step: by default the one that TensorFlow takes, a GPU or else the CPU.

    Attributes:
        names: of the devices that compute, as TensorFlow names them; at least one.
        is_home_apart: the weights are on a device of another kind, which makes the updates.
    """

    names: Sequence[str] = ("",)
    is_home_apart = False

    def spread(self, shards: int) -> list[range]:
        """Return which of a worker's shards each device computes; devices without a shard are left out."""
        return [range(shards)]

    def on(self, device: int) -> AbstractContextManager[object]:
        """Run operations inside the `with` statement on the device with this number."""
        return nullcontext()

    def at_home(self) -> AbstractContextManager[object]:
        """Create variables and run operations inside the `with` statement where the weights are."""
        return nullcontext()

    def add(self, parts: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Return the sum of all devices' tensors, where the weights are."""
        return parts[0]


class LocalDevices(Devices):
    """Named devices.

    Args:
        names: of the devices that compute.
        home: the device where the weights are and sums are made.
        add: sums each device's list of tensors, at home.
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
    """Return whether shards are computed on GPUs. If TensorFlow chooses the device, a GPU of this process decides."""
    named = [_kind(name) for name in devices.names if name]
    return "GPU" in named if named else bool(tf.config.list_logical_devices("GPU"))


class DeviceRoom:
    """Whether this process's device has memory for copies of the state's values, in bytes, in addition to its
    variables. The free memory (None if not known) is read once, at the first copy: later readings would count the
    copies."""

    def __init__(self, size: int, free: Callable[[], int | None], say: Callable[[str], None]):
        self._size, self._free, self._say = size, free, say
        self._may: bool | None = None

    def __call__(self, size: int) -> bool:
        """Return whether a part of the state may be held; its `size` is ignored, as several may be held at once."""
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
    """Return the free memory of this process's first GPU; None where the driver does not say, or other processes share
    it."""
    if visibility.share() < 1:  # the driver does not know how much of TensorFlow's part is free
        return None
    with suppress(GpuError), nvidia_driver.nvml() as library:
        own = [] if library is None else nvidia_driver.handles(library)
        return int(library.nvmlDeviceGetMemoryInfo(own[0]).free) if own else None
    return None


def set_memory(
    share: float, config: Any = tf.config, mine: Callable[[], list[nvidia_driver.Gpu]] = nvidia_driver.mine
) -> None:
    """Limit this process's GPU memory, before TensorFlow has started: memory grows as needed, and a GPU that is shared
    gives at most this process's share; otherwise TensorFlow would leave nothing to the others."""
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
