"""Sums over TCP, between threads that stand for hosts and between processes; workers are in tests/tf."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import psutil
import pytest

from raytf.distributed.allreduce.array_parts import OrderError, PeerLostError
from raytf.distributed.allreduce.network import PIECE_BYTES, NetworkSum
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.rendezvous import DATA, HEARTBEATS, MEET_SECONDS, Meeting, connect_all
from raytf.testing.processes import free_port

KEY = bytes(range(32))


def meetings(count: int) -> list[Meeting]:
    """Of so many ranks, all of which listen already."""
    addresses = tuple(rendezvous.listen("127.0.0.1") for _ in range(count))
    return [Meeting(rank, addresses, KEY) for rank in range(count)]


def in_threads(work: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each returns or raises."""
    found: list[Any] = [None] * len(work)

    def run(number: int) -> None:
        try:
            found[number] = work[number]()
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def together(
    count: int, work: Callable[[NetworkSum], Any], silent_seconds: float = 6.0, late: float = 0.0
) -> list[Any]:
    """What each of so many connected processes returns or raises; the first connects so many seconds late."""

    def member(place: Meeting) -> Any:
        time.sleep(0 if place.rank else late)
        own = NetworkSum.connect(place, silent_seconds)
        try:
            return work(own)
        finally:
            own.close()

    return in_threads([partial(member, place) for place in meetings(count)])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_all_get_the_sum_in_the_order_of_numbers(count):
    sizes = [(), (0,), (7, 3), (PIECE_BYTES // 4 + 5,), (2, 1)]

    def values(number: int) -> list[list[np.ndarray]]:
        made = np.random.default_rng(number)
        floats = [made.normal(size=s).astype(np.float32) for s in sizes]
        words = [made.integers(-(2**40), 2**40, s) for s in sizes[2:]]
        return [floats, words, [made.integers(0, 2**32, 11, np.uint32)]]

    found = together(count, lambda own: [own.add(*each) for each in values(own.number)])
    brought = [values(number) for number in range(count)]
    for place in range(3):
        for each in range(len(brought[0][place])):
            want = brought[0][place][each]
            for number in range(1, count):
                want = want + brought[number][place][each]
            for mine in found:
                np.testing.assert_array_equal(mine[place][each], want)
                assert mine[place][each].dtype == want.dtype


@pytest.mark.parametrize("kept", [[0, 2, 3], [3, 1]])
def test_some_go_on_alone_and_the_others_are_let_go(kept: list[int]):
    def work(own: NetworkSum) -> float:
        number = own.number
        assert own.add(np.ones(3))[0].tolist() == [4.0] * 3
        own.keep(kept)
        if number not in kept:
            with pytest.raises(PeerLostError, match="lost before"):
                own.add(np.ones(1))
            return 0.0
        assert (own.number, own.count) == (kept.index(number), len(kept))
        large = np.full(PIECE_BYTES // 8 + 3, float(number))
        for _ in range(3):
            found = own.add(large)[0]
        assert (found == sum(kept)).all()
        return number

    assert together(4, work) == [number if number in kept else 0.0 for number in range(4)]


def test_who_is_gone_is_noticed_by_all_and_stays_gone():
    def work(own: NetworkSum) -> list[str]:
        own.add(np.ones(3))
        if own.number == 1:
            return []
        told = []
        for _ in range(2):
            with pytest.raises(PeerLostError) as error:
                own.add(np.ones(3))
            told.append(str(error.value))
        return told

    found = together(3, work)
    for number in (0, 2):
        first, second = found[number]
        assert "Collective" in first
        assert "lost before" in second


def test_processes_that_add_different_things_are_told_so():
    found = together(2, lambda own: own.add(np.ones(3 + own.number, np.float32)))
    assert any(isinstance(each, OrderError) for each in found), found
    assert not any(isinstance(each, list) for each in found), found


def test_strangers_are_sent_away_and_hold_up_nobody():
    places = meetings(2)
    host, port = rendezvous.parsed(places[0].addresses[0])
    strangers = [socket.create_connection((host, port)) for _ in range(30)]
    strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
    strangers[1].sendall(bytes(200))
    strangers[2].close()
    began = time.monotonic()

    def member(place: Meeting) -> list[float]:
        own = NetworkSum.connect(place)
        found = own.add(np.full(2, place.rank + 1.0))[0].tolist()
        own.close()
        return found

    assert in_threads([partial(member, place) for place in places]) == [[3.0, 3.0]] * 2
    assert time.monotonic() - began < 30
    for stranger in strangers[:2]:
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    for stranger in strangers:
        stranger.close()


def test_who_does_not_know_the_key_is_of_no_group():
    places = meetings(2)
    false = Meeting(1, places[1].addresses, bytes(32))

    def member(place: Meeting) -> Any:
        return connect_all(place, 6.0, meet_seconds=1.0)

    first, second = in_threads([partial(member, places[0]), partial(member, false)])
    assert "rank 1 at 127.0.0.1:" in str(first)
    assert "did not connect in time" in str(first)
    assert "rank 0 at 127.0.0.1:" in str(second)


def test_a_call_that_comes_in_parts_is_understood():
    first, second = meetings(2)
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(connect_all(first, 6.0)))
    thread.start()
    listening = socket.create_server(("127.0.0.1", 0))
    relayed = Meeting(1, (rendezvous.joined(*listening.getsockname()), second.addresses[1]), KEY)
    calls: list[Any] = []
    other = threading.Thread(target=lambda: calls.append(connect_all(relayed, 6.0)))
    other.start()
    for _ in range(2):
        peer, _ = listening.accept()
        onward = socket.create_connection(rendezvous.parsed(first.addresses[0]))
        call = peer.recv(200)
        for begin in range(0, len(call), 7):
            onward.sendall(call[begin : begin + 7])
            time.sleep(0.01)
        peer.sendall(onward.recv(32, socket.MSG_WAITALL))
    thread.join(30)
    other.join(30)
    assert [sorted(found) for found in (answers[0], calls[0])] == [[DATA, HEARTBEATS]] * 2
    listening.close()


def test_a_process_that_does_not_come_is_not_waited_for_for_ever():
    first, _ = meetings(2)
    with pytest.raises(OSError, match=r"rank 1 at 127.0.0.1:\d+ did not connect in time"):
        connect_all(first, 6.0, meet_seconds=0.3)


def test_heartbeats_are_taken_also_of_those_that_nobody_waits_for():
    def member(place: Meeting) -> int:
        found = connect_all(place, 6.0)
        (heartbeats,) = found[HEARTBEATS].values()
        own = NetworkSum(place.rank, ["first", "second"], found[DATA], found[HEARTBEATS], hear_seconds=0.5)
        try:
            end = time.monotonic() + 5
            while own.add(np.array([time.monotonic() < end], np.int32))[0][0] == 2:
                time.sleep(0.02)
            heartbeats.setblocking(False)
            with suppress(BlockingIOError):
                return len(heartbeats.recv(100, socket.MSG_PEEK))
            return 0
        finally:
            own.close()

    waiting = in_threads([partial(member, place) for place in meetings(2)])
    assert all(isinstance(count, int) and count <= 2 for count in waiting), waiting


def test_who_comes_late_is_not_lost():
    assert together(3, lambda own: float(own.add(np.ones(1))[0][0]), silent_seconds=1.0, late=4.0) == [3.0] * 3


#: Adds without end; says so once.
ADDING = """
import sys
import numpy as np
from raytf.distributed.membership.rendezvous import Meeting
from raytf.distributed.allreduce.network import NetworkSum
own = NetworkSum.connect(Meeting(1, tuple(sys.argv[1:]), bytes(range(32))), silent_seconds=2.0)
own.add(np.ones(1000))
print("adds", flush=True)
while True:
    own.add(np.ones(1000))
"""


@contextmanager
def another() -> Iterator[tuple[NetworkSum, subprocess.Popen[str]]]:
    """This process and another one, connected; the other one adds without end."""
    (first,) = meetings(1)
    addresses = (*first.addresses, f"127.0.0.1:{free_port()}")
    with subprocess.Popen([sys.executable, "-c", ADDING, *addresses], stdout=subprocess.PIPE, text=True) as process:
        try:
            own = NetworkSum.connect(Meeting(0, addresses, KEY), silent_seconds=2.0)
            own.add(np.ones(1000))
            assert process.stdout is not None
            assert process.stdout.readline() == "adds\n"
            yield own, process
            own.close()
        finally:
            with suppress(ProcessLookupError):
                process.kill()


def lost(own: NetworkSum) -> tuple[str, float]:
    """What is raised, and after how long."""
    began = time.monotonic()
    while True:
        try:
            own.add(np.ones(1000))
        except PeerLostError as error:
            return str(error), time.monotonic() - began


def test_a_process_that_is_killed_is_noticed_at_once():
    with another() as (own, process):
        process.kill()
        text, seconds = lost(own)
        assert "rank 1 at" in text
        assert "gone" in text
        print(f"noticed after {seconds:.3f} s")
        assert seconds < 2


def test_a_process_that_is_stopped_is_noticed_by_its_silence():
    with another() as (own, process):
        process.send_signal(signal.SIGSTOP)
        text, seconds = lost(own)
        assert "silent for" in text
        print(f"noticed after {seconds:.1f} s")
        assert seconds < 10


def test_a_process_that_computes_for_long_is_not_lost_and_takes_nothing():
    large = np.ones(PIECE_BYTES // 2)  # of which the kernels' buffers hold a part

    def work(own: NetworkSum) -> float:
        if own.number:
            time.sleep(5)
        return float(own.add(large)[0][-1])

    assert together(2, work, silent_seconds=1.5) == [2.0, 2.0]


#: Holds the interpreter's lock for longer than it may be silent: `time.sleep` of the C library, called with the lock.
HOLDING = """
import ctypes, sys
import numpy as np
from raytf.distributed.membership.rendezvous import Meeting
from raytf.distributed.allreduce.network import NetworkSum
own = NetworkSum.connect(Meeting(1, tuple(sys.argv[1:]), bytes(range(32))), silent_seconds=2.0)
own.add(np.ones(10))
ctypes.PyDLL(None).sleep(5)
own.add(np.ones(10))
"""


def test_a_process_whose_interpreter_is_held_up_is_not_lost():
    (first,) = meetings(1)
    addresses = (*first.addresses, f"127.0.0.1:{free_port()}")
    with subprocess.Popen([sys.executable, "-c", HOLDING, *addresses]) as process:
        own = NetworkSum.connect(Meeting(0, addresses, KEY), silent_seconds=2.0)
        for _ in range(2):
            assert own.add(np.ones(10))[0][0] == 2
        assert process.wait(60) == 0
        own.close()


def test_nothing_is_left_when_a_process_has_ended():
    command = [sys.executable, "-c", ADDING]
    (first,) = meetings(1)
    addresses = (*first.addresses, f"127.0.0.1:{free_port()}")
    with subprocess.Popen([*command, *addresses], stdout=subprocess.PIPE, text=True) as process:
        own = NetworkSum.connect(Meeting(0, addresses, KEY))
        own.add(np.ones(1000))
        beside = psutil.Process(process.pid).children()
        assert len(beside) == 1, "heartbeats are sent by a process"
        process.kill()
    own.close()
    assert psutil.wait_procs(beside, 10)[1] == []


def test_a_host_that_is_cut_off_holds_nobody_up_after_its_generation():
    with socket.socket() as hole, ExitStack() as callers:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4):  # its queue is full, so the kernel drops further calls, as a host that is cut off does
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(hole.getsockname())
        over, own = threading.Event(), rendezvous.listen("127.0.0.1")
        place = Meeting(1, (rendezvous.joined(*hole.getsockname()), own), KEY, over.is_set)
        threading.Timer(0.5, over.set).start()
        began = time.monotonic()
        with pytest.raises(OSError, match="another rank is lost"):
            connect_all(place, 4.5)
        assert time.monotonic() - began < MEET_SECONDS / 4
        place.close()
