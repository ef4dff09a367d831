"""A job as a user starts it: a command, its output, its exit code, the step that it has reached."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from raytf.testing import processes

#: Generous: two cores, perhaps loaded; a run of a few steps takes 15 to 30 s when they are not.
PATIENCE_SECONDS = 240.0


class Job:
    """A command that was started; everything that it starts is ended with it.

    Args:
        command: a program and its arguments.
        log: file for what it prints; written anew.
        env: its environment, whole; by default that of a plain user (`processes.environment`).
        folder: in which it runs; by default that of the log.
        status_file: the `--status-file` of the command, where it has one.
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
            status_file.unlink(missing_ok=True)  # it would tell of an earlier command
        self._out = log.open("w")
        self.process = subprocess.Popen(
            list(command),
            env=dict(processes.environment() if env is None else env),
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=folder or log.parent,
        )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def status(self) -> dict[str, Any] | None:
        """What the status file says: fields of `raytf.progress.Status`; None before the first one."""
        if self._status_file is None:
            return None
        try:
            return json.loads(self._status_file.read_text())
        except FileNotFoundError:
            return None

    def wait(self, seconds: float = PATIENCE_SECONDS) -> str:
        """Wait for the end; the output.

        Raises:
            AssertionError: it failed, or does not end; with what it printed.
        """
        code = self.ended(seconds)
        if code:
            raise AssertionError(f"exit code {code}:\n{self.output}")
        return self.output

    def ended(self, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for the end; the exit code.

        Raises:
            AssertionError: it does not end; with what it printed.
        """
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not finished after {seconds:.0f} s:\n{self.output}") from None

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
        """Wait until something holds while the job runs.

        Raises:
            AssertionError: it does not come to hold, or the job ends before; with what it printed.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if not self.is_running and not condition():
                raise AssertionError(f"the job ended too soon:\n{self.output}")
            if time.monotonic() >= deadline:
                raise AssertionError(f"waited {seconds:.0f} s in vain:\n{self.output}")
            time.sleep(0.05)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The processes that the job started, or those whose command line holds a text such as `RayTrainWorker`.

        With a Ray of its own these are all of the run; on a cluster, workers are the cluster's processes.
        """
        return processes.titled(processes.family(self.process.pid)[1:], title)

    def kill(self) -> None:
        """SIGKILL of the driver and of everything that it started."""
        descendants = processes.family(self.process.pid)[1:]
        self.process.kill()
        self.process.wait(30)  # before psutil could, which would take the exit code
        processes.end(descendants)

    def close(self) -> None:
        """Kill what still runs."""
        if self.is_running:
            self.kill()
        self._out.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
