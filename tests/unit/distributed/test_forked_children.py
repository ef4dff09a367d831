"""A connection ends with the process that had it, though a child that it has forked lives on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

#: Connects with two servers, forks a child, tells its process id, and is killed.
PARENT = """
import os, signal, socket, sys, time
from raytf.distributed import sockets
known, other = (socket.socket(socket.AF_UNIX) for _ in range(2))
known.connect(sys.argv[1])
other.connect(sys.argv[2])
ours, theirs = socket.socketpair()
sockets.close_connections_with({sys.argv[1]})
child = os.fork()
if child == 0:
    theirs.sendall(b"x")  # what the user's own processes share still works
    time.sleep(300)
ours.recv(1)
known.sendall(b"parent")  # and so does the parent's connection
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_is_told_of_a_death_though_a_forked_child_lives_on(tmp_path: Path):
    servers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
    for number, server in enumerate(servers):
        server.bind(str(tmp_path / str(number)))
        server.listen()
        server.settimeout(60)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "0"), str(tmp_path / "1")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        known, other = (server.accept()[0] for server in servers)
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            assert parent.wait(60) == -signal.SIGKILL
            known.settimeout(60)
            assert known.recv(100) == b"parent"
            assert known.recv(100) == b""
            other.setblocking(False)
            with pytest.raises(BlockingIOError):  # nobody has closed this one: the child has it
                other.recv(100)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            for each in (known, other, *servers):
                each.close()
