"""The exit codes of a driver, one for each ending. People, shells and `raytf submit` can rely on them.

docs/guides/endings.md has the table for people; tests compare it with this module and with real endings.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass

from raytf.errors import GpuError, HangError, JobError, NonFiniteLossError, RaytfError, ReplicaError, WorkerLostError


class AfterEnding(enum.Enum):
    """What `raytf submit` does after an ending."""

    DONE = "exits with 0"
    FAILED = "exits with 1"
    REFUSED = "exits with 2; resubmits the command up to three times if it had been accepted earlier"
    STOPPED = "exits with 1: stopped on purpose"
    AGAIN = "resubmits the command"


@dataclass(frozen=True)
class Ending:
    """A way to end: the reason, the exit code as a shell shows it, and the reaction of `raytf submit`."""

    what: str
    code: int
    then: AfterEnding


FINISHED = Ending("the run has finished, now or earlier", 0, AfterEnding.DONE)
FAILED = Ending(
    "the job failed: its code raised an exception, workers died or hung repeatedly, or the loss is not finite",
    1,
    AfterEnding.FAILED,
)
REFUSED = Ending(
    "you have to change something first: a flag, the data, the model, storage that is full or denies access, or a "
    "cluster that is too small",
    2,
    AfterEnding.REFUSED,
)
AGAIN = Ending(
    "the same command can succeed later: Ray failed, storage cannot be reached, or another process owns the run",
    75,
    AfterEnding.AGAIN,
)
HUNG_UP = Ending(
    "SIGHUP, for example because the terminal was closed; the run saves first", 128 + signal.SIGHUP, AfterEnding.AGAIN
)
INTERRUPTED = Ending(
    "SIGINT, for example Ctrl-C; the run saves first, unless the signal is repeated",
    128 + signal.SIGINT,
    AfterEnding.STOPPED,
)
UNREAD = Ending(
    "nobody reads the job's own output any more, for example after `head`", 128 + signal.SIGPIPE, AfterEnding.AGAIN
)
TERMINATED = Ending(
    "SIGTERM, for example from `ray job stop` or at a pod's end; the run saves first, unless the signal is repeated",
    128 + signal.SIGTERM,
    AfterEnding.AGAIN,
)
KILLED = Ending("SIGKILL, for example because the machine ran out of memory", 128 + signal.SIGKILL, AfterEnding.AGAIN)
CRASHED = Ending("any other signal, for example after a defect in native code", 128 + signal.SIGSEGV, AfterEnding.AGAIN)

#: All endings, in the order of docs/guides/endings.md.
ENDINGS = (FINISHED, FAILED, REFUSED, AGAIN, HUNG_UP, INTERRUPTED, UNREAD, TERMINATED, KILLED, CRASHED)


def of_error(error: RaytfError) -> Ending:
    """Return the ending of a driver that cannot recover from an error."""
    if error.passes:
        return AGAIN
    failed = (GpuError, JobError, HangError, NonFiniteLossError, ReplicaError, WorkerLostError)
    return FAILED if isinstance(error, failed) else REFUSED


def of_code(code: int) -> Ending:
    """Return the ending that an exit code means. Negative codes are signals, as Python reports them."""
    shown = 128 - code if code < 0 else code
    known = {ending.code: ending for ending in ENDINGS}
    if shown in known:
        return known[shown]
    return CRASHED if shown > 128 and shown - 128 in signal.valid_signals() else FAILED
