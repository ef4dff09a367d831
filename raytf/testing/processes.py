"""Processes of Ray: find them by session and title, and end them without a trace, even where the test is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

#: Texts in the command lines of processes of Ray Train, of raylets, and of those that wait for the next group.
WORKER, CONTROLLER, RAYLET, WARM = "RayTrainWorker", "TrainController", "raylet/raylet", "raytf warm"


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, the oldest first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Session:
    """All processes that one process started, which leads a session of its own.

    Ray's workers overwrite their command line and environment, and lose their parent when it dies. Only the session
    shows to which node an orphan belongs.

    Args:
        leader: process number of the one that leads it.
        started: clock ticks from the boot to its start, by default read now.
    """

    def __init__(self, leader: int, started: int | None = None):
        self.leader = leader
        self.started = _started(leader) if started is None else started

    def members(self) -> list[psutil.Process]:
        """Return its living processes, the oldest first."""
        now = _started(self.leader)
        if now is not None and now != self.started:
            return []  # the number has been reused, which happens only when the session is empty
        members = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.leader:
                    process = psutil.Process(pid)
                    if _lives(process):
                        members.append((process.create_time(), pid, process))
        return [process for _, _, process in sorted(members, key=lambda entry: entry[:2])]

    def end(self, seconds: float = 30.0) -> None:
        """Send SIGKILL to all its processes and to those that they start meanwhile, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while (living := self.members()) and time.monotonic() < deadline:
            end(living, deadline - time.monotonic())


_guard_lock = threading.Lock()
_guard: subprocess.Popen[str] | None = None


def watch(target: Session | Path, sign: str = "+") -> None:
    """End a session, or remove a folder, if this process ends before it has done so itself.

    A process of its own reads from a pipe what there is. When the pipe closes, this process has ended.
    """
    global _guard
    with _guard_lock:
        if _guard is None:
            _guard = subprocess.Popen(
                [sys.executable, "-c", "from raytf.testing import processes; processes.guard()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=Path(__file__).parents[2],
                start_new_session=True,
            )
        assert _guard.stdin is not None
        # The guard is only a safety net: a test does not fail because it is lost.
        with contextlib.suppress(OSError):
            text = f"{target.leader} {target.started}" if isinstance(target, Session) else str(target)
            _guard.stdin.write(f"{sign}{text}\n")
            _guard.stdin.flush()


def forget(target: Session | Path) -> None:
    """Stop watching a session or folder, as it is gone."""
    watch(target, "-")


def guard() -> None:
    """Keep a list of what is watched until standard input ends; then end and remove it."""
    targets: list[str] = []
    for line in sys.stdin:
        sign, target = line[0], line[1:].rstrip("\n")
        if sign == "+":
            targets.append(target)
        elif target in targets:
            targets.remove(target)
    # The newest first: nodes before their head, folders after the processes that write to them.
    for target in reversed(targets):
        if target.startswith("/"):
            shutil.rmtree(target, ignore_errors=True)
        else:
            leader, started = target.split()
            Session(int(leader), int(started)).end()


def titled(processes: Iterable[psutil.Process], title: str) -> list[psutil.Process]:
    """Return the living processes whose command line contains a text."""
    matches = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
    return matches


def end(processes: Iterable[psutil.Process], seconds: float = 30.0) -> None:
    """Send SIGKILL, also to stopped processes, and wait for their end, for at most this many seconds."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + seconds
    # Not psutil's wait: it reaps our own children, and subprocess would then report exit code 0 for them.
    while any(_lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def polls(seconds: float) -> Iterator[None]:
    """Yield whenever something should be polled, until this many seconds are over.

    Polls take a fifth of a core at most, and leave the rest to what is waited for, but follow each other within 5 s.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        yield
        now = time.monotonic()
        if now >= deadline:
            return
        time.sleep(min(max(0.05, 4 * (now - began)), 5.0, deadline - now))


def wait_until(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: it does not hold after this many seconds.
    """
    for _ in polls(seconds):
        if condition():
            return
    raise TimeoutError(f"waited {seconds:.0f} s in vain until {what}")


#: Ports that `free_port` returned, where nothing may listen yet.
_reserved_ports: set[int] = set()


def free_port() -> int:
    """Return a port of the loopback on which nothing listens, a different one for each call."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port not in _reserved_ports:
            _reserved_ports.add(port)
            return port


def environment(**extra: str) -> dict[str, str]:
    """Return the environment of a plain user, without settings of Ray, AWS and TensorFlow, and with `extra`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_", "TF_"))}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **extra}


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _started(pid: int) -> int | None:
    """Return the clock ticks from the boot to the start of a process, or None where there is none."""
    try:
        # Fields after the name, which may hold anything; the start is the 22nd of all.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
