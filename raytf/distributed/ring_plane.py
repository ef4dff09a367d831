"""The control plane of a group that has TensorFlow's cluster: between hosts, TensorFlow's ring over gRPC.

The ranks' CPUs form a group of collectives separate from the strategy's, just as TensorFlow's strategy has a separate
one for host values. What is traced here names its device, so that none of it is placed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf.distributed.control_plane import ControlPlane, as_tensorflow, by_host
from raytf.distributed.reduction import packed

#: Keys of the groups of all ranks and of the first rank of each host, far from those that the strategy gives its own.
_ALL_KEY, _HOSTS_KEY = 2_000_000, 1_000_000


class Ring:
    """TensorFlow's ring over gRPC among the CPU devices of some ranks.

    Args:
        key: of the group, the same on all of its ranks.
        size: how many ranks there are.
        device: full name of this rank's CPU.
    """

    def __init__(self, key: int, size: int, device: str):
        self._device = device
        self._all_reduce = _tensorflow.ring(key, size, device)

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum over the ranks; may be traced."""
        with tf.device(self._device):
            if tensor.dtype != tf.uint32:
                return self._all_reduce(tensor)
            # There is no kernel that adds uint32; as int32 they have the same sum, bit for bit.
            return tf.bitcast(self._all_reduce(tf.bitcast(tensor, tf.int32)), tf.uint32)


class RingPlane(ControlPlane):
    """A control plane over TensorFlow's ring; see `ControlPlane`."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size, f"/job:worker/replica:0/task:{rank}/device:CPU:0")
        self._all = Ring(_ALL_KEY, world_size, self._device)
        self._over_hosts: Ring | None = None
        self._sum_vector = tf.function(lambda vector: self.add([vector])[0], reduce_retracing=True, autograph=False)
        # A separate function: what is traced before the ranks of a host have met would not change afterwards.
        self._sum_all = tf.function(self._all.add, reduce_retracing=True, autograph=False)

    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._device):
            if self.hosts == self.world_size:
                return packed(self._all.add)(tensors)
            if self.on_host is not None:
                tensors = by_host(self.on_host.add, tensors)
            if self._over_hosts is not None:
                tensors = packed(self._over_hosts.add)(tensors)
            if self.on_host is not None and self.hosts > 1:
                tensors = by_host(self.on_host.hand_out, tensors)
            return tensors

    def sum(self, values: np.ndarray) -> np.ndarray:
        if self.on_host is not None and self.hosts == 1:
            with as_tensorflow():
                return self.on_host.add(np.ascontiguousarray(values))[0]
        return self._now(self._sum_vector, values)

    def _sum_before(self, values: np.ndarray) -> np.ndarray:
        return self._now(self._sum_all, values)

    def _join_hosts(self, firsts: Sequence[int]) -> None:
        if 1 < self.hosts < self.world_size and self.rank in firsts:
            self._over_hosts = Ring(_HOSTS_KEY, self.hosts, self._device)

    def _now(self, add: Callable[[tf.Tensor], tf.Tensor], values: np.ndarray) -> np.ndarray:
        with tf.device(self._device):
            return add(tf.convert_to_tensor(values)).numpy()
