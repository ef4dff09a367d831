"""Runs a command as the first process of a pod does: signals are passed on, orphans are reaped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from raytf.errors import ConfigError

#: Forwarded as they arrive; the caller decides about SIGTERM and SIGINT.
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ASKED = (signal.SIGTERM, signal.SIGINT)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_POLL_SECONDS = 0.2
#: Part of the title that Ray gives Ray Train's workers.
_WORKER = "RayTrainWorker"


@dataclass(frozen=True)
class Raylet:
    """Ray's process on this node.

    Attributes:
        node_id: 56 hexadecimal digits.
        head: HOST:PORT of Ray's head.
    """

    node_id: str
    head: str


class Command:
    """A command and all its descendants, also those that have lost their parent.

    Made in the main thread of a process that starts no other children: those would be reaped here.

    Args:
        command: a program and its arguments.

    Raises:
        ConfigError: the program cannot be started.
    """

    def __init__(self, command: Sequence[str]):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)  # as PID 1 is by itself
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in (*_PASSED_ON, *_ASKED):
            signal.signal(number, lambda number, _: self._signals.put(number))
        try:
            self._process = subprocess.Popen(list(command), restore_signals=True)
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}. Expected a program after `--`.") from None
        self.code: int | None = None

    def wait(self, seconds: float) -> int | None:
        """Wait at most some seconds for the command's end or for SIGTERM or SIGINT, and return the signal, if any."""
        deadline = time.monotonic() + seconds
        while self.code is None:
            self._reap()
            left = deadline - time.monotonic()
            try:
                number = self._signals.get(timeout=min(_POLL_SECONDS, max(0.0, left)))
            except queue.Empty:
                if left <= 0:
                    break
                continue
            if number in _ASKED:
                return number
            self.send(number)
        return None

    def send(self, number: int) -> None:
        """Send a signal to the command itself while it lives."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def workers(self) -> int:
        """Return how many Ray Train workers descend from it."""
        return sum(_WORKER in " ".join(line) for line in self._lines())

    def raylet(self) -> Raylet | None:
        """Return the Ray node that it has started, if there is one yet."""
        for line in self._lines():
            text = " ".join(line)
            if "raylet/raylet" in line[0]:
                node = re.search(r"--node[-_]id[= ]([0-9a-f]{56})", text)
                head = re.search(r"--gcs[-_]address[= ](\S+)", text)
                if node and head:
                    return Raylet(node.group(1), head.group(1))
        return None

    def _lines(self) -> list[list[str]]:
        lines = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                lines.append(process.cmdline())
        return [line for line in lines if line]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._process.pid:
                code = os.waitstatus_to_exitcode(status)
                self._process.returncode = self.code = code
