"""What the training loop sees of a way to distribute."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import tensorflow as tf

from raytf.devices import Devices
from raytf.routes import Route


class Group(Protocol):
    """This worker among the workers, and its devices. Each rank must make the same calls in the same order.

    Attributes:
        rank, world_size: of workers.
        devices: of this process.
        route: the path that gradients take between workers; None where there is but one.
    """

    rank: int
    world_size: int
    devices: Devices

    @property
    def route(self) -> Route | None: ...

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers; may be traced."""
        ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all workers, now."""
        ...

    def share(self, data: bytes) -> bytes:
        """Rank 0's bytes, of any length, on every worker."""
        ...

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Rank 0's arrays, bit for bit, on every worker; shapes and dtypes must agree everywhere."""
        ...
