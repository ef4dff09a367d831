"""Sums in the memory of a host, over real processes."""

import hashlib
import json
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from raytf.distributed.allreduce.array_parts import PeerLostError
from raytf.distributed.allreduce.host import CHUNK_BYTES, HostSum

PATIENCE_SECONDS = 120

#: A member: adds what it is told to, and says what it has got, or why it has not.
MEMBER = """
import json, sys
from tests.tf.test_host_sum import digest, values
from raytf.distributed.allreduce.host import HostSum
from raytf.distributed.allreduce.array_parts import PeerLostError
name, number, count = map(int, sys.argv[1:])
group = HostSum(name, number, count)
print(json.dumps("there"), flush=True)
for line in sys.stdin:
    what, shapes, dtype = json.loads(line)
    try:
        found = getattr(group, what)(*values(number, shapes, dtype))
        print(json.dumps([digest(each) for each in found]), flush=True)
    except PeerLostError as error:
        print(json.dumps(str(error)), flush=True)
"""


def values(number: int, shapes: list[list[int]], dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(number)
    return [np.asarray(1e6 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]


class Members:
    def __init__(self, processes: list[subprocess.Popen[str]]):
        self.processes = processes

    def tell(self, *what: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.stdin.write(json.dumps(what) + "\n")
                process.stdin.flush()

    def answers(self, of: list[int] | None = None) -> list[object]:
        chosen = self.processes if of is None else [self.processes[i] for i in of]
        return [json.loads(process.stdout.readline()) for process in chosen]


@contextmanager
def members(count: int) -> Iterator[Members]:
    name = secrets.randbits(60)
    command = [sys.executable, "-c", MEMBER, str(name)]
    processes = [
        subprocess.Popen([*command, str(i), str(count)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for i in range(count)
    ]
    try:
        group = Members(processes)
        assert group.answers() == ["there"] * count
        yield group
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def digest(total: np.ndarray) -> list[object]:
    return [str(total.dtype), list(total.shape), hashlib.sha256(total.tobytes()).hexdigest()]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_get_the_sum_in_the_order_of_ranks(count):
    words = CHUNK_BYTES // 4
    cases = [
        ([[3]], "float32"),
        ([[words // 3, 2]], "float32"),
        ([[2 * words + 5]], "int32"),
        ([[0]], "int32"),
        ([[]], "float64"),
        ([[40_001]], "float32"),
        ([[CHUNK_BYTES + 3]], "uint8"),
        ([[7, 5], [words], [0], [], [3]], "float32"),
        ([[words - 1], [2], [3 * words, 1]], "int32"),
    ]
    with members(count) as group:
        for shapes, dtype in [*cases, *cases]:
            group.tell("add", shapes, dtype)
            totals, *others = [values(i, shapes, dtype) for i in range(count)]
            for other in others:
                totals = [total + part for total, part in zip(totals, other, strict=True)]
            assert group.answers() == [[digest(np.asarray(total)) for total in totals]] * count


def test_the_first_ones_values_go_to_all():
    with members(3) as group:
        for shapes in [[[7]], [[CHUNK_BYTES // 4 + 1], [5]], [[7]]]:
            group.tell("hand_out", shapes, "float32")
            assert group.answers() == [[digest(value) for value in values(0, shapes, "float32")]] * 3


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_those_who_wait_hear_at_once_of_a_death(lost):
    with members(3) as group:
        group.tell("add", [[3]], "float32")
        group.answers()
        rest = [i for i in range(3) if i != lost]
        os.kill(group.processes[lost].pid, signal.SIGKILL)
        group.processes[lost].wait()
        began = time.monotonic()
        group.tell("add", [[3]], "float32")
        assert all("Collective" in str(answer) for answer in group.answers(rest))
        assert time.monotonic() - began < PATIENCE_SECONDS
        group.tell("add", [[3]], "float32")  # for good
        assert all("Collective" in str(answer) for answer in group.answers(rest))


@pytest.mark.parametrize("lost", [0, 2])
def test_one_that_is_stopped_is_lost(lost):
    with members(3) as group:
        rest = [i for i in range(3) if i != lost]
        os.kill(group.processes[lost].pid, signal.SIGSTOP)
        for i in rest:
            group.processes[i].stdin.write(json.dumps(["add", [[3]], "float32"]) + "\n")
            group.processes[i].stdin.flush()
        answers = [str(answer) for answer in group.answers(rest)]
        assert any("was stopped" in answer for answer in answers)
        assert all("Collective" in answer for answer in answers)


@pytest.mark.parametrize(
    ("fork", "told"),
    [("os.fork()", "a worker of this host is gone"), ("ctypes.PyDLL(None).fork()", "process {} of this host is gone")],
)
def test_a_death_is_seen_although_a_forked_child_lives(fork: str, told: str):
    code = (
        "import ctypes, os, sys, time\nimport numpy as np\nfrom raytf.distributed.allreduce.host import HostSum\n"
        "group = HostSum(int(sys.argv[1]), 1, 2)\ngroup.add(np.ones(3))\n"
        f"child = {fork}\nif child: print(child, flush=True)\ntime.sleep(600)"
    )
    name = secrets.randbits(60)
    with subprocess.Popen([sys.executable, "-c", code, str(name)], stdout=subprocess.PIPE, text=True) as other:
        group = HostSum(name, 0, 2)
        group.add(np.ones(3))
        child = int(other.stdout.readline())
        try:
            other.kill()
            with pytest.raises(PeerLostError, match=told.format(other.pid)):
                group.add(np.ones(3))
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
            group.close()


def test_a_wait_ends_with_the_generation():
    name, over = secrets.randbits(60), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(HostSum, name, 1, 2)
        group = HostSum(name, 0, 2, over.is_set)
        over.set()
        with pytest.raises(PeerLostError, match="a worker of this group is lost"):
            group.add(np.ones(3))
        other.result().close()


@pytest.mark.parametrize("waiting", [0, 5])
def test_joining_a_first_process_that_is_silent_ends_with_the_generation(waiting: int):
    name, over = secrets.randbits(60), threading.Event()
    with ExitStack() as stack:
        first = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        first.bind(f"\0raytf-{name:x}")
        first.listen(0)
        for _ in range(waiting):  # strangers fill its queue
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.setblocking(False)
            stranger.connect_ex(f"\0raytf-{name:x}")
        threading.Timer(0.3, over.set).start()
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="a process of this host is lost"):
            HostSum(name, 1, 2, over.is_set)
        assert time.monotonic() - began < 10


def connected(name: int) -> socket.socket:
    """Connect with the first process of a meeting as soon as that process listens."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    while True:
        try:
            peer.connect(f"\0raytf-{name:x}")
            return peer
        except ConnectionRefusedError:
            time.sleep(0.01)


@pytest.mark.parametrize("hello", [b"", struct.pack("<i32s", 1, b"guessed"), struct.pack("<i", 1)])
def test_memory_is_not_handed_to_a_stranger(hello: bytes):
    name = secrets.randbits(60)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(HostSum, name, 0, 2, secret=b"known")
        with connected(name) as stranger:
            stranger.settimeout(PATIENCE_SECONDS)
            stranger.sendall(hello)
            _, descriptors, _, _ = socket.recv_fds(stranger, 1, 1)  # hung up, within a second if it says nothing
            assert not descriptors
        second = pool.submit(HostSum, name, 1, 2, secret=b"known")
        sums = [pool.submit(group.result().add, np.ones(3)) for group in (first, second)]
        assert [each.result()[0].tolist() for each in sums] == [[2.0] * 3] * 2
        first.result().close()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_memory_is_not_handed_to_another_user():
    name = secrets.randbits(60)
    code = (
        "import os, socket, struct, sys\nos.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "peer = socket.socket(socket.AF_UNIX)\npeer.connect(chr(0) + sys.argv[1])\n"
        "peer.sendall(struct.pack('<i32s', 1, b'known'))\nprint(len(socket.recv_fds(peer, 1, 1)[1]))"
    )
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(HostSum, name, 0, 2, secret=b"known")
        connected(name).close()
        told = subprocess.run(
            [sys.executable, "-c", code, f"raytf-{name:x}"], capture_output=True, text=True, check=False
        )
        assert told.stdout.strip() != "1", told
        second = HostSum(name, 1, 2, secret=b"known")
        second.close()
        first.result().close()


def test_a_name_that_is_taken_is_refused():
    name = secrets.randbits(60)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(f"\0raytf-{name:x}")
        with pytest.raises(OSError, match="in use"):
            HostSum(name, 0, 2)
