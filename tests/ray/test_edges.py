"""Deaths that no socket shows, and nodes that others do not reach: the others go on."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.step.namespaces import namespaces, reason_not_possible
from raytf.driver.arbiter import ArbiterServer
from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from tests.ray.conftest import PATIENCE
from tests.stress.cut import lose_packets, within
from tests.stress.repair import workers_of

FORKING = Path(__file__).parent / "jobs" / "forking.py"
#: Seconds after a death in which the others train again, on a loaded machine.
SOON = 30.0


def test_a_dead_worker_whose_child_holds_its_sockets_is_not_waited_for(tmp_path: Path):
    (children := tmp_path / "children").mkdir()
    (pause := tmp_path / "pause").touch()
    status = tmp_path / "status.json"
    command = [sys.executable, FORKING, "--children", children, "--pause", pause, "--workers", "2:3"]
    command += ["--storage", tmp_path, "--run", "a", "--status-file", status, "--epochs", 40]
    command += ["--global-batch-size", 128, "--logical-shards", 6]
    job = Job([*map(str, command)], tmp_path / "log", environment(), status_file=status)
    try:
        job.until(lambda: len(workers_of(job)) == 3 and (job.step or 0) > 5, PATIENCE)
        (children / "fork").touch()
        job.until(lambda: len(list(children.glob("*-*"))) == 3, PATIENCE)
        at = job.step or 0
        job.until(lambda: (job.step or 0) > at + 5, PATIENCE)
        victim = workers_of(job)[0]
        child = next(int(file.name.partition("-")[0]) for file in children.glob(f"*-{victim.pid}"))
        victim.kill()
        began = time.monotonic()
        job.until(lambda: "the others continue" in job.output, PATIENCE)
        os.kill(child, 0)  # it lives, and has the sockets of the dead one
        print(f"the others went on {time.monotonic() - began:.1f} s after the death")
        assert time.monotonic() - began < SOON
        pause.unlink()
        job.wait(PATIENCE * 2)
    finally:
        job.close()
        for file in children.glob("*-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name.partition("-")[0]), signal.SIGKILL)
    (fault,) = [event for event in ledger.read(Storage(str(tmp_path / "a"))) if event["kind"] == "fault"]
    assert fault["survived"], fault
    assert fault["cause"] == "worker_died", fault  # not a hang, of which the silence of half a minute would be a sign


#: A rank without TensorFlow and Ray: it meets the others, and leaves when somebody wants to join or a meeting fails.
RANK = """
import sys, time
from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.arbiter_link import ArbiterAddress, ArbiterLink
from raytf.distributed.membership.rendezvous import UnreachedError, connect_all, end
arbiter, key, name, host, wanted, order = sys.argv[1:]
link, step = ArbiterLink.connect(ArbiterAddress(arbiter, bytes.fromhex(key)), name), -1
while True:
    address = rendezvous.listen(host)
    try:
        has_joined = link.member.has_joined
        generation, place = link.leave(address, step) if has_joined else link.join(address, int(wanted), int(order))
    except Exception as error:
        print(type(error).__name__, flush=True)
        break
    began = time.monotonic()
    try:
        found = connect_all(place, 4.5)
    except OSError as error:
        link.member.not_met(generation, getattr(error, "ranks", ()))
        print(f"not met after {time.monotonic() - began:.1f}", flush=True)
        continue
    link.member.met()
    step = max(*generation.steps, 0)
    print("met", *generation.members, flush=True)
    while not (link.member.is_pause_wanted or place.is_over()):
        time.sleep(0.05)
    for peers in found.values():
        for peer in peers.values():
            end(peer)
"""


@pytest.mark.skipif(bool(reason_not_possible()), reason=reason_not_possible())
def test_a_newcomer_that_one_member_cannot_hear_is_left_out_after_a_meeting():
    with namespaces(3) as (hosts, own), contextlib.ExitStack() as stack:
        server = ArbiterServer(own)
        stack.callback(server.close)

        def rank(number: int, wanted: int) -> subprocess.Popen[str]:
            host = hosts[number]
            about = [
                server.address.address,
                server.address.key.hex(),
                f"n{number}-1",
                host.address,
                str(wanted),
                str(number),
            ]
            command = within(host, [sys.executable, "-c", RANK, *about])
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        members = [rank(number, 2) for number in (0, 1)]
        assert {line(member) for member in members} == {"met n0-1 n1-1"}
        lose_packets(hosts[1], hosts[2])
        newcomer = rank(2, 1)
        assert line(newcomer).startswith("not met")
        # The first rank has only answered, and hears of the others that the meeting has failed.
        assert [line(members[0]), line(members[1]).partition(" after ")[0]] == ["met n0-1 n1-1 n2-1", "not met"]
        assert {line(member) for member in members} == {"met n0-1 n1-1"}
        assert line(newcomer) == "UnreachableError"


def line(process: subprocess.Popen[str]) -> str:
    """The next line that a rank prints; a meeting has a time limit of its own."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
