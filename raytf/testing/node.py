"""A node of a local Ray cluster: processes that are found, ended and told that their time is up."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil

from raytf.testing import processes, reaper


class Node:
    """A node of an `ElasticCluster`.

    Attributes:
        id: Ray's id of it, 56 hexadecimal digits.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path, ray: Callable[..., str], address: str):
        self._process, self._log, self._ray, self._address = process, log, ray, address
        self._session = processes.Session(process.pid)
        reaper.watch(self._session)
        self._is_gone = False
        self.id = ""

    @property
    def is_alive(self) -> bool:
        """Whether its raylet lives."""
        return self.raylet() is not None

    def processes(self) -> list[psutil.Process]:
        """All its processes, the oldest first; also those whose parent has died."""
        return [] if self._is_gone else self._session.members()

    def workers(self) -> list[psutil.Process]:
        """Its Ray Train workers, the oldest first."""
        return processes.titled(self.processes(), processes.WORKER)

    def warm(self) -> list[psutil.Process]:
        """Its warm processes, which wait for the next group or get ready to, the oldest first."""
        return processes.titled(self.processes(), processes.WARM)

    def raylet(self) -> psutil.Process | None:
        """Its raylet.

        Returns:
            None where it has died.
        """
        return next(iter(processes.titled(self.processes(), processes.RAYLET)), None)

    def kill(self) -> None:
        """SIGKILL to all processes of the node, as when a machine vanishes."""
        if self._is_gone:
            return
        self._session.end()
        self._process.wait()
        self._is_gone = True
        reaper.forget(self._session)

    def kill_raylet(self) -> None:
        """SIGKILL to the raylet alone; Ray ends the node's other processes when they miss it."""
        raylet = self.raylet()
        processes.end([raylet] if raylet else [])

    def stop(self, seconds: float = 30.0) -> None:
        """End the node as its administrator would (SIGTERM): Ray hears of it, and takes nothing new to it.

        A node that has been given notice ends only at its deadline while it has workers.

        Args:
            seconds: after which what has not ended is killed, as a pod is after its grace period.
        """
        if not self._is_gone:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            self.kill()

    def drain(self, notice_seconds: float) -> None:
        """Give notice of preemption, as a cloud does: Ray is told, and nothing is killed. Takes 1 s, not the notice.

        A node on which nothing runs ends at once; Ray has no use for it.

        Args:
            notice_seconds: that Ray is told; whole ones, at least 1.

        Raises:
            RuntimeError: Ray refused; with what it said.
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
        """What its `ray start`, and what that ran under, has printed so far."""
        return self._log.read_text(errors="replace")

    def is_up(self) -> bool:
        """Whether Ray has it, once it was started; `id` is known from then on.

        Raises:
            RuntimeError: it has ended; with what it said.
        """
        if self._process.poll() is not None:
            raise RuntimeError(f"a node did not start:\n{self._log.read_text()}")
        raylet = self.raylet()
        found = raylet and re.search(r"--node[-_]id[= ]([0-9a-f]{56})", " ".join(raylet.cmdline()))
        self.id = found.group(1) if found else ""
        return bool(self.id) and "Ray runtime started" in self._log.read_text()
