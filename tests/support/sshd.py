"""Real sshd on addresses of the loopback, port 22, since Ray knows no other: hosts of one's own for tests."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def servers(folder: Path, addresses: list[str]) -> Iterator[Path]:
    """Start an sshd on each address; gives the private key that gets in as the user of the test.

    Args:
        folder: for keys and logs.
        addresses: such as 127.77.0.1.
    """
    tool = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if tool is None or shutil.which("ssh") is None:
        pytest.skip("openssh-server and openssh-client are not installed")
    if os.geteuid() != 0:
        pytest.skip("only root may listen on port 22")
    for address in addresses:
        with socket.socket() as probe:
            try:
                # As sshd does: connections of an earlier test linger.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((address, 22))
            except OSError as problem:
                pytest.skip(f"{address}:22 cannot be listened on: {problem}")
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd's own empty folder, which its package makes at start
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    running: list[subprocess.Popen[bytes]] = []
    try:
        for address in addresses:
            settings = {
                "ListenAddress": f"{address}:22",
                "HostKey": folder / "host",
                "AuthorizedKeysFile": folder / "authorized_keys",
                "PidFile": "none",
                "StrictModes": "no",
                "UsePAM": "no",
                "UseDNS": "no",
                "PasswordAuthentication": "no",
                "PermitRootLogin": "prohibit-password",
            }
            options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
            log = open(folder / f"{address}.log", "wb")  # noqa: SIM115
            running.append(subprocess.Popen([tool, "-D", "-e", "-f", "/dev/null", *options], stderr=log))
            log.close()
            _wait(address, running[-1], folder / f"{address}.log")
        yield folder / "user"
    finally:
        for server in running:
            server.terminate()
        for server in running:
            server.wait(30)


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection((address, 22), timeout=1).close()
            return
        except OSError:
            assert server.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "sshd did not come up"
            time.sleep(0.05)


def user() -> str:
    return getpass.getuser()
