"""Strangers at a port: few at a time, for a short time, and nobody waits longer because of them."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.rendezvous import Meeting, connect_all
from raytf.distributed.sockets import Callers, most_callers
from raytf.testing.processes import free_port, wait_until

WORD = b"0123456789"


@contextmanager
def calling(**settings: float) -> Iterator[tuple[Callers, Callable[[], socket.socket]]]:
    """Callers at a socket, and a function that connects with it."""
    server = socket.create_server(("127.0.0.1", 0))
    address = server.getsockname()
    with ExitStack() as stack:
        callers = stack.enter_context(Callers(server, len(WORD), **settings))
        yield callers, lambda: stack.enter_context(socket.create_connection(address, 10))


def heard(callers: Callers, rounds: int = 1) -> list[bytes]:
    """What callers have said in so many rounds."""
    said = []
    for _ in range(rounds):
        for peer, word in callers.calls(5):
            said.append(word)
            peer.close()
    return said


def test_the_oldest_caller_is_closed_where_there_are_too_many():
    with calling(most=2) as (callers, connected):
        first, second, third = (connected() for _ in range(3))
        assert heard(callers, 3) == []
        assert first.recv(1) == b""
        second.sendall(WORD)
        assert heard(callers) == [WORD]
        third.sendall(WORD)
        assert heard(callers) == [WORD]


def test_a_caller_that_is_silent_for_too_long_is_closed():
    now = [0.0]
    with calling(seconds=10, clock=lambda: now[0]) as (callers, connected):
        silent = connected()
        heard(callers)
        silent.sendall(WORD[:-1])
        heard(callers)
        now[0] = 10.5
        connected().sendall(WORD)
        while heard(callers) != [WORD]:
            pass
        assert silent.recv(1) == b""


def test_few_callers_are_kept_where_few_files_can_be_opened():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        assert most_callers() == 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


#: A rank that may open few files, and waits for another one.
WAITING = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from raytf.distributed.membership.rendezvous import Meeting
from raytf.distributed.membership.rendezvous import connect_all
connect_all(Meeting(0, tuple(sys.argv[1:]), bytes(range(32))), 4.5, meet_seconds=30)
print("met", flush=True)
"""


def test_strangers_that_use_up_a_ranks_files_do_not_keep_others_out():
    addresses = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-c", WAITING, *addresses]
    with ExitStack() as stack, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        stack.callback(process.kill)
        assert process.stdout is not None
        place = rendezvous.parsed(addresses[0])
        wait_until(lambda: socket.socket().connect_ex(place) == 0, "the rank listens", 20)
        for _ in range(150):
            stack.enter_context(socket.create_connection(place, 10))
        for group in connect_all(Meeting(1, addresses, bytes(range(32))), 4.5, meet_seconds=15).values():
            for peer in group.values():
                peer.close()
        assert process.stdout.readline() == "met\n"


def test_a_busy_stranger_does_not_hide_that_the_generation_is_over():
    own, over, ends = rendezvous.listen("127.0.0.1"), threading.Event(), threading.Event()

    def drip() -> None:
        for _ in range(20):
            with suppress(OSError), socket.create_connection(rendezvous.parsed(own), 10) as peer:
                for _ in range(50):  # fewer bytes than a call has
                    if ends.wait(0.01):
                        return
                    peer.sendall(b"x")

    stranger = threading.Thread(target=drip, daemon=True)
    stranger.start()
    began = time.monotonic()
    threading.Timer(0.5, over.set).start()
    try:
        with pytest.raises(OSError, match="another rank is lost"):
            connect_all(Meeting(0, (own, "127.0.0.1:1"), bytes(32), over.is_set), 4.5, meet_seconds=6)
    finally:
        ends.set()
    assert time.monotonic() - began < 3
    stranger.join(20)
