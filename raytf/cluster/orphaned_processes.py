"""Kills what is left of a Ray when the driver that started it is gone, even after `kill -9`.

It runs as a program of its own, which needs Python's own library only. It kills only processes that carry the mark of
this one Ray in their environment, even if they were stopped by a signal.
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

#: Environment variable of each process of a Ray that a driver has started.
MARK = "RAYTF_OWN_RAY"
#: Seconds between two checks of the driver; for processes to exit by themselves; and to kill all of them.
_POLL_SECONDS, _GRACE_SECONDS, _END_SECONDS = 0.5, 3.0, 60.0
_PR_SET_PDEATHSIG = 1


class OrphanGuard:
    """The driver's handle of this program.

    Args:
        mark: of the processes.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, mark: str):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C of a terminal is for the driver
            cwd="/",
            text=True,
        )

    def remove(self, folder: str) -> None:
        """Remove this folder too when the processes are gone."""
        self._write(f"+{folder}\n")

    def over(self) -> None:
        """Note that Ray was asked to stop: processes that do not exit within seconds are killed."""
        self._write(".\n")
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def _write(self, text: str) -> None:
        # Only a safety net: its loss is no reason to fail.
        with contextlib.suppress(OSError, ValueError):
            assert self._process.stdin is not None
            self._process.stdin.write(text)
            self._process.stdin.flush()


def die_with_parent() -> None:
    """Have the system kill this process when its parent dies, even while it is stopped by a signal."""
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died in between
        os.kill(os.getpid(), signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Return the processes that carry a mark, without this one and those that have exited."""
    wanted = f"{MARK}={mark}".encode()
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid() and _carries(int(name), wanted):
            pids.append(int(name))
    return pids


def end(mark: str, seconds: float = _END_SECONDS) -> None:
    """Kill all processes that carry a mark, and those that they start meanwhile, for at most this many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = marked(mark)
        if not left:
            return
        for pid in left:
            _kill(pid, f"{MARK}={mark}".encode())
        time.sleep(0.1)


def _carries(pid: int, wanted: bytes) -> bool:
    # Ended processes that nobody has reaped yet have no environment.
    try:
        with open(f"/proc/{pid}/environ", "rb") as stream:
            return wanted in stream.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def _kill(pid: int, wanted: bytes) -> None:
    """Kill a process that carries a mark, but not another process that has just got its number."""
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
    """Wait until the driver exits or reports that its Ray stops; return whether it did, and the folders to remove."""
    text, inputs, is_there = b"", [0], True
    while is_there and b".\n" not in text:
        is_there = os.getppid() == parent  # before the last read
        if select.select(inputs, [], [], _POLL_SECONDS * is_there)[0]:
            read = os.read(0, 65536)
            text += read
            if not read:  # a program may close this descriptor, and live
                inputs = []
    lines = text.decode(errors="surrogateescape").split("\n")
    return "." in lines, [line[1:] for line in lines if line.startswith("+")]


def main(mark: str, parent: int) -> None:
    """Wait for the driver's exit, then kill and remove what it has left."""
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
