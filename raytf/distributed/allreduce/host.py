"""Sums over the processes of one host, through shared memory.

Between processes on one machine, TensorFlow's collectives use gRPC: the data is copied several times, by threads that
the workers' arithmetic needs. Here each process writes its values where the others read them. With two processes, each
adds the other's values to its own. With more, each adds one part and reads the sums of the other parts (reduce-scatter
and all-gather; Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005).
Values are added in the order of ranks, so all processes get the same bits.

Processes wait for each other over Unix sockets in a star. A process that dies closes its socket, which the others
notice at once. If a child that C code forked still holds the socket, /proc shows within a second that the process is
gone. /proc also shows whether a process was stopped. For a process that is not visible in /proc, the arbiter reports
that its generation is over. The memory has no name, so a killed process leaves no memory behind. Only processes of the
same user that know the group's secret receive the memory.
"""

from __future__ import annotations

import hmac
import mmap
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from raytf.distributed.allreduce.array_parts import (
    OrderError,
    Parts,
    PeerLostError,
    all_or_none,
    copy_in,
    copy_out,
    empty,
    pieces,
    sum_of,
)
from raytf.distributed.membership.peer_liveness import (
    PROCESS_LOOK_SECONDS,
    Sign,
    Waiting,
    sign_of_process,
)
from raytf.distributed.membership.rendezvous import end
from raytf.distributed.sockets import Callers, close_in_children

#: Bytes of each process's part of the memory. Longer vectors are added in pieces, which fit in the CPU caches.
CHUNK_BYTES = 1 << 22
#: From this many bytes on, more than two processes add one part each. For fewer bytes, it is faster to save one wait.
_PARTS_BYTES = 1 << 16
#: Seconds for all processes to connect, on a loaded machine.
_MEET_SECONDS = 60.0
#: Seconds between two checks whether an awaited process is lost.
_MEET_LOOK_SECONDS = 0.1
#: Seconds for a caller to identify itself.
_CALL_SECONDS = 1.0
#: The first message of a process: its number and the group's secret.
_HELLO = struct.Struct("<i32s")


def host_identity() -> str | None:
    """Return an id that is equal for processes that can share memory through sockets, or None if there is none."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"
    except OSError:
        return None


class HostSum:
    """This process's part in sums over the processes of its host. All must make the same calls in the same order.

    Args:
        name: name of the meeting point, 60 random bits that all processes know.
        number: number of this process among them.
        count: number of processes, at least two.
        is_over: returns whether a process of the group is known to be lost, which ends every wait.
        secret: at most 32 bytes that only the processes of the group know. The name is visible to other users.
        is_left: returns whether a process is known to have left the group, which ends the meeting but no sum.

    Raises:
        OSError: the processes did not connect, or the system refused the memory.
    """

    def __init__(
        self,
        name: int,
        number: int,
        count: int,
        is_over: Callable[[], bool] = lambda: False,
        secret: bytes = b"",
        is_left: Callable[[], bool] = lambda: False,
    ):
        self.number, self.count, self._is_over = number, count, is_over
        self._secret, self._is_left = secret.ljust(32, b"\0"), is_left
        self._peers: list[tuple[socket.socket, _Process]] = []
        # An abstract address leaves no file to remove.
        address = f"\0raytf-{name:x}"
        self._turn = 0
        try:
            memory = self._open(address) if number == 0 else self._join(address)
        except BaseException:
            self.close()
            raise
        self._slots = [
            [np.frombuffer(memory, np.uint8, CHUNK_BYTES, (turn * count + i) * CHUNK_BYTES) for i in range(count)]
            for turn in range(2)
        ]
        self._total = np.frombuffer(memory, np.uint8, CHUNK_BYTES, 2 * count * CHUNK_BYTES)

    def add(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return the sums of all processes' values, which must have one dtype, and equal shapes on all processes.

        Raises:
            PeerLostError: a process is gone, or stopped.
        """
        out = [empty(v) for v in values]
        with all_or_none("this host", bool(self._peers), self.close):
            for mine, total, size in pieces(values, out, CHUNK_BYTES):
                self._add(mine, total, size)
        return out

    def hand_out(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return the values of process 0, on every process.

        Raises:
            PeerLostError: a process is gone, or stopped.
        """
        out = [empty(v) for v in values]
        with all_or_none("this host", bool(self._peers), self.close):
            for mine, total, size in pieces(values, out, CHUNK_BYTES):
                slot = self._next_slots(mine[0].dtype, size)[0]
                if self.number == 0:
                    copy_in(mine, slot)
                self._meet(size)
                copy_out(slot, total)
        return out

    def close(self) -> None:
        """Close the connections, so that processes that wait for this one notice that it is gone."""
        for peer, _ in self._peers:
            end(peer)
        self._peers = []

    def _add(self, mine: Parts, total: Parts, size: int) -> None:
        # Two sets of slots are used in turn: at the last meeting, all processes had read the set that is written next.
        dtype = mine[0].dtype
        slots = self._next_slots(dtype, size)
        copy_in(mine, slots[self.number])
        self._meet(size)
        if self.count == 2 or size * dtype.itemsize < _PARTS_BYTES:
            begin = 0
            for part in total:
                own = slice(begin, begin + len(part))
                sum_of([slot[own] for slot in slots], part)
                begin += len(part)
            return
        shared = self._total[: size * dtype.itemsize].view(dtype)
        bounds = [size * i // self.count for i in range(self.count + 1)]
        own = slice(bounds[self.number], bounds[self.number + 1])
        sum_of([slot[own] for slot in slots], shared[own])
        self._meet(size)
        copy_out(shared, total)

    def _next_slots(self, dtype: np.dtype[Any], size: int) -> list[np.ndarray]:
        self._turn = 1 - self._turn
        return [slot[: size * dtype.itemsize].view(dtype) for slot in self._slots[self._turn]]

    def _open(self, address: str) -> mmap.mmap:
        size = (2 * self.count + 1) * CHUNK_BYTES
        descriptor = os.memfd_create("raytf-sum", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, size)
            peers: dict[int, socket.socket] = {}
            deadline = time.monotonic() + _MEET_SECONDS
            with Callers(_server(address, self.count), _HELLO.size, seconds=_CALL_SECONDS) as callers:
                while len(peers) < self.count - 1:
                    self._check_time(deadline)
                    for peer, hello in callers.calls(_MEET_LOOK_SECONDS):
                        number = self._number_of(peer, hello)
                        if number is None or number in peers:
                            peer.close()  # a stranger
                        else:
                            peers[number] = peer
            for number in sorted(peers):
                socket.send_fds(peers[number], [b"\0"], [descriptor])
                self._add_peer(peers[number])
            return mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def _join(self, address: str) -> mmap.mmap:
        deadline = time.monotonic() + _MEET_SECONDS
        while True:
            first = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            first.settimeout(_MEET_LOOK_SECONDS)
            try:
                first.connect(address)
                break
            except OSError:  # the first process does not listen yet, or strangers have filled its queue
                first.close()
                self._check_time(deadline)
                time.sleep(0.005)
        if not _is_of_this_user(first):
            first.close()
            raise PermissionError("another user occupies the meeting point of this host's processes")
        try:
            first.sendall(_HELLO.pack(self.number, self._secret))
            descriptors = self._handed(first, deadline)
        except BaseException:
            first.close()
            raise
        try:
            self._add_peer(first)
            return mmap.mmap(descriptors[0], (2 * self.count + 1) * CHUNK_BYTES)
        finally:
            os.close(descriptors[0])

    def _handed(self, first: socket.socket, deadline: float) -> list[int]:
        """Return the memory's descriptor, which process 0 sends after all processes have connected."""
        while True:
            self._check_time(deadline)
            try:
                _, descriptors, _, _ = socket.recv_fds(first, 1, 1)
            except TimeoutError:
                continue
            if not descriptors:
                raise ConnectionError("the first process of this host is gone")
            return descriptors

    def _number_of(self, peer: socket.socket, hello: bytes) -> int | None:
        """Return the number of the process that has connected, or None for a stranger."""
        number, secret = _HELLO.unpack(hello)
        is_of_group = _is_of_this_user(peer) and hmac.compare_digest(secret, self._secret)
        return number if is_of_group and 0 < number < self.count else None

    def _check_time(self, deadline: float) -> None:
        if self._is_over() or self._is_left():
            raise ConnectionError("a process of this host is lost")
        if time.monotonic() > deadline:
            raise TimeoutError("a process of this host did not connect in time")

    def _add_peer(self, peer: socket.socket) -> None:
        close_in_children(peer)
        # Use the system's time limit, because Python's would cost another system call for each byte.
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(PROCESS_LOOK_SECONDS), 0))
        self._peers.append((peer, _Process(_credentials(peer)[0])))

    def _meet(self, size: int) -> None:
        """Wait until all processes have reached this point, each with the same size."""
        mark = bytes([size % 251])
        if self.number:
            self._peers[0][0].send(mark)
            self._wait_for(*self._peers[0], mark)
            return
        for peer, process in self._peers:
            self._wait_for(peer, process, mark)
        for peer, _ in self._peers:
            peer.send(mark)

    def _wait_for(self, peer: socket.socket, process: _Process, mark: bytes) -> None:
        waiting: Waiting | None = None
        while True:
            try:
                received = peer.recv(1)
            except BlockingIOError:
                waiting = waiting or Waiting.for_processes()
                loss = waiting.check_signs({0: process.sign()}, self._is_over())
                if loss is not None and loss.number is None:
                    raise PeerLostError("Collective: a worker of this group is lost") from None
                if loss is not None:
                    how = "is gone" if loss.sign is Sign.GONE else "was stopped"
                    raise PeerLostError(f"Collective: {process} {how}") from None
                continue
            if received == mark:
                return
            if received:
                raise OrderError(f"{process} does not add as many values as this process, which is a bug")
            raise PeerLostError("Collective: a worker of this host is gone")


def _server(address: str, count: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(address)
        server.listen(count)
    except OSError:
        server.close()
        raise
    return server


def _credentials(peer: socket.socket) -> tuple[int, int, int]:
    """Return the pid, user and group of the other side of a connection."""
    pid, user, group = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user, group


def _is_of_this_user(peer: socket.socket) -> bool:
    return _credentials(peer)[1] == os.getuid()


class _Process:
    """Another process on this host, as /proc shows it. Its pid is 0 if it is not visible, as between containers."""

    def __init__(self, number: int):
        self._number, self._started = number, _status_of(number)[1]

    def __str__(self) -> str:
        return f"process {self._number} of this host"

    def sign(self) -> Sign:
        return sign_of_process(*_status_of(self._number), self._started)


def _status_of(number: int) -> tuple[str, str]:
    """Return a process's state and start time; with its pid, the start time identifies it. Empty if not visible."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
