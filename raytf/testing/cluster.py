"""An elastic Ray cluster on this machine: every node a raylet with processes of its own, added and killed by script."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from raytf.testing import processes

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
#: Generous: a node starts in 3 s on a quiet machine.
_PATIENCE = 180.0
#: Ray's defaults need up to a minute to miss a dead node.
_HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 3,
}
_OBJECT_STORE_BYTES = 150_000_000


class Node:
    """A node of an `ElasticCluster`.

    Attributes:
        id: Ray's id of it.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, cluster: ElasticCluster):
        self._process, self._log, self._cluster = process, log, cluster
        self.id = ""

    @property
    def is_alive(self) -> bool:
        """Whether its raylet lives."""
        return bool(self.raylet())

    def processes(self) -> list[psutil.Process]:
        """All its processes."""
        return processes.family(self._process.pid)

    def workers(self) -> list[psutil.Process]:
        """Its Ray Train workers."""
        return processes.titled(self.processes(), processes.WORKER)

    def raylet(self) -> list[psutil.Process]:
        """Its raylet, or nothing."""
        return processes.titled(self.processes(), processes.RAYLET)

    def kill(self) -> None:
        """SIGKILL to all processes of the node, as when a machine vanishes."""
        processes.end(self.processes())
        self._process.wait()

    def kill_raylet(self) -> None:
        """SIGKILL to the raylet alone; Ray ends its workers when they miss it."""
        processes.end(self.raylet())

    def drain(self, notice_seconds: float) -> None:
        """Give notice of preemption, as a cloud does: Ray is told, and nothing is killed.

        Raises:
            RuntimeError: Ray refused.
        """
        self._cluster.ray(
            "drain-node",
            f"--address={self._cluster.address}",
            f"--node-id={self.id}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message=notice of preemption",
            f"--deadline-remaining-seconds={max(1, round(notice_seconds))}",
        )

    def _find_id(self) -> bool:
        for raylet in self.raylet():
            text = " ".join(raylet.cmdline())
            found = re.search(r"--node-id[= ]([0-9a-f]{56})", text) or re.search(r"--node_id[= ]([0-9a-f]{56})", text)
            if found:
                self.id = found.group(1)
        if self._process.poll() is not None:
            raise RuntimeError(f"a node did not start:\n{self._log.read_text()}")
        return bool(self.id)


class ElasticCluster:
    """A head without CPUs and nodes that come and go; a context manager, which leaves nothing behind.

        with ElasticCluster() as cluster:
            node = cluster.add_node(cpus=1)
            subprocess.run([...], env={**os.environ, **cluster.env})
            node.kill()

    Args:
        nodes: to start with.
        cpus: of each of them.
        dashboard: start the dashboard and the job server too.

    Attributes:
        address: HOST:PORT of the head.
        env: environment variables with which a job finds the cluster.
        dashboard_url: of the job server, or None.
    """

    def __init__(self, nodes: int = 0, cpus: int = 1, dashboard: bool = False):
        self._first, self._cpus, self._dashboard = nodes, cpus, dashboard
        self._nodes: list[Node] = []
        self._head: Node | None = None

    def __enter__(self) -> ElasticCluster:
        # Ray's sockets have paths of at most 107 characters; a test's own folder may be longer.
        self._folder = Path(tempfile.mkdtemp(prefix="raytf-", dir="/tmp"))
        port = processes.free_port()
        self.address = f"127.0.0.1:{port}"
        self.env = {"RAY_ADDRESS": self.address, "RAY_AUTH_MODE": "disabled"}
        dashboard = processes.free_port()
        self.dashboard_url = f"http://127.0.0.1:{dashboard}" if self._dashboard else None
        try:
            self._head = self._start(
                "--head",
                f"--port={port}",
                "--num-cpus=0",
                f"--temp-dir={self._folder}/ray",
                f"--include-dashboard={str(self._dashboard).lower()}",
                f"--dashboard-port={dashboard}",
                f"--ray-client-server-port={processes.free_port()}",
                f"--system-config={json.dumps(_HEALTH)}",
            )
            for _ in range(self._first):
                self.add_node(self._cpus)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    @property
    def nodes(self) -> list[Node]:
        """Nodes that live, the oldest first, without the head."""
        return [node for node in self._nodes if node.is_alive]

    @property
    def head(self) -> Node:
        """The head, on which a job's driver and Ray Train's controller run."""
        if self._head is None:
            raise RuntimeError("the cluster was not started: use it in a `with` statement")
        return self._head

    def add_node(self, cpus: int | None = None) -> Node:
        """Start a node, and wait until Ray has it.

        Raises:
            RuntimeError, TimeoutError: it does not start.
        """
        # One at a time: two raylets that start at once take each other's sockets.
        node = self._start(f"--address={self.address}", f"--num-cpus={self._cpus if cpus is None else cpus}")
        self._nodes.append(node)
        return node

    def controllers(self) -> list[psutil.Process]:
        """Ray Train's controllers."""
        return processes.titled(self.head.processes(), processes.CONTROLLER)

    def workers(self) -> list[psutil.Process]:
        """Ray Train's workers on all nodes."""
        return [worker for node in self._nodes for worker in node.workers()]

    def ray(self, *arguments: str) -> str:
        """Output of a command of Ray's.

        Raises:
            RuntimeError: it failed; with what it printed.
        """
        run = subprocess.run(
            [*_RAY, *arguments],
            env=processes.environment(**self.env),
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
        )
        if run.returncode:
            raise RuntimeError(f"ray {' '.join(arguments)} failed:\n{run.stdout}{run.stderr}")
        return run.stdout

    def close(self) -> None:
        """Kill all and remove what they wrote."""
        for node in [*self._nodes, *([self._head] if self._head else [])]:
            node.kill()
        # What a killed raylet left behind has lost its parent, and carries the folder's name.
        processes.end(processes.titled(psutil.process_iter(), f"{self._folder}/"))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *arguments: str) -> Node:
        log = self._folder / f"node-{len(self._nodes)}-{processes.free_port()}.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                [*_RAY, "start", "--block", f"--object-store-memory={_OBJECT_STORE_BYTES}", *arguments],
                env=processes.environment(RAY_AUTH_MODE="disabled"),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        node = Node(process, log, self)
        try:
            processes.wait_until(node._find_id, "a node of Ray starts", _PATIENCE)
            processes.wait_until(lambda: "Ray runtime started" in log.read_text(), "a node of Ray is up", _PATIENCE)
        except BaseException:
            node.kill()
            raise
        return node
