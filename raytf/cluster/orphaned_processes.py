"""Kills the remaining processes of a Ray when the driver that started it has exited, even after `kill -9`.

This module runs as a separate program, which needs only Python's standard library. It kills only processes with the
mark of this one Ray in their environment, even if a signal has stopped them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

#: Environment variable that marks each process of a Ray that a driver has started.
MARK = "RAYTF_OWN_RAY"
#: Seconds between two checks of the driver; for processes to exit by themselves; for killing all of them.
_POLL_SECONDS, _GRACE_SECONDS, _END_SECONDS = 0.5, 3.0, 60.0
_PR_SET_PDEATHSIG = 1


class OrphanGuard:
    """The driver's handle of this program.

    Args:
        mark: the mark of the processes.

    Raises:
        OSError: the program cannot be started.
    """

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C at the terminal must reach only the driver
            cwd="/",
            text=True,
        )

    def remove(self, folder: str) -> None:
        """Also remove this folder after the processes have exited."""
        self._write(f"+{folder}\n")

    def over(self) -> None:
        """Report that Ray is stopping: processes that do not exit within seconds are killed."""
        self._write(".\n")
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _write(self, text: str) -> None:
        # Only a safety net, so its loss must not fail the driver.
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(text)
            self._process.stdin.flush()


def die_with_parent() -> None:
    """Make the system kill this process when its parent dies, even if a signal has stopped this process."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died in between
        os.kill(os.getpid(), signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the ids of the living processes that carry a mark, except this one."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _carries(int(name), wanted):
            pids.append(int(name))
    return pids


def end(mark: str, seconds: float = _END_SECONDS) -> None:
    """Kill all processes that carry a mark, until none is left or this many seconds have passed."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = marked(mark)
        if not left:
            return
        for pid in left:
            _kill(pid, f"{MARK}={mark}".encode())
        time.sleep(0.1)


def _carries(pid: int, wanted: bytes) -> bool:
    # Processes that have exited but are not reaped yet have no environment.
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return wanted in stream.read().split(b"\0")
    except OSError:  # the process has exited, or belongs to another user
        return False


def _kill(pid: int, wanted: bytes) -> None:
    """Kill a process that carries a mark, but not another process that has just got its id."""
    with contextlib.suppress(OSError):
        try:
            handle = os.pidfd_open(pid)
        except OSError as error:
            if isinstance(error, ProcessLookupError):
                return
            os.kill(pid, signal.SIGKILL)  # a system without pidfd_open
            return
        try:
            if _carries(pid, wanted):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _wait(parent: int) -> tuple[bool, list[str]]:
    """Wait until the driver exits or reports that Ray is stopping; return whether it reported, and the folders."""
    text, inputs, is_there = b"", [0], True
    while is_there and b".\n" not in text:
        is_there = os.getppid() == parent  # before the last read
        if select.select(inputs, [], [], _POLL_SECONDS * is_there)[0]:
            read = os.read(0, 65536)
            text += read
            if not read:  # the driver may close its end and continue to run
                inputs = []
    lines = text.decode(errors="surrogateescape").split("\n")
    return "." in lines, [line[1:] for line in lines if line.startswith("+")]


def main(mark: str, parent: int) -> None:
    """Wait until the driver exits or Ray stops, then kill the remaining processes and remove the folders."""
    is_orderly, folders = _wait(parent)
    deadline = time.monotonic() + _GRACE_SECONDS
    while is_orderly and marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    end(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # Ray's link to its newest session
            link = os.path.join(os.path.dirname(folder), "session_latest")
            if os.readlink(link) == folder:
                os.unlink(link)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    main(sys.argv[1], int(sys.argv[2]))
