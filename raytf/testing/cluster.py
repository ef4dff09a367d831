"""An elastic Ray cluster on this machine: a script adds and kills nodes, each a raylet with its own processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from raytf.testing import processes

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
#: Seconds for a node to start; on an idle machine, that takes 3 s.
_PATIENCE = 180.0
#: With its defaults, Ray needs up to a minute to notice a dead node.
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
_TRIES = 3
_OBJECT_STORE_BYTES = 150_000_000
#: Waits until Ray knows of this many living nodes, including the head. Runs in its own process, which imports Ray.
_WAIT = """
import sys, time
from ray._raylet import GcsClient
client, wanted, deadline = GcsClient(address=sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
while True:
    alive = sum(node.state == 0 for node in client.get_all_node_info().values())
    if alive == wanted or time.monotonic() >= deadline:
        break
    time.sleep(0.1)
print(alive)
"""


class Node:
    """A node of an `ElasticCluster`.

    Attributes:
        id: Ray's id of the node, 56 hexadecimal digits.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ray: Callable[..., str], address: str):
        self._process, self._log, self._ray, self._address = process, log, ray, address
        self._session = processes.Session(process.pid)
        processes.watch(self._session)
        self._is_gone = False
        self.id = ""

    @property
    def is_alive(self) -> bool:
        """Whether its raylet is alive."""
        return self.raylet() is not None

    def processes(self) -> list[psutil.Process]:
        """Return all its processes, the oldest first, including those whose parent has died."""
        return [] if self._is_gone else self._session.members()

    def workers(self) -> list[psutil.Process]:
        """Return its Ray Train workers, the oldest first."""
        return processes.titled(self.processes(), processes.WORKER)

    def warm(self) -> list[psutil.Process]:
        """Return its warm processes, which are or become ready for the next group, the oldest first."""
        return processes.titled(self.processes(), processes.WARM)

    def raylet(self) -> psutil.Process | None:
        """Return its raylet, or None if it has died."""
        return next(iter(processes.titled(self.processes(), processes.RAYLET)), None)

    def kill(self) -> None:
        """Send SIGKILL to all processes of the node, as when a machine disappears."""
        if self._is_gone:
            return
        self._session.end()
        self._process.wait()
        self._is_gone = True
        processes.forget(self._session)

    def kill_raylet(self) -> None:
        """Send SIGKILL to the raylet only. The node's other processes exit when they notice its death."""
        raylet = self.raylet()
        processes.end([raylet] if raylet else [])

    def stop(self, seconds: float = 30.0) -> None:
        """Stop the node as its administrator would (SIGTERM): Ray is informed, and places nothing new there.

        A node with notice of preemption and with workers stops only at its deadline.

        Args:
            seconds: grace period, like that of a pod, after which remaining processes are killed.
        """
        if not self._is_gone:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self.kill()

    def drain(self, notice_seconds: float) -> None:
        """Send notice of preemption to Ray, as a cloud does, and kill nothing. Returns after 1 s, not at the deadline.

        An idle node stops at once.

        Args:
            notice_seconds: seconds until the deadline; Ray gets them rounded, at least 1.

        Raises:
            RuntimeError: Ray refused; the message has its output.
        """
        self._ray(
            "drain-node",
            f"--address={self._address}",
            f"--node-id={self.id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=notice of preemption",
            f"--deadline-remaining-seconds={max(1, round(notice_seconds))}",
        )

    @property
    def output(self) -> str:
        """The output so far of its `ray start`, and of the command around it."""
        return self._log.read_text(errors="replace")

    def is_up(self) -> bool:
        """Return whether the node has started, and set `id`.

        Raises:
            RuntimeError: the node has exited; the message has its output.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"a node did not start:\n{self._log.read_text()}")
        raylet = self.raylet()
        match = raylet and re.search(r"--node[-_]id[= ]([0-9a-f]{56})", " ".join(raylet.cmdline()))
        self.id = match.group(1) if match else ""
        return bool(self.id) and "Ray runtime started" in self._log.read_text()


class ElasticCluster:
    """A head, and nodes that join and leave; a context manager that removes all of them at its end.

        with ElasticCluster() as cluster:
            node = cluster.add_node(cpus=1)
            subprocess.run([...], env={**os.environ, **cluster.env})
            node.kill()

    Args:
        nodes: number of nodes to start on entry, besides the head.
        cpus: CPUs of each of these nodes.
        head_cpus: CPUs of the head; with 0, no worker runs there.
        dashboard: whether to start the dashboard and the job server, too.
        keeps_state: whether the head stores its state in `folder`, and restores it after `restart_head`.
        token: the token that clients must send; None if they need none.

    Attributes:
        address: HOST:PORT of the head.
        env: environment variables with which a job finds the cluster.
        dashboard_url: URL of the job server, or None.
        folder: folder of Ray's logs until the cluster is closed.

    Raises:
        RuntimeError, TimeoutError: Ray does not start on entry; the message has Ray's output if there is some.
    """

    def __init__(
        self,
        nodes: int = 0,
        cpus: int = 1,
        head_cpus: int = 0,
        dashboard: bool = False,
        keeps_state: bool = False,
        token: str | None = None,
    ):
        self._first, self._cpus, self._head_cpus, self._dashboard = nodes, cpus, head_cpus, dashboard
        self._keeps_state, self._token = keeps_state, token
        self._nodes: list[Node] = []
        self._head: Node | None = None
        self._starts = 0

    def __enter__(self) -> ElasticCluster:
        # Paths of Ray's sockets have at most 107 characters; in a test's own folder, they may be longer.
        self.folder = Path(tempfile.mkdtemp(prefix="raytf-", dir="/tmp"))
        processes.watch(self.folder)
        port, dashboard = processes.free_port(), processes.free_port()
        self.address = f"127.0.0.1:{port}"
        self.env = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled"}
        if self._token is not None:
            self.env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._token}
        self.dashboard_url = f"http://127.0.0.1:{dashboard}" if self._dashboard else None
        self._head_arguments = (
            "--head",
            f"--port={port}",
            f"--num-cpus={self._head_cpus}",
            f"--temp-dir={self.folder}/ray",
            f"--include-dashboard={str(self._dashboard).lower()}",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={processes.free_port()}",
            f"--system-config={json.dumps(_HEALTH)}",
        )
        try:
            self._start_head()
            for _ in range(self._first):
                self.add_node()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def nodes(self) -> list[Node]:
        """Living nodes, the oldest first, without the head."""
        return [node for node in self._nodes if node.is_alive]

    @property
    def head(self) -> Node:
        """The head, on which a job's driver and Ray Train's controller run."""
        if self._head is None:
            raise RuntimeError("the cluster was not started. Use it in a `with` statement")
        return self._head

    def add_node(self, cpus: int | None = None, under: Sequence[str] = ()) -> Node:
        """Start a node, and wait until it has joined.

        Args:
            cpus: CPUs of the node; by default as many as the cluster's other nodes have.
            under: a command that runs its last arguments, here `ray start`, such as `raytf node --`.

        Raises:
            RuntimeError, TimeoutError: the node does not start.
        """
        # One at a time: raylets that start at the same time take each other's sockets.
        node = self._start(
            f"--address={self.address}",
            f"--num-cpus={self._cpus if cpus is None else cpus}",
            # The head's log monitor reads the logs of all nodes, which share a folder.
            "--include-log-monitor=false",
            under=under,
        )
        self._nodes.append(node)
        return node

    def restart_head(self) -> Node:
        """Kill the head if it is alive, and start another one at the same address.

        Raises:
            RuntimeError, TimeoutError: the new head does not start.
        """
        self.head.kill()
        for _ in range(_TRIES - 1):
            # Ray gives a node 30 s to start, which is too short on a loaded machine.
            with contextlib.suppress(RuntimeError):
                return self._start_head()
        return self._start_head()

    def wait(self, nodes: int | None = None, seconds: float = 120.0) -> None:
        """Wait until Ray knows of exactly this many living nodes besides the head.

        Ray notices the death of a node after some seconds. Each call starts a process that asks Ray, which takes 1 s.

        Args:
            nodes: number of nodes; by default as many as are alive.
            seconds: the most seconds to wait.

        Raises:
            TimeoutError: Ray knows of another number of nodes, which the message has.
            RuntimeError: Ray does not answer.
        """
        wanted = len(self.nodes) if nodes is None else nodes
        command = [sys.executable, "-c", _WAIT, self.address, str(wanted + 1), str(seconds)]
        known = int(_output(command, self._environment(), seconds + _PATIENCE)) - 1
        if known != wanted:
            raise TimeoutError(f"waited {seconds:.0f} s for {wanted} nodes besides the head; Ray knows of {known}")

    def controllers(self) -> list[psutil.Process]:
        """Return Ray Train's controllers."""
        members = [process for node in [self.head, *self._nodes] for process in node.processes()]
        return processes.titled(members, processes.CONTROLLER)

    def workers(self) -> list[psutil.Process]:
        """Return Ray Train's workers on all nodes, those of the head and of the oldest node first."""
        return [worker for node in [self.head, *self._nodes] for worker in node.workers()]

    def ray(self, *arguments: str) -> str:
        """Run a Ray command, such as `ray("status", f"--address={cluster.address}")`, and return its output.

        Raises:
            RuntimeError: the command failed; the message has its output.
        """
        return _output([*_RAY, *arguments], self._environment(), _PATIENCE)

    def close(self) -> None:
        """Kill all nodes and remove their files. Can be called more than once."""
        for node in [*reversed(self._nodes), *([self._head] if self._head else [])]:
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        processes.forget(self.folder)

    def _start_head(self) -> Node:
        self._head = self._start(*self._head_arguments)
        if self.dashboard_url:
            url = f"{self.dashboard_url}/api/version"
            processes.wait_until(lambda: _answers(url), "Ray's dashboard answers", _PATIENCE)
        return self._head

    def _environment(self) -> dict[str, str]:
        # A job that Ray starts must find the cluster's `python`.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
        # Ray gives a stopped job 3 s to save, which is too short on a loaded machine.
        # With Ray's niceness of 15, a job would starve beside other programs.
        more = {"RAY_JOB_STOP_WAIT_TIME_S": "60", "RAY_worker_niceness": "0"}
        return processes.environment(**self.env, PATH=path, **more)

    def _start(self, *arguments: str, under: Sequence[str] = ()) -> Node:
        self._starts += 1
        log = self.folder / f"start-{self._starts}.log"
        own = [
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
            # By default, all nodes on a machine would use the same ports.
            f"--dashboard-agent-listen-port={processes.free_port()}",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        env = self._environment()
        del env["RAY_ADDRESS"]  # a head does not start if this variable names another one
        if self._keeps_state:
            env |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self.folder / "state")}
        with log.open("w") as out:
            process = subprocess.Popen(
                [*under, *_RAY, "start", "--block", *own, *arguments],
                env=env,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        node = Node(process, log, self.ray, self.address)
        try:
            processes.wait_until(node.is_up, "a node of Ray is up", _PATIENCE)
        except BaseException:
            node.kill()
            raise
        return node


def _output(command: list[str], env: dict[str, str], seconds: float) -> str:
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} failed:\n{run.stdout}{run.stderr}")
    return run.stdout


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status == 200
    except urllib.error.HTTPError as error:
        return error.code == 401  # it requires a token
    except (urllib.error.URLError, OSError):
        return False
