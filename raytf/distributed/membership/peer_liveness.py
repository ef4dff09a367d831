"""Heartbeats to other ranks, sent by a small process beside this one, and the decision which ranks of a sum are lost.

A thread of Python's would not do: whatever holds the interpreter's lock for seconds, such as the reading of a large
file by an extension, would make this process look dead. The other way round, the process beside it sends nothing while
this one is stopped, and it ends with it.
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
#: Seconds without one after which the other side counts as lost. With a heartbeat, a look and what follows, those that
#: are left train on before 6 s are over.
SILENT_SECONDS = 4.5

#: Imports next to nothing, so that it starts in some milliseconds: parent's pid, seconds between heartbeats, sockets.
#: It holds these open, so it must end at once with its parent: others would not see that the parent is gone.
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
#: Seconds between two looks at a process of this host.
PROCESS_LOOK_SECONDS = 1.0
#: Seconds for which a process may be stopped; as long as TensorFlow waits for a heartbeat.
STOPPED_SECONDS = 6.0


class HeartbeatSender:
    """Sends heartbeats over connections until it is told to end, or until this process ends; closing one ends those
    over it."""

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
        """Send no more; may be called again."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()


# A sum asks only now and then, while nothing comes. Silence is counted in looks of this process: while it stood still
# itself, it has not looked. `allreduce.host` looks at the processes of its host, `allreduce.network` at heartbeats
# of other hosts; `tests.stress.simulate` tries both in a simulated world.


class Sign(Enum):
    """The state of a process, as one look shows it."""

    ALIVE = "alive"
    #: It is stopped, or sends no heartbeats.
    QUIET = "quiet"
    GONE = "gone"


class Loss(NamedTuple):
    """The reason why a sum cannot complete.

    Attributes:
        number: of the process that is lost; None for an unknown one of the group.
        sign: the look that has shown it.
    """

    number: int | None
    sign: Sign


class Waiting:
    """Decides that a process that is waited for is lost when it was quiet in so many looks, one after the other."""

    def __init__(self, looks: int):
        self._looks = looks
        self._quiet: dict[int, int] = {}

    @classmethod
    def for_processes(cls, stopped_seconds: float = STOPPED_SECONDS) -> Waiting:
        """Return a decision about processes of this host, with a look every `PROCESS_LOOK_SECONDS`."""
        return cls(math.ceil(stopped_seconds / PROCESS_LOOK_SECONDS))

    @classmethod
    def for_heartbeats(cls, silent_seconds: float = SILENT_SECONDS) -> Waiting:
        """Return a decision about processes that send heartbeats, with a look every `BEAT_SECONDS`; one more, since the
        newest heartbeat may be on its way."""
        return cls(math.floor(silent_seconds / BEAT_SECONDS) + 1)

    def check_signs(self, signs: Mapping[int, Sign], is_broken: bool = False) -> Loss | None:
        """Return a loss, for which the sum cannot end; None while the processes are to be waited for.

        Args:
            signs: of the processes that are waited for, by their numbers.
            is_broken: whether a process of the group is known to be lost. That counts also for those that this host
                does not show, as between containers.
        """
        for number, sign in signs.items():
            if sign is Sign.GONE:  # a child that it has forked may hold its socket
                return Loss(number, sign)
        if is_broken:
            return Loss(None, Sign.GONE)
        for number, sign in signs.items():
            self._quiet[number] = self._quiet.get(number, 0) + 1 if sign is Sign.QUIET else 0
            if self._quiet[number] >= self._looks:
                return Loss(number, sign)
        return None


def sign_of_process(state: str, started: str, began: str) -> Sign:
    """Return what the system's table of processes shows of a process.

    Args:
        state: the process's state there; empty if it is not visible.
        started: when the process with its number started: another one may have got its number.
        began: when it had started at the first look; empty if it was never visible, which says nothing.
    """
    if began and (state in ("", "Z", "X") or started != began):
        return Sign.GONE
    return Sign.QUIET if state in ("T", "t") else Sign.ALIVE
