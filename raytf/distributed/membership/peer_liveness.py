"""Heartbeats to other ranks, sent by a small child process, and the decision which ranks of a sum are lost.

A Python thread could not send them: an extension that holds the interpreter's lock for seconds, for example to read a
large file, would make this process look dead. The child sends nothing while this process is stopped, and exits with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

from raytf.distributed.sockets import close_in_children

#: Seconds between two heartbeats.
BEAT_SECONDS = 0.5
#: Seconds without a heartbeat after which a peer counts as lost. Including detection and repair, the surviving ranks
#: then continue to train within 6 s.
SILENT_SECONDS = 4.5

#: Imports almost nothing, to start in milliseconds. Arguments: the parent's pid, seconds between heartbeats, sockets.
#: It holds the sockets open, so it must exit with its parent, or peers would not notice that the parent is gone.
_PROGRAM = """
import os, select, sys
parent, seconds, sockets = int(sys.argv[1]), float(sys.argv[2]), [int(each) for each in sys.argv[3:]]
while os.getppid() == parent:
    with open(f"/proc/{parent}/stat") as file:
        stopped = file.read().rpartition(") ")[2][0] in "Tt"
    for each in () if stopped else list(sockets):
        try:
            os.write(each, b"\\n")
        except BlockingIOError:
            pass
        except OSError:
            sockets.remove(each)
    if select.select([0], [], [], seconds)[0]:
        break  # the other end is closed: the parent has ended
"""
#: Seconds between two checks of a process on this host.
PROCESS_LOOK_SECONDS = 1.0
#: Seconds for which a process may be stopped; the same time for which TensorFlow waits for a heartbeat.
STOPPED_SECONDS = 6.0


class HeartbeatSender:
    """Sends heartbeats over connections until `end` is called or this process exits. If a connection is closed, its
    heartbeats stop."""

    def __init__(self, connections: Iterable[socket.socket]):
        descriptors = [each.fileno() for each in connections]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), str(BEAT_SECONDS)]
        self._process = subprocess.Popen(
            [*command, *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdin is not None
        close_in_children(self._process.stdin)

    def end(self) -> None:
        """Stop sending heartbeats; may be called more than once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


# A sum checks its peers only from time to time, while no data arrives. Silence is counted in checks of this process,
# because a paused process does not check. `allreduce.host` checks the processes of its host, `allreduce.network` checks
# the heartbeats of other hosts, and `tests.stress.simulate` tests both in a simulated world.


class Sign(Enum):
    """The state of a process at one check."""

    ALIVE = "alive"
    #: The process is stopped, or sends no heartbeats.
    QUIET = "quiet"
    GONE = "gone"


class Loss(NamedTuple):
    """The reason why a sum cannot complete.

    Attributes:
        number: number of the lost process; None for an unknown process of the group.
        sign: state of the process that showed the loss.
    """

    number: int | None
    sign: Sign


class Waiting:
    """Decides that an awaited process is lost after it was quiet in `looks` checks in a row."""

    def __init__(self, looks: int):
        self._looks = looks
        self._quiet: dict[int, int] = {}

    @classmethod
    def for_processes(cls, stopped_seconds: float = STOPPED_SECONDS) -> Waiting:
        """Return a `Waiting` for processes on this host, checked every `PROCESS_LOOK_SECONDS`."""
        return cls(math.ceil(stopped_seconds / PROCESS_LOOK_SECONDS))

    @classmethod
    def for_heartbeats(cls, silent_seconds: float = SILENT_SECONDS) -> Waiting:
        """Return a `Waiting` for processes that send heartbeats, checked every `BEAT_SECONDS`, plus one check because
        the newest heartbeat may be in transit."""
        return cls(math.floor(silent_seconds / BEAT_SECONDS) + 1)

    def check_signs(self, signs: Mapping[int, Sign], is_broken: bool = False) -> Loss | None:
        """Return the loss because of which the sum cannot complete, or None to keep waiting for the processes.

        Args:
            signs: state of each awaited process, by number.
            is_broken: whether a process of the group is known to be lost, even one that is not visible on this host, as
                between containers.
        """
        for number, sign in signs.items():
            if sign is Sign.GONE:  # its socket may be open in a forked child
                return Loss(number, sign)
        if is_broken:
            return Loss(None, Sign.GONE)
        for number, sign in signs.items():
            self._quiet[number] = self._quiet.get(number, 0) + 1 if sign is Sign.QUIET else 0
            if self._quiet[number] >= self._looks:
                return Loss(number, sign)
        return None


def sign_of_process(state: str, started: str, began: str) -> Sign:
    """Return the sign of a process, from the system's process table.

    Args:
        state: state of the process in the table; empty if it is not visible.
        started: start time of the process that has its pid now, which may be another process.
        began: start time at the first check; empty if the process was never visible, so its absence means nothing.
    """
    if began and (state in ("", "Z", "X") or started != began):
        return Sign.GONE
    return Sign.QUIET if state in ("T", "t") else Sign.ALIVE
