"""The exchange of values between ranks outside of the step, over CPUs and host memory only.

TensorFlow cannot add int32 and bfloat16 on GPUs, and NCCL does not support two ranks on one GPU. Ranks therefore agree,
send weights and add metrics over their CPUs, whatever device computes the gradients. Ranks that share a host first
add in its memory (`host`), and only the first rank of each host talks to other hosts. Gradients can take this path,
too. It is the usual path for CPUs, and for GPUs the one with no requirements.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf.distributed import state_transfer
from raytf.distributed.allreduce.array_parts import PeerLostError, copy_in, copy_out, pieces
from raytf.distributed.allreduce.host import HostSum
from raytf.distributed.allreduce.network import NetworkSum
from raytf.distributed.allreduce.reduction import packed
from raytf.distributed.membership.rendezvous import Meeting, UnreachedError, parsed
from raytf.errors import WorkerLostError

#: Bytes of the row in which a rank describes itself.
_ROW_BYTES = 1024
#: Number of random bits in the name of a host's meeting point.
_BITS = 60
#: Bytes that are sent at once. This much memory is needed in addition to the arrays.
PIECE_BYTES = 1 << 26
#: Up to this many bytes, a separate message on which arrays are zero is not worthwhile.
_SMALL_BYTES = 1 << 16
#: This process's own CPU, whether or not the process is in a cluster.
_DEVICE = "/device:CPU:0"
#: Keys of the groups of all ranks and of the first rank of each host, far from the keys that the strategy uses.
_ALL_KEY, _HOSTS_KEY = 2_000_000, 1_000_000


class ControlPlane(abc.ABC):
    """This rank's connection to all others over CPUs. Each rank must make the same calls in the same order.

    Args:
        rank: this rank.
        world_size: number of ranks.
        device: full name of this rank's CPU.

    Attributes:
        on_host: the sum over the ranks of this host, if several share its memory.
        hosts: number of groups of ranks that share memory; the number of ranks if none do.
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
        """Return the sums of tensors of one dtype over all ranks, on this rank's CPU. Can be traced."""

    @abc.abstractmethod
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all ranks, computed at once.

        Raises:
            tf.errors.UnavailableError: or another error of TensorFlow, if a rank is gone.
        """

    @abc.abstractmethod
    def _sum_before(self, values: np.ndarray) -> np.ndarray:
        """Return the same as `sum`, for calls before the ranks of a host share memory."""

    @abc.abstractmethod
    def _join_hosts(self, firsts: Sequence[int]) -> None:
        """Prepare sums over hosts by the first rank of each host, after ranks have set up shared memory."""

    def gather(self, row: bytes) -> list[bytes]:
        """Return each rank's row, on every rank. A row has at most 1024 bytes and must not end in zeros."""
        table = np.zeros([self.world_size, _ROW_BYTES], np.uint8)
        table[self.rank, : len(row)] = np.frombuffer(row, np.uint8)
        rows = self._sum_before(table.view(np.int32))
        return [each.tobytes().rstrip(b"\0") for each in rows.view(np.uint8)]

    def meet(self, hosts: Sequence[str], tokens: Sequence[str]) -> None:
        """Set up shared memory with the ranks of this host. Every rank must call it; all ranks succeed or none.

        Args:
            hosts: for each rank, an id that is equal for ranks that can share memory.
            tokens: a random token of each rank. The tokens of a host's ranks determine the name of its meeting point.
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
        """Return the bytes of the rank `giver`, of any length, on every rank."""
        length = int(self.sum(np.array([len(data) if self.rank == giver else 0], np.float64))[0])
        own = data if self.rank == giver else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)], giver=giver)[0].tobytes()

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        """Return the arrays of the rank `giver`, bit for bit, on every rank; see the function `broadcast`."""
        return broadcast(arrays, self.rank == giver, self.sum)


def by_host(call: Callable[..., list[np.ndarray]], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Call a function of arrays with tensors; its results have the same shapes. Can be traced."""
    arrays = tf.numpy_function(call, tensors, [t.dtype for t in tensors])
    return [tf.ensure_shape(each, t.shape) for each, t in zip(arrays, tensors, strict=True)]


@contextlib.contextmanager
def as_tensorflow() -> Iterator[None]:
    """Raise the loss of a rank as the error that TensorFlow raises in a graph."""
    try:
        yield
    except PeerLostError as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from None


def broadcast(
    arrays: list[np.ndarray],
    is_first: bool,
    add: Callable[[np.ndarray], np.ndarray],
    piece_bytes: int = PIECE_BYTES,
) -> list[np.ndarray]:
    """Return the giver's arrays, bit for bit; the giver itself gets the same objects back.

    Adding integer zeros keeps every bit, including NaN payloads. An array whose bytes are all zero, such as a slot of
    Adam in a new run, is not sent, but only marked by one number.

    Args:
        arrays: arrays of the giver; other ranks pass arrays of the same shapes and dtypes, whose values do not matter.
        is_first: whether this rank is the giver.
        add: returns the sum of an int32 vector over all ranks.
        piece_bytes: most bytes that are added at once; a multiple of 4.

    Returns:
        The arrays. Some may share memory, so do not write to them.
    """
    travels = np.ones(len(arrays), np.int32)
    if sum(a.nbytes for a in arrays) > _SMALL_BYTES:
        travels = add(np.array([is_first and _has_bits(a) for a in arrays], np.int32))
    sent = [
        _bytes_of(a) if is_first else np.empty(a.nbytes, np.uint8)
        for a, travel in zip(arrays, travels, strict=True)
        if travel
    ]
    for parts, _, size in pieces(sent, sent, piece_bytes) if any(map(len, sent)) else ():
        words = np.zeros(-(-size // 4), np.int32)
        if is_first:
            copy_in(parts, words.view(np.uint8))
        summed = add(words)
        if not is_first:
            copy_out(summed.view(np.uint8), parts)
    if is_first:
        return arrays
    received = iter(sent)
    return [
        (next(received) if travel else np.zeros(a.nbytes, np.uint8)).view(a.dtype).reshape(a.shape)
        for a, travel in zip(arrays, travels, strict=True)
    ]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _has_bits(array: np.ndarray) -> bool:
    """Return whether any bit is set, as in -0.0."""
    data = _bytes_of(array)
    whole = len(data) - len(data) % 8
    return bool(data[:whole].view(np.uint64).any() or data[whole:].any())


class SocketPlane(ControlPlane):
    """A control plane over TCP; see `ControlPlane`. A graph that adds stays valid when the ranks meet again.

    Args:
        meeting: the ranks to connect to.

    Attributes:
        loss: why the last sum failed, if a rank was lost; otherwise empty.

    Raises:
        WorkerLostError: the ranks cannot reach each other. The message names the ranks that were not reached.
    """

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(0, 1, _DEVICE)
        self.loss = ""
        #: Address at which others reach this rank.
        self._host = ""
        #: Connects all ranks at first, later the first rank of each host; None on other ranks.
        self._network: NetworkSum | None = None
        self.join(meeting)

    def join(self, meeting: Meeting) -> None:
        """Connect this rank to all others of a meeting, and leave the previous meeting. Call `meet` next.

        Raises:
            WorkerLostError: the ranks cannot reach each other. The message names the ranks that were not reached.
        """
        self.leave()
        self.rank, self.world_size, self.hosts, self.loss = meeting.rank, meeting.world_size, meeting.world_size, ""
        self._is_over, self._is_lost = meeting.is_over, meeting.is_lost
        self._host, _ = parsed(meeting.addresses[meeting.rank])
        if meeting.world_size == 1:
            meeting.close()
            return
        try:
            self._network = NetworkSum.connect(meeting)
        except OSError as error:
            lost = WorkerLostError(
                f"rank {meeting.rank} at {meeting.addresses[meeting.rank]} has not met the others: {error}. Nodes "
                "must be able to reach each other at any port."
            )
            lost.unreached = error.ranks if isinstance(error, UnreachedError) else frozenset()
            raise lost from None

    def leave(self) -> None:
        """Close the connections, so that ranks that wait for this one notice that it is gone."""
        for each in (self._network, self.on_host):
            if each is not None:
                each.close()
        self._network = self.on_host = None

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        """Send arrays directly from some ranks to others; see `Ranks.hand`."""
        return state_transfer.hand(self, self._host, self._is_over, arrays, givers, takers)

    def add(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.device(self._device):
            return by_host(self._add_here, tensors)

    def sum(self, values: np.ndarray) -> np.ndarray:
        with as_tensorflow():
            return self._add_here(np.asarray(values, order="C"))[0]

    def _sum_before(self, values: np.ndarray) -> np.ndarray:
        with as_tensorflow(), self._hanging_up():
            return values if self._network is None else self._network.add(values)[0]

    def _join_hosts(self, firsts: Sequence[int]) -> None:
        if self._network is None:
            return
        if self.hosts > 1:
            self._network.keep(firsts)
        if self.hosts == 1 or self.rank not in firsts:
            self._network.close()
            self._network = None

    def _add_here(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return the sums over all ranks: add in each host's memory, then between hosts, then copy within each host."""
        with self._hanging_up():
            sums = list(values) if self.on_host is None else self.on_host.add(*values)
            if self._network is not None:
                sums = self._network.add(*sums)
            if self.on_host is not None and self.hosts > 1:
                sums = self.on_host.hand_out(*sums)
        return sums

    @contextlib.contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """Close the connections if a sum fails, so that ranks that wait for this one notice."""
        if self.loss:
            raise PeerLostError(self.loss)
        try:
            yield
        except PeerLostError as error:
            self.loss = str(error)
            self.leave()
            raise
        except BaseException:
            self.leave()
            raise


# The ranks' CPUs form a group of collectives separate from the strategy's, just as TensorFlow's strategy has a separate
# group for host values. Operations here are traced with an explicit device, so that none is placed on a GPU.


class Ring:
    """TensorFlow's ring over gRPC among the CPU devices (full names) of some ranks, which all use the same key."""

    def __init__(self, key: int, size: int, device: str):
        self._device = device
        self._all_reduce = _tensorflow.ring(key, size, device)

    def add(self, tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(self._device):
            if tensor.dtype != tf.uint32:
                return self._all_reduce(tensor)
            # No kernel adds uint32; the sum as int32 has the same bits.
            return tf.bitcast(self._all_reduce(tf.bitcast(tensor, tf.int32)), tf.uint32)


class RingPlane(ControlPlane):
    """A control plane over TensorFlow's ring; see `ControlPlane`."""

    def __init__(self, rank: int, world_size: int):
        super().__init__(rank, world_size, f"/job:worker/replica:0/task:{rank}/device:CPU:0")
        self._all = Ring(_ALL_KEY, world_size, self._device)
        self._over_hosts: Ring | None = None
        self._sum_vector = tf.function(lambda vector: self.add([vector])[0], reduce_retracing=True, autograph=False)
        # A separate function, because a graph traced before the ranks of a host have met would not change afterwards.
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
