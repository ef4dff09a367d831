"""Heartbeats of this process, an empty line each, sent by a small process beside it.

A thread of Python's would not do: whatever holds the interpreter's lock for seconds, such as the reading of a large
file by an extension, would make this process look dead. The other way round, the process beside it sends nothing while
this one is stopped, and it ends with it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterable

from raytf.distributed.forked_children import close_in_children

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


class HeartbeatSender:
    """Sends heartbeats until it is told to end, or until this process ends.

    Args:
        connections: over which they go; others may be received there, and closing one ends the heartbeats over it.
    """

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
