"""The arbiter over real connections: workers that join, leave, die, are stopped, and strangers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from benchmarks.step.namespaces import namespaces, reason_not_possible
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink
from raytf.distributed.membership.member import DismissedError, LeftBehindError, RunOverError, UnreachableError
from raytf.distributed.membership.rendezvous import MEET_SECONDS, connect_all
from raytf.driver.arbiter import ArbiterServer
from raytf.errors import WorkerLostError
from raytf.testing.processes import wait_until


@contextmanager
def serving(host: str = "127.0.0.1", **settings: float) -> Iterator[ArbiterAddress]:
    server = ArbiterServer(host, **settings)
    try:
        yield server.address
    finally:
        server.close()


def aside(work: Any, *args: Any) -> list[Any]:
    """What a call in a thread returns or raises, once it has."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work(*args))
        except Exception as error:
            found.append(error)

    threading.Thread(target=run, daemon=True).start()
    return found


def one(found: list[Any], seconds: float = 20) -> Any:
    deadline = time.monotonic() + seconds
    while not found and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found, "nothing came"
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def pair(arbiter: ArbiterAddress) -> tuple[ArbiterLink, ArbiterLink]:
    """Two workers of a first generation."""
    links = ArbiterLink.connect(arbiter, "a"), ArbiterLink.connect(arbiter, "b")
    answers = [aside(link.join, f"h:{i}", 2) for i, link in enumerate(links)]
    places = [one(answer)[1] for answer in answers]
    assert sorted(place.rank for place in places) == [0, 1]
    assert places[0].key == places[1].key
    assert places[0].addresses == places[1].addresses
    return links


def test_survivors_and_a_newcomer_are_brought_together():
    with serving() as arbiter:
        first, second = pair(arbiter)
        second.close()
        generation, place = one(aside(first.leave, "h:9", 12))
        assert (generation.number, generation.members, generation.steps) == (2, ("a",), (12,))
        third = ArbiterLink.connect(arbiter, "c")
        joining = aside(third.join, "h:7", 1)
        deadline = time.monotonic() + 20
        while not first.member.is_pause_wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        assert first.member.is_pause_wanted
        generation, other = one(aside(first.leave, "h:8", 15))
        assert (generation.number, generation.members, generation.steps) == (3, ("a", "c"), (15, -1))
        assert (other.rank, one(joining)[1].rank) == (0, 1)
        assert other.key == one(joining)[1].key != place.key
        assert not first.member.is_pause_wanted


def test_who_is_left_behind_is_told_once_and_who_leaves_is_not():
    told: list[str] = []
    server = ArbiterServer("127.0.0.1")
    leaves = ArbiterLink.connect(server.address, "a", left_behind=lambda: told.append("a"))
    ArbiterLink.connect(server.address, "b", left_behind=lambda: told.append("b"))
    leaves.close()
    wait_until(lambda: leaves.member.is_lost, "the connection has ended", 20)
    server.close()
    wait_until(lambda: bool(told), "b is told", 20)
    assert told == ["b"]


def test_strangers_are_not_workers_and_another_arbiter_is_not_the_run_s():
    with serving() as arbiter:
        with socket.create_connection(arbiter.address.split(":")) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            stranger.settimeout(10)
            assert stranger.makefile("rb").read().startswith(b'{"challenge"')
        with pytest.raises(WorkerLostError, match="does not answer"):
            ArbiterLink.connect(ArbiterAddress(arbiter.address, bytes(32)), "a")
        pair(arbiter)


def test_garbage_harms_nobody(capfd: pytest.CaptureFixture[str]):
    with serving() as arbiter:
        for line in (b"[]\n", b'{"name": 1, "proof": "\xc3\xa9", "challenge": null}\n', b"[" * 5000, b"\n", b""):
            with socket.create_connection(arbiter.address.split(":")) as stranger:
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
                stranger.settimeout(20)
                assert stranger.makefile("rb").read().startswith(b'{"challenge"')
        pair(arbiter)
    assert capfd.readouterr().err == ""


def test_when_the_driver_is_gone_its_workers_end():
    server = ArbiterServer("127.0.0.1")
    first, _ = pair(server.address)
    server.close()
    for _ in range(2):
        with pytest.raises(WorkerLostError, match="connection with the driver's arbiter is lost"):
            one(aside(first.leave, "h:9", 3))
    with pytest.raises(WorkerLostError, match="does not answer"):
        ArbiterLink.connect(server.address, "c")


def test_members_that_do_not_leave_are_not_waited_for_for_ever():
    with serving(leave_seconds=2) as arbiter:
        first, second = pair(arbiter)
        generation, _ = one(aside(first.leave, "h:9", 3))
        assert generation.members == ("a",)
        with pytest.raises(WorkerLostError, match="b did not leave its group in time"):
            one(aside(second.leave, "h:8", 3))


needs_namespaces = pytest.mark.skipif(bool(reason_not_possible()), reason=reason_not_possible() or "they are possible")

#: A worker that joins and then does nothing.
WORKER = """
import sys, time
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink
link = ArbiterLink.connect(ArbiterAddress(sys.argv[1], bytes.fromhex(sys.argv[2])), "b")
link.join("h:2", int(sys.argv[3]))
print("member", flush=True)
time.sleep(600)
"""


@contextmanager
def member(
    arbiter: ArbiterAddress, wanted: int, within: Sequence[str] = (), code: str = WORKER
) -> Iterator[subprocess.Popen[str]]:
    """A process that becomes a member."""
    command = [*within, sys.executable, "-c", code, arbiter.address, arbiter.key.hex(), str(wanted)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "member\n"
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 2.0), (signal.SIGSTOP, 8.0)])
def test_a_process_that_is_killed_or_stopped_is_no_member_any_more(number: signal.Signals, seconds: float):
    with serving(silent_seconds=3) as arbiter:
        first = ArbiterLink.connect(arbiter, "a")
        joined = aside(first.join, "h:1", 2)
        with member(arbiter, 2) as process:
            one(joined)
            began = time.monotonic()
            os.kill(process.pid, number)
            generation, _ = one(aside(first.leave, "h:3", 4))
            assert generation.members == ("a",)
            took = time.monotonic() - began
            print(f"without it after {took:.2f} s")
            assert took < seconds


def test_a_child_of_a_killed_process_keeps_no_connection_open():
    forking = "import os\nif not os.fork(): time.sleep(30)\n"
    with serving(silent_seconds=60) as arbiter:
        first = ArbiterLink.connect(arbiter, "a")
        joined = aside(first.join, "h:1", 2)
        with member(arbiter, 2, code=WORKER.replace("print", f"{forking}print")) as process:
            one(joined)
            process.kill()
            generation, _ = one(aside(first.leave, "h:3", 4))
            assert generation.members == ("a",)


def test_a_single_stopped_worker_stays_a_member_longer_than_one_of_several():
    with serving(silent_seconds=1, all_silent_seconds=4) as arbiter, member(arbiter, 1) as process:
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGCONT)
        newcomer = ArbiterLink.connect(arbiter, "a")
        joined = aside(newcomer.join, "h:1", 1)
        time.sleep(2)  # it is not let go later either
        assert not joined
        os.kill(process.pid, signal.SIGSTOP)
        generation, _ = one(joined)
        assert generation.members == ("a",)


@needs_namespaces
def test_one_that_is_alone_is_not_kept_where_its_host_is_cut_off():
    with namespaces(1) as ((host,), here), serving(here, silent_seconds=3, all_silent_seconds=600) as arbiter:
        within = ("ip", "netns", "exec", host.name)
        with member(arbiter, 1, within) as process:
            os.kill(process.pid, signal.SIGSTOP)
            newcomer = ArbiterLink.connect(arbiter, "a")
            joined = aside(newcomer.join, f"{here}:1", 1)
            time.sleep(6)
            assert not joined  # its kernel answers
            subprocess.run([*within, "ip", "link", "set", "eth0", "down"], check=True)
            generation, _ = one(joined)
            assert generation.members == ("a",)


def test_a_worker_that_leaves_hands_its_state_over_before_it_is_asked_to():
    with serving() as arbiter:
        first, second = ArbiterLink.connect(arbiter, "a"), ArbiterLink.connect(arbiter, "b")
        one(aside(first.join, "h:1", 1))
        controller = ArbiterLink.connect(arbiter, "the controller")
        controller.dismiss(["a"], after=["b"])
        joining = aside(second.join, "h:2", 1)
        until(lambda: first.member.is_pause_wanted)
        generation, _ = one(aside(first.leave, "h:3", 4))
        assert generation.members == ("a", "b")
        one(joining)
        until(lambda: first.member.is_pause_wanted and second.member.is_pause_wanted)
        leaving = aside(first.leave, "h:4", 5)
        generation, _ = one(aside(second.leave, "h:5", 5))
        assert generation.members == ("b",)
        with pytest.raises(DismissedError):
            one(leaving)


def test_who_comes_when_the_run_is_over_gets_what_it_has_come_to():
    result = {"weights_sha256": "0" * 64, "history": [{"loss": 0.5}] * 2000}
    with serving() as arbiter:
        first, second = pair(arbiter)
        early = ArbiterLink.connect(arbiter, "c")
        assert (early.found_running, early.found_over) == (True, None)
        waiting = aside(early.join, "h:3", 3)
        until(lambda: first.member.is_pause_wanted)
        first.tell_over(result)
        with pytest.raises(RunOverError) as over:
            one(waiting)
        assert over.value.result == result
        first.close()
        second.close()
        late = ArbiterLink.connect(arbiter, "d")
        assert late.found_over == result
        with pytest.raises(RunOverError):
            late.join("h:4", 1)


def test_a_group_that_is_to_be_smaller_begins_with_those_that_are_there():
    with serving() as arbiter:
        link = ArbiterLink.connect(arbiter, "a")
        assert not link.found_running
        joining = aside(link.join, "h:1", 2)
        time.sleep(0.2)
        assert not joining
        link.want(1)
        generation, place = one(joining)
        assert (generation.members, place.world_size) == (("a",), 1)


def test_members_know_that_to_wait_for_one_is_in_vain():
    with serving() as arbiter:
        first, second = pair(arbiter)
        second.close()
        _, place = one(aside(first.leave, "h:9", 12))
        assert not place.is_over()
        third = ArbiterLink.connect(arbiter, "c")
        joining = aside(third.join, "h:7", 1)
        until(lambda: first.member.is_pause_wanted)
        _, place = one(aside(first.leave, "h:8", 15))
        assert not place.is_over()
        one(joining)
        third.close()
        until(place.is_over)


def test_somebody_is_told_again_and_again_that_a_worker_waits():
    waits: list[int] = []
    with serving() as arbiter:
        link = ArbiterLink.connect(arbiter, "a", lambda: waits.append(1))
        joining = aside(link.join, "h:1", 2)
        until(lambda: len(waits) >= 2)
        link.close()
        with pytest.raises(LeftBehindError):
            one(joining)


def until(condition: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def test_members_that_meet_hear_at_once_that_one_has_left():
    with serving() as arbiter:
        links = [ArbiterLink.connect(arbiter, name) for name in "abc"]
        joining = [aside(link.join, rendezvous.listen("127.0.0.1"), 3, order) for order, link in enumerate(links)]
        places = [one(each)[1] for each in joining]
        waiting = [aside(connect_all, place, 4.5) for place in places[:2]]
        places[2].close()
        began = time.monotonic()
        left = aside(links[2].leave, "h:9", -1)
        for each in waiting:
            with pytest.raises(OSError, match="another rank is lost"):
                one(each)
        assert time.monotonic() - began < MEET_SECONDS / 4
        assert not any(place.is_lost() for place in places), "nobody is lost, so no sum is given up"
        again = [aside(link.leave, f"h:{i}", -1) for i, link in enumerate(links[:2])]
        assert {one(each)[0].number for each in (*again, left)} == {2}


def test_a_newcomer_that_reaches_no_member_is_left_out_after_one_meeting():
    with serving() as arbiter:
        links = pair(arbiter)
        third = ArbiterLink.connect(arbiter, "n2-1")
        joined = aside(third.join, "h:3", 1)
        wait_until(lambda: all(link.member.is_pause_wanted for link in links), "a pause", 20)
        for answer in [aside(link.leave, f"h:{i}", 7) for i, link in enumerate(links)]:
            assert one(answer)[0].members[-1] == "n2-1"
        generation, _ = one(joined)
        for link, unreached in zip((*links, third), ([2], [2], [0]), strict=True):
            link.member.not_met(generation, unreached)
        left = aside(third.leave, "h:4", -1)
        again = [aside(link.leave, f"h:{i}", 7) for i, link in enumerate(links)]
        assert all(set(one(answer)[0].members) == {"a", "b"} for answer in again)
        with pytest.raises(UnreachableError, match="cannot reach each other") as caught:
            one(left)
        assert caught.value.node == "n2"
        fourth = ArbiterLink.connect(arbiter, "n2-2")
        with pytest.raises(UnreachableError):  # nobody waits for its node again
            one(aside(fourth.join, "h:5", 1))
        assert not links[0].member.is_pause_wanted


def test_members_that_hang_up_when_the_run_is_over_are_not_lost():
    with serving() as arbiter:
        links = ArbiterLink.connect(arbiter, "a"), ArbiterLink.connect(arbiter, "b")
        answers = [aside(link.join, f"h:{i}", 2) for i, link in enumerate(links)]
        place = one(answers[1])[1]
        links[0].tell_over({"steps": 3})
        links[0].close()
        with pytest.raises(RunOverError):  # the arbiter has heard of the end, and of the hang-up after it
            one(aside(ArbiterLink.connect(arbiter, "c").join, "h:9", 1))
        assert not place.is_lost()
        assert not place.is_over()
