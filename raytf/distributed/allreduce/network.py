"""Sums over the processes of several hosts, over TCP.

TensorFlow's ring over gRPC serializes its data and has 2 (n - 1) waits for n processes. Here all processes are
connected to each other. Each process adds one part of a piece, which the others send to it, and sends them the sum
(reduce-scatter and all-gather by direct exchange; Thakur, Rabenseifner and Gropp, Optimization of collective
communication operations in MPICH, 2005). This takes two waits, and no process sends or receives more than twice the
piece. Two processes send each other the whole piece, with one wait. Values are added in the order of the processes'
numbers, so all processes get the same bits.

A process that dies closes its connections. A stopped process, or a host that is gone or cut off, sends no heartbeats
(`peer_liveness`). Heartbeats use separate connections, because a process reads no data while it computes.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable, Sequence

import numpy as np

from raytf.distributed.allreduce.array_parts import (
    OrderError,
    PeerLostError,
    all_or_none,
    copy_in,
    copy_out,
    empty,
    pieces,
    sum_of,
)
from raytf.distributed.membership.peer_liveness import BEAT_SECONDS, SILENT_SECONDS, HeartbeatSender, Sign, Waiting
from raytf.distributed.membership.rendezvous import DATA, HEARTBEATS, Meeting, connect_all, end

#: Bytes of a piece; its parts stay in the caches while they are added.
PIECE_BYTES = 1 << 21
#: Seconds between two reads of the heartbeats of all processes.
_HEAR_SECONDS = 30.0
#: The header of a piece: the number of earlier pieces, its bytes, the type of its numbers, and padding.
_HEAD = struct.Struct("<IIII")
#: Most bytes of a number.
_LARGEST_NUMBER = 16


class NetworkSum:
    """This process's part in sums over processes of several hosts. Each must make the same calls in the same order.

    Args:
        number: number of this process among them.
        names: names of all processes, for messages.
        data: data connection to each other process, by number.
        heartbeats: heartbeat connection to each other process, by number.
        silent_seconds: seconds without a heartbeat after which a process counts as lost.
        hear_seconds: seconds between two reads of the heartbeats of processes that are never awaited.
    """

    _peers: dict[int, socket.socket]
    _heartbeats: dict[int, socket.socket]

    def __init__(
        self,
        number: int,
        names: Sequence[str],
        data: dict[int, socket.socket],
        heartbeats: dict[int, socket.socket],
        silent_seconds: float = SILENT_SECONDS,
        hear_seconds: float = _HEAR_SECONDS,
    ):
        self._silent_seconds, self._hear_seconds = silent_seconds, hear_seconds
        self._sequence, self._heard_at = 0, time.monotonic()
        self._sender = HeartbeatSender(heartbeats.values())
        self._mine, self._total = (np.empty(PIECE_BYTES, np.uint8) for _ in range(2))
        self._take(number, names, data, heartbeats)

    @classmethod
    def connect(cls, meeting: Meeting, silent_seconds: float = SILENT_SECONDS) -> NetworkSum:
        """Connect this rank to all others, using ranks as numbers; each rank has 2 (n - 1) connections. Raise an
        OSError that names the ranks that did not connect."""
        connections = connect_all(meeting, silent_seconds)
        names = [f"rank {rank} at {address}" for rank, address in enumerate(meeting.addresses)]
        return cls(meeting.rank, names, connections[DATA], connections[HEARTBEATS], silent_seconds)

    def add(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return the sums of all processes' values, which must have one dtype, and equal shapes on all processes.

        Raises:
            PeerLostError: a process is gone, stopped or cut off.
            OrderError: another process adds different arrays.
        """
        out = [empty(v) for v in values]
        with all_or_none("another host", bool(self._peers), self.close):
            for mine, total, size in pieces(values, out, PIECE_BYTES):
                dtype = mine[0].dtype
                # Contiguous values are sent in place and added directly into their target.
                own, target = (
                    each[0] if len(each) == 1 else memory[: size * dtype.itemsize].view(dtype)
                    for each, memory in ((mine, self._mine), (total, self._total))
                )
                if len(mine) > 1:
                    copy_in(mine, own)
                self._sum(own, target)
                if len(total) > 1:
                    copy_out(target, total)
            if time.monotonic() - self._heard_at > self._hear_seconds:
                self._heard_at = time.monotonic()
                for n in self._peers:
                    self._hear(n)
        return out

    def keep(self, numbers: Sequence[int]) -> None:
        """Add only over these processes (at least two) from now on, renumbered by their place in this list, and close
        the other connections. All processes must call it."""
        if self.number not in numbers:
            self.close()
            return
        for n in self._peers:
            if n not in numbers:
                end(self._peers[n])
                end(self._heartbeats[n])
        kept = {i: n for i, n in enumerate(numbers) if n in self._peers}
        self._take(
            numbers.index(self.number),
            [self._names[n] for n in numbers],
            {i: self._peers[n] for i, n in kept.items()},
            {i: self._heartbeats[n] for i, n in kept.items()},
        )

    def close(self) -> None:
        """Close the connections, so that processes that wait for this one notice that it is gone."""
        self._sender.end()
        for peer in [*self._peers.values(), *self._heartbeats.values()]:
            end(peer)
        self._peers, self._heartbeats = {}, {}

    def _take(
        self,
        number: int,
        names: Sequence[str],
        data: dict[int, socket.socket],
        heartbeats: dict[int, socket.socket],
    ) -> None:
        self.number, self.count, self._names = number, len(data) + 1, names
        self._peers, self._heartbeats = data, heartbeats
        self._numbers = {peer.fileno(): n for n, peer in data.items()}
        self._waiting = Waiting.for_heartbeats(self._silent_seconds)
        # With more than two processes, each sends a part of a piece.
        most = PIECE_BYTES if self.count == 2 else PIECE_BYTES // self.count + _LARGEST_NUMBER
        self._theirs = {n: np.empty(_HEAD.size + most, np.uint8) for n in data}

    def _sum(self, mine: np.ndarray, total: np.ndarray) -> None:
        if self.count == 2:
            other = 1 - self.number
            theirs = self._exchange({other: mine}, {other: slice(0, len(mine))})[other]
            sum_of([mine, theirs] if self.number == 0 else [theirs, mine], total)
            return
        bounds = [len(mine) * i // self.count for i in range(self.count + 1)]
        parts = [slice(bounds[i], bounds[i + 1]) for i in range(self.count)]
        own = parts[self.number]
        received = self._exchange({n: mine[parts[n]] for n in self._peers}, dict.fromkeys(self._peers, own))
        sum_of([mine[own] if n == self.number else received[n] for n in range(self.count)], total[own])
        received = self._exchange(dict.fromkeys(self._peers, total[own]), {n: parts[n] for n in self._peers})
        for n, part in received.items():
            total[parts[n]] = part

    def _exchange(self, outgoing: dict[int, np.ndarray], parts: dict[int, slice]) -> dict[int, np.ndarray]:
        """Send each process its numbers, and return the numbers of a part of the piece from each."""
        dtype = next(iter(outgoing.values())).dtype
        left = {
            n: [memoryview(_HEAD.pack(self._sequence, a.nbytes, dtype.num, 0)), a.view(np.uint8).data]
            for n, a in outgoing.items()
        }
        lengths = {n: (part.stop - part.start) * dtype.itemsize for n, part in parts.items()}
        awaited = {n: self._theirs[n].data[: _HEAD.size + length] for n, length in lengths.items()}
        poll = select.poll()
        for peer in self._peers.values():
            poll.register(peer, select.POLLIN | select.POLLOUT)
        while left or awaited:
            ready = poll.poll(BEAT_SECONDS * 1000)
            for descriptor, _ in ready:
                n = self._numbers[descriptor]
                if n in awaited:
                    self._receive(n, awaited, lengths[n], dtype)
                if n in left:
                    self._send(n, left)
                wanted = (select.POLLIN if n in awaited else 0) | (select.POLLOUT if n in left else 0)
                if wanted:
                    poll.modify(descriptor, wanted)
                else:
                    poll.unregister(descriptor)
            if not ready:
                self._check_heartbeats({*awaited, *left})
        self._sequence = (self._sequence + 1) % 2**32
        return {n: self._theirs[n][_HEAD.size : _HEAD.size + length].view(dtype) for n, length in lengths.items()}

    def _receive(self, n: int, awaited: dict[int, memoryview], length: int, dtype: np.dtype) -> None:
        """Read the available data from a process."""
        try:
            count = self._peers[n].recv_into(awaited[n])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(n, error) from None
        if not count:
            raise self._gone(n)
        before = _HEAD.size + length - len(awaited[n])
        awaited[n] = awaited[n][count:]
        if before < _HEAD.size <= before + count:
            self._check(n, length, dtype)  # before waiting for data that may never arrive
        if not len(awaited[n]):
            del awaited[n]

    def _send(self, n: int, left: dict[int, list[memoryview]]) -> None:
        try:
            count = self._peers[n].sendmsg(left[n])
        except BlockingIOError:
            return
        except OSError as error:
            raise self._gone(n, error) from None
        while left[n] and count >= len(left[n][0]):
            count -= len(left[n].pop(0))
        if left[n]:
            left[n][0] = left[n][0][count:]
        else:
            del left[n]

    def _check(self, n: int, length: int, dtype: np.dtype) -> None:
        sequence, count, kind, _ = _HEAD.unpack(self._theirs[n][: _HEAD.size].tobytes())
        if (sequence, count, kind) != (self._sequence, length, dtype.num):
            raise OrderError(
                f"{self._names[n]} is at a different sum than this process ({count} bytes of type {kind} as sum "
                f"{sequence} instead of {length} of type {dtype.num} as {self._sequence}), which is a bug"
            )

    def _check_heartbeats(self, numbers: Iterable[int]) -> None:
        """Check whether awaited processes still send heartbeats."""
        loss = self._waiting.check_signs({n: Sign.ALIVE if self._hear(n) else Sign.QUIET for n in numbers})
        if loss is not None and loss.number is not None:
            name = self._names[loss.number]
            raise PeerLostError(f"Collective: {name} has been silent for {self._silent_seconds:g} s")

    def _hear(self, n: int) -> bool:
        """Read all heartbeats that have arrived from a process, and return whether there were any.

        Call it also for processes that are never awaited: the kernel ends a connection that is never read.
        """
        has_come = False
        while True:
            try:
                heard = self._heartbeats[n].recv(1 << 16)
            except BlockingIOError:
                return has_come
            except OSError as error:
                raise self._gone(n, error) from None
            if not heard:
                raise self._gone(n)
            has_come = True

    def _gone(self, n: int, error: OSError | None = None) -> PeerLostError:
        return PeerLostError(f"Collective: {self._names[n]} is gone" + ("" if error is None else f" ({error})"))
