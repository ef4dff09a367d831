"""Networks of this machine for hosts of tests: one for each owner at a time, taken back when the owner has died."""

from __future__ import annotations

import fcntl
import ipaddress
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import IO

#: Administrators' programs are not on everybody's PATH.
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
_STATE = Path("/tmp/raytf-hosts")
#: Meant for test networks (RFC 2544): no other network is there.
_POOL = ipaddress.IPv4Network("198.18.0.0/15")
_PATIENCE = 60.0


@dataclass(frozen=True)
class Network:
    """A bridge with an address of this machine, which forwards nothing to elsewhere.

    Attributes:
        subnet: its addresses.
        bridge: the network device.
        folder: for what belongs to it.
    """

    subnet: ipaddress.IPv4Network
    bridge: str
    folder: Path
    _lock: IO[str]

    @property
    def gateway(self) -> str:
        """This machine's address in it."""
        return str(self.subnet[1])

    @classmethod
    def claim(cls, wanted: str | None = None) -> Network:
        """Take a network that no living process has. What dead ones left is removed.

        Args:
            wanted: subnet, by default a free one.

        Raises:
            RuntimeError: there is none, or this machine has it already.
        """
        _STATE.mkdir(exist_ok=True)
        found = None
        for number, subnet in enumerate(_POOL.subnets(new_prefix=24)):
            # The kernel unlocks it when its owner ends, however that comes.
            lock = (_STATE / f"{number}.lock").open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                lock.close()
                continue
            network = cls(ipaddress.IPv4Network(wanted or subnet), f"rth{number}", _STATE / str(number), lock)
            network._clear()
            if found is None and (wanted or not _is_taken(subnet)):
                found = network
                continue
            lock.close()
            if not (_STATE / f"{number + 1}.lock").exists():
                break
        if found is None:
            raise RuntimeError(f"no free network in {_POOL}")
        if _is_taken(found.subnet):
            found.remove()
            raise RuntimeError(f"subnet {found.subnet} overlaps with a network that this machine has already")
        return found

    def set_up(self) -> None:
        """Make the bridge."""
        ip("link", "add", self.bridge, "type", "bridge")
        ip("address", "add", f"{self.gateway}/{self.subnet.prefixlen}", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        Path(f"/proc/sys/net/ipv4/conf/{self.bridge}/forwarding").write_text("0")

    def remove(self) -> None:
        """Remove the bridge, what is connected to it, and the folder; the network is anybody's again."""
        self._clear()
        self._lock.close()

    def _clear(self) -> None:
        links = Path("/sys/class/net", self.bridge, "brif")
        if links.exists():
            for link in links.iterdir():
                call("ip", "link", "delete", link.name, check=False)
            call("ip", "link", "delete", self.bridge, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def program(name: str) -> str:
    """Path of a program.

    Raises:
        RuntimeError: there is none of that name.
    """
    path = shutil.which(name, path=PATH)
    if path is None:
        raise RuntimeError(f"there is no program {name}")
    return path


def call(name: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for its end.

    Raises:
        RuntimeError: it failed, and `check` was asked for; with what it said.
    """
    command = [program(name), *arguments]
    env = {**os.environ, "PATH": PATH}
    run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, timeout=_PATIENCE)
    if check and run.returncode:
        raise RuntimeError(f"{' '.join([name, *arguments])}: {run.stderr.strip() or run.returncode}")
    return run


def ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `ip`, see `call`."""
    return call("ip", *arguments)


def _is_taken(subnet: ipaddress.IPv4Network) -> bool:
    routes = json.loads(ip("-json", "-4", "route", "show", "table", "all").stdout)
    known = [route["dst"] for route in routes if route["dst"] != "default"]
    return any(subnet.overlaps(ipaddress.IPv4Network(route)) for route in known)
