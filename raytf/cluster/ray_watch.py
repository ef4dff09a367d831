"""Notices at once that the driver's Ray has died, and exits with one line and an exit code before Ray's core exits.

Ray's core in the driver notices a dead raylet after some 10 s, and a dead GCS after a minute. It then ends the process
with its own messages and exit code 1 or a core dump, and without an exception in Python.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import psutil

from raytf.config import program
from raytf.config.command_line import EXIT_AGAIN


@dataclass(frozen=True)
class Loss:
    """A process of Ray that has died.

    Attributes:
        text: a description for users.
        is_reachable: whether actors can still be called.
    """

    text: str
    is_reachable: bool


#: Returns the loss of a process; None while the process lives.
Sign = Callable[[], Loss | None]
#: Seconds between two checks; for all farewells before the process exits; to reach a port.
_POLL_SECONDS, _FAREWELL_SECONDS, _REACH_SECONDS = 0.5, 9.0, 2.0
#: Seconds between two checks of a port; for which Ray waits for the GCS to return.
_PORT_SECONDS, RECONNECT_SECONDS = 2.0, 60.0
#: The part of these seconds that is left to save and exit before Ray's core ends the process.
_RESERVE_SECONDS = 15.0

#: Called with the loss before the process exits; returns a text to add to the message, which may be empty.
Farewell = Callable[[Loss], str]
_farewells: list[Farewell] = []


@contextlib.contextmanager
def farewell(call: Farewell) -> Iterator[None]:
    """Call `call`, for at most 9 s before the exit, if Ray is lost while the `with` statement lasts."""
    _farewells.append(call)
    try:
        yield
    finally:
        _farewells.remove(call)


class WatchedProcess:
    """A process of this machine.

    Args:
        name: name of the process, for messages.
        is_all: whether nothing of Ray answers without this process.

    Attributes:
        handle: file descriptor that becomes readable when the process dies; -1 if the system has none.
    """

    def __init__(self, name: str, pid: int, is_all: bool):
        self._name, self._pid, self._is_all = name, pid, is_all
        self._process: psutil.Process | None = None  # None: it had already died
        self.handle = -1
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)
        with contextlib.suppress(OSError):
            self.handle = os.pidfd_open(pid)

    def __call__(self) -> Loss | None:
        # A process that is not reaped yet is dead, too.
        with contextlib.suppress(psutil.NoSuchProcess):
            process = self._process
            if process is not None and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return None
        return Loss(f"{self._name} (pid {self._pid}) has died", not self._is_all)

    def close(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1


class WatchedPort:
    """A port that may be closed for a while.

    Args:
        name: name of its process, for messages.
        address: HOST:PORT.
        seconds: the longest time without an answer.
        clock: returns monotonic seconds.
    """

    def __init__(self, name: str, address: str, seconds: float, clock: Callable[[], float] = time.monotonic):
        host, _, port = address.rpartition(":")
        self._name, self._host, self._port = name, host.strip("[]"), int(port)
        self._seconds, self._clock = seconds, clock
        self._answered_at = self._asked_at = clock()

    def __call__(self) -> Loss | None:
        now = self._clock()
        if now - self._asked_at < _PORT_SECONDS:
            return None
        self._asked_at = now
        try:
            socket.create_connection((self._host, self._port), timeout=_REACH_SECONDS).close()
        except OSError:
            silent = now - self._answered_at
            return Loss(f"{self._name} has not answered for {silent:.0f} s", True) if silent >= self._seconds else None
        self._answered_at = now
        return None


def patience(reconnect_seconds: float) -> float:
    """Return how many seconds a driver waits for a GCS: fewer than Ray's core, which then exits the process."""
    return max(reconnect_seconds - _RESERVE_SECONDS, reconnect_seconds / 2)


class RayWatch:
    """Watches the processes that this process cannot continue without; a context manager.

    When one of them dies, the farewells are called, and this process exits with code 75 and a line on standard error.
    Ray's output in the meantime is hidden.

    Args:
        signs: one for each watched process.
        end: called with the loss; exits this process.
    """

    def __init__(self, signs: Sequence[Sign], end: Callable[[Loss], None] | None = None):
        self._signs, self._end = signs, end or leave
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="raytf-vigil")

    def __enter__(self) -> RayWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        # Before Ray is told to stop: if a process is already dead, Ray would wait for it, or end this process.
        self._check_signs()
        self._stop.set()
        self._thread.join(5)
        for sign in self._signs:
            if isinstance(sign, WatchedProcess):
                sign.close()

    def _watch(self) -> None:
        handles = select.poll()
        for sign in self._signs:
            if isinstance(sign, WatchedProcess) and sign.handle >= 0:
                handles.register(sign.handle, select.POLLIN)
        while not self._stop.is_set():
            handles.poll(_POLL_SECONDS * 1000)  # returns at once, before Ray prints anything
            self._check_signs()

    def _check_signs(self) -> None:
        with self._lock:
            if self._stop.is_set():
                return
            for sign in self._signs:
                loss = sign()
                if loss is not None:
                    self._stop.set()
                    self._end(loss)
                    return


def leave(loss: Loss) -> None:
    """Exit this process because a process that it needs has died."""
    shown = sys.stdout
    terminal = _mute()
    texts: list[str] = []

    def say_farewell() -> None:
        for call in reversed(_farewells):
            with contextlib.suppress(Exception, SystemExit):
                texts.append(call(loss))

    thread = threading.Thread(target=say_farewell, daemon=True, name="raytf-farewell")
    thread.start()
    thread.join(_FAREWELL_SECONDS)
    try:
        why = "; ".join(filter(None, texts)) or "this process cannot continue"
        with contextlib.suppress(Exception):
            shown.flush()
        with contextlib.suppress(OSError):
            how = f"T{program.next_command()[1:]} continues where this one stopped."
            os.write(terminal, f"error: {loss.text}; {why}. {how}\n".encode())
    finally:
        os._exit(EXIT_AGAIN)


def _mute() -> int:
    """Hide what Ray writes from now on, and return a descriptor that still reaches standard error."""
    try:
        terminal, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        # Ray prints the raylet's messages on standard output. Streams from before, such as the display's, still show.
        sys.stdout = sys.stderr = open(nothing, "w")  # noqa: SIM115
    except OSError:
        return 2
    return terminal
