"""One worker: what the strategies of one process have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import PerReplica

from raytf.devices import Devices, LocalDevices
from raytf.routes import Route
from raytf.wire import Layout


class Alone:
    """A group of one worker with some devices.

    Args:
        devices: that compute.
    """

    rank, world_size = 0, 1
    route: Route | None = None

    def __init__(self, devices: Devices):
        self.devices = devices

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def share(self, data: bytes) -> bytes:
        return data

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        return arrays


def devices_of(strategy: tf.distribute.Strategy, home: str) -> LocalDevices:
    """A strategy's devices; what each has of a sum goes to one of them in one piece, and is added there.

    Args:
        home: where weights belong and sums are made.
    """
    names = strategy.extended.worker_devices

    def add(parts: list[list[tf.Tensor]], home: str) -> list[tf.Tensor]:
        flat = []
        for name, tensors in zip(names, parts, strict=False):
            with tf.device(name):  # one sum for all tensors
                flat.append(tf.concat([tf.reshape(t, [-1]) for t in tensors], 0))
        reduced = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, PerReplica(flat), home)
        total = strategy.experimental_local_results(reduced)[0]
        return Layout([t.shape for t in parts[0]]).split(tf.ensure_shape(total, flat[0].shape))

    return LocalDevices(names, home, add)


def compute_devices() -> Sequence[str]:
    """The GPUs that this process sees; without any, its logical CPUs."""
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    return [device.name for device in found]
