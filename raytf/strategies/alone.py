"""One worker: what the strategies of one process have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

from raytf.devices import Devices, LocalDevices


class Alone:
    """A group of one worker with some devices.

    Args:
        devices: that compute.
    """

    rank, world_size = 0, 1

    def __init__(self, devices: Devices):
        self.devices = devices

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.identity(tensor)

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def share(self, data: bytes) -> bytes:
        return data

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


def devices_of(strategy: tf.distribute.Strategy, home: str) -> LocalDevices:
    """A strategy's devices, which add as the strategy does: with NCCL between GPUs, else on the device of the sum.

    Args:
        home: where weights belong and sums are made.
    """

    def add(parts: list[list[tf.Tensor]], home: str) -> list[tf.Tensor]:
        pairs: list[Any] = [(PerReplica(each), home) for each in zip(*parts, strict=True)]
        # Without this, a scale of the values to be found would be looked for in the present replica: there is none.
        reduced = strategy.extended.batch_reduce_to(tf.distribute.ReduceOp.SUM, pairs)
        return [tf.convert_to_tensor(strategy.experimental_local_results(value)[0]) for value in reduced]

    return LocalDevices(strategy.extended.worker_devices, home, add)


def compute_devices() -> Sequence[str]:
    """The GPUs that this process sees; without any, its logical CPUs."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in found]
