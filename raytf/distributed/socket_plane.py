"""The control plane of a group without TensorFlow's cluster: between hosts, TCP connections of raytf's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from raytf.distributed import handover
from raytf.distributed.control_plane import ControlPlane, as_tensorflow, by_host
from raytf.distributed.meeting import Meeting, parsed
from raytf.distributed.network_allreduce import NetworkSum
from raytf.distributed.sum_pieces import PeerLostError
from raytf.errors import WorkerLostError

#: This process's own, whether it is in a cluster or not.
_DEVICE = "/device:CPU:0"


class SocketPlane(ControlPlane):
    """A control plane over TCP; see `ControlPlane`. A graph that adds stays valid when the ranks meet again.

    Attributes:
        loss: why the last sum failed, because a rank is lost; empty while all are there.
    """

    def __init__(self) -> None:
        super().__init__(0, 1, _DEVICE)
        self.loss = ""
        #: Address at which others reach this rank.
        self._host = ""
        #: Over all ranks at first, then over the first ones of each host; None on any other rank.
        self._network: NetworkSum | None = None

    @classmethod
    def connect(cls, meeting: Meeting) -> SocketPlane:
        """A plane of ranks that have met.

        Raises:
            WorkerLostError: they do not reach each other; says which.
        """
        plane = cls()
        plane.join(meeting)
        return plane

    def join(self, meeting: Meeting) -> None:
        """Connect this rank with all others of a meeting, and leave those of the one before; `meet` comes next.

        Raises:
            WorkerLostError: they do not reach each other; says which.
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
                f"rank {meeting.rank} at {meeting.addresses[meeting.rank]} has not met the others: {error}. Nodes must "
                "be able to reach each other at any port."
            )
            lost.unreached = getattr(error, "ranks", frozenset())
            raise lost from None

    def leave(self) -> None:
        """Hang up; ranks that wait for this one then see that it is gone."""
        for each in (self._network, self.on_host):
            if each is not None:
                each.close()
        self._network = self.on_host = None

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        """Send arrays straight from some ranks to others; see `Ranks.hand`."""
        return handover.hand(self, self._host, self._is_over, arrays, givers, takers)

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
        """Sums over all ranks: in the memory of each host, then between hosts, and to all of the host."""
        with self._hanging_up():
            found = list(values) if self.on_host is None else self.on_host.add(*values)
            if self._network is not None:
                found = self._network.add(*found)
            if self.on_host is not None and self.hosts > 1:
                found = self.on_host.hand_out(*found)
        return found

    @contextlib.contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """If another host or a rank of this one is lost, tell the others that wait for this rank."""
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
