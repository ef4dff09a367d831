"""A cluster of `cluster-configs/local.yaml` on hosts of this machine, started and used from one more, the laptop."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import yaml

from raytf.testing.job import Job
from tests.cluster.hosts import ROOT, Host, Hosts

CONFIG = ROOT / "cluster-configs" / "local.yaml"
PATIENCE = 300.0

#: In place of uv, which would fetch Python and packages from the network: hosts share this environment's. raytf itself
#: is the one that the config copies to `~/raytf`, since that comes first.
_PYTHON = f"test -x ~/venv/bin/python || {sys.executable} -m venv --without-pip ~/venv"
_PACKAGES = (
    f"printf '%s\\n' ~/raytf {sysconfig.get_path('purelib')}"
    f" > ~/venv/lib/python{sysconfig.get_python_version()}/site-packages/shared.pth;"
    f' for program in ray raytf; do sed "1s|.*|#!$HOME/venv/bin/python|" {sys.prefix}/bin/$program'
    " > ~/venv/bin/$program && chmod +x ~/venv/bin/$program; done"
)
#: Addresses of the nodes that Ray takes for alive, once there are so many, or at the deadline.
_ALIVE = """
import json, sys, time
from ray._raylet import GcsClient
client, wanted, deadline = GcsClient(address=sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while True:
    alive = [node.node_manager_address for node in client.get_all_node_info().values() if node.state == 0]
    if len(alive) == wanted or time.monotonic() >= deadline:
        break
    time.sleep(0.2)
print(json.dumps(sorted(alive)))
"""


def derived(head: str, workers: list[str]) -> dict[str, Any]:
    """The config with addresses filled in; what needs the internet is replaced.

    Each host offers one CPU, so that a job with three workers is on all three.
    """
    config = yaml.safe_load(CONFIG.read_text())
    config["provider"] |= {"head_ip": head, "worker_ips": workers}
    replaced = {"uv/0.8.0/install.sh": None, "uv venv": _PYTHON, "uv pip install": _PACKAGES}
    commands = []
    for command in config["setup_commands"]:
        (mark,) = [mark for mark in replaced if mark in command] or [""]
        commands.append(replaced.pop(mark) if mark else command)
    assert not replaced, f"no command of {CONFIG.name} has {list(replaced)}"
    config["setup_commands"] = [command for command in commands if command]
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        text = json.dumps(config[key])
        assert text.count("ray start ") == 1
        config[key] = json.loads(text.replace("ray start ", "ray start --num-cpus=1 "))
    return config


class OnPrem:
    """Three hosts for a cluster, and a laptop that starts Ray on them.

    Attributes:
        hosts: the cluster's hosts; the first is the head.
        laptop: the host on which the user types.
        single: one more host, which has no part in the cluster.
        shared: a folder that all of them mount.
        config: the config's path on all of them.
        seconds: what was measured, by name.
    """

    def __init__(self, hosts: Hosts):
        self.hosts = [hosts.add(name) for name in ("head", "worker-1", "worker-2")]
        self.laptop, self.single, self.shared = hosts.add("laptop"), hosts.add("single"), hosts.shared
        self.config = self.shared / "local.yaml"
        head, *workers = [host.address for host in self.hosts]
        self.config.write_text(yaml.safe_dump(derived(head, workers)))
        self.seconds: dict[str, float] = {}
        self._folder, self._jobs = hosts.folder, 0

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def workers(self) -> list[Host]:
        return self.hosts[1:]

    def script(self, command: str) -> str:
        """What a shell gets, for a command that the user types in the checkout."""
        programs, checkout = Path(sys.executable).parent, shlex.quote(str(ROOT))
        env = f"PATH={programs}:$PATH PYTHONPATH={checkout} RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
        return f"export {env}; cd {checkout}; {command}"

    def type(self, command: str, name: str = "", seconds: float = PATIENCE) -> str:
        """What a command prints that the user types on the laptop; its time is kept under a name.

        Raises:
            RuntimeError: it failed; with what it printed.
        """
        with self.timed(name or command):
            run = self.laptop.run(self.script(command), seconds)
        return run.stdout + run.stderr

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Keep the time that the block takes."""
        start = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - start

    def start(self, command: str, host: Host | None = None) -> Job:
        """A command that the user types on the laptop or another host, and does not wait for; close it."""
        self._jobs += 1
        log = self._folder / f"typed-{self._jobs}.log"
        return Job((host or self.laptop).command(self.script(command)), log)

    def alive(self, wanted: int, seconds: float = PATIENCE) -> list[str]:
        """Addresses of the nodes that Ray takes for alive, when there are so many or after this many seconds."""
        client = f"python -c {shlex.quote(_ALIVE)} {self.head.address}:6379 {wanted} {seconds}"
        return json.loads(self.head.run(client, seconds + 60).stdout)

    def ray_processes(self) -> dict[str, list[str]]:
        """Command lines of what runs on the cluster's hosts beside SSH's servers and sessions, by host."""
        found: dict[str, list[str]] = {}
        for host in self.hosts:
            lines = [" ".join(line).strip() for line in command_lines(host)]
            found[host.name] = [line for line in lines if "ray" in line]
        return found


def command_lines(host: Host) -> list[list[str]]:
    """Those of a host's processes."""
    lines = []
    for process in host.processes():
        try:
            lines.append(process.cmdline())
        except psutil.Error:
            continue
    return lines


def curl(host: Host, url: str, *options: str) -> subprocess.CompletedProcess[str]:
    """What an HTTP server says to a host."""
    return host.run(shlex.join(["curl", "-sS", "-m", "20", *options, url]), check=False)
