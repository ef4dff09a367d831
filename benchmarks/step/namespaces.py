"""Hosts for a benchmark: network namespaces of this machine, joined by a bridge, whose processes share no memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

#: Numbers of networks that this process has made: what the kernel deletes is not gone at once.
_numbers = itertools.count()
#: Meant for test networks (RFC 2544).
_SUBNET = "198.19.255"


@dataclass(frozen=True)
class Namespace:
    """A host: its name, for `ip netns exec`, and its address."""

    name: str
    address: str


def reason_not_possible() -> str:
    """Why there can be none here; empty where they are possible."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need ip (Debian's package iproute2)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"this machine forbids network namespaces ({tried.stderr.strip()})" if tried.returncode else ""


@contextlib.contextmanager
def namespaces(count: int) -> Iterator[tuple[list[Namespace], str]]:
    """So many hosts, and this machine's address in their network; nothing stays.

    Raises:
        subprocess.CalledProcessError: the machine forbids them.
    """
    mark = f"rb{os.getpid() % 100_000}n{next(_numbers)}"
    made = [Namespace(f"{mark}-{i}", f"{_SUBNET}.{i + 2}") for i in range(count)]
    with contextlib.ExitStack() as stack:
        _ip("link", "add", mark, "type", "bridge")
        stack.callback(_ip, "link", "delete", mark)
        _ip("address", "add", f"{_SUBNET}.1/24", "dev", mark)
        _ip("link", "set", mark, "up")
        for i, each in enumerate(made):
            _ip("netns", "add", each.name)
            stack.callback(_ip, "netns", "delete", each.name)
            _ip("link", "add", f"{mark}v{i}", "type", "veth", "peer", "name", "eth0", "netns", each.name)
            _ip("link", "set", f"{mark}v{i}", "master", mark, "up")
            inside = ("netns", "exec", each.name, "ip")
            _ip(*inside, "address", "add", f"{each.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "link", "set", "lo", "up")
        yield made, f"{_SUBNET}.1"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
