"""What ranks exchange outside of the step, over CPUs and host memory only.

TensorFlow refuses to add int32 and bfloat16 on GPUs, and NCCL refuses two ranks on one GPU. So whatever device computes
the gradients, ranks agree, send weights and add metrics over their CPUs. Ranks that share a host first add in its
memory (`host_allreduce`), and only the first of each host talks to those of other hosts. Gradients can take this path,
too: on CPUs it is the usual one, and on GPUs the one that needs nothing of them.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from raytf.distributed import pieces
from raytf.distributed.host_allreduce import HostSum
from raytf.distributed.sum_pieces import PeerLostError

#: Bytes of the row in which a rank describes itself.
_ROW_BYTES = 1024
#: Random bits in the name of a host's meeting point.
_BITS = 60


class ControlPlane(abc.ABC):
    """This rank's link to all others over CPUs; each rank must make the same calls in the same order.

    Args:
        rank: this rank.
        world_size: how many ranks there are.
        device: full name of this rank's CPU.

    Attributes:
        on_host: the sum over the ranks of this host, where several share its memory.
        hosts: how many groups of ranks share memory; the number of ranks where none do.
    """

    def __init__(self, rank: int, world_size: int, device: str):
        self.rank, self.world_size, self.hosts = rank, world_size, world_size
        self.on_host: HostSum | None = None
        self._device = device
        #: Whether the meeting must end, and whether a rank is lost; see `Meeting`.
        self._is_over: Callable[[], bool] = lambda: False
        self._is_lost: Callable[[], bool] = lambda: False

    @abc.abstractmethod
    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums of tensors of one dtype over all ranks, from any device, on this rank's CPU; may be traced."""

    @abc.abstractmethod
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all ranks, computed at once.

        Raises:
            tf.errors.UnavailableError: or another error of TensorFlow's, when a rank is gone.
        """

    @abc.abstractmethod
    def _sum_before(self, values: np.ndarray) -> np.ndarray:
        """As `sum`, before the ranks of a host share memory."""

    @abc.abstractmethod
    def _join_hosts(self, firsts: Sequence[int]) -> None:
        """Prepare sums over hosts, now that ranks share memory.

        Args:
            firsts: the first rank of each host.
        """

    def gather(self, row: bytes) -> list[bytes]:
        """Each rank's row, on every rank; a row is at most 1024 bytes and must not end in zeros."""
        table = np.zeros([self.world_size, _ROW_BYTES], np.uint8)
        table[self.rank, : len(row)] = np.frombuffer(row, np.uint8)
        found = self._sum_before(table.view(np.int32))
        return [each.tobytes().rstrip(b"\0") for each in found.view(np.uint8)]

    def meet(self, hosts: Sequence[str], tokens: Sequence[str]) -> None:
        """Set up shared memory with the ranks of this host; every rank must call it, and all succeed or none.

        Args:
            hosts: for each rank, what it has in common with the ranks that it can share memory with.
            tokens: random, one for each rank; those of a host make the name of its meeting point.
        """
        ranks_of: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            ranks_of.setdefault(host, []).append(rank)
        if len(ranks_of) < self.world_size:
            self._share_memory(ranks_of[hosts[self.rank]], len(ranks_of), tokens)
        alone = self.hosts == self.world_size
        self._join_hosts(range(self.world_size) if alone else [ranks[0] for ranks in ranks_of.values()])

    def _share_memory(self, own: Sequence[int], hosts: int, tokens: Sequence[str]) -> None:
        on_host, failed = None, 0
        if len(own) > 1:
            drawn = hashlib.sha256("".join(tokens[rank] for rank in own).encode()).digest()
            try:
                name = int.from_bytes(drawn[:8]) >> 64 - _BITS
                number, secret = own.index(self.rank), drawn[8:]
                on_host = HostSum(name, number, len(own), self._is_lost, secret, is_left=self._is_over)
            except OSError:
                failed = 1
        if not self._sum_before(np.array([failed], np.int32))[0]:
            self.on_host, self.hosts = on_host, hosts
        elif on_host is not None:
            on_host.close()

    def share(self, data: bytes, giver: int = 0) -> bytes:
        """The bytes of one rank, of any length, on every rank."""
        length = int(self.sum(np.array([len(data) if self.rank == giver else 0], np.float64))[0])
        own = data if self.rank == giver else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)], giver=giver)[0].tobytes()

    def broadcast(
        self, arrays: list[np.ndarray], giver: int = 0, piece_bytes: int = pieces.PIECE_BYTES
    ) -> list[np.ndarray]:
        """The arrays of one rank, bit for bit, on every rank; see `pieces.broadcast`."""
        return pieces.broadcast(arrays, self.rank == giver, self.sum, piece_bytes)


def by_host(call: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """What a function of arrays makes of tensors, with the shapes that these have; may be traced."""
    found = tf.numpy_function(call, tensors, [t.dtype for t in tensors])
    return [tf.ensure_shape(each, t.shape) for each, t in zip(found, tensors, strict=True)]


@contextlib.contextmanager
def as_tensorflow() -> Iterator[None]:
    """Raise the loss of a rank as TensorFlow does in a graph."""
    try:
        yield
    except PeerLostError as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from None
