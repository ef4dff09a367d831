"""Strangers at a real arbiter, and whoever can change what workers and the arbiter send each other."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from benchmarks.step.namespaces import namespaces
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink
from raytf.distributed.membership.member import LeftBehindError, RunOverError
from raytf.driver.arbiter import ArbiterServer
from raytf.testing.processes import wait_until
from tests.unit.driver.test_arbiter import aside, needs_namespaces, one, pair, serving


def called(stack: ExitStack, arbiter: ArbiterAddress) -> socket.socket:
    return stack.enter_context(socket.create_connection(rendezvous.parsed(arbiter.address), 10))


def has_hung_up(peer: socket.socket) -> bool:
    peer.settimeout(5)
    with suppress(ConnectionResetError):
        while peer.recv(1 << 16):
            pass
    return True


def test_little_is_read_of_a_stranger():
    with serving() as arbiter, ExitStack() as stack:
        for _ in range(4):
            stranger = called(stack, arbiter)
            with suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(bytes(1 << 23))
            assert has_hung_up(stranger)
        pair(arbiter)


def test_the_oldest_strangers_are_sent_away_and_workers_are_let_in(caplog: pytest.LogCaptureFixture):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = 400 + 2 * len(os.listdir("/proc/self/fd"))  # a quarter of it for strangers, of whom both ends are here
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with serving() as arbiter, ExitStack() as stack:
            strangers = [called(stack, arbiter) for _ in range(limit // 4 + 30)]
            assert all(has_hung_up(stranger) for stranger in strangers[:30])
            first, _ = pair(arbiter)
            assert strangers[-1].recv(100).startswith(b'{"challenge"')
            assert not first.member.is_lost
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert caplog.records == []


#: An arbiter that can open no further file until it is told to close some.
FULL = """
import os, resource, socket, sys
from raytf.distributed.membership.rendezvous import parsed
from raytf.driver.arbiter import ArbiterServer
server, files = ArbiterServer("127.0.0.1"), []
with socket.create_connection(parsed(server.address.address)) as first:
    first.recv(100)  # it answers, and has the files that it needs itself
    first.shutdown(socket.SHUT_WR)
    while first.recv(100):  # until it has closed its side, too
        pass
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    print(server.address.address, flush=True)
sys.stdin.readline()
for file in files:
    os.close(file)
sys.stdin.readline()
"""


def test_an_arbiter_without_files_accepts_connections_once_it_has_some():
    with subprocess.Popen(
        [sys.executable, "-c", FULL],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = rendezvous.parsed(process.stdout.readline().strip())
        with socket.create_connection(address, 0.3) as worker:
            with pytest.raises(TimeoutError):
                worker.recv(100)
            process.stdin.write("close them\n")
            process.stdin.flush()
            worker.settimeout(20)
            assert worker.recv(100).startswith(b'{"challenge"')
        assert process.communicate("end\n") == ("", "")


def test_an_arbiter_that_ends_with_a_stranger_connected_reports_no_error(caplog: pytest.LogCaptureFixture):
    server = ArbiterServer("127.0.0.1")
    with ExitStack() as stack:
        stranger = called(stack, server.address)
        assert stranger.recv(100).startswith(b'{"challenge"')
        server.close()
        assert has_hung_up(stranger)
    assert caplog.records == []


def test_a_worker_that_talks_nonsense_is_lost_and_harms_nobody():
    with serving() as arbiter:
        link = ArbiterLink.connect(arbiter, "a")
        link.want("two")  # type: ignore[arg-type]
        with pytest.raises(LeftBehindError, match="does not understand this worker: wanted: expected a whole number"):
            one(aside(link.join, "h:1", 1))
        pair(arbiter)


@contextmanager
def relayed(
    arbiter: ArbiterAddress, change: Callable[[bytes], bytes], back: Callable[[bytes], bytes] = bytes
) -> Iterator[ArbiterAddress]:
    """An address whose bytes go to the arbiter and back, changed."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:

        def forward(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(change(data))
                target.shutdown(socket.SHUT_WR)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    worker, _ = server.accept()
                    onward = socket.create_connection(rendezvous.parsed(arbiter.address))
                    stack.enter_context(worker)
                    stack.enter_context(onward)
                    for ends in ((worker, onward, change), (onward, worker, back)):
                        threading.Thread(target=forward, args=ends, daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield ArbiterAddress(rendezvous.joined(*server.getsockname()), arbiter.key)
        server.shutdown(socket.SHUT_RDWR)


def test_heartbeats_do_not_break_long_lines():
    result = {"history": [0.123456789] * 450_000}

    def slowly(data: bytes) -> bytes:
        time.sleep(0.01 * (len(data) > 1000))
        return data

    with serving() as arbiter, relayed(arbiter, slowly) as far:
        joining = aside(ArbiterLink.connect(arbiter, "a").join, "h:1", 2)
        ArbiterLink.connect(far, "b").tell_over(result)
        with pytest.raises(RunOverError) as over:
            one(joining)
        assert over.value.result == result


@pytest.mark.parametrize(
    "change",
    [lambda data: data.replace(b'"wanted":1', b'"wanted":2'), lambda data: data * 2 if b'"wanted"' in data else data],
    ids=["changed", "repeated"],
)
def test_what_a_worker_says_cannot_be_changed_or_repeated(change: Callable[[bytes], bytes]):
    with serving() as arbiter, relayed(arbiter, change) as far:
        link = ArbiterLink.connect(far, "a")
        link.want(1)
        wait_until(lambda: link.member.is_lost, "the arbiter hangs up", 20)
        with pytest.raises(LeftBehindError, match="changed, repeated or left out on its way"):
            one(aside(link.join, "h:1", 1))


def test_no_key_travels_and_all_members_derive_the_same_one():
    seen: list[bytes] = []

    def note(data: bytes) -> bytes:
        seen.append(data)
        return data

    with serving() as arbiter:
        places = []
        with ExitStack() as stack:
            for name in "ab":
                far = stack.enter_context(relayed(arbiter, note, note))
                link = ArbiterLink.connect(far, name)
                places.append(aside(link.join, "h:1", 2))
            keys = {one(place)[1].key for place in places}
        assert len(keys) == 1
        assert seen
        for key in (arbiter.key, *keys):
            assert len(key) == 32
            assert key.hex().encode() not in b"".join(seen)


#: A worker that says when it has lost the arbiter.
CUT_OFF = """
import sys, threading
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink
lost = threading.Event()
link = ArbiterLink.connect(ArbiterAddress(sys.argv[1], bytes.fromhex(sys.argv[2])), "b", left_behind=lost.set)
print("connected", flush=True)
lost.wait()
print("lost", flush=True)
"""


@needs_namespaces
def test_a_worker_whose_host_is_cut_off_notices_it():
    with namespaces(1) as ((host,), here), serving(here) as arbiter:
        within = ["ip", "netns", "exec", host.name]
        command = [*within, sys.executable, "-c", CUT_OFF, arbiter.address, arbiter.key.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            subprocess.run([*within, "ip", "link", "set", "eth0", "down"], check=True)
            began = time.monotonic()
            assert process.stdout.readline() == "lost\n"
            assert time.monotonic() - began < 8
