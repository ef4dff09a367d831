"""What the training loop sees of a strategy, and the group of one worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from raytf.distributed.devices import Devices
from raytf.distributed.routes import SumRoute


class Ranks(Protocol):
    """How ranks exchange values outside of the step. Each rank must make the same calls in the same order.

    Attributes:
        rank: this worker's rank.
        world_size: how many workers there are.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all workers, computed at once."""
        ...

    def share(self, data: bytes, giver: int = 0) -> bytes:
        """The bytes of one rank, of any length, on every worker."""
        ...

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        """The arrays of one rank, bit for bit, on every worker; shapes and dtypes must agree everywhere."""
        ...

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        """The arrays of some ranks, which all have the same, bit for bit, on others. Where the ranks can meet again.

        Args:
            arrays: of the givers; the takers' have the same shapes and dtypes, and are written over.
            givers, takers: ranks.

        Returns:
            The givers' arrays on the takers.
        """
        ...


class Group(Ranks, Protocol):
    """This worker's place among the workers, and its devices.

    Attributes:
        devices: of this process.
        route: the path that gradients take between workers; None for a single worker.
    """

    devices: Devices

    @property
    def route(self) -> SumRoute | None: ...

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all workers; may be traced."""
        ...


class SingleWorkerGroup:
    """A group of one worker with some devices.

    Args:
        devices: of this process.
    """

    rank, world_size = 0, 1
    route: SumRoute | None = None

    def __init__(self, devices: Devices):
        self.devices = devices

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return tensors

    def sum(self, values: np.ndarray) -> np.ndarray:
        return values

    def share(self, data: bytes, giver: int = 0) -> bytes:
        return data

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        return arrays

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        return arrays
