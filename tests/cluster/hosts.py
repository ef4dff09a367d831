"""Hosts that are namespaces of this machine: each with its own address, disk, processes, SSH server and user.

    with Hosts(3) as hosts:
        hosts[0].run("hostname")
        hosts.add("late", address=str(hosts.subnet[77]))
        hosts[1].kill()
        hosts[2].disconnect()

A host sees this machine's files below its own (an overlay, whose upper layer is memory), but nothing of its /tmp, /run,
/dev/shm, home folders and processes. A bridge joins the hosts with each other and with this machine, and nothing else.
Needs root; `reason_not_possible` says what is missing. Nothing stays: not after an error, and not after SIGKILL.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from raytf.testing import processes
from tests.cluster.network import PATH, Network, call, ip, program

ROOT = Path(__file__).parents[2]
#: The user by whom hosts are reached, as on the images of clouds: no administrator.
USER = "ubuntu"
_PROGRAMS = {
    "curl": "curl",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "rsync": "rsync",
    "ssh": "openssh-client",
    "sshd": "openssh-server",
    "unshare": "util-linux",
}
_PATIENCE = 60.0
_INIT = Path(__file__).with_name("host_init.sh")
_NAMESPACES = ("--net", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--uts", "--ipc")
_TRIAL = """
mount -t tmpfs tmpfs /mnt && mkdir /mnt/upper /mnt/work /mnt/root &&
mount -t overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work overlay /mnt/root &&
mount -t proc proc /proc && ip link add name trial0 type bridge && ip link add name trial1 type veth peer name trial2
"""


@functools.cache
def reason_not_possible() -> str:
    """Why there can be no such hosts here, for a skip; empty where they are possible."""
    if os.geteuid() != 0:
        return "hosts as namespaces need root"
    for name, package in _PROGRAMS.items():
        if shutil.which(name, path=PATH) is None:
            return f"hosts as namespaces need {name} (Debian's package {package})"
    trial = call("unshare", *_NAMESPACES, "sh", "-c", _TRIAL, check=False)
    if trial.returncode:
        return f"this machine forbids namespaces, overlays or bridges: {trial.stderr.strip() or trial.returncode}"
    return ""


class Host:
    """A host; made by `Hosts`.

    Attributes:
        name: its host name.
        address: its IP address.
        user: who logs in there.
        home: the user's home folder there.
        pid: its first process, which is its SSH server, as this machine numbers it.
    """

    def __init__(self, name: str, address: str, user: str, link: str, log: Path):
        self.name, self.address, self.user = name, address, user
        self.home = f"/home/{user}"
        self._link, self._log = link, log
        self._process: subprocess.Popen[bytes] | None = None
        self.pid = 0
        self._namespace = ""
        self._namespace_file = -1

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """What its start and its SSH server have said."""
        return self._log.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All that run there but the first."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/pid") == self._namespace:
                    found.append(process)
        return found

    def command(self, script: str, user: str = "") -> list[str]:
        """A command of this machine that runs a script there, by bash, in the user's home folder.

        As over SSH without a terminal: ~/.bashrc is read and nothing else. The script outlives the command's SIGKILL.
        """
        user = user or self.user
        home = "/root" if user == "root" != self.user else self.home
        env = [f"HOME={home}", f"USER={user}", "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LANG=C.UTF-8"]
        enter = [program("nsenter"), f"--target={self.pid}", "--mount", "--net", "--pid", "--uts", "--ipc", "--root"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        start = f"cd; [ -f ~/.bashrc ] && . ~/.bashrc; {script}"
        return [*enter, "/usr/bin/env", "-i", *env, *become, "/bin/bash", "-c", start]

    def run(
        self, script: str, seconds: float = 120.0, check: bool = True, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a script there and wait for its end; it is killed after this many seconds.

        Raises:
            RuntimeError: it failed, and `check` was asked for; with what it printed.
        """
        command = self.command(script, user)
        at = command.index("/bin/bash")
        command[at:at] = ["timeout", "--kill-after=5", str(seconds)]
        run = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds + 30)
        if check and run.returncode:
            raise RuntimeError(f"{self.name}: {script!r}: exit code {run.returncode}\n{run.stdout}{run.stderr}")
        return run

    def disconnect(self) -> None:
        """Take its link down: from now on nothing comes from it, and nobody is told so."""
        ip("link", "set", self._link, "down")

    def reconnect(self) -> None:
        """Take its link up again."""
        ip("link", "set", self._link, "up")

    def kill(self) -> None:
        """SIGKILL to its first process and by that to all; its peers see connections that close."""
        if self._process is None:
            return
        if self.pid and self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._session.end()  # which is all that there is of a host whose start has failed
        self._process.wait(_PATIENCE)
        processes.wait_until(lambda: not self.processes(), f"all of host {self.name} is gone", _PATIENCE)
        call("ip", "link", "delete", self._link, check=False)  # the kernel may have been faster

    def shut_down(self, seconds: float = 30.0) -> None:
        """End it as its administrator would: SIGTERM to all, and after this many seconds SIGKILL."""
        if self.is_alive:
            self.run("kill -TERM -1", user="root", check=False)
            with contextlib.suppress(TimeoutError):
                processes.wait_until(lambda: not self.processes(), "all have ended", seconds)
        self.kill()

    def _start(self, env: dict[str, str], bridge: str, network: Any, gateway: str) -> None:
        own = {"HOST_NAME": self.name, "HOST_ADDRESS": self.address, "HOST_USER": self.user, "HOST_HOME": self.home}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [program("unshare"), *_NAMESPACES, "/bin/bash", str(_INIT)],
                env={"PATH": PATH, **own, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._session = processes.Session(self._process.pid)
        processes.watch(self._session)
        self._until(lambda: "host is ready" in self.log, "is set up")
        (first,) = psutil.Process(self._process.pid).children()
        self.pid, self._namespace = first.pid, os.readlink(f"/proc/{first.pid}/ns/pid")
        # As long as it is open, no other namespace gets the same number, also when this one has ended.
        self._namespace_file = os.open(f"/proc/{first.pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        ip("link", "set", self._link, "master", bridge, "up")
        for arguments in (
            ["link", "set", "lo", "up"],
            ["address", "add", f"{self.address}/{network.prefixlen}", "dev", "eth0"],
            ["link", "set", "eth0", "up"],
            # Ray finds a host's own address by its route to everywhere.
            ["route", "add", "default", "via", gateway],
        ):
            call("nsenter", f"--target={self.pid}", "--net", "ip", *arguments)
        self._until(lambda: _answers(self.address, 22), "answers on SSH's port")

    def _until(self, condition: Any, what: str) -> None:
        def holds() -> object:
            if not self.is_alive:
                raise RuntimeError(f"host {self.name} did not start:\n{self.log}")
            return condition()

        processes.wait_until(holds, f"host {self.name} {what}", _PATIENCE)

    def _close(self) -> None:
        self.kill()
        if self._process is not None:
            processes.forget(self._session)
        if self._namespace_file >= 0:
            os.close(self._namespace_file)
            self._namespace_file, self._namespace = -1, ""


class Hosts:
    """Hosts in a network of their own; a context manager, which leaves nothing behind.

    Args:
        count: hosts to start with.
        subnet: their network, such as `10.0.0.0/16`; by default a free one of 256 addresses. Its first address is this
            machine's, through which hosts reach it; nothing is forwarded to elsewhere.
        user: who logs in; `root` or one that hosts get.
        visible: folders besides this Python's and the checkout that hosts see at the same place, and cannot change.

    Attributes:
        folder: a folder of this machine, for whatever belongs to these hosts.
        shared: a folder that all see at the same place and may write in, as if over NFS.
        key: the private key by which the user of every host is reached; hosts have it too, as ~/.ssh/id_ed25519.
        subnet: the network.
        gateway: this machine's address in it.
        bridge: this machine's network device in it.

    Raises:
        RuntimeError, TimeoutError: on entry and by `add`, with what did not work.
    """

    def __init__(self, count: int = 0, subnet: str | None = None, user: str = USER, visible: Sequence[Path] = ()):
        self._count, self._wanted, self.user = count, subnet, user
        self._visible = _outermost([Path(sys.prefix), Path(sys.base_prefix), ROOT, *visible])
        self._hosts: list[Host] = []
        self._made = 0
        self._network: Network | None = None

    def __enter__(self) -> Hosts:
        reason = reason_not_possible()
        if reason:
            raise RuntimeError(reason)
        self._network = network = Network.claim(self._wanted)
        self.folder, self.bridge, self.subnet, self.gateway = (
            network.folder,
            network.bridge,
            network.subnet,
            network.gateway,
        )
        try:
            self.folder.mkdir(mode=0o711)
            processes.watch(self.folder)
            self.shared, self.key = self.folder / "shared", self.folder / "key"
            (self.folder / "disk").mkdir()
            self.shared.mkdir()
            self.shared.chmod(0o1777)
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", self.bridge, "-f", str(self.key))
            network.set_up()
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(list(self._hosts))

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def add(self, name: str | None = None, address: str | None = None, public_keys: Sequence[str] = ()) -> Host:
        """A further host, started; about half a second.

        Args:
            name: `host-1`, `host-2`, ... by default.
            address: in the subnet; by default one that none of these hosts has had.
            public_keys: lines for ~/.ssh/authorized_keys besides this object's own.
        """
        self._made += 1
        address = address or str(self.subnet[10 + self._made])
        if any(host.address == address and host.is_alive for host in self._hosts):
            raise RuntimeError(f"there is a host with the address {address} already")
        name = name or f"host-{self._made}"
        link = f"{self.bridge}-{self._made}"
        host = Host(name, address, self.user, link, self.folder / f"{link}.log")
        self._hosts.append(host)
        keys = [self.key.with_suffix(".pub").read_text().strip(), *public_keys]
        env = {
            "DISK": str(self.folder / "disk"),
            "SHARED": str(self.shared),
            "VISIBLE": "\n".join(map(str, self._visible)),
            "AUTHORIZED_KEYS": "\n".join(keys),
            "OWN_KEY": self.key.read_text(),
            "SSHD": program("sshd"),
        }
        try:
            host._start(env, self.bridge, self.subnet, self.gateway)
        except BaseException:
            self.remove(host)
            raise
        return host

    def remove(self, host: Host) -> None:
        """Kill a host, if it lives, and forget it."""
        host._close()
        self._hosts.remove(host)

    def ssh(self, host: Host) -> list[str]:
        """The command that reaches a host from this machine by SSH; append what to run there."""
        options = ["StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes"]
        return ["ssh", "-F", "none", "-i", str(self.key), *(f"-o{o}" for o in options), f"{self.user}@{host.address}"]

    def close(self) -> None:
        """Kill all hosts and remove everything; may be called again."""
        if self._network is None:
            return
        for host in reversed(list(self._hosts)):
            self.remove(host)
        self._network.remove()
        processes.forget(self.folder)
        self._network = None


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Existing folders, without those that lie in another one of them."""
    real = sorted({folder.resolve() for folder in folders})
    return [folder for folder in real if not any(folder.is_relative_to(other) for other in real if other != folder)]


def _answers(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=1).close()
    except OSError:
        return False
    return True
