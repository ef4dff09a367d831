"""How a driver ends: one exit code for each ending, which people, shells and `raytf submit` can rely on.

docs/guides/endings.md has the table for people; a test compares it with this one, and with what really happens.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from raytf.errors import GpuError, HangError, JobError, NonFiniteLossError, RaytfError, ReplicaError, WorkerLostError


class AfterEnding(enum.Enum):
    """What `raytf submit` does after an ending."""

    DONE = "ends with 0"
    FAILED = "ends with 1"
    REFUSED = "ends with 2; up to three more tries where the command had been taken before"
    STOPPED = "ends with 1: somebody wanted it"
    AGAIN = "submits it again"


@dataclass(frozen=True)
class Ending:
    """A way to end.

    Attributes:
        what: has happened, for people.
        code: as a shell shows it.
        then: what `raytf submit` does.
    """

    what: str
    code: int
    then: AfterEnding


FINISHED = Ending("the run has finished, now or before", 0, AfterEnding.DONE)
FAILED = Ending(
    "the job failed: its own code raised, workers die or hang again and again, the loss is not finite",
    1,
    AfterEnding.FAILED,
)
REFUSED = Ending(
    "something has to be changed first: a flag, the data, the model, storage that denies or is full, a cluster that is "
    "too small",
    2,
    AfterEnding.REFUSED,
)
AGAIN = Ending(
    "the same command may do it later: Ray failed, storage cannot be reached, another process owns the run",
    75,
    AfterEnding.AGAIN,
)
HUNG_UP = Ending("SIGHUP, as of a terminal that is closed; the run saves first", 128 + signal.SIGHUP, AfterEnding.AGAIN)
INTERRUPTED = Ending(
    "SIGINT, as of Ctrl-C; the run saves first, and a second one does not wait for that",
    128 + signal.SIGINT,
    AfterEnding.STOPPED,
)
UNREAD = Ending("nobody reads what the job itself prints (as after `head`)", 128 + signal.SIGPIPE, AfterEnding.AGAIN)
TERMINATED = Ending(
    "SIGTERM, as of `ray job stop` or a pod's end; the run saves first, and a second one does not wait for that",
    128 + signal.SIGTERM,
    AfterEnding.AGAIN,
)
KILLED = Ending("SIGKILL, as of a machine whose memory is used up", 128 + signal.SIGKILL, AfterEnding.AGAIN)
CRASHED = Ending("any other signal, as of a defect in native code", 128 + signal.SIGSEGV, AfterEnding.AGAIN)

#: All of them, as in docs/guides/endings.md.
ENDINGS = (FINISHED, FAILED, REFUSED, AGAIN, HUNG_UP, INTERRUPTED, UNREAD, TERMINATED, KILLED, CRASHED)


def of_error(error: RaytfError) -> Ending:
    """The ending of a driver that meets an error and can do nothing about it."""
    if error.passes:
        return AGAIN
    failed = (GpuError, JobError, HangError, NonFiniteLossError, ReplicaError, WorkerLostError)
    return FAILED if isinstance(error, failed) else REFUSED


def of_code(code: int) -> Ending:
    """The ending of which an exit code tells, also as Python gives it: negative for a signal."""
    shown = 128 - code if code < 0 else code
    known = {ending.code: ending for ending in ENDINGS}
    if shown in known:
        return known[shown]
    return CRASHED if shown > 128 and shown - 128 in signal.valid_signals() else FAILED
