"""The hosts on which the other tests of clusters stand."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from raytf.testing.processes import wait_until
from tests.cluster.hosts import ROOT, Hosts

pytestmark = pytest.mark.usefixtures("hosts_are_possible")

#: Prints what there is of it, and waits to be killed.
OWNER = """
import sys, time
from tests.cluster.hosts import Hosts
with Hosts(1) as hosts:
    print(hosts.bridge, hosts.folder, hosts[0].pid, flush=True)
    time.sleep(600)
"""
#: Takes its leave when it is asked to go.
PROGRAM = """
trap 'echo bye > said; exit' TERM
echo up > said
while :; do sleep 0.1; done
"""


def test_each_host_has_a_name_files_processes_and_an_address_of_its_own():
    with Hosts(2) as hosts:
        first, second = hosts
        first.run("echo secret > ~/file; echo secret > /tmp/file; nohup sleep 600 > /dev/null 2>&1 &")
        for host in hosts:
            assert host.run("hostname; hostname -I; whoami; pwd").stdout.split() == [
                host.name,
                host.address,
                "ubuntu",
                "/home/ubuntu",
            ]
        assert second.run("ls ~ /tmp/file; pgrep -x sleep", check=False).stdout.split() == ["/home/ubuntu:"]
        assert first.run("pgrep -cx sleep").stdout.split() == ["1"]
        assert [process.name() for process in first.processes()] == ["sleep"]
        assert first.run(f"touch {ROOT}/file", check=False).returncode != 0, "a host can change the checkout"
        first.run(f"echo common > {hosts.shared}/file")
        assert second.run(f"cat {hosts.shared}/file").stdout == "common\n"
        assert second.run(f"{sys.executable} -c 'import numpy; print(42)'").stdout == "42\n"
    assert not hosts.folder.exists()
    assert not Path("/sys/class/net", hosts.bridge).exists()


def test_hosts_reach_each_other_and_are_reached_by_ssh():
    with Hosts(2) as hosts:
        hop = f"ssh -o StrictHostKeyChecking=no {hosts[1].address} hostname"
        run = subprocess.run([*hosts.ssh(hosts[0]), hop], capture_output=True, text=True, timeout=60)
        assert run.stdout == "host-2\n", run.stderr


def test_a_killed_host_closes_its_connections_and_a_cut_off_one_is_silent():
    with Hosts(2) as hosts:
        killed, silent = hosts
        connections = []
        for host in hosts:
            connection = socket.create_connection((host.address, 22), timeout=30)
            assert connection.recv(1000).startswith(b"SSH-2.0")
            connections.append(connection)
        silent.disconnect()
        killed.kill()
        assert connections[0].recv(1000) == b""
        assert not killed.is_alive
        connections[1].settimeout(1)
        with pytest.raises(TimeoutError):
            connections[1].recv(1000)
        assert silent.is_alive
        silent.reconnect()
        wait_until(lambda: subprocess.run([*hosts.ssh(silent), "true"]).returncode == 0, "it is back", 60)

        late = hosts.add("late", address=killed.address)
        assert late.run("hostname -I; nohup sleep 600 > /dev/null 2>&1 &").stdout.split() == [killed.address]
        assert killed.processes() == []


def test_a_host_that_is_shut_down_lets_its_programs_end():
    with Hosts(1) as hosts:
        said = hosts.shared / "said"
        (hosts.shared / "program").write_text(PROGRAM)
        hosts[0].run(f"cd {hosts.shared}; nohup bash program > /dev/null 2>&1 &")
        wait_until(lambda: said.exists() and said.read_text() == "up\n", "the program runs", 60)
        hosts[0].shut_down()
        assert said.read_text() == "bye\n"
        assert not hosts[0].is_alive


def test_what_a_killed_owner_leaves_is_ended_or_removed_by_the_next_one():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        bridge, folder, pid = owner.stdout.readline().split()
        host = psutil.Process(int(pid))
        assert host.is_running()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not host.is_running(), "the host is gone", 60)
    wait_until(lambda: not Path(folder).exists(), "its folder is gone", 60)
    with Hosts():
        pass
    assert not Path("/sys/class/net", bridge).exists()


def test_two_owners_have_networks_of_their_own_and_a_taken_one_is_refused():
    with Hosts() as one, Hosts() as other:
        assert not one.subnet.overlaps(other.subnet)
        with pytest.raises(RuntimeError, match="overlaps"), Hosts(subnet=str(one.subnet)):
            pass
    with Hosts(1, subnet="10.231.0.0/16") as given:
        assert given[0].run("hostname -I").stdout.startswith("10.231.")
