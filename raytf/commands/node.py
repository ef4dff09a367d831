"""`raytf node -- COMMAND ...`: run a Ray node that drains in time on SIGTERM or a preemption notice."""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import tyro

from raytf.cluster.preemption import watcher
from raytf.config.flags import NoticeSection
from raytf.config.terminal_text import say
from raytf.errors import ClusterError, ConfigError

#: Seconds between two checks whether a Ray node has started, and whether its workers have exited.
_NODE_SECONDS = 0.5
#: Seconds between two checks whether the node still runs, and seconds that the command may outlive it.
_STAY_SECONDS, _FOLLOW_SECONDS = 5.0, 10.0
#: Seconds at the end of the grace period for SIGKILL to take effect.
_KILL_SECONDS = 1.0
#: Signals to forward immediately, and signals that `Command.wait` returns to its caller.
_PASSED_ON = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
_ASKED = (signal.SIGTERM, signal.SIGINT)
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
_POLL_SECONDS = 0.2
#: Part of the title that Ray gives Ray Train's workers.
_WORKER = "RayTrainWorker"


@dataclass(frozen=True)
class Node:
    """Run a Ray node that drains in time, e.g. as the first process of a pod: raytf node -- ray start --block ...

    On SIGTERM, which Kubernetes sends before it kills a pod, and on the cloud's preemption notice, Ray drains the node.
    After SIGTERM, the command is stopped when no Ray Train worker runs here, or shortly before the grace period ends.
    It is also stopped after `ray stop`, which `ray start --block` outlives.
    """

    command: tyro.conf.Positional[tuple[str, ...]] = ()
    """The command to run, after `--`; it must stay in the foreground, as `ray start --block` does."""
    grace_seconds: float = 30.0
    """Seconds from SIGTERM to SIGKILL: terminationGracePeriodSeconds of the pod."""
    margin_seconds: float = 5.0
    """The last seconds of the grace period, in which the command can stop by itself."""
    notices: tyro.conf.OmitArgPrefixes[NoticeSection] = field(default_factory=NoticeSection)

    def check(self) -> None:
        """Check that the flags can work.

        Raises:
            ConfigError: a flag cannot work; the message says what was expected and how to fix it.
        """
        if not self.command:
            raise ConfigError("No command given. Usage: raytf node -- ray start --block --address=HEAD:6379")
        if not _KILL_SECONDS < self.margin_seconds < self.grace_seconds < float("inf"):
            raise ConfigError(
                f"--grace-seconds {self.grace_seconds:g} --margin-seconds {self.margin_seconds:g}: expected a margin "
                f"above {_KILL_SECONDS:g} s and below the grace period."
            )
        self.notices.check()


@dataclass(frozen=True)
class Raylet:
    """The Ray node that runs here.

    Attributes:
        node_id: 56 hexadecimal digits.
        head: HOST:PORT of Ray's head.
    """

    node_id: str
    head: str


class Command:
    """A command, run as if by the first process of a pod: signals are forwarded, and orphaned processes reaped.

    Create it in the main thread of a process without other children, because it would reap them, too.

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
        """Wait until the command exits, SIGTERM or SIGINT arrives, or time is up. Return the signal, if any."""
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
        """Send a signal to the command's process, if it still runs."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def workers(self) -> int:
        """Return how many Ray Train workers descend from the command."""
        return sum(_WORKER in " ".join(line) for line in self._lines())

    def raylet(self) -> Raylet | None:
        """Return the Ray node that the command has started, or None if it has not started yet."""
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


def main(flags: Node) -> None:
    """Run the command, and exit with its code, or 128 + N if signal N killed it."""
    flags.check()
    command = Command(flags.command)
    watching = False
    seen = time.monotonic()
    while command.code is None:
        raylet = command.raylet()
        if raylet is not None:
            seen = time.monotonic()
            if not watching:
                watching = True
                _watch_notices(flags.notices, raylet)
        elif watching and time.monotonic() - seen > _FOLLOW_SECONDS:
            _say("Ray has stopped here; stopping the command, which still runs")
            _end(command, time.monotonic() + flags.margin_seconds)
            break
        asked = command.wait(_STAY_SECONDS if watching else _NODE_SECONDS)
        if asked == signal.SIGTERM:
            _leave(command, flags.grace_seconds, flags.margin_seconds)
        elif asked is not None:
            command.send(asked)
    while command.code is None:
        command.wait(_NODE_SECONDS)
    sys.exit(command.code if command.code >= 0 else 128 - command.code)


def _leave(command: Command, grace: float, margin: float) -> None:
    """Drain this node, and stop the command before the grace period is over."""
    end = time.monotonic() + grace
    last = end - margin
    raylet = command.raylet()
    if raylet is not None:
        _say(f"SIGTERM: asking Ray to drain node {raylet.node_id[:8]}, which stops in {grace:.0f} s")
        # In a thread, because Ray may answer late and the grace period is running.
        threading.Thread(target=_drain, args=(raylet, last - time.monotonic()), daemon=True).start()
        _wait_for_workers(command, last)
    _end(command, end - _KILL_SECONDS)


def _end(command: Command, last: float) -> None:
    """Send SIGTERM to the command, and SIGKILL if it still runs at the time `last`."""
    command.send(signal.SIGTERM)
    while command.code is None and (left := last - time.monotonic()) > 0:
        asked = command.wait(left)
        if asked is not None:
            command.send(asked)
    command.send(signal.SIGKILL)


def _wait_for_workers(command: Command, last: float) -> None:
    workers = command.workers()
    while command.code is None and workers and (left := last - time.monotonic()) > 0:
        if command.wait(min(_NODE_SECONDS, left)) is not None:
            return  # another signal: stop waiting
        workers = command.workers()
    _say(f"{workers or 'no'} Ray Train worker{'s' if workers > 1 else ''} left here; stopping the command")


def _drain(raylet: Raylet, seconds: float) -> None:
    try:
        watcher.drain_node(raylet.head, raylet.node_id, "kubernetes: SIGTERM", seconds)
    except ClusterError as error:
        _say(str(error))


def _watch_notices(notices: NoticeSection, raylet: Raylet) -> None:
    watcher.start(
        notices,
        raylet.node_id,
        f"{socket.gethostname()} ({raylet.node_id[:8]})",
        _say,
        lambda **fields: None,
        lambda reason, seconds: watcher.drain_node(raylet.head, raylet.node_id, reason, seconds),
    )


def _say(message: str) -> None:
    say(f"raytf node: {message}", file=sys.stderr)
