"""Finds processes of Ray by session and title, and makes sure that none is left, even if the test is killed."""

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

#: Texts in the command lines of Ray Train's processes, of raylets, and of warm processes for the next group.
WORKER, CONTROLLER, RAYLET, WARM = "RayTrainWorker", "TrainController", "raylet/raylet", "raytf warm"


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants, the oldest first."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Session:
    """All processes in the session that one process leads.

    Ray's workers overwrite their command line and environment, and lose their parent when it dies. Only the session
    shows which node an orphan belongs to.

    Args:
        leader: process id of the session's leader.
        started: clock ticks from the boot to the leader's start; by default read now.
    """

    def __init__(self, leader: int, started: int | None = None):
        self.leader = leader
        self.started = _started(leader) if started is None else started

    def members(self) -> list[psutil.Process]:
        """Return its living processes, the oldest first."""
        now = _started(self.leader)
        if now is not None and now != self.started:
            return []  # the id has been reused, which happens only after the session is empty
        members = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.leader:
                    process = psutil.Process(pid)
                    if _lives(process):
                        members.append((process.create_time(), pid, process))
        return [process for _, _, process in sorted(members, key=lambda entry: entry[:2])]

    def end(self, seconds: float = 30.0) -> None:
        """Send SIGKILL to all its processes, and to new ones until none is left, for at most this many seconds."""
        deadline = time.monotonic() + seconds
        while (living := self.members()) and time.monotonic() < deadline:
            end(living, deadline - time.monotonic())


_guard_lock = threading.Lock()
_guard: subprocess.Popen[str] | None = None


def watch(target: Session | Path, sign: str = "+") -> None:
    """Have a session killed, or a folder removed, when this process exits, unless `forget` is called before.

    A guard process reads the targets from a pipe. When the pipe closes, this process has exited.
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
        # The guard is only a safety net, so its loss must not fail a test.
        with contextlib.suppress(OSError):
            text = f"{target.leader} {target.started}" if isinstance(target, Session) else str(target)
            _guard.stdin.write(f"{sign}{text}\n")
            _guard.stdin.flush()


def forget(target: Session | Path) -> None:
    """Stop watching a session or folder that no longer exists."""
    watch(target, "-")


def guard() -> None:
    """Read the watched targets until standard input ends, then kill the sessions and remove the folders."""
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
    """Return the living processes whose command line contains `title`."""
    matches = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if title in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                matches.append(process)
    return matches


def end(processes: Iterable[psutil.Process], seconds: float = 30.0) -> None:
    """Send SIGKILL to processes, even to stopped ones, and wait until they exit, for at most this many seconds."""
    processes = list(processes)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    deadline = time.monotonic() + seconds
    # Not psutil's wait, which reaps our own children: subprocess would then report exit code 0 for them.
    while any(_lives(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.02)


def polls(seconds: float) -> Iterator[None]:
    """Yield each time the caller should poll, until this many seconds are over.

    Polling takes at most a fifth of a core, to leave the rest to the awaited process; pauses are at most 5 s long.
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
        TimeoutError: the condition does not hold within this many seconds.
    """
    for _ in polls(seconds):
        if condition():
            return
    raise TimeoutError(f"waited {seconds:.0f} s in vain until {what}")


#: Ports that `free_port` has returned, on which nothing may listen yet.
_reserved_ports: set[int] = set()


def free_port() -> int:
    """Return a free port of the loopback interface, a different one for each call."""
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
    """Return the clock ticks from the boot to the start of a process, or None if it does not exist."""
    try:
        # The name, the second field, may contain anything, so split after it. The start time is the 22nd field.
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None
