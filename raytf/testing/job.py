"""A job, started as by a user: a command, its output, its exit code, and its latest step."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from raytf.testing import processes

#: Seconds for a run of a few steps, which takes 15 to 30 s on two idle cores.
PATIENCE_SECONDS = 240.0


class Job:
    """A started command; a context manager, which kills everything that the command started.

    Args:
        command: a program and its arguments.
        log: file for its output, which is overwritten.
        env: its whole environment; by default that of a plain user (`environment()`).
        folder: working directory; by default the folder of the log.
        status_file: the command's `--status-file`, if it has one.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        status_file: Path | None = None,
    ):
        self.log, self._status_file = log, status_file
        if status_file is not None:
            status_file.unlink(missing_ok=True)  # of an earlier command
        with log.open("w") as out:
            self.process = subprocess.Popen(
                list(command),
                env=dict(processes.environment() if env is None else env),
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                cwd=folder or log.parent,
            )
        self._is_gone = False
        self._session = processes.Session(self.process.pid)
        processes.watch(self._session)

    @property
    def output(self) -> str:
        """The output so far."""
        return self.log.read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def status(self) -> dict[str, Any] | None:
        """The fields of `raytf.runs.status.Status` in the status file; None before the first status."""
        if self._status_file is None:
            return None
        try:
            return json.loads(self._status_file.read_text())
        except FileNotFoundError:
            return None

    @property
    def step(self) -> int | None:
        """The latest global step in the status file; None before the first status."""
        status = self.status
        return None if status is None else status["step"]

    def wait(self, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for the end, and return the output.

        Raises:
            AssertionError: the job failed or does not end; the message has its output.
        """
        code = self.ended(seconds)
        if code:
            raise AssertionError(f"exit code {code}:\n{self.output}")
        return self.output

    def ended(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end, and return the exit code, negative for a signal.

        Raises:
            AssertionError: the job does not end; the message has its output.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished after {seconds:.0f} s:\n{self.output}") from None

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until a condition holds while the job runs.

        Raises:
            AssertionError: the condition does not hold in time, or the job ends first; the message has its output.
        """
        for _ in processes.polls(seconds):
            if condition():
                return
            if not self.is_running:
                raise AssertionError(f"the job ended too soon:\n{self.output}")
        raise AssertionError(f"waited {seconds:.0f} s in vain:\n{self.output}")

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Return the processes that the job started and whose command line contains `title`, such as `RayTrainWorker`.

        A job that starts its own Ray has all processes of its run. On a cluster, the nodes have controller and workers.
        """
        return [process for process in processes.titled(self._members(), title) if process.pid != self.process.pid]

    def kill(self) -> None:
        """Send SIGKILL to the driver and to everything that it started."""
        if self._is_gone:
            return
        processes.end(self._members())
        self._session.end()
        self.process.wait(30)
        self._is_gone = True
        processes.forget(self._session)

    def close(self) -> None:
        """Kill all processes that still run."""
        self.kill()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def _members(self) -> list[psutil.Process]:
        if self._is_gone:
            return []
        # Also its descendants, since some programs start processes in other sessions.
        members = {process.pid: process for process in self._session.members()}
        if self.is_running:
            members |= {process.pid: process for process in processes.family(self.process.pid)}
        return list(members.values())
