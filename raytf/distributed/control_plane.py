"""What ranks exchange outside of the step, over CPUs and host memory only.

TensorFlow refuses to add int32 and bfloat16 on GPUs, and NCCL refuses two ranks on one GPU. So whatever device computes
the gradients, ranks agree, send weights and add metrics over their CPU devices. These form a group of collectives
separate from the strategy's, just as TensorFlow's strategy has a separate one for host values. What is traced here
names its device, so that none of it is placed on a GPU.

Workers that share a host first add in its memory (`host_allreduce`), and only the first of each host talks to those of
other hosts. Gradients can take this path, too: on CPUs it is the usual one, and on GPUs the one that needs nothing of
them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf.distributed import pieces
from raytf.distributed.host_allreduce import HostSum, PeerLostError
from raytf.distributed.reduction import packed

#: Keys of the groups of all ranks and of the first rank of each host, far from those that the strategy gives its own.
_ALL_KEY, _HOSTS_KEY = 2_000_000, 1_000_000
#: Bytes of the row in which a rank describes itself.
_ROW_BYTES = 1024
#: Random bits in the name of a host's meeting point.
_BITS = 60


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


class ControlPlane:
    """This rank's link to all others over CPUs; each rank must make the same calls in the same order.

    Args:
        rank: this rank.
        world_size: how many ranks there are, at least two.
        device: full name of this rank's CPU.

    Attributes:
        on_host: the sum over the ranks of this host, where several share its memory.
        hosts: how many groups of ranks share memory; the number of ranks where none do.
    """

    def __init__(self, rank: int, world_size: int, device: str):
        self.rank, self.world_size, self.hosts = rank, world_size, world_size
        self.on_host: HostSum | None = None
        self._device = device
        self._all = Ring(_ALL_KEY, world_size, device)
        self._over_hosts: Ring | None = None
        self._sum_vector = tf.function(lambda vector: self.add([vector])[0], reduce_retracing=True, autograph=False)
        # A separate function: what is traced before the ranks of a host have met would not change afterwards.
        self._sum_before = tf.function(self._all.add, reduce_retracing=True, autograph=False)

    def gather(self, row: bytes) -> list[bytes]:
        """Each rank's row, on every rank; a row is at most 1024 bytes and must not end in zeros."""
        table = np.zeros([self.world_size, _ROW_BYTES], np.uint8)
        table[self.rank, : len(row)] = np.frombuffer(row, np.uint8)
        found = self._now(self._sum_before, table.view(np.int32))
        return [each.tobytes().rstrip(b"\0") for each in found.view(np.uint8)]

    def share_memory(self, hosts: Sequence[str], tokens: Sequence[str]) -> None:
        """Set up shared memory with the ranks of this host; every rank must call it, and all succeed or none.

        Args:
            hosts: for each rank, what it has in common with the ranks that it can share memory with.
            tokens: random, one for each rank; those of a host make the name of its meeting point.
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(rank)
        if len(ranks_of) == self.world_size:
            return
        own = ranks_of[hosts[self.rank]]
        on_host, failed = None, 0
        if len(own) > 1:
            drawn = hashlib.sha256("".join(tokens[rank] for rank in own).encode()).digest()
            try:
                on_host = HostSum(int.from_bytes(drawn[:8]) >> 64 - _BITS, own.index(self.rank), len(own))
            except OSError:
                failed = 1
        if self._now(self._sum_before, np.array([failed], np.int32))[0]:
            if on_host is not None:
                on_host.close()
            return
        self.on_host, self.hosts = on_host, len(ranks_of)
        if self.hosts > 1 and self.rank == own[0]:
            self._over_hosts = Ring(_HOSTS_KEY, self.hosts, self._device)

    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all ranks, from any device, on this rank's CPU; may be traced."""
        with tf.device(self._device):
            if self.hosts == self.world_size:
                return packed(self._all.add)(tensors)
            if self.on_host is not None:
                tensors = _by_host(self.on_host.add, tensors)
            if self._over_hosts is not None:
                tensors = packed(self._over_hosts.add)(tensors)
            if self.on_host is not None and self.hosts > 1:
                tensors = _by_host(self.on_host.hand_out, tensors)
            return tensors

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all ranks, computed at once.

        Raises:
            tf.errors.UnavailableError: or another error of TensorFlow's, when a rank is gone.
        """
        if self.on_host is not None and self.hosts == 1:
            try:
                return self.on_host.add(np.ascontiguousarray(values))[0]
            except PeerLostError as error:  # in a graph TensorFlow also turns it into one of its own errors
                raise tf.errors.UnavailableError(None, None, str(error)) from None
        return self._now(self._sum_vector, values)

    def _now(self, add: Callable[[tf.Tensor], tf.Tensor], values: np.ndarray) -> np.ndarray:
        with tf.device(self._device):
            return add(tf.convert_to_tensor(values)).numpy()

    def share(self, data: bytes) -> bytes:
        """Rank 0's bytes, of any length, on every rank."""
        length = int(self.sum(np.array([len(data) if self.rank == 0 else 0], np.float64))[0])
        own = data if self.rank == 0 else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)])[0].tobytes()

    def broadcast(self, arrays: list[np.ndarray], piece_bytes: int = pieces.PIECE_BYTES) -> list[np.ndarray]:
        """Rank 0's arrays, bit for bit, on every rank; see `pieces.broadcast`."""
        return pieces.broadcast(arrays, self.rank == 0, self.sum, piece_bytes)


def _by_host(call: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    found = tf.numpy_function(call, tensors, [t.dtype for t in tensors])
    return [tf.ensure_shape(each, t.shape) for each, t in zip(found, tensors, strict=True)]
